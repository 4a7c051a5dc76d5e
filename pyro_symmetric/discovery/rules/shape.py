"""Operators that move entries about without touching them: views, and reads and writes at places along an axis.

Places that are known (slices, index maps) take units along. If they are data, the axis along which they are counted is
told apart; along all other axes units stay what they are, if their entries go to the same places.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.rules.registry import Call, register_rule
from pyro_symmetric.discovery.values import Value


@register_rule("view", "_unsafe_view", "reshape", "view_as", "flatten", "unflatten")
def reshape(flow: Flow, call: Call) -> Value:
    return flow.reshape(call.value, call.shape)


@register_rule("squeeze")
def squeeze(flow: Flow, call: Call) -> Value:
    dim = call.get("dim", range(call.value.dim))
    return flow.squeeze(call.value, [dim] if isinstance(dim, int) else dim)


@register_rule("unsqueeze")
def unsqueeze(flow: Flow, call: Call) -> Value:
    return flow.unsqueeze(call.value, call["dim"])


@register_rule("permute", "transpose")
def permute(flow: Flow, call: Call) -> Value:
    axes = [*range(call.value.dim)]
    if call.name == "transpose":
        one, other = call.value.axis(call["dim0"]), call.value.axis(call["dim1"])
        axes[one], axes[other] = other, one
    return flow.relaid(call.value, [call.value.axis(axis) for axis in call.get("dims", axes)])


@register_rule("expand", "expand_as")
def expand(flow: Flow, call: Call) -> Value:
    return flow.expand(call.value, call.shape)


@register_rule("repeat")
def repeat(flow: Flow, call: Call) -> Value:
    """Whole copies, one after the other: a new axis in front of each repeated one, then merged."""
    value, counts = call.value, call["repeats"]
    while value.dim < len(counts):
        value = flow.unsqueeze(value, 0)
    for axis, count in enumerate(counts):
        if count != 1:
            shape = [*value.shape[:axis], count, *value.shape[axis:]]
            value = flow.expand(flow.unsqueeze(value, axis), shape)
            value = flow.reshape(value, [*shape[:axis], count * shape[axis + 1], *shape[axis + 2 :]])
    return value


@register_rule("view_as_real")
def view_as_real(flow: Flow, call: Call) -> Value:
    """A new last axis, along which the real and the imaginary part are told apart."""
    value = flow.unsqueeze(call.value, call.value.dim)
    return flow.value(call.shape, value.parts, value.fixed | {value.dim - 1})


@register_rule("view_as_complex")
def view_as_complex(flow: Flow, call: Call) -> Value:
    """The last axis goes; a unit along it is the real or the imaginary part of a larger one."""
    last = call.value.dim - 1
    return flow.squeeze(flow.off(call.value, [last]), [last])


# places that are known ----------------------------------------------------------------------------------------------


@register_rule("slice", "select")
def slice_rule(flow: Flow, call: Call) -> Value:
    taken = flow.take(call.value, call.axis, _places(call))
    return flow.squeeze(taken, [call.axis]) if call.name == "select" else taken


def _places(call: Call) -> Array:
    """The places along its axis that a slice takes, or a selection of one."""
    every = np.arange(call.value.shape[call.axis])
    return every[[call["index"]]] if "index" in call.arguments else every[call["start"] : call["end"] : call["step"]]


@register_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
def split(flow: Flow, call: Call) -> list[Value]:
    ends = np.cumsum([shape[call.axis] for shape in call.shapes])
    return [
        flow.take(call.value, call.axis, np.arange(end - shape[call.axis], end))
        for end, shape in zip(ends, call.shapes, strict=True)
    ]


@register_rule("unbind")
def unbind(flow: Flow, call: Call) -> list[Value]:
    every = np.arange(call.value.shape[call.axis])
    return [flow.squeeze(flow.take(call.value, call.axis, every[[place]]), [call.axis]) for place in every]


@register_rule("flip")
def flip(flow: Flow, call: Call) -> Value:
    value = call.value
    for axis in map(value.axis, call["dims"]):
        value = flow.take(value, axis, np.arange(value.shape[axis])[::-1])
    return value


@register_rule("cat")
def cat(flow: Flow, call: Call) -> Value:
    values = [value for value in call["tensors"] if value.shape != (0,)]
    return flow.cat(values, values[0].axis(call["dim"]))


@register_rule("stack")
def stack(flow: Flow, call: Call) -> Value:
    axis = call["dim"] % len(call.shape)
    return flow.cat([flow.unsqueeze(value, axis) for value in call["tensors"]], axis)


@register_rule("constant_pad_nd")
def pad(flow: Flow, call: Call) -> Value:
    """Constants around: units continue with others, which are all equal. Less than none: entries go."""
    value, widths = call.value, call["pad"]
    for step, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        axis = value.dim - 1 - step
        length = value.shape[axis]
        value = flow.take(value, axis, np.arange(max(0, -before), length + min(0, after)))
        around = [Value((*value.shape[:axis], max(0, width), *value.shape[axis + 1 :])) for width in (before, after)]
        value = flow.cat([piece for piece in (around[0], value, around[1]) if piece.shape[axis]], axis)
    return value


@register_rule("slice_scatter", "select_scatter")
def write_slice(flow: Flow, call: Call) -> Value:
    """Some places along an axis get other entries: those places and the rest are told apart."""
    value, source, axis, written = call.value, call["src"], call.axis, _places(call)
    if call.name == "select_scatter":
        source = flow.unsqueeze(source, axis)
    if np.array_equal(written, np.arange(value.shape[axis])):
        return source
    if value.part_on(axis) is None:
        return _written(flow, call, [value.across([axis]), flow.off(source, [axis])], [axis])
    # Units keep their atoms; what is written must be made of the same units, or equal everywhere (zeros). Taking the
    # places out notes them as a tensor of their own, which tells them and the rest apart.
    flow.elementwise([flow.take(value, axis, written), source])
    return flow.value(value.shape, value.parts, value.fixed | {a for a in source.fixed if a != axis})


# places that are data -----------------------------------------------------------------------------------------------


@register_rule("embedding", "_embedding_bag", "_embedding_bag_forward_only")
def embedding(flow: Flow, call: Call) -> Value:
    """Rows by number (or sums, means, largest entries of some): the vocabulary can't move."""
    weight, *numbers = call.operands
    for value in numbers:
        flow.pin(value)
    lead = range(len(call.shape) - 1)
    rows = flow.relaid(flow.restrict(weight, [1]), [*(None for _ in lead), 1], call.shape)
    return flow.value(call.shape, rows.parts, rows.fixed.union(lead))


