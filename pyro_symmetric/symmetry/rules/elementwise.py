"""Operators that work entry by entry."""

from __future__ import annotations

from dataclasses import replace

from pyro_symmetric.symmetry.labeller import HOMOGENEOUS, LINEAR, NOTHING, ODD, Labeller, Passes
from pyro_symmetric.symmetry.labels import Value
from pyro_symmetric.symmetry.rules import Call, as_value, register_rule

_COPY = """alias clone contiguous detach dropout feature_dropout lift lift_fresh lift_fresh_copy _to_copy to type_as
    resolve_conj resolve_neg positive"""
_LINEAR = "neg _conj _neg_view"
_HOMOGENEOUS = "relu leaky_relu"
_ODD = "asin asinh atan atanh erf erfinv hardshrink round sgn sign sin sinh softshrink tan tanh trunc"
_NEITHER = """acos acosh alpha_dropout bernoulli bitwise_not ceil celu cos cosh digamma elu erfc exp exp2 expm1 floor
    frac gelu hardsigmoid hardswish i0 isfinite isinf isnan lgamma log log10 log1p log2 log_sigmoid logical_not logit
    mish nan_to_num relu6 rrelu selu sigmoid silu softplus special_expit threshold"""


def _names(text: str) -> list[str]:
    return [f"aten.{name}" for name in text.split()]


def _first(call: Call) -> Value:
    return call.operands[0]


def _unary(labeller: Labeller, call: Call, passes: Passes) -> Value:
    value = _first(call)
    # Rounding and comparing know nothing of scales.
    labeller.still(value, passes if call.floating else NOTHING)
    return replace(value, constant=None, zero=value.zero and passes is LINEAR)


@register_rule(*_names(_COPY))
def copy(labeller: Labeller, call: Call) -> Value:
    return replace(_unary(labeller, call, LINEAR), constant=_first(call).constant)


@register_rule(*_names(_LINEAR))
def linear_map(labeller: Labeller, call: Call) -> Value:
    return _unary(labeller, call, LINEAR)


@register_rule(*_names(_HOMOGENEOUS))
def homogeneous_map(labeller: Labeller, call: Call) -> Value:
    return _unary(labeller, call, HOMOGENEOUS)


@register_rule("aten.abs")
def absolute(labeller: Labeller, call: Call) -> Value:
    return labeller.even(_first(call))


@register_rule(*_names(_ODD))
def odd_map(labeller: Labeller, call: Call) -> Value:
    return _unary(labeller, call, ODD)


@register_rule(*_names(_NEITHER))
def any_map(labeller: Labeller, call: Call) -> Value:
    return _unary(labeller, call, NOTHING)


@register_rule("aten.native_dropout")
def native_dropout(labeller: Labeller, call: Call) -> list[Value]:
    value = call["input"]
    return [value, replace(value, constant=None)]


@register_rule("aten.hardtanh", "aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.clip")
def clamp(labeller: Labeller, call: Call) -> Value:
    """Odd if the bounds are opposite; positively homogeneous if each bound is zero or missing."""
    operands = call.operands
    if len(operands) > 1:
        return labeller.elementwise(operands, "sum", HOMOGENEOUS)
    low = call.arguments.get("min", call.arguments.get("min_val"))
    high = call.arguments.get("max", call.arguments.get("max_val"))
    bounds = [bound for bound in (low, high) if bound is not None]
    odd = len(bounds) == 2 and sum(bounds) == 0
    return _unary(labeller, call, Passes(scale=all(b == 0 for b in bounds), sign=odd))


@register_rule("aten.sqrt", "aten.rsqrt", "aten.reciprocal", "aten.square", "aten.pow.Tensor_Scalar")
def power(labeller: Labeller, call: Call) -> Value:
    """``x ** p`` multiplies multipliers p times; a whole p keeps or cancels signs."""
    fixed = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0}
    exponent = call.arguments.get("exponent", fixed.get(call.target.overloadpacket.__name__))
    if not isinstance(exponent, int | float):
        return _unary(labeller, call, NOTHING)
    whole = float(exponent).is_integer()
    value = replace(_first(call), zero=False)  # 0 ** 0 = 1
    return labeller.elementwise([value], "product", Passes(scale=True, sign=whole), [float(exponent)])


