"""Softmax and the normalisations: statistics over some axes, then weights and biases unit by unit."""

from __future__ import annotations

from dataclasses import replace

from pyro_symmetric.symmetry.labeller import HOMOGENEOUS, NOTHING, ODD, Labeller, Passes
from pyro_symmetric.symmetry.labels import Value, opaque
from pyro_symmetric.symmetry.rules import Call, register_rule


def normalise(labeller: Labeller, value: Value, axes: list[int], passes: Passes = NOTHING) -> Value:
    """Any function of an entry and of a symmetric statistic over ``axes``."""
    gone = {value.axis(axis) for axis in axes}
    labeller.still(value, passes)
    sizes = dict(enumerate(value.shape))
    for part in value.parts:
        if gone & set(part.axes):
            labeller.project(part, [axis for axis in part.axes if axis not in gone], sizes)
    return replace(value, constant=None, zero=False)


def _affine(labeller: Labeller, value: Value, weight: Value | None, bias: Value | None, axis: int) -> Value:
    """Weights and biases along ``axis`` and those behind it (channels: one axis only, others are broadcast)."""
    for kind, operand in (("product", weight), ("sum", bias)):
        if operand is not None:
            shape = [*operand.shape, *[1] * (value.dim - axis - operand.dim)]
            value = labeller.elementwise([value, labeller.reshape(operand, shape)], kind)
    return value


@register_rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax", "aten._safe_softmax")
def softmax(labeller: Labeller, call: Call) -> Value:
    return normalise(labeller, call["self"], [call["dim"]])


@register_rule("aten.layer_norm", "aten.native_layer_norm")
def layer_norm(labeller: Labeller, call: Call) -> Value | list[Value]:
    value = call["input"]
    first = value.dim - len(call["normalized_shape"])
    result = normalise(labeller, value, list(range(first, value.dim)))
    result = _affine(labeller, result, call["weight"], call["bias"], first)
    return result if len(call.shapes) == 1 else [result, *_statistics(call)]


@register_rule("aten.rms_norm", "aten._fused_rms_norm")
def rms_norm(labeller: Labeller, call: Call) -> Value | list[Value]:
    """Odd, as no mean is subtracted."""
    value = call["input"]
    first = value.dim - len(call["normalized_shape"])
    result = normalise(labeller, value, list(range(first, value.dim)), ODD)
    result = _affine(labeller, result, call["weight"], None, first)
    return result if len(call.shapes) == 1 else [result, *_statistics(call)]


def _statistics(call: Call) -> list[Value]:
    """Further results (means, deviations) serve the backward pass and the running statistics, not the output.

    Labelling them as unknown is right only as long as nothing in the graph reads them; :mod:`discovery` checks that.
    """
    return [opaque(shape) for shape in call.shapes[1:]]


@register_rule("aten._weight_norm", "aten._weight_norm_interface")
def weight_norm(labeller: Labeller, call: Call) -> Value | list[Value]:
    """``g * v / |v|``, the norm over all axes but one."""
    direction, length = call["v"], call["g"]
    others = [axis for axis in range(direction.dim) if axis != direction.axis(call["dim"])]
    norm = labeller.reduce(direction, others, keepdim=True, passes=HOMOGENEOUS)
    result = labeller.elementwise([direction, length, norm], "product", coefficients=(1.0, 1.0, -1.0))
    return result if len(call.shapes) == 1 else [result, *_statistics(call)]


@register_rule("aten.group_norm")
def group_norm(labeller: Labeller, call: Call) -> Value:
    return _group_norm(labeller, call["input"], call["num_groups"], call["weight"], call["bias"])


@register_rule("aten.native_group_norm")
def native_group_norm(labeller: Labeller, call: Call) -> list[Value]:
    result = _group_norm(labeller, call["input"], call["group"], call["weight"], call["bias"])
    return [result, *_statistics(call)]


def _group_norm(labeller: Labeller, value: Value, groups: int, weight: Value | None, bias: Value | None) -> Value:
    """Channels move within their group, groups as wholes."""
    shape = value.shape
    split = labeller.reshape(value, [shape[0], groups, shape[1] // groups, *shape[2:]])
    split = normalise(labeller, split, list(range(2, split.dim)))
    return _affine(labeller, labeller.reshape(split, shape), weight, bias, 1)


@register_rule("aten.instance_norm")
def instance_norm(labeller: Labeller, call: Call) -> Value:
    value = labeller.restrict(call["input"], [0, 1])
    if call["running_mean"] is not None and not call["use_input_stats"]:
        return _batch_norm(labeller, call)
    for statistic in (call["running_mean"], call["running_var"]):
        if statistic is not None:
            labeller.pin(statistic)
    labeller.still(value, ODD)
    return _affine(labeller, value, call["weight"], call["bias"], 1)


@register_rule(
    "aten.batch_norm", "aten._native_batch_norm_legit_no_training", "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit", "aten.native_batch_norm", "aten._batch_norm_with_update_functional",
    "aten.cudnn_batch_norm", "aten._batch_norm_impl_index",
)  # fmt: skip
def batch_norm(labeller: Labeller, call: Call) -> Value | list[Value]:
    result = _batch_norm(labeller, call)
    # What follows the output are statistics; the new running ones are written back and read by nobody.
    return result if len(call.shapes) == 1 else [result, *_statistics(call)]


def _channels(labeller: Labeller, value: Value) -> Value:
    """Statistics are taken over all axes but that of the channels, so units along the others may move, too."""
    joint = value.part_on(1)
    if joint is not None and joint.axes != (1,):
        value = labeller.restrict(value, [1])
    for part in value.parts:
        if part.axes != (1,):
            labeller.facts.still(part.atoms)
    return value


def _batch_norm(labeller: Labeller, call: Call) -> Value:
    r"""``(x - mean) / sqrt(variance + epsilon) * weight + bias``, channel by channel.

    What comes in may be rescaled by any :math:`\lambda` without any effect: the running mean takes :math:`\lambda`, the
    running variance :math:`\lambda^2`, exactly so for ``variance + epsilon``. What goes out has the multiplier of the
    affine weight and bias, and the sign of what came in.
    """
    value = _channels(labeller, call["input"])
    mean, variance = call.arguments.get("running_mean"), call.arguments.get("running_var")
    if mean is None or variance is None:  # batch statistics only: epsilon stands in the way of scalings
        labeller.still(value, ODD)
        return _affine(labeller, value, call["weight"], call["bias"], 1)
    shape = [-1, *[1] * (value.dim - 2)]
    value = labeller.elementwise([value, labeller.reshape(mean, shape)])
    part, spread = value.part_on(1), labeller.reshape(variance, shape).part_on(0)
    if part is None or spread is None:
        labeller.pin(variance)
        return _affine(labeller, value, call["weight"], call["bias"], 1)
    facts = labeller.facts
    facts.unify(part.atoms, spread.atoms)
    facts.balance([(2.0, part.atoms), (-1.0, spread.atoms)], sign=False)
    facts.still(spread.atoms, scale=False)
    facts.epsilon(spread.atoms, float(call.arguments.get("eps", call.arguments.get("epsilon", 0.0))))
    standard = replace(part, atoms=facts.fresh(part.atoms.shape))
    facts.unify(part.atoms, standard.atoms)
    facts.still(standard.atoms, sign=False)
    facts.balance([(1.0, part.atoms), (-1.0, standard.atoms)], scale=False)
    others = [other for other in value.parts if other is not part]
    result = labeller.value(value.shape, [standard, *others], value.fixed)
    return _affine(labeller, result, call["weight"], call["bias"], 1)
