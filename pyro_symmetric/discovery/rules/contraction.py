"""Linear maps: products that are summed over an axis; attention, which is made of these."""

from __future__ import annotations

from pyro_symmetric.discovery.flow import Flow, Value
from pyro_symmetric.discovery.rules.registry import Call, register_rule


def matmul(flow: Flow, one: Value, other: Value) -> Value:
    """``torch.matmul`` with its broadcasting: batch axes are tied, the inner axis is summed over."""
    batch = max(one.dim - 2, other.dim - 2, 0)
    rows, inner, columns = batch, batch + 1, batch + 2
    left = [*range(batch - max(one.dim - 2, 0), batch), *([rows] if one.dim > 1 else []), inner]
    right = [*range(batch - max(other.dim - 2, 0), batch), inner, *([columns] if other.dim > 1 else [])]
    return flow.combine([(one, left), (other, right)], sorted({*range(batch), *left, *right} - {inner}))


def linear(flow: Flow, value: Value, weight: Value, bias: Value | None) -> Value:
    """``value @ weight.T + bias``."""
    last = value.dim - 1
    out = [*range(last), *([last + 1] if weight.dim == 2 else [])]
    result = flow.combine([(value, range(value.dim)), (weight, [last + 1, last][-weight.dim :])], out)
    return result if bias is None else flow.elementwise([result, bias])


@register_rule("linear")
def linear_rule(flow: Flow, call: Call) -> Value:
    return linear(flow, call["input"], call["weight"], call["bias"])


@register_rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul_rule(flow: Flow, call: Call) -> Value:
    return matmul(flow, *call.operands)


@register_rule("addmm", "addbmm", "baddbmm", "addmv")
def addmm(flow: Flow, call: Call) -> Value:
    start, one, other = call.operands
    product = matmul(flow, one, other)
    return flow.elementwise([start, flow.reduce(product, [0]) if call.name == "addbmm" else product])


@register_rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(flow: Flow, call: Call) -> Value:
    """``value[start:end] @ weights[e]`` for the rows of each expert, which keep their numbers."""
    value, weights, *others = call.operands
    if (value.dim, weights.dim) != (2, 3) or not others:
        return flow.give_up(call.operands, call.shape, "its groups don't lie along the rows")
    flow.pin(others[0])
    weights = flow.restrict(weights, [1, 2])
    chosen = flow.relaid(weights, [None, 1, 2], [call.shape[0], *weights.shape[1:]])
    result = flow.combine([(value, [0, 1]), (flow.value(chosen.shape, chosen.parts, {0}), [0, 1, 2])], [0, 2])
    bias = call.get("bias")
    return result if bias is None else flow.elementwise([result, flow.restrict(bias, [1])])


@register_rule("bilinear")
def bilinear(flow: Flow, call: Call) -> Value:
    one, other, weight = call["input1"], call["input2"], call["weight"]
    batch = one.dim - 1
    lead = list(range(batch))
    terms = [(one, [*lead, batch]), (other, [*lead, batch + 1]), (weight, [batch + 2, batch, batch + 1])]
    result = flow.combine(terms, [*lead, batch + 2])
    return result if call["bias"] is None else flow.elementwise([result, call["bias"]])


@register_rule("einsum")
def einsum(flow: Flow, call: Call) -> Value:
    """Axes of an ellipsis are counted from the last one, with numbers that are no letters."""
    inputs, arrow, out = call["equation"].replace(" ", "").partition("->")
    operands = [
        (value, _letters(text, value.dim)) for value, text in zip(call["tensors"], inputs.split(","), strict=True)
    ]
    if arrow:
        return flow.combine(operands, _letters(out, len(call.shape)))
    used = [letter for _, letters in operands for letter in letters]
    return flow.combine(operands, sorted({letter for letter in used if letter < 0 or used.count(letter) == 1}))


def _letters(text: str, dim: int) -> list[int]:
    before, _, after = text.partition("...")
    hidden = dim - len(before) - len(after) if "." in text else 0
    return [*map(ord, before), *range(-hidden, 0), *map(ord, after)]


@register_rule("scaled_dot_product_attention")
def attention(flow: Flow, call: Call) -> Value:
    """``softmax(q k' + mask) v``: rows of q and k are one unit within a head, rows of v another, heads move whole."""
    query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    if call.get("enable_gqa") and query.dim >= 3:
        key, value = (_per_query_head(flow, x, query.shape[-3]) for x in (key, value))
    scores = matmul(flow, query, flow.relaid(key, [*range(key.dim - 2), key.dim - 1, key.dim - 2]))
    if mask is not None:
        scores = flow.elementwise([scores, mask])
    return matmul(flow, flow.normalise(scores, [-1]), value)


def _per_query_head(flow: Flow, value: Value, heads: int) -> Value:
    """Grouped queries: each head of keys (values) serves several heads of queries in a row."""
    *lead, own, length, width = value.shape
    axis = value.dim - 2
    wide = flow.expand(flow.unsqueeze(value, axis), [*lead, own, heads // own, length, width])
    return flow.reshape(wide, [*lead, heads, length, width])


@register_rule("_cdist_forward", "cdist")
def distances(flow: Flow, call: Call) -> Value:
    """Norms of all differences between rows of two matrices."""
    one, other = call["x1"], call["x2"]
    return flow.reduce(flow.elementwise([flow.unsqueeze(one, one.dim - 1), flow.unsqueeze(other, other.dim - 2)]), [-1])
