"""Operators that work entry by entry, that look along some axes, and that make tensors out of nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.rules.registry import Call, register_rule
from pyro_symmetric.discovery.values import Value, opaque

# PyTorch tags most functions of entries in the same place, but not these. Dropout is the identity, or its mean.
UNTAGGED = """to alias contiguous clone detach lift lift_fresh lift_fresh_copy _to_copy _conj _neg_view hardswish
    log_sigmoid special_expit floor_divide polar __and__ __or__ complex max.other min.other masked_fill _prelu_kernel
    rsub rrelu threshold dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout"""


@register_rule(torch.Tag.pointwise, *UNTAGGED.split())
def pointwise(flow: Flow, call: Call) -> list[Value]:
    """Units of all operands are the same."""
    return [flow.elementwise(call.operands) if call.operands else opaque(call.shape)] * len(call.shapes)


@register_rule("view.dtype")
def other_numbers(flow: Flow, call: Call) -> Value:
    return flow.give_up(call.operands, call.shape, "its bytes are read as other numbers")


@register_rule("type_as", "copy")
def of_another(flow: Flow, call: Call) -> Value:
    """One operand's entries, in another's place or of its type."""
    return call.value if call.name == "type_as" else flow.expand(call["src"], call.shape)


# tensors out of nothing ---------------------------------------------------------------------------------------------


@register_rule("full", "full_like", "scalar_tensor", "zeros", "zeros_like", "ones", "ones_like", "new_full")
def full(flow: Flow, call: Call) -> Value:
    filling = call.get("fill_value", call.get("s", int(call.name.startswith("ones"))))
    whole = isinstance(filling, int) and not isinstance(filling, bool)
    constant = torch.full(call.shape, filling, device="cpu") if whole else None
    value = flow.expand(filling, call.shape) if isinstance(filling, Value) else Value(call.shape)
    return replace(value, constant=constant)


@register_rule("arange")
def arange(flow: Flow, call: Call) -> Value:
    start, step = call.get("start", 0), call.get("step", 1)
    whole = all(isinstance(n, int) for n in (start, step))
    return opaque(call.shape, torch.arange(call.shape[0], device="cpu") * step + start if whole else None)


@register_rule("empty_like", "new_empty", "new_empty_strided")
def anything(flow: Flow, call: Call) -> Value:
    return opaque(call.shape)


# Random numbers that have the shape of an operand alone, and those whose law depends on operands. PyTorch's tag of what
# draws has more (attention, recurrent layers): functions of their operands, which are taken apart.
OF_SHAPE = """rand randn randint randperm rand_like randn_like randint_like uniform exponential cauchy log_normal
    geometric normal_functional""".split()  # noqa: SIM905
OF_PARAMETERS = "bernoulli normal multinomial poisson binomial _standard_gamma _sample_dirichlet".split()  # noqa: SIM905


@register_rule(*OF_SHAPE, *OF_PARAMETERS)
def drawn(flow: Flow, call: Call) -> Value:
    """A network that draws random numbers is taken as a function of its weights with these numbers fixed.

    So every entry meets a number of its own, and entries can't be exchanged, even if they are in law.
    """
    for value in call.operands if call.name in OF_PARAMETERS else ():
        flow.pin(value)
    return opaque(call.shape)


@register_rule("bernoulli.p")
def mask(flow: Flow, call: Call) -> Value:
    """A mask of dropout, as its mean."""
    return Value(call.shape)


# along some axes ----------------------------------------------------------------------------------------------------


def _axes(call: Call) -> list[int]:
    """The axes along which an operator looks: an int, a list, or all if none is given."""
    dim = call.get("dim")
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(call.value.dim))
    return [call.value.axis(d) for d in ([dim] if isinstance(dim, int) else dim)]


def _in_order(flow: Flow, call: Call) -> Value:
    """Units along these axes can't move."""
    return flow.restrict(call.value, set(range(call.value.dim)) - set(_axes(call)))


@register_rule(
    "sum", "mean", "nansum", "amax", "amin", "std", "var", "var_mean", "std_mean", "max", "min", "median", "kthvalue",
    "logsumexp", "prod", "any", "all", "count_nonzero", "linalg_vector_norm", "argmax", "argmin",
)  # fmt: skip
def symmetric(flow: Flow, call: Call) -> list[Value]:
    """A symmetric function, or the places of its entries, which aren't symmetric."""
    second = len(call.shapes) > 1 and not call.name.endswith("_mean") and bool(call.read - {0})
    value = _in_order(flow, call) if second or call.name.startswith("arg") else call.value
    return [flow.reduce(value, _axes(call), bool(call.get("keepdim", False)))] * len(call.shapes)


@register_rule("sort", "topk")
def ranked(flow: Flow, call: Call) -> list[Value]:
    """The first entries by rank: they have places of their own."""
    value = _in_order(flow, call) if call.read - {0} else call.value
    left = flow.reduce(value, _axes(call), True)
    return [flow.value(call.shape, left.parts, {*left.fixed, call.axis})] * 2


@register_rule("cumsum", "cummax", "cummin", "cumprod", "logcumsumexp", "_fft_r2c", "_fft_c2c", "_fft_c2r")
def ordered(flow: Flow, call: Call) -> list[Value]:
    value = _in_order(flow, call)
    return [flow.value(call.shape, value.parts, value.fixed.union(_axes(call)))] * len(call.shapes)


# softmax and the normalisations: statistics over some axes, then weights and biases unit by unit ---------------------


@register_rule("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax")
def softmax(flow: Flow, call: Call) -> Value:
    return flow.normalise(call.value, [call["dim"]])


@register_rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(flow: Flow, call: Call) -> Value:
    value = call["input"]
    first = value.dim - len(call["normalized_shape"])
    return _affine(flow, call, flow.normalise(value, range(first, value.dim)), first)


@register_rule("group_norm", "native_group_norm")
def group_norm(flow: Flow, call: Call) -> Value:
    """Channels move within their group, groups as wholes."""
    shape, groups = call["input"].shape, call.get("num_groups") or call["group"]
    split = flow.reshape(call["input"], [shape[0], groups, shape[1] // groups, *shape[2:]])
    return _affine(flow, call, flow.reshape(flow.normalise(split, range(2, split.dim)), shape), 1)


@register_rule("instance_norm")
def instance_norm(flow: Flow, call: Call) -> Value:
    return _affine(flow, call, flow.restrict(call["input"], [0, 1]), 1)


@register_rule(
    "batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit", "native_batch_norm", "_batch_norm_with_update_functional", "cudnn_batch_norm",
)  # fmt: skip
def batch_norm(flow: Flow, call: Call) -> Value:
    """Statistics are taken over all axes but that of the channels, so units along the others may move, too."""
    value = call["input"]
    channels = value.part_on(1)
    return _affine(flow, call, value if channels is None or channels.axes == (1,) else flow.restrict(value, [1]), 1)


def _affine(flow: Flow, call: Call, value: Value, axis: int) -> Value:
    """Statistics, weights and biases along ``axis`` and those behind it (channels: one axis only)."""
    for operand in map(call.get, ("running_mean", "running_var", "weight", "bias")):
        if operand is not None:
            wide = flow.reshape(operand, [*operand.shape, *[1] * (value.dim - axis - operand.dim)])
            value = flow.elementwise([value, wide])
    return value
