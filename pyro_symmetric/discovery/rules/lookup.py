"""Reads and writes at computed places: embeddings, index maps, scatter, and what graph networks make of them.

The places are data, and so is the axis along which they are counted. Along all other axes units stay what they are, if
their entries go to the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.flow import Flow, Value, opaque
from pyro_symmetric.discovery.rules.registry import Call, register_rule
from pyro_symmetric.discovery.rules.shape import places


@register_rule("embedding")
def embedding(flow: Flow, call: Call) -> Value:
    """Rows by number: the vocabulary can't move."""
    return _rows(flow, call["weight"], [call["indices"]], call.shape)


@register_rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(flow: Flow, call: Call) -> Value:
    """Sums, means (or largest entries) of rows by number."""
    given = [call.get(name) for name in ("indices", "offsets", "per_sample_weights")]
    return _rows(flow, call["weight"], [value for value in given if value is not None], call.shape)


def _rows(flow: Flow, weight: Value, numbers: Sequence[Value], shape: Sequence[int]) -> Value:
    for value in numbers:
        flow.pin(value)
    lead = len(shape) - 1
    result = flow.relaid(flow.restrict(weight, [1]), [*[None] * lead, 1], shape)
    return flow.value(shape, result.parts, result.fixed.union(range(lead)))


@register_rule("index_select")
def index_select(flow: Flow, call: Call) -> Value:
    return _look_up(flow, call.value, {call.axis: call["index"]}, call.shape)


@register_rule("index")
def index(flow: Flow, call: Call) -> Value:
    return _look_up(flow, call.value, _by_axis(call), call.shape)


def _by_axis(call: Call) -> dict[int, Value]:
    """The axis where each index starts."""
    indices, axis = dict[int, Value](), 0
    for entry in call["indices"]:
        if entry is not None:
            indices[axis] = entry
        axis += _width(entry)
    return indices


def _width(entry: Value | None) -> int:
    """The number of axes that an index stands for: a mask stands for as many as it has."""
    return entry.dim if entry is not None and entry.mask else 1


def _look_up(flow: Flow, value: Value, indices: dict[int, Value], shape: tuple[int, ...]) -> Value:
    (axis, entry), *others = indices.items()
    if not others and entry.constant is not None and entry.dim == 1 and not entry.mask:
        return flow.take(value, axis, entry.constant.numpy().astype(np.int64) % value.shape[axis])
    for entry in indices.values():
        flow.pin(entry)
    axes = [axis + i for axis, entry in sorted(indices.items()) for i in range(_width(entry))]
    kept = [axis for axis in range(value.dim) if axis not in axes]
    together = axes == list(range(axes[0], axes[-1] + 1))
    first, new = axes[0] if together else 0, len(shape) - len(kept)
    result = flow.relaid(flow.restrict(value, kept), [*kept[:first], *[None] * new, *kept[first:]], shape)
    return flow.value(shape, result.parts, result.fixed.union(range(first, first + new)))


@register_rule(
    "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "bincount", "histc",
    "searchsorted", "bucketize", "repeat_interleave.Tensor",
)  # fmt: skip
def depends_on_all(flow: Flow, call: Call) -> list[Value]:
    """Nothing may move in what decides about places and sizes."""
    for operand in call.operands:
        flow.pin(operand)
    return [opaque(shape) for shape in call.shapes]


@register_rule("gather")
def gather(flow: Flow, call: Call) -> Value:
    """Each entry from a place of its own: units may be exchanged if their entries come from the same places."""
    axis, chosen = call.axis, call["index"]
    value = flow.restrict(call.value, set(range(call.value.dim)) - {axis})
    for other in set(range(value.dim)) - {axis}:
        value = flow.take(value, other, np.arange(chosen.shape[other]))
    return flow.elementwise([_with_length_one(value, axis), chosen])


def _with_length_one(value: Value, axis: int) -> Value:
    """The units off an axis."""
    shape = tuple(1 if i == axis else n for i, n in enumerate(value.shape))
    return replace(value, shape=shape, fixed=value.fixed - {axis}, constant=None)


