"""Operators that work entry by entry, and those that make tensors out of nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyro_symmetric.discovery.flow import Flow, Value, opaque
from pyro_symmetric.discovery.rules.registry import Call, register_rule

# PyTorch tags most functions of entries in the same place, but not these.
UNTAGGED = """alias clone detach lift lift_fresh lift_fresh_copy _to_copy type_as _conj _neg_view hardswish log_sigmoid
    special_expit floor_divide polar __and__ __or__ complex max.other min.other masked_fill _prelu_kernel rsub rrelu
    threshold"""


@register_rule(torch.Tag.pointwise, *UNTAGGED.split())
def pointwise(flow: Flow, call: Call) -> Value:
    """Units of all operands are the same."""
    return flow.elementwise(call.operands) if call.operands else opaque(call.shape)


@register_rule("type_as", "copy")
def of_another(flow: Flow, call: Call) -> Value:
    """One operand's entries, in another's place or of its type."""
    return call.value if call.name == "type_as" else flow.expand(call["src"], call.shape)


@register_rule("native_dropout")
def dropout(flow: Flow, call: Call) -> list[Value]:
    return [call.value, call.value]


@register_rule("full", "full_like", "scalar_tensor")
def full(flow: Flow, call: Call) -> Value:
    filling = call.get("fill_value", call.get("s"))
    whole = isinstance(filling, int) and not isinstance(filling, bool)
    constant = torch.full(call.shape, filling, device="cpu") if whole else None
    value = flow.expand(filling, call.shape) if isinstance(filling, Value) else Value(call.shape)
    return replace(value, constant=constant)


@register_rule("arange")
def arange(flow: Flow, call: Call) -> Value:
    start, step = call.get("start", 0), call.get("step", 1)
    whole = all(isinstance(n, int) for n in (start, step))
    return opaque(call.shape, torch.arange(call.shape[0], device="cpu") * step + start if whole else None)


# A network that draws random numbers is taken as a function of its weights with these numbers fixed. So every entry
# meets a number of its own, and entries can't be exchanged, even if they are in law.
OF_A_SHAPE = """rand rand_like randn randn_like randint randint_like randperm normal.float_float normal_functional
    uniform exponential cauchy log_normal geometric random"""
OF_PARAMETERS = """bernoulli.default normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor multinomial poisson
    binomial _standard_gamma _sample_dirichlet"""
NOISE = frozenset(name.partition(".")[0] for name in f"{OF_A_SHAPE} {OF_PARAMETERS}".split())


@register_rule("empty_like", "new_empty", "new_empty_strided", *OF_A_SHAPE.split())
def anything(flow: Flow, call: Call) -> Value:
    return opaque(call.shape)


@register_rule(*OF_PARAMETERS.split())
def drawn(flow: Flow, call: Call) -> Value:
    for value in call.operands:
        flow.pin(value)
    return opaque(call.shape)


@register_rule("bernoulli.p")
def mask(flow: Flow, call: Call) -> Value:
    """A mask of dropout, as its mean."""
    return Value(call.shape)
