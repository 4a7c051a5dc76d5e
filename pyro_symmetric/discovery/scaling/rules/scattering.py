"""Writes at computed places: scatter, index_add, index_put, embedding bags, and what graph networks make of them.

The places are data, and so is the axis along which they are counted. Along all other axes units stay what they are, if
their entries go to the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import HOMOGENEOUS, LINEAR, NOTHING, Passes, Value, opaque
from pyro_symmetric.discovery.scaling.rules.indexing import indexed_axes
from pyro_symmetric.discovery.scaling.rules.registry import Call, as_value, register_rule

# The multipliers that a reduction of all entries with the same place lets through.
REDUCTIONS = {
    "add": LINEAR, "sum": LINEAR, "mean": LINEAR, "amax": HOMOGENEOUS, "amin": HOMOGENEOUS, "prod": NOTHING,
    "multiply": NOTHING,
}  # fmt: skip


@register_rule("scatter", "scatter_add", "scatter_reduce")
def scatter(labeller: Labeller, call: Call) -> Value:
    """Each entry goes to a place of its own along one axis."""
    value, chosen, axis = call["self"], _expanded(call["index"]), call.axis
    source = as_value(call.get("src", call.get("value")))
    off = [a for a in range(value.dim) if a != axis]
    labeller.pin(chosen)
    same = all(chosen.shape[a] == value.shape[a] for a in off)
    if not same or (source.dim and any(source.shape[a] != chosen.shape[a] for a in off)):
        return labeller.give_up([value, source], call.shape, "only some of the units are written")
    passes = REDUCTIONS[call.get("reduce") or "add"]
    written = labeller.elementwise([_thin(labeller, source, axis), _thin(labeller, chosen, axis)], "product")
    written = replace(written, zero=source.zero)
    return _written(labeller, call, [_thin(labeller, value, axis), written], [axis], passes)


@register_rule("index_add", "index_reduce", "index_copy")
def index_add(labeller: Labeller, call: Call) -> Value:
    """Whole slices go to places along one axis."""
    labeller.pin(call["index"])
    axis = call.axis
    operands = [_thin(labeller, operand, axis) for operand in (call["self"], call["source"])]
    return _written(labeller, call, operands, [axis], REDUCTIONS[call.get("reduce") or "add"])


@register_rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(labeller: Labeller, call: Call) -> Value:
    """``self[indices] = values``, or ``+=``: places along the indexed axes, which must be neighbours."""
    value, written = call["self"], call["values"]
    axes: list[int] = []
    length = 0
    for entry in call["indices"]:
        if entry is not None:
            labeller.pin(entry)
        width = indexed_axes(entry)
        axes += range(length, length + width) if entry is not None else ()
        length += width
    first, behind = axes[0], value.dim - axes[-1] - 1
    if axes != list(range(first, first + len(axes))):
        return labeller.give_up([value, written], call.shape, "indices have gaps between them")
    places = max(1 if entry.mask else entry.dim for entry in call["indices"] if entry is not None)
    # The axis of what is written that lies along each of the value's axes, if it has one there.
    ahead = written.dim - behind - places - first
    along = [*range(ahead, ahead + first), *[-1] * len(axes), *range(written.dim - behind, written.dim)]
    matched: list[int | None] = [a if a >= 0 and written.shape[a] > 1 else None for a in along]
    written = labeller.relaid(labeller.restrict(written, [a for a in matched if a is not None]), matched)
    old = labeller.restrict(value, [a for a in range(value.dim) if a not in axes])
    old = labeller.relaid(old, [None if a in axes else a for a in range(old.dim)])
    return _written(labeller, call, [old, written], axes, LINEAR)


def _expanded(places: Value) -> Value:
    """Places that are written out entry by entry: along an axis without changes they are equal, as if expanded."""
    if places.constant is None:
        return places
    numbers = places.constant
    changing = {axis for axis in places.fixed if bool((numbers != numbers.narrow(axis, 0, 1)).any())}
    return replace(places, fixed=frozenset(changing))


def _thin(labeller: Labeller, value: Value, axis: int) -> Value:
    """The labels off an axis, which has length one."""
    if not value.dim:
        return value
    value = labeller.restrict(value, [a for a in range(value.dim) if a != axis])
    return labeller.relaid(value, [None if a == axis else a for a in range(value.dim)])


def _written(labeller: Labeller, call: Call, operands: Sequence[Value], axes: Sequence[int], passes: Passes) -> Value:
    """Old and new entries have the same units and multipliers; along the indexed axes all entries differ."""
    tied = labeller.elementwise(operands, "sum", passes)
    wide = labeller.relaid(tied, [None if a in axes else a for a in range(tied.dim)], call.shape)
    zero = all(operand.zero for operand in operands)
    return replace(labeller.value(call.shape, wide.parts, wide.fixed.union(axes)), zero=zero)


@register_rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(labeller: Labeller, call: Call) -> list[Value]:
    """Sums, means (or largest entries) of rows by number."""
    for name in ("indices", "offsets", "per_sample_weights"):
        if call.get(name) is not None:
            labeller.pin(call[name])
    weight = labeller.restrict(call["weight"], [1])
    labeller.still(weight, HOMOGENEOUS if call["mode"] == 2 else LINEAR)
    result = labeller.relaid(weight, [None, 1], call.shape)
    result = labeller.value(call.shape, result.parts, result.fixed | {0})
    if any(call.read[1:]):
        result = labeller.give_up([result], call.shape, "the places of its largest entries are read")
    return [result, *map(opaque, call.shapes[1:])]
