"""Linear maps: products that are summed over an axis."""

from __future__ import annotations

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value
from pyro_symmetric.discovery.scaling.rules.registry import Call, register_rule


def matmul(labeller: Labeller, one: Value, other: Value) -> Value:
    """``torch.matmul`` with its broadcasting: batch axes are tied, the inner axis is summed over."""
    rows, columns = one.dim > 1, other.dim > 1
    batch = max(one.dim - 2, other.dim - 2, 0)
    i, k, j = batch, batch + 1, batch + 2
    left = [*range(batch - max(one.dim - 2, 0), batch), *([i] if rows else []), k]
    right = [*range(batch - max(other.dim - 2, 0), batch), k, *([j] if columns else [])]
    out = [*range(batch), *([i] if rows else []), *([j] if columns else [])]
    return labeller.combine([(one, left), (other, right)], out)


def linear(labeller: Labeller, value: Value, weight: Value, bias: Value | None) -> Value:
    """``value @ weight.T + bias``."""
    last = value.dim - 1
    out = [*range(last), *([last + 1] if weight.dim == 2 else [])]
    result = labeller.combine([(value, range(value.dim)), (weight, [last + 1, last][-weight.dim :])], out)
    return result if bias is None else labeller.elementwise([result, bias])


@register_rule("linear", sliced=True)
def linear_rule(labeller: Labeller, call: Call) -> Value:
    return linear(labeller, call["input"], call["weight"], call["bias"])


@register_rule("matmul", "mm", "bmm", "mv", "dot", "vdot", sliced=True)
def matmul_rule(labeller: Labeller, call: Call) -> Value:
    return matmul(labeller, *call.operands)


@register_rule("addmm", "addbmm", "baddbmm", "addmv", sliced=True)
def addmm(labeller: Labeller, call: Call) -> Value:
    start, one, other = call.operands
    product = matmul(labeller, one, other)
    if call.name == "addbmm":
        product = labeller.reduce(labeller.settled(product), [0])
    return labeller.elementwise([start, product])


@register_rule("_grouped_mm", "transformers::grouped_mm_fallback", sliced=True)
def grouped_mm(labeller: Labeller, call: Call) -> Value:
    """``value[start:end] @ weights[e]`` for the rows of each expert, where the data have chosen the experts' rows."""
    value, weights, *others = call.operands
    if (value.dim, weights.dim) != (2, 3) or not others:
        return labeller.give_up(call.operands, call.shape, "its groups don't lie along the rows")
    chosen = labeller.chosen(weights, 0, others[0], call.shape[0])
    result = labeller.combine([(value, [0, 1]), (chosen, [0, 1, 2])], [0, 2])
    bias = call.get("bias")
    return result if bias is None else labeller.elementwise([result, bias])


@register_rule("bilinear")
def bilinear(labeller: Labeller, call: Call) -> Value:
    one, other, weight = call["input1"], call["input2"], call["weight"]
    batch = one.dim - 1
    lead = list(range(batch))
    terms = [(one, [*lead, batch]), (other, [*lead, batch + 1]), (weight, [batch + 2, batch, batch + 1])]
    result = labeller.combine(terms, [*lead, batch + 2])
    return result if call["bias"] is None else labeller.elementwise([result, call["bias"]])


@register_rule("einsum", sliced=True)
def einsum(labeller: Labeller, call: Call) -> Value:
    """Axes of an ellipsis are counted from the last one, with numbers that are no letters."""
    inputs, arrow, out = call["equation"].replace(" ", "").partition("->")
    operands = [
        (value, _letters(text, value.dim)) for value, text in zip(call["tensors"], inputs.split(","), strict=True)
    ]
    if arrow:
        return labeller.combine(operands, _letters(out, len(call.shape)))
    used = [letter for _, letters in operands for letter in letters]
    ordered = sorted({letter for letter in used if letter < 0 or used.count(letter) == 1})
    return labeller.combine(operands, ordered)


def _letters(text: str, dim: int) -> list[int]:
    before, _, after = text.partition("...")
    hidden = dim - len(before) - len(after) if "." in text else 0
    return [*map(ord, before), *range(-hidden, 0), *map(ord, after)]
