"""Operators that work entry by entry."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from pyro_symmetric.discovery.flow import Part
from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import HOMOGENEOUS, LINEAR, NOTHING, ODD, Passes, Value
from pyro_symmetric.discovery.scaling.rules.registry import Call, as_value, reads_numbers, register_rule

# The multipliers that functions of one entry let through.
UNARY = {
    LINEAR: "alias clone detach lift lift_fresh lift_fresh_copy _to_copy type_as neg _conj _neg_view",
    HOMOGENEOUS: "relu leaky_relu rrelu",
    ODD: "asin asinh atan atanh erf erfinv hardshrink round sin sinh softshrink tan tanh trunc",
    NOTHING: """acos acosh bitwise_not ceil celu digamma elu erfc exp exp2 expm1 floor frac gelu
        hardsigmoid hardswish isfinite isinf isnan lgamma log log10 log1p log2 log_sigmoid logical_not logit mish
        nan_to_num relu6 selu sigmoid silu softplus special_expit""",
}
# Functions that make others vanish: the multipliers that they let through, and those that don't matter to them.
VANISHING = {
    (HOMOGENEOUS, LINEAR): "abs",
    (ODD, LINEAR): "sgn sign",
    (NOTHING, ODD): "cos cosh i0",
}
# Functions of two entries that let no multiplier through; a sum keeps the units of both together.
BINARY = """atan2 bitwise_and bitwise_or bitwise_xor eq floor_divide fmod ge gt hypot le logaddexp logical_and
    logical_or logical_xor lt ne polar remainder __and__ __or__ bitwise_left_shift bitwise_right_shift
    pow.Tensor_Tensor pow.Scalar lerp addcmul addcdiv"""


def _unary(labeller: Labeller, call: Call, passes: Passes) -> Value:
    value = call.value
    labeller.still(value, passes if call.floating else NOTHING)  # rounding and comparing know nothing of scales
    return replace(value, zero=value.zero and passes is LINEAR)


for _passes, _names in UNARY.items():
    register_rule(*_names.split(), sliced=True)(functools.partial(_unary, passes=_passes))


def _vanishing(labeller: Labeller, call: Call, passes: Passes, allowed: Passes) -> Value:
    """Multipliers that are ``allowed`` but don't pass end here; others are one."""
    labeller.still(call.value, allowed)
    value = labeller.unscaled(call.value, passes)
    return replace(value, zero=value.zero and call.name not in ("cos", "cosh", "i0"))


for (_passes, _allowed), _names in VANISHING.items():
    register_rule(*_names.split())(functools.partial(_vanishing, passes=_passes, allowed=_allowed))


@register_rule("gt.Scalar", "ge.Scalar", "lt.Scalar", "le.Scalar", "eq.Scalar", "ne.Scalar")
def compared_with_number(labeller: Labeller, call: Call) -> Value:
    """Scales don't matter to a comparison with zero, nor do signs if it asks for nothing but zero itself."""
    zero, even = call["other"] == 0, call.name in ("eq", "ne")
    return replace(_vanishing(labeller, call, NOTHING, Passes(scale=zero, sign=zero and even)), zero=False)


@reads_numbers
@register_rule("eq.Tensor")
def equal(labeller: Labeller, call: Call) -> Value:
    """Numbers of units beside all numbers in order, as ``one_hot`` compares them: the units lie along the last axis."""
    for one, other in ((call["self"], call["other"]), (call["other"], call["self"])):
        numbers, every = one.numbers, other.constant
        if (
            numbers is None
            or every is None
            or one.labelled
            or every.shape[-1:] != numbers.shape
            or one.shape[-1:] != (1,)
        ):
            continue
        if torch.equal(every.flatten(), torch.arange(len(numbers), device="cpu")):
            last = len(call.shape) - 1
            return labeller.value(call.shape, [labeller.renewed(Part((last,), numbers), NOTHING)], range(last))
    for value in call.operands:
        labeller.pin(value) if value.numbers is not None else None
    return any_entries(labeller, replace(call, arguments={k: _plain(v) for k, v in call.arguments.items()}))


