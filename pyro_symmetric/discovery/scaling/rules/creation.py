"""Operators that make tensors out of nothing: constants, which no symmetry moves."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value, opaque
from pyro_symmetric.discovery.scaling.rules.registry import Call, as_value, register_rule


@register_rule("full", "full_like", "scalar_tensor")
def full(labeller: Labeller, call: Call) -> Value:
    filling = call.get("fill_value", call.get("s"))
    constant = torch.full(call.shape, filling, device="cpu") if isinstance(filling, int) and not call.floating else None
    return replace(labeller.expand(as_value(filling), call.shape), constant=constant)


@register_rule("arange")
def arange(labeller: Labeller, call: Call) -> Value:
    start, step = call.get("start", 0), call.get("step", 1)
    whole = all(isinstance(n, int) for n in (start, step))
    return opaque(call.shape, torch.arange(call.shape[0], device="cpu") * step + start if whole else None)


@register_rule("empty_like", "new_empty", "new_empty_strided")
def something(labeller: Labeller, call: Call) -> Value:
    return opaque(call.shape)


@register_rule("copy")
def copy(labeller: Labeller, call: Call) -> Value:
    return labeller.expand(call["src"], call.shape)
