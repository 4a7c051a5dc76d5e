"""Convolution, pooling, padding, resizing: operators on images, whose labels may lie on batch and channels only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.flow import Part
from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import HOMOGENEOUS, LINEAR, NOTHING, Passes, Value
from pyro_symmetric.discovery.scaling.rules.registry import Call, register_rule
from pyro_symmetric.discovery.scaling.rules.shape import cat


def _resized(labeller: Labeller, value: Value, shape: Sequence[int], dims: int) -> Value:
    """The same labels on a tensor whose last ``dims`` axes have other lengths."""
    fixed = {axis for axis in value.fixed if axis < len(shape) - dims}
    return labeller.value(shape, value.parts, fixed | set(range(len(shape) - dims, len(shape))))


@register_rule(*(f"conv{d}d" for d in "123"), *(f"conv_transpose{d}d" for d in "123"), "convolution", sliced=True)
def convolution(labeller: Labeller, call: Call) -> Value:
    """Groups of channels each see their own inputs: output unit and input unit are members of one group."""
    weight, columns = _apart(call["weight"])
    value, bias = labeller.settled(call["input"]), call["bias"]
    transposed = call.get("transposed", "transpose" in call.name)
    dims = weight.dim - 2
    alone = value.dim == dims + 1
    if alone:
        value = labeller.unsqueeze(value, 0)
    value = _pixels(labeller, labeller.restrict(value, [0, 1]), dims)
    weight = _pixels(labeller, labeller.restrict(weight, [0, 1]), dims)
    if columns is None:
        result = _with_shared_columns(labeller, value, weight, call["groups"], transposed)
    else:
        result = _grouped(labeller, value, weight, columns, call["groups"], transposed)
    shape = call.shape if not alone else (1, *call.shape)
    result = _resized(labeller, Value(shape, result.parts, result.fixed), shape, dims)
    if bias is not None:
        result = labeller.elementwise([result, labeller.reshape(bias, [-1, *[1] * dims])])
    return labeller.squeeze(result, [0]) if alone else result


def _pixels(labeller: Labeller, value: Value, dims: int) -> Value:
    """Forget the (unlabelled) axes of pixels."""
    return Value(value.shape[:-dims], value.parts, frozenset(a for a in value.fixed if a < value.dim - dims))


def _apart(weight: Value) -> tuple[Value, Part | None]:
    """A grouped kernel without the part of its columns, and that part."""
    columns = next((part for part in weight.parts if part.axes == (0, 1)), None)
    if columns is None or weight.part_on(0) is columns:
        return weight, None
    rest = tuple(part for part in weight.parts if part is not columns)
    return replace(weight, parts=rest), columns


def _grouped(labeller: Labeller, value: Value, weight: Value, columns: Part, groups: int, transposed: bool) -> Value:
    """A kernel with columns of each group's own, as a product of two tensors ``(groups, ...)``: rows and columns.

    Those of the two that meet the inputs are the same units as these; the others are the outputs, and members of the
    same group. Multipliers of the inputs end in the former, those of the outputs start in the latter.
    """
    batch, group, inputs, outputs = range(4)
    second = weight.shape[1]
    own = columns.atoms.reshape(groups, -1, second)[:, 0].reshape(-1)
    pieces = [Value(weight.shape[:1], weight.parts), Value((len(own),), (Part((0,), own),))]
    rows, cols = (labeller.reshape(piece, [groups, piece.shape[0] // groups]) for piece in pieces)
    entering, leaving = (rows, cols) if transposed else (cols, rows)
    value = labeller.reshape(value, [value.shape[0], groups, value.shape[1] // groups])
    if value.shape[2] == 1:
        value, entering = _absorbed(labeller, value, entering)
    result = labeller.combine(
        [(value, [batch, group, inputs]), (entering, [group, inputs]), (leaving, [group, outputs])],
        [batch, group, outputs],
    )
    return labeller.reshape(result, [result.shape[0], -1])


def _absorbed(labeller: Labeller, value: Value, entering: Value) -> tuple[Value, Value]:
    """Groups of one input: no sum says that its multiplier ends in the kernel, so it is said here."""
    part, own = value.part_on(1), entering.part_on(0)
    if own is None or part is None or part.axes != (1,):
        labeller.still(entering)
        return value, entering
    labeller.facts.balance([(1.0, part.atoms), (1.0, own.atoms)])
    inside = labeller.renewed(part, NOTHING)
    labeller.facts.unify(own.atoms, inside.atoms)
    parts = [inside if p is part else p for p in value.parts]
    return (
        labeller.value(value.shape, parts, value.fixed, value.zero),
        labeller.value(entering.shape, [Part((0,), inside.atoms)], entering.fixed),
    )


def _with_shared_columns(labeller: Labeller, value: Value, weight: Value, groups: int, transposed: bool) -> Value:
    """A kernel of one group, or one that was computed: its columns are the same units for all groups."""
    batch, group, inputs, outputs = range(4)
    if groups == 1:
        return labeller.combine(
            [(value, [batch, inputs]), (weight, [inputs, outputs] if transposed else [outputs, inputs])],
            [batch, outputs],
        )
    # The groups lie along axis 0 of the weight: of its outputs or, if transposed, of its inputs.
    n = value.shape[1] // groups
    value = labeller.reshape(value, [value.shape[0], groups, n])
    first, second = weight.shape
    weight = labeller.reshape(weight, [groups, first // groups, second])
    letters = [group, inputs, outputs] if transposed else [group, outputs, inputs]
    # Axis 1 of the weight is one axis for all groups: units along it move alike in all of them, and aren't rescaled.
    shared = weight.part_on(2)
    if shared is not None:
        labeller.facts.still(shared.atoms)
    result = labeller.combine([(value, [batch, group, inputs]), (weight, letters)], [batch, group, outputs])
    return labeller.reshape(result, [result.shape[0], -1])


# Operators on images that keep channels apart, and the multipliers that they let through.
CHANNELWISE = {
    HOMOGENEOUS: "max_pool{d}d max_pool{d}d_with_indices adaptive_max_pool{d}d fractional_max_pool{d}d",
    LINEAR: """avg_pool{d}d adaptive_avg_pool{d}d _adaptive_avg_pool{d}d reflection_pad{d}d replication_pad{d}d
        upsample_nearest{d}d _upsample_nearest_exact{d}d upsample_linear{d}d upsample_bilinear{d}d upsample_bicubic{d}d
        upsample_trilinear{d}d _upsample_bilinear{d}d_aa _upsample_bicubic{d}d_aa""",
}


def _channelwise(labeller: Labeller, call: Call, passes: Passes) -> Value | list[Value]:
    """Places of maxima have no multiplier."""
    dims = int(next(c for c in call.name if c.isdigit()))
    value = labeller.restrict(call.value, range(call.value.dim - dims))
    labeller.still(value, passes)
    pooled = _resized(labeller, value, call.shape, dims)
    return pooled if len(call.shapes) == 1 else [pooled, labeller.unscaled(pooled)]


for _passes, _names in CHANNELWISE.items():
    register_rule(*(name.format(d=d) for name in _names.split() for d in "123"))(
        functools.partial(_channelwise, passes=_passes)
    )


@register_rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(labeller: Labeller, call: Call) -> Value:
    labeller.pin(call["grid"])
    value = labeller.restrict(call["input"], [0, 1])
    return _resized(labeller, value, call.shape, value.dim - 2)


@register_rule("constant_pad_nd")
def pad(labeller: Labeller, call: Call) -> Value:
    """Constants around: labels continue with units of their own, which are all equal. Less than none: entries go."""
    value, widths = call.value, call["pad"]
    for step, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        axis = value.dim - 1 - step
        length = value.shape[axis]
        value = labeller.take(value, axis, np.arange(max(0, -before), length + min(0, after)))
        pieces = [_filled(value, axis, before, call["value"]), value, _filled(value, axis, after, call["value"])]
        value = cat(labeller, [piece for piece in pieces if piece.shape[axis]], axis)
    return value


def _filled(value: Value, axis: int, width: int, filling: float | None) -> Value:
    shape = tuple(max(0, width) if i == axis else n for i, n in enumerate(value.shape))
    return Value(shape, zero=not filling)


@register_rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def fourier(labeller: Labeller, call: Call) -> Value:
    """A linear map along some axes, on which units can't move."""
    axes = {call.value.axis(axis) for axis in call["dim"]}
    value = labeller.restrict(call.value, set(range(call.value.dim)) - axes, shared=True)
    return labeller.value(call.shape, value.parts, value.fixed | axes, value.zero)
