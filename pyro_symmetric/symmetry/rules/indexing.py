"""Lookups: embeddings, constant index maps, writes into slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pyro_symmetric.symmetry.labeller import LINEAR, Labeller
from pyro_symmetric.symmetry.labels import Value
from pyro_symmetric.symmetry.rules import Call, register_rule
from pyro_symmetric.symmetry.rules.shape import take


@register_rule("aten.embedding")
def embedding(labeller: Labeller, call: Call) -> Value:
    """Rows by number: the vocabulary can't move."""
    weight, indices = call["weight"], call["indices"]
    labeller.pin(indices)
    weight = labeller.restrict(weight, [1])
    last = indices.dim
    parts = [part.moved({1: last}) for part in weight.parts]
    return labeller.value(call.shape, parts, [*range(last), *([last] if 1 in weight.fixed else [])])


@register_rule("aten.index_select")
def index_select(labeller: Labeller, call: Call) -> Value:
    value, axis = call["self"], call["self"].axis(call["dim"])
    return _look_up(labeller, value, {axis: call["index"]}, call.shape)


@register_rule("aten.index")
def index(labeller: Labeller, call: Call) -> Value:
    indices = {axis: value for axis, value in enumerate(call["indices"]) if value is not None}
    return _look_up(labeller, call["self"], indices, call.shape)


def _look_up(labeller: Labeller, value: Value, indices: dict[int, Value], shape: tuple[int, ...]) -> Value:
    for entry in indices.values():
        labeller.pin(entry)
    if len(indices) == 1:
        ((axis, entry),) = indices.items()
        if entry.constant is not None and entry.dim == 1 and entry.constant.dtype != torch.bool:
            places = entry.constant.numpy().astype(np.int64) % value.shape[axis]
            return take(labeller, value, axis, places)
    kept = [axis for axis in range(value.dim) if axis not in indices]
    value = labeller.restrict(value, kept)
    axes = sorted(indices)
    together = axes == list(range(axes[0], axes[-1] + 1))
    new = len(shape) - len(kept)
    first = axes[0] if together else 0
    to = {axis: i + (new if i >= first else 0) for i, axis in enumerate(kept)}
    parts = [part.moved(to) for part in value.parts]
    fixed = [*(to[axis] for axis in value.fixed if axis in to), *range(first, first + new)]
    return labeller.value(shape, parts, fixed)


@register_rule("aten.gather")
def gather(labeller: Labeller, call: Call) -> Value:
    """Each entry from a place of its own: nothing may move."""
    return labeller.give_up(call.operands, call.shape)


@register_rule("aten.slice_scatter")
def slice_scatter(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    axis = value.axis(call["dim"])
    places = np.arange(value.shape[axis])[call["start"] : call["end"] : call["step"]]
    return _written(labeller, value, call["src"], axis, places)


@register_rule("aten.select_scatter")
def select_scatter(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    axis = value.axis(call["dim"])
    places = np.arange(value.shape[axis])[[call["index"]]]
    return _written(labeller, value, labeller.unsqueeze(call["src"], axis), axis, places)


def _written(labeller: Labeller, value: Value, source: Value, axis: int, places: np.ndarray) -> Value:
    """Some places along an axis get other entries: those places and the rest are told apart."""
    if np.array_equal(places, np.arange(value.shape[axis])):
        return source
    part = value.part_on(axis)
    if part is None:
        labels = [labeller.restrict(source, [a for a in range(source.dim) if a != axis]), value]
        thin = [replace(v, shape=_thin(v, axis), fixed=v.fixed - {axis}, constant=None) for v in labels]
        tied = labeller.elementwise(thin)
        return labeller.value(value.shape, tied.parts, tied.fixed | {axis})
    # Units keep their labels; what is written must be made of the same units, or equal everywhere (zeros). Taking the
    # places out notes them as a tensor of their own, which tells them and the rest apart.
    old = take(labeller, value, axis, places)
    labeller.elementwise([old, source], "sum", LINEAR)
    fixed = value.fixed | {a for a in source.fixed if a != axis}
    return labeller.value(value.shape, value.parts, fixed)


def _thin(value: Value, axis: int) -> tuple[int, ...]:
    return tuple(1 if i == axis else n for i, n in enumerate(value.shape))
