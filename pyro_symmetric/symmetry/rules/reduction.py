"""Operators that sum over axes, or look along them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pyro_symmetric.symmetry.labeller import HOMOGENEOUS, LINEAR, NOTHING, Labeller, Passes
from pyro_symmetric.symmetry.labels import Value, opaque
from pyro_symmetric.symmetry.rules import Call, register_rule


def _axes(call: Call, value: Value) -> list[int]:
    """The reduced axes: an int, a list, or all if none is given."""
    dim = call.arguments.get("dim")
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(value.dim))
    return [value.axis(d) for d in dim] if isinstance(dim, Iterable) else [value.axis(dim)]


def _reduced(labeller: Labeller, call: Call, value: Value, passes: Passes) -> Value:
    result = labeller.reduce(value, _axes(call, value), bool(call.arguments.get("keepdim", False)), passes)
    return replace(result, zero=value.zero and passes.scale)


@register_rule("aten.sum", "aten.mean", "aten.nansum")
def total(labeller: Labeller, call: Call) -> Value:
    return _reduced(labeller, call, call["self"], LINEAR)


@register_rule("aten.linalg_vector_norm", "aten.norm")
def norm(labeller: Labeller, call: Call) -> Value:
    return _reduced(labeller, call, labeller.even(call["self"]), HOMOGENEOUS)


@register_rule("aten.amax", "aten.amin", "aten.std")
def largest(labeller: Labeller, call: Call) -> Value:
    return _reduced(labeller, call, call["self"], HOMOGENEOUS)


@register_rule("aten.var")
def variance(labeller: Labeller, call: Call) -> Value:
    return _reduced(labeller, call, labeller.elementwise([call["self"]], "product", HOMOGENEOUS, [2.0]), HOMOGENEOUS)


@register_rule("aten.var_mean", "aten.std_mean")
def variance_and_mean(labeller: Labeller, call: Call) -> list[Value]:
    value = call["self"]
    if "var" in call.target.overloadpacket.__name__:
        value = labeller.elementwise([value], "product", HOMOGENEOUS, [2.0])
    return [_reduced(labeller, call, value, HOMOGENEOUS), _reduced(labeller, call, call["self"], LINEAR)]


@register_rule("aten.logsumexp", "aten.prod", "aten.any", "aten.all", "aten.count_nonzero")
def any_reduction(labeller: Labeller, call: Call) -> Value:
    return _reduced(labeller, call, call["self"], NOTHING)


@register_rule("aten.max", "aten.min")
def maximum(labeller: Labeller, call: Call) -> Value | list[Value]:
    """Largest entry, alone or with its place; as ``max(x, y)`` entry by entry."""
    if "other" in call.arguments:
        return labeller.elementwise([call["self"], call["other"]], "sum", HOMOGENEOUS)
    if len(call.shapes) == 1:
        return _reduced(labeller, call, call["self"], HOMOGENEOUS)
    # Places change with the order of units; discovery pins everything if somebody reads them.
    return [_reduced(labeller, call, call["self"], HOMOGENEOUS), opaque(call.shapes[1])]


@register_rule("aten.argmax", "aten.argmin")
def place_of_maximum(labeller: Labeller, call: Call) -> Value:
    value = _in_order(labeller, call)
    return _reduced(labeller, call, value, NOTHING)


@register_rule("aten.cumsum", "aten.cumprod", "aten.sort", "aten.topk", "aten.logcumsumexp")
def along(labeller: Labeller, call: Call) -> Value | list[Value]:
    """Looks along an axis in order: units on it can't move."""
    value = _in_order(labeller, call)
    labeller.still(value)
    return [labeller.value(shape, value.parts, range(len(shape))) for shape in call.shapes]


def _in_order(labeller: Labeller, call: Call) -> Value:
    value = call["self"]
    gone = _axes(call, value) if value.dim else []
    return labeller.restrict(value, [axis for axis in range(value.dim) if axis not in gone])
