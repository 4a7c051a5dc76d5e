"""Operators that move entries about without touching them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pyro_symmetric.symmetry.labeller import Labeller
from pyro_symmetric.symmetry.labels import Part, Value
from pyro_symmetric.symmetry.rules import Call, register_rule


@register_rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_as")
def reshape(labeller: Labeller, call: Call) -> Value:
    return labeller.reshape(call["self"], call.shape)


@register_rule("aten.squeeze")
def squeeze(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    dim = call.arguments.get("dim", range(value.dim))
    return labeller.squeeze(value, [dim] if isinstance(dim, int) else dim)


@register_rule("aten.unsqueeze")
def unsqueeze(labeller: Labeller, call: Call) -> Value:
    return labeller.unsqueeze(call["self"], call["dim"])


@register_rule("aten.permute")
def permute(labeller: Labeller, call: Call) -> Value:
    return labeller.permute(call["self"], call["dims"])


@register_rule("aten.transpose", "aten.swapaxes", "aten.swapdims")
def transpose(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    one, other = (value.axis(axis) for axis in list(call.arguments.values())[1:3])
    order = list(range(value.dim))
    order[one], order[other] = other, one
    return labeller.permute(value, order)


@register_rule("aten.t", "aten.numpy_T", "aten.mT", "aten.adjoint")
def turn(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    order = list(range(value.dim))
    order[-2:] = order[-2:][::-1]
    if value.dim > 2 and "numpy_T" in str(call.target):
        order = order[::-1]
    return labeller.permute(value, order)


@register_rule("aten.movedim")
def movedim(labeller: Labeller, call: Call) -> Value:
    order = np.moveaxis(np.empty(list(range(1, call["self"].dim + 1))), call["source"], call["destination"])
    return labeller.permute(call["self"], [n - 1 for n in order.shape])


@register_rule("aten.expand", "aten.expand_as", "aten.broadcast_to")
def expand(labeller: Labeller, call: Call) -> Value:
    return labeller.expand(call["self"], call.shape)


@register_rule("aten.repeat", "aten.tile")
def repeat(labeller: Labeller, call: Call) -> Value:
    """Whole copies, one after the other: a new axis in front of each repeated one, then merged."""
    value, counts = call["self"], list(call.arguments.values())[1]
    counts = [1] * (value.dim - len(counts)) + list(counts)
    while value.dim < len(counts):
        value = labeller.unsqueeze(value, 0)
    for axis, count in enumerate(counts):
        if count != 1:
            shape = [*value.shape[:axis], count, *value.shape[axis:]]
            value = labeller.expand(labeller.unsqueeze(value, axis), shape)
            value = labeller.reshape(value, [*shape[:axis], count * shape[axis + 1], *shape[axis + 2 :]])
    return value


@register_rule("aten.repeat_interleave.self_int")
def repeat_interleave(labeller: Labeller, call: Call) -> Value:
    """Each entry several times in a row: a new axis behind the repeated one, then merged."""
    value, count = call["self"], call["repeats"]
    if call["dim"] is None:
        value = labeller.reshape(value, [-1])
    axis = value.axis(call["dim"] or 0)
    shape = [*value.shape[: axis + 1], count, *value.shape[axis + 1 :]]
    return labeller.reshape(labeller.expand(labeller.unsqueeze(value, axis + 1), shape), call.shape)


@register_rule("aten.slice")
def slice_rule(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    axis = value.axis(call["dim"])
    return take(labeller, value, axis, np.arange(value.shape[axis])[call["start"] : call["end"] : call["step"]])


@register_rule("aten.narrow")
def narrow(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    axis = value.axis(call["dim"])
    return take(labeller, value, axis, np.arange(value.shape[axis])[call["start"] :][: call["length"]])


@register_rule("aten.select")
def select(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    axis = value.axis(call["dim"])
    return labeller.squeeze(take(labeller, value, axis, np.arange(value.shape[axis])[[call["index"]]]), [axis])


def take(labeller: Labeller, value: Value, axis: int, index: np.ndarray) -> Value:
    """Choose places along an axis (all of them, in order: nothing happens)."""
    if np.array_equal(index, np.arange(value.shape[axis])):
        return value
    result = labeller.take(value, axis, index)
    if value.constant is not None:
        import torch

        result = replace(result, constant=value.constant.index_select(axis, torch.as_tensor(index)))
    return result


@register_rule(
    "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.unsafe_split", "aten.unsafe_chunk",
    "aten.unsafe_split_with_sizes",
)  # fmt: skip
def split(labeller: Labeller, call: Call) -> list[Value]:
    value = call["self"]
    axis = value.axis(call["dim"])
    results, start = [], 0
    for shape in call.shapes:
        results.append(take(labeller, value, axis, np.arange(start, start + shape[axis])))
        start += shape[axis]
    return results


@register_rule("aten.unbind")
def unbind(labeller: Labeller, call: Call) -> list[Value]:
    value = call["self"]
    axis = value.axis(call["dim"])
    return [labeller.squeeze(take(labeller, value, axis, np.array([i])), [axis]) for i in range(value.shape[axis])]


@register_rule("aten.flip")
def flip(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    for axis in call["dims"]:
        value = labeller.take(value, value.axis(axis), np.arange(value.shape[axis])[::-1])
    return value


@register_rule("aten.roll")
def roll(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    if not call["dims"]:
        return labeller.give_up([value], call.shape)
    shifts = call["shifts"] if isinstance(call["shifts"], list | tuple) else [call["shifts"]]
    for axis, shift in zip(call["dims"], shifts, strict=True):
        value = labeller.take(value, value.axis(axis), np.roll(np.arange(value.shape[axis]), shift))
    return value


@register_rule("aten.cat", "aten.concat", "aten.concatenate")
def cat_rule(labeller: Labeller, call: Call) -> Value:
    values = [value for value in call["tensors"] if value.shape != (0,)]
    return cat(labeller, values, values[0].axis(call.arguments.get("dim", 0)))


@register_rule("aten.stack")
def stack(labeller: Labeller, call: Call) -> Value:
    axis = call["dim"] % len(call.shape)
    return cat(labeller, [labeller.unsqueeze(value, axis) for value in call["tensors"]], axis)


def cat(labeller: Labeller, values: list[Value], axis: int) -> Value:
    """Side by side along ``axis``: labels on it are joined end to end, labels on other axes are tied like in a sum."""
    if len(values) == 1:
        return values[0]
    along = [value.part_on(axis) for value in values]
    if any(part is not None for part in along):
        axes = {part.axes for part in along if part is not None}
        if len(axes) > 1 or (axes != {(axis,)} and None in along):  # labels of different kinds: reduce to this axis
            others = [i for i in range(values[0].dim) if i == axis]
            values = [v if p is None else _only(labeller, v, p, others) for v, p in zip(values, along, strict=True)]
            along = [value.part_on(axis) for value in values]
    rest = [replace(v, parts=tuple(p for p in v.parts if axis not in p.axes), constant=None) for v in values]
    length = sum(value.shape[axis] for value in values)
    tied = _tied(labeller, rest, axis, length)
    if all(part is None for part in along):
        return tied
    shape = next(part for part in along if part is not None)
    pieces = []
    for value, part in zip(values, along, strict=True):
        if part is None:  # constant, or without units: nothing in this stretch may move, unless all entries are equal
            atoms = labeller.facts.fresh((value.shape[axis],))
            if axis in value.fixed:
                labeller.facts.pin(atoms, labeller.where)
            elif not value.zero:
                labeller.facts.still(atoms)
            part = Part((axis,), atoms)
        pieces.append(part.atoms)
    joined = np.concatenate(pieces, axis=shape.axes.index(axis))
    if np.unique(joined).size < joined.size:  # the same units twice, as in cat(x, -x)
        joined = labeller.copies(joined, shape.axes, axis)
    parts = [*tied.parts, Part(shape.axes, joined)]
    return labeller.value(tied.shape, parts, tied.fixed - {axis}, all(value.zero for value in values))


def _only(labeller: Labeller, value: Value, part: Part, axes: list[int]) -> Value:
    """Keep labels of ``part`` on these axes only."""
    single = labeller.restrict(replace(value, parts=(part,)), axes)
    return replace(single, parts=(*single.parts, *(p for p in value.parts if p is not part)))


def _tied(labeller: Labeller, values: list[Value], axis: int, length: int) -> Value:
    """Labels off the axis must agree in all pieces; along the axis entries are told apart by their place."""
    thin = []
    for value in values:
        shape = [1 if i == axis else n for i, n in enumerate(value.shape)]
        thin.append(Value(tuple(shape), value.parts, value.fixed - {axis}, value.zero))
    tied = labeller.elementwise(thin)
    shape = [length if i == axis else n for i, n in enumerate(tied.shape)]
    return labeller.value(shape, tied.parts, tied.fixed | {axis}, all(value.zero for value in values))
