"""Softmax and the normalisations: statistics over some axes, then weights and biases unit by unit."""

from __future__ import annotations

from pyro_symmetric.discovery.flow import Flow, Value
from pyro_symmetric.discovery.rules.registry import Call, register_rule


def _affine(flow: Flow, call: Call, value: Value, axis: int, names: tuple[str, ...] = ("weight", "bias")) -> Value:
    """Weights and biases along ``axis`` and those behind it (channels: one axis only, others are broadcast)."""
    for operand in (call.get(name) for name in names):
        if operand is not None:
            wide = flow.reshape(operand, [*operand.shape, *[1] * (value.dim - axis - operand.dim)])
            value = flow.elementwise([value, wide])
    return value


@register_rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(flow: Flow, call: Call) -> Value:
    return flow.normalise(call.value, [call["dim"]])


@register_rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(flow: Flow, call: Call) -> Value:
    value = call["input"]
    first = value.dim - len(call["normalized_shape"])
    return _affine(flow, call, flow.normalise(value, range(first, value.dim)), first)


@register_rule("native_group_norm")
def group_norm(flow: Flow, call: Call) -> Value:
    """Channels move within their group, groups as wholes."""
    shape, groups = call["input"].shape, call["group"]
    split = flow.reshape(call["input"], [shape[0], groups, shape[1] // groups, *shape[2:]])
    return _affine(flow, call, flow.reshape(flow.normalise(split, range(2, split.dim)), shape), 1)


STATISTICS = "running_mean", "running_var"


@register_rule("instance_norm")
def instance_norm(flow: Flow, call: Call) -> Value:
    value = flow.restrict(call["input"], [0, 1])
    return _affine(flow, call, value, 1, (*STATISTICS, "weight", "bias"))


@register_rule(
    "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "_native_batch_norm_legit",
    "native_batch_norm", "_batch_norm_with_update_functional", "cudnn_batch_norm",
)  # fmt: skip
def batch_norm(flow: Flow, call: Call) -> Value:
    """Statistics are taken over all axes but that of the channels, so units along the others may move, too."""
    value = call["input"]
    channels = value.part_on(1)
    if channels is not None and channels.axes != (1,):
        value = flow.restrict(value, [1])
    return _affine(flow, call, value, 1, (*STATISTICS, "weight", "bias"))
