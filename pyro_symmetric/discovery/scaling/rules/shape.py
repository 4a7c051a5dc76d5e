"""Operators that move entries about without touching them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.flow import Part
from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value
from pyro_symmetric.discovery.scaling.rules.registry import Call, register_rule


@register_rule("view.dtype")
def other_numbers(labeller: Labeller, call: Call) -> Value:
    """The same bytes, read as numbers of another kind."""
    return labeller.give_up(call.operands, call.shape, "its bytes are read as other numbers")


@register_rule("view", "_unsafe_view", "reshape")
def reshape(labeller: Labeller, call: Call) -> Value:
    return labeller.reshape(call.value, call.shape)


@register_rule("squeeze", sliced=True)
def squeeze(labeller: Labeller, call: Call) -> Value:
    dim = call.get("dim", range(call.value.dim))
    return labeller.squeeze(call.value, [dim] if isinstance(dim, int) else dim)


@register_rule("unsqueeze", sliced=True)
def unsqueeze(labeller: Labeller, call: Call) -> Value:
    return labeller.unsqueeze(call.value, call["dim"])


@register_rule("permute", sliced=True)
def permute(labeller: Labeller, call: Call) -> Value:
    return labeller.relaid(call.value, [call.value.axis(dim) for dim in call["dims"]])


@register_rule("expand", sliced=True)
def expand(labeller: Labeller, call: Call) -> Value:
    return labeller.expand(call.value, call.shape)


@register_rule("repeat")
def repeat(labeller: Labeller, call: Call) -> Value:
    """Whole copies, one after the other: a new axis in front of each repeated one, then merged."""
    value, counts = call.value, call["repeats"]
    while value.dim < len(counts):
        value = labeller.unsqueeze(value, 0)
    for axis, count in enumerate(counts):
        if count != 1:
            shape = [*value.shape[:axis], count, *value.shape[axis:]]
            value = labeller.expand(labeller.unsqueeze(value, axis), shape)
            value = labeller.reshape(value, [*shape[:axis], count * shape[axis + 1], *shape[axis + 2 :]])
    return value


def places(call: Call) -> Array:
    """The places along its axis that a slice takes, or a selection of one."""
    every = np.arange(call.value.shape[call.axis])
    return every[[call["index"]]] if "index" in call.arguments else every[call["start"] : call["end"] : call["step"]]


@register_rule("slice", "select", sliced=True)
def slice_rule(labeller: Labeller, call: Call) -> Value:
    taken = labeller.take(call.value, call.axis, places(call))
    return labeller.squeeze(taken, [call.axis]) if call.name == "select" else taken


@register_rule("diagonal", "diagonal_copy")
def diagonal(labeller: Labeller, call: Call) -> Value:
    """Entries that have the same place along two axes, or places so far apart as the offset says."""
    rows, columns = call.value.axis(call["dim1"]), call.value.axis(call["dim2"])
    offset, every = call.get("offset") or 0, np.arange(call.shape[-1])
    value = labeller.take(call.value, rows, every + max(-offset, 0))
    return labeller.diagonal(labeller.take(value, columns, every + max(offset, 0)), rows, columns)


@register_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", sliced=True)
def split(labeller: Labeller, call: Call) -> list[Value]:
    results, start = [], 0
    for shape in call.shapes:
        stop = start + shape[call.axis]
        results.append(labeller.take(call.value, call.axis, np.arange(start, stop)))
        start = stop
    return results


@register_rule("flip")
def flip(labeller: Labeller, call: Call) -> Value:
    value = call.value
    for axis in call["dims"]:
        value = labeller.take(value, value.axis(axis), np.arange(value.shape[axis])[::-1])
    return value


@register_rule("view_as_real")
def view_as_real(labeller: Labeller, call: Call) -> Value:
    """A new last axis, along which the real and the imaginary part are told apart."""
    value = labeller.unsqueeze(call.value, call.value.dim)
    return labeller.value(call.shape, value.parts, value.fixed | {value.dim - 1}, value.zero)


@register_rule("view_as_complex")
def view_as_complex(labeller: Labeller, call: Call) -> Value:
    """The last axis goes; a unit along it is the real or the imaginary part of a larger one."""
    value = labeller.restrict(call.value, range(call.value.dim - 1))
    return labeller.value(call.shape, value.parts, value.fixed - {value.dim - 1}, value.zero)


@register_rule("cat")
def cat_rule(labeller: Labeller, call: Call) -> Value:
    values = [value for value in call["tensors"] if value.shape != (0,)]
    return cat(labeller, values, values[0].axis(call["dim"]))


def cat(labeller: Labeller, values: list[Value], axis: int) -> Value:
    """Side by side along ``axis``: labels on it are joined end to end, labels on other axes are tied as in a sum."""
    if len(values) == 1:
        return values[0]
    along = [value.part_on(axis) for value in values]
    axes = {part.axes for part in along if part is not None}
    if len(axes) > 1 or (None in along and not axes <= {(axis,)}):  # labels of different kinds: reduce to this axis
        joint = set[int]().union(*axes) - {axis}
        values = [labeller.restrict(value, set(range(value.dim)) - joint) for value in values]
        along = [value.part_on(axis) for value in values]
    rest = [replace(v, parts=tuple(p for p in v.parts if axis not in p.axes)) for v in values]
    tied = _tied(labeller, rest, axis, sum(value.shape[axis] for value in values))
    shape = next((part for part in along if part is not None), None)
    if shape is None:
        return tied
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
    return labeller.value(tied.shape, [*tied.parts, Part(shape.axes, joined)], tied.fixed - {axis}, tied.zero)


def _tied(labeller: Labeller, values: list[Value], axis: int, length: int) -> Value:
    """Labels off the axis must agree in all pieces; along the axis entries are told apart by their place."""
    thin = []
    for value in values:
        shape = [1 if i == axis else n for i, n in enumerate(value.shape)]
        thin.append(Value(tuple(shape), value.parts, value.fixed - {axis}, value.zero))
    tied = labeller.elementwise(thin)
    shape = [length if i == axis else n for i, n in enumerate(tied.shape)]
    return labeller.value(shape, tied.parts, tied.fixed | {axis}, all(value.zero for value in values))
