"""Linear maps: products that are summed over an axis."""

from __future__ import annotations

from pyro_symmetric.symmetry.labeller import Labeller
from pyro_symmetric.symmetry.labels import Value
from pyro_symmetric.symmetry.rules import Call, register_rule


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


@register_rule("aten.linear")
def linear_rule(labeller: Labeller, call: Call) -> Value:
    return linear(labeller, call["input"], call["weight"], call["bias"])


@register_rule("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot", "aten.vdot")
def matmul_rule(labeller: Labeller, call: Call) -> Value:
    one, other = call.operands
    return matmul(labeller, one, other)


@register_rule("aten.addmm", "aten.baddbmm", "aten.addbmm", "aten.addmv")
def addmm(labeller: Labeller, call: Call) -> Value:
    start, one, other = call.operands
    return labeller.elementwise([start, matmul(labeller, one, other)])


@register_rule("aten.outer", "aten.ger")
def outer(labeller: Labeller, call: Call) -> Value:
    one, other = call.operands
    return labeller.combine([(one, [0]), (other, [1])], [0, 1])


@register_rule("aten.bilinear")
def bilinear(labeller: Labeller, call: Call) -> Value:
    one, other, weight = call["input1"], call["input2"], call["weight"]
    batch = one.dim - 1
    lead = list(range(batch))
    terms = [(one, [*lead, batch]), (other, [*lead, batch + 1]), (weight, [batch + 2, batch, batch + 1])]
    result = labeller.combine(terms, [*lead, batch + 2])
    return result if call["bias"] is None else labeller.elementwise([result, call["bias"]])


@register_rule("aten.einsum")
def einsum(labeller: Labeller, call: Call) -> Value:
    equation, operands = call["equation"].replace(" ", ""), call["tensors"]
    inputs, arrow, out = equation.partition("->")
    if "." in equation or not arrow:
        return labeller.give_up(operands, call.shape)
    terms = [(value, [ord(c) for c in letters]) for value, letters in zip(operands, inputs.split(","), strict=True)]
    return labeller.combine(terms, [ord(c) for c in out])