@register_rule("index", "index_select")
def index(flow: Flow, call: Call) -> Value:
    value, indices = call.value, _by_axis(call)
    (axis, entry), *others = indices.items()
    if not others and entry.constant is not None and entry.dim == 1 and not entry.mask:
        return flow.take(value, axis, entry.constant.numpy().astype(np.int64) % value.shape[axis])
    for entry in indices.values():
        flow.pin(entry)
    axes, shape = _axes(indices), call.shape
    kept = [axis for axis in range(value.dim) if axis not in axes]
    first, new = axes[0] if axes == [*range(axes[0], axes[-1] + 1)] else 0, len(shape) - len(kept)
    result = flow.relaid(flow.restrict(value, kept), [*kept[:first], *[None] * new, *kept[first:]], shape)
    return flow.value(shape, result.parts, result.fixed.union(range(first, first + new)))


def _by_axis(call: Call) -> dict[int, Value]:
    """The axis where each index starts."""
    if "dim" in call.arguments:
        return {call.axis: call["index"]}
    indices, axis = dict[int, Value](), 0
    for entry in call["indices"]:
        if entry is not None:
            indices[axis] = entry
        axis += _width(entry)
    return indices


def _width(entry: Value | None) -> int:
    """The number of axes that an index stands for: a mask stands for as many as it has."""
    return entry.dim if entry is not None and entry.mask else 1


def _axes(indices: dict[int, Value]) -> list[int]:
    """The axes that indices stand for."""
    return [axis + i for axis, entry in sorted(indices.items()) for i in range(_width(entry))]


@register_rule("gather")
def gather(flow: Flow, call: Call) -> Value:
    """Each entry from a place of its own: units may be exchanged if their entries come from the same places."""
    value, chosen = flow.off(call.value, [call.axis]), call["index"]
    for other in set(range(value.dim)) - {call.axis}:
        value = flow.take(value, other, np.arange(chosen.shape[other]))
    return flow.elementwise([value, chosen])


@register_rule("scatter", "scatter_add", "scatter_reduce")
def scatter(flow: Flow, call: Call) -> Value:
    """Each entry goes to a place of its own along one axis."""
    value, chosen, axis = call["self"], _expanded(call["index"]), call.axis
    source = call.get("src", call.get("value"))
    source = source if isinstance(source, Value) else Value(())
    flow.pin(chosen)
    around = [[n for a, n in enumerate(x.shape) if a != axis] for x in (value, chosen, source)]
    if around[0] != around[1] or (source.dim and around[2] != around[1]):
        return flow.give_up([value, source], call.shape, "only some of the units are written")
    return _written(flow, call, [flow.off(x, [axis]) for x in (value, source, chosen)], [axis])


def _expanded(chosen: Value) -> Value:
    """Places that are written out entry by entry: along an axis without changes they are equal, as if expanded."""
    if chosen.constant is None:
        return chosen
    numbers = chosen.constant
    changing = {axis for axis in chosen.fixed if bool((numbers != numbers.narrow(axis, 0, 1)).any())}
    return replace(chosen, fixed=frozenset(changing))


@register_rule("index_put", "_index_put_impl", "_unsafe_index_put", "index_add", "index_reduce", "index_copy")
def index_put(flow: Flow, call: Call) -> Value:
    """``self[indices] = values``, or ``+=``: places along the indexed axes, which must be neighbours."""
    value, source, indices = call["self"], call.get("values", call.get("source")), _by_axis(call)
    for entry in indices.values():
        flow.pin(entry)
    axes = _axes(indices)
    if axes != [*range(axes[0], axes[-1] + 1)]:
        return flow.give_up([value, source], call.shape, "indices have gaps between them")
    ahead, behind = [*range(axes[0])], value.dim - axes[-1] - 1
    dim = axes[0] + max(1 if entry.mask else entry.dim for entry in indices.values()) + behind
    kept = [*ahead, *range(dim - behind, dim)]
    source = flow.restrict(flow.relaid(source, [*[None] * (dim - source.dim), *range(source.dim)]), kept)
    source = flow.relaid(source, [*ahead, *(None for _ in axes), *kept[len(ahead) :]])
    return _written(flow, call, [flow.off(value, axes), source], axes)


def _written(flow: Flow, call: Call, operands: Sequence[Value], axes: Collection[int]) -> Value:
    """Old and new entries have the same units; along the indexed axes all entries differ."""
    tied = flow.elementwise(operands)
    return flow.value(call.shape, tied.parts, tied.fixed.union(axes))
