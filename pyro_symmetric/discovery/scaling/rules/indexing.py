"""Lookups: embeddings, constant index maps, writes into slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value, opaque
from pyro_symmetric.discovery.scaling.rules.registry import Call, reads_numbers, register_rule
from pyro_symmetric.discovery.scaling.rules.shape import places


@register_rule("embedding")
def embedding(labeller: Labeller, call: Call) -> Value:
    """Rows by number: the vocabulary can't move."""
    weight, indices = call["weight"], call["indices"]
    labeller.pin(indices)
    weight = labeller.restrict(weight, [1])
    result = labeller.relaid(weight, [*[None] * indices.dim, 1], call.shape)
    return labeller.value(call.shape, result.parts, result.fixed.union(range(indices.dim)))


@reads_numbers
@register_rule("index_select", sliced=True)
def index_select(labeller: Labeller, call: Call) -> Value:
    return _look_up(labeller, call.value, {call.axis: call["index"]}, call.shape)


@reads_numbers
@register_rule("index", sliced=True)
def index(labeller: Labeller, call: Call) -> Value:
    indices, axis = {}, 0
    for entry in call["indices"]:
        if entry is not None:
            indices[axis] = entry
        axis += indexed_axes(entry)
    return _look_up(labeller, call.value, indices, call.shape)


def indexed_axes(entry: Value | None) -> int:
    """The number of axes that an index stands for: a mask stands for as many as it has."""
    return entry.dim if entry is not None and entry.mask else 1


def _look_up(labeller: Labeller, value: Value, indices: dict[int, Value], shape: tuple[int, ...]) -> Value:
    if len(indices) == 1:
        ((axis, entry),) = indices.items()
        if entry.constant is not None and entry.dim == 1 and not entry.mask:
            return labeller.take(value, axis, entry.constant.numpy().astype(np.int64) % value.shape[axis])
        if entry.dim == 1 and not entry.mask and axis not in value.routes and shape[axis : axis + 1] == entry.shape:
            return labeller.chosen(value, axis, entry, entry.shape[0])
    for entry in indices.values():
        labeller.pin(entry)
    value = labeller.settled(value)
    if value.overlaps:
        raise labeller.facts.entangled(value.parts)
    axes = [axis + i for axis, entry in sorted(indices.items()) for i in range(indexed_axes(entry))]
    kept = [axis for axis in range(value.dim) if axis not in axes]
    value = labeller.restrict(value, kept)
    together = axes == list(range(axes[0], axes[-1] + 1))
    first, new = axes[0] if together else 0, len(shape) - len(kept)
    result = labeller.relaid(value, [*kept[:first], *[None] * new, *kept[first:]], shape)
    return labeller.value(shape, result.parts, result.fixed.union(range(first, first + new)))


@register_rule(
    "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "bincount", "histc",
    "searchsorted", "bucketize", "repeat_interleave.Tensor",
)  # fmt: skip
def depends_on_all(labeller: Labeller, call: Call) -> list[Value]:
    """Nothing may move in what decides about places and sizes."""
    for operand in call.operands:
        labeller.pin(operand)
    return [opaque(shape) for shape in call.shapes]


@reads_numbers
@register_rule("gather")
def gather(labeller: Labeller, call: Call) -> Value:
    """Each entry from a place of its own: units may be exchanged if their entries come from the same places."""
    axis, chosen = call.axis, replace(call["index"], numbers=None)
    value, _ = labeller.numbered(call.value, axis, call["index"])
    value = labeller.restrict(value, set(range(value.dim)) - {axis})
    for other in set(range(value.dim)) - {axis}:
        value = labeller.take(value, other, np.arange(chosen.shape[other]))
    thin = replace(value, shape=_with_length(value, axis, 1), fixed=value.fixed - {axis})
    return replace(labeller.elementwise([thin, chosen], "product"), zero=value.zero)


@register_rule("slice_scatter", "select_scatter")
def scatter(labeller: Labeller, call: Call) -> Value:
    """Some places along an axis get other entries: those places and the rest are told apart."""
    value, source, axis, written = call.value, call["src"], call.axis, places(call)
    if call.name == "select_scatter":
        source = labeller.unsqueeze(source, axis)
    if np.array_equal(written, np.arange(value.shape[axis])):
        return source
    if value.part_on(axis) is None:
        labels = [labeller.restrict(source, [a for a in range(source.dim) if a != axis]), value]
        thin = [replace(v, shape=_with_length(v, axis, 1), fixed=v.fixed - {axis}) for v in labels]
        tied = labeller.elementwise(thin)
        return labeller.value(value.shape, tied.parts, tied.fixed | {axis})
    # Units keep their labels; what is written must be made of the same units, or equal everywhere (zeros). Taking the
    # places out notes them as a tensor of their own, which tells them and the rest apart.
    old = labeller.take(value, axis, written)
    labeller.elementwise([old, source])
    fixed = value.fixed | {a for a in source.fixed if a != axis}
    return labeller.value(value.shape, value.parts, fixed)


def _with_length(value: Value, axis: int, length: int) -> tuple[int, ...]:
    return tuple(length if i == axis else n for i, n in enumerate(value.shape))
