"""Softmax and the normalisations: statistics over some axes, then weights and biases unit by unit."""

from __future__ import annotations

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import ODD, Value, opaque
from pyro_symmetric.discovery.scaling.rules.registry import Call, register_rule


def _affine(labeller: Labeller, call: Call, value: Value, axis: int) -> list[Value]:
    """Weights and biases along ``axis`` and those behind it (channels: one axis only, others are broadcast).

    Further results (means, deviations) are for the backward pass and for running statistics. Nothing else should read
    them.
    """
    for kind, name in (("product", "weight"), ("sum", "bias")):
        operand = call.get(name)
        if operand is not None:
            shape = [*operand.shape, *[1] * (value.dim - axis - operand.dim)]
            value = labeller.elementwise([value, labeller.reshape(operand, shape)], kind)
    if any(call.read[1:]):
        value = labeller.give_up([value], call.shape, "its statistics are read")
    return [value, *map(opaque, call.shapes[1:])]


@register_rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(labeller: Labeller, call: Call) -> Value:
    return labeller.normalise(call.value, [call["dim"]])


@register_rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(labeller: Labeller, call: Call) -> list[Value]:
    """Without a mean that is subtracted, the normalisation is odd entry by entry."""
    value = call["input"]
    first = value.dim - len(call["normalized_shape"])
    axes = list(range(first, value.dim))
    value = labeller.normalise(value, axes, ODD) if "rms" in call.name else labeller.standardise(value, axes)
    return _affine(labeller, call, value, first)


@register_rule("native_group_norm")
def group_norm(labeller: Labeller, call: Call) -> list[Value]:
    """Channels move within their group, groups as wholes."""
    value, groups = call["input"], call["group"]
    shape = value.shape
    split = labeller.reshape(value, [shape[0], groups, shape[1] // groups, *shape[2:]])
    split = labeller.standardise(split, list(range(2, split.dim)))
    return _affine(labeller, call, labeller.reshape(split, shape), 1)


@register_rule("instance_norm")
def instance_norm(labeller: Labeller, call: Call) -> Value:
    value = labeller.restrict(call["input"], [0, 1])
    if call["running_mean"] is not None and not call["use_input_stats"]:
        return batch_norm(labeller, call)[0]
    for statistic in (call["running_mean"], call["running_var"]):
        if statistic is not None:
            labeller.pin(statistic)
    labeller.still(value, ODD)
    return _affine(labeller, call, value, 1)[0]


def _channels(labeller: Labeller, value: Value) -> Value:
    """Statistics are taken over all axes but that of the channels, so units along the others may move, too."""
    joint = value.part_on(1)
    if joint is not None and joint.axes != (1,):
        value = labeller.restrict(value, [1])
    for part in value.parts:
        if part.axes != (1,):
            labeller.facts.still(part.atoms)
    return value


@register_rule(
    "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "_native_batch_norm_legit",
    "native_batch_norm", "_batch_norm_with_update_functional", "cudnn_batch_norm",
)  # fmt: skip
def batch_norm(labeller: Labeller, call: Call) -> list[Value]:
    r"""``(x - mean) / sqrt(variance + epsilon) * weight + bias``, channel by channel.

    What comes in may be rescaled by any :math:`\lambda` without any effect: the running mean takes :math:`\lambda`, the
    running variance :math:`\lambda^2`, exactly so for ``variance + epsilon``. What goes out has the multiplier of the
    affine weight and bias, and the sign of what came in.
    """
    value = _channels(labeller, call["input"])
    mean, variance = call.get("running_mean"), call.get("running_var")
    if mean is None or variance is None:  # batch statistics only: epsilon stands in the way of scalings
        labeller.still(value, ODD)
        return _affine(labeller, call, value, 1)
    shape = [-1, *[1] * (value.dim - 2)]
    value = labeller.elementwise([value, labeller.reshape(mean, shape)])
    part, spread = value.part_on(1), labeller.reshape(variance, shape).part_on(0)
    if part is None or spread is None:
        labeller.pin(variance)
        return _affine(labeller, call, value, 1)
    facts = labeller.facts
    facts.unify(part.atoms, spread.atoms)
    facts.balance([(2.0, part.atoms), (-1.0, spread.atoms)], sign=False)
    facts.still(spread.atoms, scale=False)
    facts.epsilon(spread.atoms, float(call.get("eps", call.get("epsilon", 0.0))))
    others = [other for other in value.parts if other is not part]
    standard = labeller.value(value.shape, [labeller.renewed(part, ODD), *others], value.fixed)
    return _affine(labeller, call, standard, 1)
