"""Scaled dot-product attention, written as the products and the softmax that it is made of."""

from __future__ import annotations

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value
from pyro_symmetric.discovery.scaling.rules.contraction import matmul
from pyro_symmetric.discovery.scaling.rules.registry import Call, register_rule


@register_rule("scaled_dot_product_attention")
def attention(labeller: Labeller, call: Call) -> Value:
    """``softmax(q k' + mask) v``: rows of q and k are one unit within a head, rows of v another, heads move whole."""
    query, key, value, mask = call["query"], call["key"], call["value"], call["attn_mask"]
    if call.get("enable_gqa") and query.dim >= 3:
        key, value = (_per_query_head(labeller, x, query.shape[-3]) for x in (key, value))
    order = [*range(key.dim - 2), key.dim - 1, key.dim - 2]
    scores = matmul(labeller, query, labeller.relaid(key, order))
    if mask is not None:
        scores = labeller.elementwise([scores, mask])
    return matmul(labeller, labeller.normalise(scores, [-1]), value)


def _per_query_head(labeller: Labeller, value: Value, heads: int) -> Value:
    """Grouped queries: each head of keys (values) serves several heads of queries in a row."""
    *lead, own, length, width = value.shape
    if own == heads:
        return value
    axis = value.dim - 2
    wide = labeller.expand(labeller.unsqueeze(value, axis), [*lead, own, heads // own, length, width])
    return labeller.reshape(wide, [*lead, heads, length, width])
