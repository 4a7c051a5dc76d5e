"""Convolution, pooling, padding, resizing: operators on images, whose units lie along batch and channels only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyro_symmetric.discovery.flow import Flow, Part, Value
from pyro_symmetric.discovery.rules.registry import Call, register_rule


def _resized(flow: Flow, value: Value, shape: Sequence[int], dims: int) -> Value:
    """The same units on a tensor whose last ``dims`` axes have other lengths."""
    kept = len(shape) - dims
    return flow.value(shape, value.parts, {axis for axis in value.fixed if axis < kept}.union(range(kept, len(shape))))


@register_rule(*(f"conv{d}d" for d in "123"), *(f"conv_transpose{d}d" for d in "123"), "convolution")
def convolution(flow: Flow, call: Call) -> Value:
    """Groups of channels each see their own inputs: output unit and input unit are members of one group."""
    value, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    dims = weight.dim - 2
    alone = value.dim == dims + 1
    value = flow.unsqueeze(value, 0) if alone else value
    columns = weight.columns
    if columns is not None and (weight.part_on(0) is None or len({*columns.atoms[:, 0].tolist()}) != groups):
        weight, columns = flow.whole(weight), None
    weight = replace(weight, parts=tuple(part for part in weight.parts if part is not columns))
    value, weight = (_pixels(flow, x, dims) for x in (value, weight))
    transposed = call.get("transposed", "transpose" in call.name)
    result = _per_group(flow, value, weight, columns, groups, transposed)
    shape = call.shape if not alone else (1, *call.shape)
    result = _resized(flow, Value(shape, result.parts, result.fixed), shape, dims)
    if bias is not None:
        result = flow.elementwise([result, flow.reshape(bias, [-1, *[1] * dims])])
    return flow.squeeze(result, [0]) if alone else result


def _pixels(flow: Flow, value: Value, dims: int) -> Value:
    """The axes that aren't pixels, along which alone units may lie."""
    value = flow.restrict(value, [0, 1])
    return Value(value.shape[:-dims], value.parts, frozenset(a for a in value.fixed if a < value.dim - dims))


def _per_group(flow: Flow, value: Value, weight: Value, columns: Part | None, groups: int, transposed: bool) -> Value:
    """A kernel as a product of rows, ``(groups, ...)``, and columns, which may be those of each group.

    The groups lie along axis 0 of the kernel: of its outputs or, if transposed, of its inputs.
    """
    batch, group, inputs, outputs = range(4)
    if groups == 1:
        letters = [inputs, outputs] if transposed else [outputs, inputs]
        return flow.combine([(value, [batch, inputs]), (weight, letters)], [batch, outputs])
    rows, second = weight.shape
    letter_of_rows, letter_of_columns = (inputs, outputs) if transposed else (outputs, inputs)
    value = flow.reshape(value, [value.shape[0], groups, value.shape[1] // groups])
    terms = [(value, [batch, group, inputs])]
    if columns is None:
        kernel = flow.reshape(weight, [groups, rows // groups, second])
        terms += [(kernel, [group, letter_of_rows, letter_of_columns])]
    else:
        own = columns.atoms.reshape(groups, -1, second)[:, 0]
        kernel = flow.reshape(Value((rows,), weight.parts), [groups, rows // groups])
        terms += [(kernel, [group, letter_of_rows])]
        terms += [(flow.value(own.shape, [Part((0, 1), own)]), [group, letter_of_columns])]
    result = flow.combine(terms, [batch, group, outputs])
    return flow.reshape(result, [result.shape[0], -1])


CHANNELWISE = """max_pool{d}d max_pool{d}d_with_indices adaptive_max_pool{d}d fractional_max_pool{d}d avg_pool{d}d
    adaptive_avg_pool{d}d _adaptive_avg_pool{d}d reflection_pad{d}d replication_pad{d}d upsample_nearest{d}d
    _upsample_nearest_exact{d}d upsample_linear{d}d upsample_bilinear{d}d upsample_bicubic{d}d upsample_trilinear{d}d
    _upsample_bilinear{d}d_aa _upsample_bicubic{d}d_aa"""


@register_rule(*(name.format(d=d) for name in CHANNELWISE.split() for d in "123"))
def channelwise(flow: Flow, call: Call) -> list[Value]:
    """Operators on images that keep channels apart."""
    dims = int(next(c for c in call.name if c.isdigit()))
    value = flow.restrict(call.value, range(call.value.dim - dims))
    return [_resized(flow, value, call.shape, dims)] * len(call.shapes)


@register_rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(flow: Flow, call: Call) -> Value:
    flow.pin(call["grid"])
    value = flow.restrict(call["input"], [0, 1])
    return _resized(flow, value, call.shape, value.dim - 2)


@register_rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def fourier(flow: Flow, call: Call) -> Value:
    """A linear map along some axes, on which units can't move."""
    axes = {call.value.axis(axis) for axis in call["dim"]}
    value = flow.restrict(call.value, set(range(call.value.dim)) - axes)
    return flow.value(call.shape, value.parts, value.fixed | axes)