def _plain(value: Value) -> Value:
    return replace(value, numbers=None)


@register_rule("threshold")
def threshold(labeller: Labeller, call: Call) -> Value:
    """Entries that don't exceed the threshold are replaced; positively homogeneous if both numbers are zero."""
    homogeneous = call["threshold"] == 0 and call["value"] == 0
    return _unary(labeller, call, HOMOGENEOUS if homogeneous else NOTHING)


@register_rule("native_dropout")
def native_dropout(labeller: Labeller, call: Call) -> list[Value]:
    """The mask is random, and knows nothing of the operand but its units."""
    return [call.value, labeller.unscaled(call.value)]


@register_rule("hardtanh", "clamp")
def clamp(labeller: Labeller, call: Call) -> Value:
    """Odd if the bounds are opposite; positively homogeneous if each bound is zero or missing."""
    if len(call.operands) > 1:
        return labeller.elementwise(call.operands, "sum", HOMOGENEOUS)
    bounds = [bound for name in ("min", "min_val", "max", "max_val") if (bound := call.get(name)) is not None]
    odd = len(bounds) == 2 and sum(bounds) == 0
    return _unary(labeller, call, Passes(scale=all(b == 0 for b in bounds), sign=odd))


@register_rule("sqrt", "rsqrt", "reciprocal", "pow.Tensor_Scalar")
def power(labeller: Labeller, call: Call) -> Value:
    """``x ** p`` multiplies multipliers p times; a whole p keeps or cancels signs."""
    exponent = call.get("exponent", {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}.get(call.name))
    value = replace(call.value, zero=False)  # 0 ** 0 = 1
    passes = Passes(scale=True, sign=float(exponent).is_integer())
    return labeller.elementwise([value], "product", passes, [float(exponent)])


def _binary(labeller: Labeller, call: Call, kind: str, passes: Passes, coefficients: tuple[float, ...] = ()) -> Value:
    operands = [as_value(call["self"]), as_value(call["other"])]
    return labeller.elementwise(operands, kind, passes if call.floating else NOTHING, coefficients)


# The names of all operators whose results depend, entry by entry, on their operands' entries in the same place.
ENTRYWISE = frozenset(
    name.partition(".")[0]
    for names in (*UNARY.values(), *VANISHING.values(), BINARY, "add sub rsub mul div sqrt rsqrt reciprocal clamp")
    for name in names.split()
)

# Sums keep one multiplier for both operands; products multiply theirs.
for _names, _kind, _passes in (
    ("add sub rsub", "sum", LINEAR),
    ("mul", "product", LINEAR),
    ("maximum minimum fmax fmin max.other min.other", "sum", HOMOGENEOUS),
):
    register_rule(*_names.split(), sliced=True)(functools.partial(_binary, kind=_kind, passes=_passes))


@register_rule("complex")
def real_and_imaginary(labeller: Labeller, call: Call) -> Value:
    return labeller.elementwise(call.operands)


@register_rule("div", sliced=True)
def div(labeller: Labeller, call: Call) -> Value:
    passes = LINEAR if call.get("rounding_mode") is None else NOTHING
    return _binary(labeller, call, "product", passes, (1.0, -1.0))


@register_rule(*BINARY.split())
def any_entries(labeller: Labeller, call: Call) -> Value:
    """Any function of entries in the same place."""
    return replace(labeller.elementwise(call.operands, "sum", NOTHING), zero=False)


@register_rule("where.self", "masked_fill")
def where(labeller: Labeller, call: Call) -> Value:
    """One of two entries; the mask keeps its units together with those, and has no multipliers."""
    mask, *choices = (call["mask"], call["value"], call["self"]) if "mask" in call.arguments else call.operands
    chosen = labeller.elementwise([as_value(choice) for choice in choices])
    labeller.still(mask)
    return replace(labeller.elementwise([replace(mask, zero=False), chosen], "product"), zero=chosen.zero)


@register_rule("_prelu_kernel")
def prelu(labeller: Labeller, call: Call) -> Value:
    labeller.still(call["weight"])
    return labeller.elementwise([call["self"], call["weight"]], "product", HOMOGENEOUS)
