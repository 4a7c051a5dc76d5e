"""Operators that move entries about without touching them."""

from __future__ import annotations

import numpy as np

from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.flow import Flow, Value
from pyro_symmetric.discovery.rules.registry import Call, register_rule


@register_rule("view.dtype")
def other_numbers(flow: Flow, call: Call) -> Value:
    return flow.give_up(call.operands, call.shape, "its bytes are read as other numbers")


@register_rule("view", "_unsafe_view", "reshape")
def reshape(flow: Flow, call: Call) -> Value:
    return flow.reshape(call.value, call.shape)


@register_rule("squeeze")
def squeeze(flow: Flow, call: Call) -> Value:
    dim = call.get("dim", range(call.value.dim))
    return flow.squeeze(call.value, [dim] if isinstance(dim, int) else dim)


@register_rule("unsqueeze")
def unsqueeze(flow: Flow, call: Call) -> Value:
    return flow.unsqueeze(call.value, call["dim"])


@register_rule("permute")
def permute(flow: Flow, call: Call) -> Value:
    return flow.relaid(call.value, [call.value.axis(dim) for dim in call["dims"]])


@register_rule("expand")
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


def places(call: Call) -> Array:
    """The places along its axis that a slice takes, or a selection of one."""
    every = np.arange(call.value.shape[call.axis])
    return every[[call["index"]]] if "index" in call.arguments else every[call["start"] : call["end"] : call["step"]]


@register_rule("slice", "select")
def slice_rule(flow: Flow, call: Call) -> Value:
    taken = flow.take(call.value, call.axis, places(call))
    return flow.squeeze(taken, [call.axis]) if call.name == "select" else taken


@register_rule("diagonal", "diagonal_copy")
def diagonal(flow: Flow, call: Call) -> Value:
    """Entries that have the same place along two axes, or places so far apart as the offset says."""
    rows, columns = call.value.axis(call["dim1"]), call.value.axis(call["dim2"])
    offset, every = call.get("offset") or 0, np.arange(call.shape[-1])
    value = flow.take(call.value, rows, every + max(-offset, 0))
    return flow.diagonal(flow.take(value, columns, every + max(offset, 0)), rows, columns)


@register_rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(flow: Flow, call: Call) -> list[Value]:
    ends = np.cumsum([shape[call.axis] for shape in call.shapes])
    return [
        flow.take(call.value, call.axis, np.arange(end - shape[call.axis], end))
        for end, shape in zip(ends, call.shapes, strict=True)
    ]


@register_rule("flip")
def flip(flow: Flow, call: Call) -> Value:
    value = call.value
    for axis in map(value.axis, call["dims"]):
        value = flow.take(value, axis, np.arange(value.shape[axis])[::-1])
    return value


@register_rule("view_as_real")
def view_as_real(flow: Flow, call: Call) -> Value:
    """A new last axis, along which the real and the imaginary part are told apart."""
    value = flow.unsqueeze(call.value, call.value.dim)
    return flow.value(call.shape, value.parts, value.fixed | {value.dim - 1})


@register_rule("view_as_complex")
def view_as_complex(flow: Flow, call: Call) -> Value:
    """The last axis goes; a unit along it is the real or the imaginary part of a larger one."""
    value = flow.restrict(call.value, range(call.value.dim - 1))
    return flow.value(call.shape, value.parts, value.fixed - {value.dim - 1})


@register_rule("cat")
def cat(flow: Flow, call: Call) -> Value:
    values = [value for value in call["tensors"] if value.shape != (0,)]
    return flow.cat(values, values[0].axis(call["dim"]))


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
