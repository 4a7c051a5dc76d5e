"""Operators that sum over axes, or look along them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import HOMOGENEOUS, LINEAR, NOTHING, Passes, Value
from pyro_symmetric.discovery.scaling.rules.registry import Call, register_rule

# The multipliers that symmetric functions of all entries along an axis let through; those of functions of their order.
SYMMETRIC = {
    LINEAR: "sum mean nansum",
    HOMOGENEOUS: "amax amin std max min median kthvalue sort topk",
    NOTHING: "logsumexp prod any all count_nonzero",
}
ORDERED = {LINEAR: "cumsum", HOMOGENEOUS: "cummax cummin", NOTHING: "cumprod logcumsumexp"}


def _axes(call: Call) -> list[int]:
    """The reduced axes: an int, a list, or all if none is given."""
    dim = call.get("dim")
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(call.value.dim))
    return [call.value.axis(d) for d in (dim if isinstance(dim, Iterable) else [dim])]


def _reduced(labeller: Labeller, call: Call, value: Value, passes: Passes) -> Value:
    result = labeller.reduce(value, _axes(call), bool(call.get("keepdim", False)), passes)
    return replace(result, zero=value.zero and passes.scale)


def _symmetric(labeller: Labeller, call: Call, passes: Passes) -> Value | list[Value]:
    """A symmetric function, alone or with the places of its entries, which aren't symmetric."""
    numbers = _numbers(call)
    value = _in_order(labeller, call) if any(call.read[1:]) and numbers is None else call.value
    if call.name in ("sort", "topk"):  # the first entries by rank: they have places of their own
        ranked = labeller.reduce(value, _axes(call), True, passes)
        result = labeller.value(call.shape, ranked.parts, {*ranked.fixed, call.axis})
    else:
        result = _reduced(labeller, call, value, passes)
    return result if len(call.shapes) == 1 else [result, replace(labeller.unscaled(result), numbers=numbers)]


def _ordered(labeller: Labeller, call: Call, passes: Passes) -> Value | list[Value]:
    value = _in_order(labeller, call)
    labeller.still(value, passes)
    result = labeller.value(call.shape, value.parts, range(len(call.shape)))
    return result if len(call.shapes) == 1 else [result, labeller.unscaled(result)]


def _numbers(call: Call) -> Array | None:
    """The units whose numbers say which entries have some rank along an axis, if units lie along it alone."""
    axes = _axes(call)
    part = call.value.part_on(axes[0]) if len(axes) == 1 and not call.value.overlaps else None
    return part.atoms if part is not None and part.axes == tuple(axes) else None


def _in_order(labeller: Labeller, call: Call) -> Value:
    """Units along these axes can't move, but be rescaled together."""
    keep = set(range(call.value.dim)) - set(_axes(call) if call.value.dim else [])
    return labeller.restrict(call.value, keep, shared=True)


for _rule, _table in ((_symmetric, SYMMETRIC), (_ordered, ORDERED)):
    for _passes, _names in _table.items():
        register_rule(*_names.split())(functools.partial(_rule, passes=_passes))


@register_rule("argmax", "argmin")
def place_of_maximum(labeller: Labeller, call: Call) -> Value:
    """The place doesn't depend on scales, and turns to that of the minimum with the sign."""
    numbers = _numbers(call)
    value = _in_order(labeller, call) if numbers is None else call.value
    return replace(labeller.unscaled(_reduced(labeller, call, value, HOMOGENEOUS)), numbers=numbers)


@register_rule("linalg_vector_norm")
def norm(labeller: Labeller, call: Call) -> Value:
    return _reduced(labeller, call, labeller.unscaled(call.value, HOMOGENEOUS), HOMOGENEOUS)


@register_rule("_cdist_forward", "cdist")
def distances(labeller: Labeller, call: Call) -> Value:
    """Norms of all differences between rows of two matrices; with p = 0, numbers of entries that differ."""
    one, other = call["x1"], call["x2"]
    difference = labeller.elementwise([labeller.unsqueeze(one, one.dim - 1), labeller.unsqueeze(other, other.dim - 2)])
    size = labeller.unscaled(difference, HOMOGENEOUS if call["p"] else NOTHING)
    return labeller.reduce(size, [-1], passes=HOMOGENEOUS)


@register_rule("var", "var_mean", "std_mean")
def variance(labeller: Labeller, call: Call) -> Value | list[Value]:
    """The variance has the square of the operand's scale; the mean has the scale and the sign."""
    value = call.value
    if call.name != "std_mean":
        value = labeller.elementwise([value], "product", HOMOGENEOUS, [2.0])
    spread = _reduced(labeller, call, value, HOMOGENEOUS)
    return spread if len(call.shapes) == 1 else [spread, _reduced(labeller, call, call.value, LINEAR)]