@register_rule("slice_scatter", "select_scatter")
def write_slice(flow: Flow, call: Call) -> Value:
    """Some places along an axis get other entries: those places and the rest are told apart."""
    value, source, axis, written = call.value, call["src"], call.axis, places(call)
    if call.name == "select_scatter":
        source = flow.unsqueeze(source, axis)
    if np.array_equal(written, np.arange(value.shape[axis])):
        return source
    if value.part_on(axis) is None:
        source = flow.restrict(source, [a for a in range(source.dim) if a != axis])
        tied = flow.elementwise([_with_length_one(x, axis) for x in (source, value)])
        return flow.value(value.shape, tied.parts, tied.fixed | {axis})
    # Units keep their atoms; what is written must be made of the same units, or equal everywhere (zeros). Taking the
    # places out notes them as a tensor of their own, which tells them and the rest apart.
    flow.elementwise([flow.take(value, axis, written), source])
    return flow.value(value.shape, value.parts, value.fixed | {a for a in source.fixed if a != axis})


@register_rule("scatter", "scatter_add", "scatter_reduce")
def scatter(flow: Flow, call: Call) -> Value:
    """Each entry goes to a place of its own along one axis."""
    value, chosen, axis = call["self"], _expanded(call["index"]), call.axis
    source = call.get("src", call.get("value"))
    source = source if isinstance(source, Value) else Value(())
    off = [a for a in range(value.dim) if a != axis]
    flow.pin(chosen)
    same = all(chosen.shape[a] == value.shape[a] for a in off)
    if not same or (source.dim and any(source.shape[a] != chosen.shape[a] for a in off)):
        return flow.give_up([value, source], call.shape, "only some of the units are written")
    return _written(flow, call, [_off(flow, x, [axis]) for x in (value, source, chosen)], [axis])


def _expanded(chosen: Value) -> Value:
    """Places that are written out entry by entry: along an axis without changes they are equal, as if expanded."""
    if chosen.constant is None:
        return chosen
    numbers = chosen.constant
    changing = {axis for axis in chosen.fixed if bool((numbers != numbers.narrow(axis, 0, 1)).any())}
    return replace(chosen, fixed=frozenset(changing))


@register_rule("index_add", "index_reduce", "index_copy")
def index_add(flow: Flow, call: Call) -> Value:
    """Whole slices go to places along one axis."""
    flow.pin(call["index"])
    return _written(flow, call, [_off(flow, x, [call.axis]) for x in (call["self"], call["source"])], [call.axis])


@register_rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(flow: Flow, call: Call) -> Value:
    """``self[indices] = values``, or ``+=``: places along the indexed axes, which must be neighbours."""
    value, written, indices = call["self"], call["values"], _by_axis(call)
    for entry in indices.values():
        flow.pin(entry)
    axes = [axis + i for axis, entry in indices.items() for i in range(_width(entry))]
    first, behind = axes[0], value.dim - axes[-1] - 1
    if axes != list(range(first, first + len(axes))):
        return flow.give_up([value, written], call.shape, "indices have gaps between them")
    lengths = max(1 if entry.mask else entry.dim for entry in indices.values())
    # The axis of what is written that lies along each of the value's axes, if it has one there.
    ahead = written.dim - behind - lengths - first
    along = [*range(ahead, ahead + first), *[-1] * len(axes), *range(written.dim - behind, written.dim)]
    matched: list[int | None] = [a if a >= 0 and written.shape[a] > 1 else None for a in along]
    written = flow.relaid(flow.restrict(written, [a for a in matched if a is not None]), matched)
    return _written(flow, call, [_off(flow, value, axes), written], axes)


def _off(flow: Flow, value: Value, axes: Sequence[int]) -> Value:
    """The units off some axes, which have length one."""
    if not value.dim:
        return value
    value = flow.restrict(value, [a for a in range(value.dim) if a not in axes])
    return flow.relaid(value, [None if a in axes else a for a in range(value.dim)])


def _written(flow: Flow, call: Call, operands: Sequence[Value], axes: Sequence[int]) -> Value:
    """Old and new entries have the same units; along the indexed axes all entries differ."""
    tied = flow.elementwise(operands)
    wide = flow.relaid(tied, [None if a in axes else a for a in range(tied.dim)], call.shape)
    return flow.value(call.shape, wide.parts, wide.fixed.union(axes))
