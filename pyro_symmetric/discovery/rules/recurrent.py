"""LSTM, GRU and plain recurrent layers: one set of hidden units for each layer and direction.

A hidden unit owns a row of ``weight_ih``, ``weight_hh`` and both biases in each gate, and a column of ``weight_hh``.
"""

from __future__ import annotations

import numpy as np

from pyro_symmetric.discovery.flow import Flow, Part, Value
from pyro_symmetric.discovery.rules.contraction import linear
from pyro_symmetric.discovery.rules.registry import Call, register_rule

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@register_rule(*(f"{kind}.input" for kind in GATES))
def recurrent(flow: Flow, call: Call) -> list[Value]:
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
        like = flow.restrict(like, [2])
        flow.elementwise([Value((1, 1, like.shape[2]), x.parts, x.fixed & {2}) for x in (state, like)])
    flow.elementwise([cell, _per_unit(flow, linear(flow, hidden, weight_hh, bias_hh), gates)])
    return hidden, cell


def _per_unit(flow: Flow, value: Value, gates: int) -> Value:
    """Gate by gate rows -> the units that own one row in each gate."""
    a, b, rows = value.shape
    split = flow.reshape(value, [a, b, gates, rows // gates])
    return flow.elementwise([flow.squeeze(flow.take(split, 2, np.array([gate])), [2]) for gate in range(gates)])


def _stacked(flow: Flow, finals: list[Value], shape: tuple[int, ...]) -> Value:
    """Final states of all layers and directions: each has units of its own."""
    parts = [final.part_on(2) for final in finals]
    if any(part is None or part.axes != (2,) for part in parts):
        return flow.give_up(finals, shape, "hidden units belong to the batch or to time")
    return flow.value(shape, [Part((0, 2), np.stack([part.atoms for part in parts if part is not None]))], [1])