def _binary(labeller: Labeller, call: Call, kind: str, passes: Passes, coefficients: tuple[float, ...] = ()) -> Value:
    one, other = as_value(call["self"]), as_value(call["other"])
    return labeller.elementwise([one, other], kind, passes if call.floating else NOTHING, coefficients)


@register_rule("aten.add", "aten.sub", "aten.rsub", "aten.subtract")
def add(labeller: Labeller, call: Call) -> Value:
    return _binary(labeller, call, "sum", LINEAR)


@register_rule("aten.mul", "aten.multiply")
def mul(labeller: Labeller, call: Call) -> Value:
    return _binary(labeller, call, "product", LINEAR)


@register_rule("aten.div", "aten.true_divide", "aten.divide")
def div(labeller: Labeller, call: Call) -> Value:
    passes = LINEAR if call.arguments.get("rounding_mode") is None else NOTHING
    return _binary(labeller, call, "product", passes, (1.0, -1.0))


@register_rule("aten.maximum", "aten.minimum", "aten.fmax", "aten.fmin")
def maximum(labeller: Labeller, call: Call) -> Value:
    return _binary(labeller, call, "sum", HOMOGENEOUS)


@register_rule(
    *_names(
        """atan2 bitwise_and bitwise_or bitwise_xor eq floor_divide fmod ge gt hypot le logaddexp logical_and logical_or
        logical_xor lt ne remainder __and__ __or__ bitwise_left_shift bitwise_right_shift"""
    )
)
def compare(labeller: Labeller, call: Call) -> Value:
    """Any function of two entries: the same units stay together, no multiplier passes."""
    return replace(_binary(labeller, call, "sum", NOTHING), zero=False)


@register_rule("aten.pow.Tensor_Tensor", "aten.pow.Scalar", "aten.lerp", "aten.addcmul", "aten.addcdiv", "aten.where")
def any_entries(labeller: Labeller, call: Call) -> Value:
    """Any function of entries in the same place."""
    return replace(labeller.elementwise(call.operands, "sum", NOTHING), zero=False)


@register_rule("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(labeller: Labeller, call: Call) -> Value:
    chosen = labeller.elementwise([as_value(call["self"]), as_value(call["other"])])
    return _masked(labeller, call["condition"], chosen)


@register_rule("aten.masked_fill")
def masked_fill(labeller: Labeller, call: Call) -> Value:
    filled = labeller.elementwise([call["self"], as_value(call["value"])])
    return _masked(labeller, call["mask"], filled)


def _masked(labeller: Labeller, mask: Value, value: Value) -> Value:
    labeller.still(mask)
    chosen = labeller.elementwise([replace(mask, zero=False), value], "product")
    return replace(chosen, zero=value.zero)


@register_rule("aten.prelu", "aten._prelu_kernel")
def prelu(labeller: Labeller, call: Call) -> Value:
    value, slope = call["self"], call["weight"]
    labeller.still(slope)
    if slope.dim == 1 and value.dim > 1:
        slope = labeller.reshape(slope, [slope.shape[0], *[1] * (value.dim - 2)])
    return labeller.elementwise([value, slope], "product", HOMOGENEOUS)


@register_rule("aten.glu")
def glu(labeller: Labeller, call: Call) -> Value:
    """The first half times the sigmoid of the second."""
    import numpy as np

    value = call["self"]
    axis = value.axis(call["dim"])
    half = value.shape[axis] // 2
    gate = labeller.take(value, axis, np.arange(half, 2 * half))
    labeller.still(gate)
    return labeller.elementwise([labeller.take(value, axis, np.arange(half)), gate], "product")
