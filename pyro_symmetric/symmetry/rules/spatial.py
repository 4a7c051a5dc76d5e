"""Convolution, pooling, padding, resizing: operators on images, whose labels may lie on batch and channels only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pyro_symmetric.symmetry.labeller import HOMOGENEOUS, LINEAR, Labeller, Passes
from pyro_symmetric.symmetry.labels import Part, Value, opaque
from pyro_symmetric.symmetry.rules import Call, register_rule
from pyro_symmetric.symmetry.rules.shape import cat


def _resized(labeller: Labeller, value: Value, shape: Sequence[int], dims: int) -> Value:
    """The same labels on a tensor whose last ``dims`` axes have other lengths."""
    fixed = {axis for axis in value.fixed if axis < len(shape) - dims}
    return labeller.value(shape, value.parts, fixed | set(range(len(shape) - dims, len(shape))))


@register_rule(*(f"aten.conv{d}d" for d in "123"), *(f"aten.conv_transpose{d}d" for d in "123"), "aten.convolution")
def convolution(labeller: Labeller, call: Call) -> Value:
    """Groups of channels each see their own inputs: output unit and input unit are members of one group."""
    weight, columns = _apart(call["weight"])
    value, bias = call["input"], call["bias"]
    transposed = call.arguments.get("transposed", "transpose" in str(call.target))
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
    facts = labeller.facts
    facts.balance([(1.0, part.atoms), (1.0, own.atoms)])
    inside = facts.fresh(own.atoms.shape)  # the same units without a multiplier
    facts.unify(part.atoms, inside)
    facts.unify(own.atoms, inside)
    facts.still(inside)
    parts = [Part((1,), inside) if p is part else p for p in value.parts]
    return (
        labeller.value(value.shape, parts, value.fixed, value.zero),
        labeller.value(entering.shape, [Part((0,), inside)], entering.fixed),
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


_POOLS = "max_pool{d}d max_pool{d}d_with_indices adaptive_max_pool{d}d fractional_max_pool{d}d"
_MEANS = """avg_pool{d}d adaptive_avg_pool{d}d _adaptive_avg_pool{d}d reflection_pad{d}d replication_pad{d}d
    upsample_nearest{d}d _upsample_nearest_exact{d}d"""


def _for_dims(text: str) -> list[str]:
    return [f"aten.{name.format(d=d)}" for name in text.split() for d in "123"]


def _pool(labeller: Labeller, call: Call, passes: Passes) -> Value | list[Value]:
    dims = int(next(c for c in call.target.overloadpacket.__name__ if c.isdigit()))
    value = call["self"] if "self" in call.arguments else call["input"]
    value = labeller.restrict(value, range(value.dim - dims))
    labeller.still(value, passes)
    pooled = _resized(labeller, value, call.shape, dims)
    return pooled if len(call.shapes) == 1 else [pooled] * len(call.shapes)


@register_rule(*_for_dims(_POOLS))
def max_pool(labeller: Labeller, call: Call) -> Value | list[Value]:
    return _pool(labeller, call, HOMOGENEOUS)


@register_rule(
    *_for_dims(_MEANS),
    "aten.upsample_linear1d",
    "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d",
    "aten.upsample_trilinear3d",
    "aten._upsample_bilinear2d_aa",
    "aten._upsample_bicubic2d_aa",
)
def mean_pool(labeller: Labeller, call: Call) -> Value | list[Value]:
    return _pool(labeller, call, LINEAR)


@register_rule("aten.grid_sampler_2d", "aten.grid_sampler", "aten.grid_sampler_3d")
def grid_sampler(labeller: Labeller, call: Call) -> Value:
    labeller.pin(call["grid"])
    value = labeller.restrict(call["input"], [0, 1])
    return _resized(labeller, value, call.shape, value.dim - 2)


@register_rule("aten.constant_pad_nd", "aten.pad")
def pad(labeller: Labeller, call: Call) -> Value:
    """Constants around: labels continue with units of their own, which are all equal."""
    value, widths = call["self"], list(call["pad"])
    filling = call.arguments.get("value")
    if call.arguments.get("mode", "constant") != "constant":
        dims = len(widths) // 2
        return _resized(labeller, labeller.restrict(value, range(value.dim - dims)), call.shape, dims)
    for step, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        axis = value.dim - 1 - step
        if before < 0 or after < 0:
            return labeller.give_up([value], call.shape)
        pieces = [_filled(value, axis, before, filling), value, _filled(value, axis, after, filling)]
        value = cat(labeller, [piece for piece in pieces if piece.shape[axis]], axis)
    return value


def _filled(value: Value, axis: int, width: int, filling: float | None) -> Value:
    shape = tuple(width if i == axis else n for i, n in enumerate(value.shape))
    return Value(shape, zero=not filling)


@register_rule("aten.pixel_shuffle")
def pixel_shuffle(labeller: Labeller, call: Call) -> Value:
    """(c r r, h, w) -> (c, h r, w r)."""
    value, r = call["self"], call["upscale_factor"]
    *lead, channels, h, w = value.shape
    n = len(lead)
    value = labeller.reshape(value, [*lead, channels // r**2, r, r, h, w])
    return labeller.reshape(labeller.permute(value, [*range(n), n, n + 3, n + 1, n + 4, n + 2]), call.shape)


@register_rule("aten.pixel_unshuffle")
def pixel_unshuffle(labeller: Labeller, call: Call) -> Value:
    """(c, h r, w r) -> (c r r, h, w)."""
    value, r = call["self"], call["downscale_factor"]
    *lead, channels, h, w = value.shape
    n = len(lead)
    value = labeller.reshape(value, [*lead, channels, h // r, r, w // r, r])
    return labeller.reshape(labeller.permute(value, [*range(n), n, n + 2, n + 4, n + 1, n + 3]), call.shape)


@register_rule("aten.channel_shuffle")
def channel_shuffle(labeller: Labeller, call: Call) -> Value:
    value, groups = call["self"], call["groups"]
    batch, channels, *pixels = value.shape
    value = labeller.reshape(value, [batch, groups, channels // groups, *pixels])
    return labeller.reshape(labeller.permute(value, [0, 2, 1, *range(3, value.dim)]), call.shape)


@register_rule("aten.im2col")
def im2col(labeller: Labeller, call: Call) -> Value:
    """(b, c, h, w) -> (b, c k k, l): every channel becomes a block of features."""
    value = labeller.restrict(call["self"], [0, 1])
    if value.dim != 4:
        return labeller.give_up([value], call.shape)
    batch, channels = value.shape[:2]
    kernel = math.prod(call["kernel_size"])
    shape = (batch, channels, kernel, call.shape[-1])
    patches = replace(value, shape=shape, fixed=(value.fixed & {0, 1}) | opaque(shape).fixed & {2, 3}, constant=None)
    return labeller.reshape(patches, call.shape)
