"""Linear maps: products that are summed over an axis; attention, convolution and recurrent layers, made of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.rules.registry import Call, register_rule
from pyro_symmetric.discovery.values import Part, Value


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


@register_rule("addmm", "baddbmm", "addmv")
def addmm(flow: Flow, call: Call) -> Value:
    start, one, other = call.operands
    return flow.elementwise([start, matmul(flow, one, other)])


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
    if any(len(set(letters)) < len(letters) for _, letters in operands):
        return flow.give_up(call["tensors"], call.shape, "a letter comes twice")
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


# images, whose units lie along batch and channels only --------------------------------------------------------------


@register_rule(*(f"conv{d}d" for d in "123"), *(f"conv_transpose{d}d" for d in "123"), "convolution")
def convolution(flow: Flow, call: Call) -> Value:
    """Groups of channels each see their own inputs: output unit and input unit are members of one group."""
    value, weight, bias = call["input"], call["weight"], call["bias"]
    dims = weight.dim - 2
    alone = value.dim == dims + 1
    value = _channels(flow, flow.unsqueeze(value, 0) if alone else value)
    transposed = call.get("transposed", "transpose" in call.name)
    result = _per_group(flow, value, weight, call["groups"], transposed)
    result = _resized(flow, result, call.shape if not alone else (1, *call.shape), dims)
    if bias is not None:
        result = flow.elementwise([result, flow.reshape(bias, [-1, *[1] * dims])])
    return flow.squeeze(result, [0]) if alone else result


def _channels(flow: Flow, value: Value) -> Value:
    """The first two axes, without those of pixels, along which no unit may lie."""
    value = flow.restrict(value, [0, 1])
    return Value(value.shape[:2], value.parts, value.fixed & {0, 1})


def _per_group(flow: Flow, value: Value, weight: Value, groups: int, transposed: bool) -> Value:
    """A kernel as a product of rows, ``(groups, ...)``, and columns, which may be those of each group.

    The groups lie along axis 0 of the kernel: of its outputs or, if transposed, of its inputs.
    """
    batch, group, inputs, outputs = range(4)
    of_rows, of_columns = (inputs, outputs) if transposed else (outputs, inputs)
    columns, (rows, second) = weight.columns, weight.shape[:2]
    weight = _channels(flow, replace(weight, parts=tuple(part for part in weight.parts if part is not columns)))
    if groups == 1:
        return flow.combine([(value, [batch, inputs]), (weight, [of_rows, of_columns])], [batch, outputs])
    value = flow.reshape(value, [value.shape[0], groups, value.shape[1] // groups])
    if columns is None:
        terms = [(flow.reshape(weight, [groups, rows // groups, second]), [group, of_rows, of_columns])]
    else:
        own = columns.atoms.reshape(groups, -1, second)[:, 0]
        terms = [(flow.reshape(weight.across([1]), [groups, rows // groups, 1]), [group, of_rows, of_columns])]
        terms += [(flow.value(own.shape, [Part((0, 1), own)]), [group, of_columns])]
    result = flow.combine([(value, [batch, group, inputs]), *terms], [batch, group, outputs])
    return flow.reshape(result, [result.shape[0], -1])


CHANNELWISE = """max_pool{d}d max_pool{d}d_with_indices adaptive_max_pool{d}d fractional_max_pool{d}d avg_pool{d}d
    adaptive_avg_pool{d}d _adaptive_avg_pool{d}d reflection_pad{d}d replication_pad{d}d upsample_nearest{d}d
    _upsample_nearest_exact{d}d upsample_linear{d}d upsample_bilinear{d}d upsample_bicubic{d}d upsample_trilinear{d}d
    _upsample_bilinear{d}d_aa _upsample_bicubic{d}d_aa grid_sampler_{d}d"""


@register_rule(*(name.format(d=d) for name in CHANNELWISE.split() for d in "123"))
def channelwise(flow: Flow, call: Call) -> list[Value]:
    """Operators on images that keep channels apart."""
    value, *places = call.operands
    for other in places:
        flow.pin(other)
    dims = int(next(c for c in call.name if c.isdigit()))
    return [_resized(flow, flow.restrict(value, range(value.dim - dims)), call.shape, dims)] * len(call.shapes)


def _resized(flow: Flow, value: Value, shape: Sequence[int], dims: int) -> Value:
    """The same units on a tensor whose last ``dims`` axes have other lengths."""
    kept = len(shape) - dims
    return flow.value(shape, value.parts, {axis for axis in value.fixed if axis < kept}.union(range(kept, len(shape))))


# LSTM, GRU and plain recurrent layers -------------------------------------------------------------------------------

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@register_rule(*(f"{kind}.input" for kind in GATES))
def recurrent(flow: Flow, call: Call) -> list[Value]:
    """One set of hidden units for each layer and direction.

    A unit owns a row of ``weight_ih``, ``weight_hh`` and both biases in each gate, and a column of ``weight_hh``.
    """
    states = call["hx"] if call.name == "lstm" else [call["hx"]]
    directions = 2 if call["bidirectional"] else 1
    per_cell = len(call["params"]) // (call["num_layers"] * directions)
    value, finals = call["input"], []
    for layer in range(call["num_layers"]):
        outputs = []
        for number in range(layer * directions, (layer + 1) * directions):
            first = [flow.restrict(flow.take(state, 0, np.array([number])), [2]) for state in states]
            params = call["params"][number * per_cell : (number + 1) * per_cell]
            last = _cell(flow, value, params, first, bool(call["has_biases"]), GATES[call.name])
            outputs.append(last[0])
            finals.append(last)
        value = flow.cat(outputs, 2)
    return [value, *(_stacked(flow, [last[i] for last in finals], states[i].shape) for i in range(len(states)))]


def _cell(
    flow: Flow, value: Value, params: list[Value], states: list[Value], biases: bool, gates: int
) -> tuple[Value, Value]:
    """Hidden units and cells over all steps, ``(batch, time, units)``, of one layer in one direction."""
    weight_ih, weight_hh, *rest = params
    bias_ih, bias_hh = rest[:2] if biases else (None, None)
    cell = _per_unit(flow, linear(flow, value, weight_ih, bias_ih), gates)
    hidden = linear(flow, cell, rest[-1], None) if len(rest) == (3 if biases else 1) else cell
    for state, like in zip(states, (hidden, cell), strict=False):  # the first state is made of the same units
        flow.elementwise([state.across([0, 1]), flow.off(like, [0, 1])])
    flow.elementwise([cell, _per_unit(flow, linear(flow, hidden, weight_hh, bias_hh), gates)])
    return hidden, cell


def _per_unit(flow: Flow, value: Value, gates: int) -> Value:
    """Gate by gate rows -> the units that own one row in each gate."""
    *lead, rows = value.shape
    split, axis = flow.reshape(value, [*lead, gates, rows // gates]), len(lead)
    return flow.elementwise([flow.squeeze(flow.take(split, axis, np.array([gate])), [axis]) for gate in range(gates)])


def _stacked(flow: Flow, finals: list[Value], shape: tuple[int, ...]) -> Value:
    """Final states of all layers and directions: each has units of its own."""
    parts = [final.part_on(2) for final in finals]
    if any(part is None or part.axes != (2,) for part in parts):
        return flow.give_up(finals, shape, "hidden units belong to the batch or to time")
    return flow.value(shape, [Part((0, 2), np.stack([part.atoms for part in parts if part is not None]))], [1])


@register_rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def fused_cell(flow: Flow, call: Call) -> list[Value]:
    """The step that a GPU takes in one: gates of inputs and of hidden units, the state, and biases."""
    inner, outer, state, *biases = call.operands
    gates = GATES["lstm" if "lstm" in call.name else "gru"]
    units = flow.elementwise([state, *(_per_unit(flow, value, gates) for value in (inner, outer, *biases))])
    return [units, units][: len(call.shapes) - 1]
