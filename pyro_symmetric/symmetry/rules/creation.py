"""Operators that make tensors out of nothing: constants, which no symmetry moves."""

from __future__ import annotations

import torch

from pyro_symmetric.symmetry.labeller import Labeller
from pyro_symmetric.symmetry.labels import Value, opaque
from pyro_symmetric.symmetry.rules import Call, as_value, register_rule


@register_rule("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero")
def zeros(labeller: Labeller, call: Call) -> Value:
    return Value(call.shape, zero=True)


@register_rule("aten.ones", "aten.ones_like", "aten.new_ones")
def ones(labeller: Labeller, call: Call) -> Value:
    return Value(call.shape)


@register_rule("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor", "aten.fill")
def full(labeller: Labeller, call: Call) -> Value:
    filling = next((call.arguments[k] for k in ("fill_value", "value", "s") if k in call.arguments), None)
    value = as_value(filling)
    return labeller.expand(value, call.shape) if value.dim == 0 else opaque(call.shape)


@register_rule("aten.arange")
def arange(labeller: Labeller, call: Call) -> Value:
    start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
    if not all(isinstance(n, int) for n in (start, step)):
        return opaque(call.shape)
    return opaque(call.shape, torch.arange(call.shape[0]) * step + start)


@register_rule(
    "aten.empty", "aten.new_empty", "aten.empty_like", "aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like",
    "aten.linspace", "aten.eye", "aten.tril_indices", "aten.triu_indices", "aten.randint", "aten.randperm",
)  # fmt: skip
def something(labeller: Labeller, call: Call) -> Value:
    return opaque(call.shape)


@register_rule("aten.copy")
def copy(labeller: Labeller, call: Call) -> Value:
    return labeller.expand(call["src"], call.shape)
