"""Operators that sum over axes, or look along them."""

from __future__ import annotations

from pyro_symmetric.discovery.flow import Flow, Value
from pyro_symmetric.discovery.rules.registry import Call, register_rule

# Functions of all entries along an axis that don't mind their order; the others do.
SYMMETRIC = """sum mean nansum amax amin std var var_mean std_mean max min median kthvalue logsumexp prod any all
    count_nonzero linalg_vector_norm"""
ORDERED = "cumsum cummax cummin cumprod logcumsumexp"


def _axes(call: Call) -> list[int]:
    """The reduced axes: an int, a list, or all if none is given."""
    dim = call.get("dim")
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(call.value.dim))
    return [call.value.axis(d) for d in ([dim] if isinstance(dim, int) else dim)]


def _in_order(flow: Flow, call: Call) -> Value:
    """Units along these axes can't move."""
    return flow.restrict(call.value, set(range(call.value.dim)) - set(_axes(call)))


@register_rule(*SYMMETRIC.split())
def symmetric(flow: Flow, call: Call) -> list[Value]:
    """A symmetric function, alone or with the places of its entries, which aren't symmetric."""
    places = len(call.shapes) > 1 and not call.name.endswith("_mean") and bool(call.read - {0})
    value = _in_order(flow, call) if places else call.value
    return [flow.reduce(value, _axes(call), bool(call.get("keepdim", False)))] * len(call.shapes)


@register_rule("sort", "topk")
def ranked(flow: Flow, call: Call) -> list[Value]:
    """The first entries by rank: they have places of their own."""
    value = _in_order(flow, call) if call.read - {0} else call.value
    left = flow.reduce(value, _axes(call), True)
    return [flow.value(call.shape, left.parts, {*left.fixed, call.axis})] * 2


@register_rule(*ORDERED.split())
def ordered(flow: Flow, call: Call) -> list[Value]:
    value = _in_order(flow, call)
    return [flow.value(call.shape, value.parts, range(len(call.shape)))] * len(call.shapes)


@register_rule("argmax", "argmin")
def place_of_maximum(flow: Flow, call: Call) -> Value:
    return flow.reduce(_in_order(flow, call), _axes(call), bool(call["keepdim"]))
