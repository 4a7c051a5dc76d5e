"""LSTM, GRU and plain recurrent layers: one set of hidden units for each layer and direction.

A hidden unit owns a row of ``weight_ih``, ``weight_hh`` and both biases in each gate, and a column of ``weight_hh``.
The hyperbolic tangent is odd. So a unit of an LSTM or a GRU may change its sign, with that of its candidate's row
(which goes through the tangent) and of its column; the rows of its gates (which go through a sigmoid) keep theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.flow import Part
from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import HOMOGENEOUS, NOTHING, ODD, Passes, Value
from pyro_symmetric.discovery.scaling.rules.contraction import linear
from pyro_symmetric.discovery.scaling.rules.registry import Call, register_rule
from pyro_symmetric.discovery.scaling.rules.shape import cat

# Rows for each unit, and the multipliers that candidates let through: of several rows, the third is the candidate.
_CELLS = {"lstm": (4, ODD), "gru": (3, ODD), "rnn_tanh": (1, ODD), "rnn_relu": (1, HOMOGENEOUS)}
_CANDIDATE = 2


@register_rule(*(f"{kind}.input" for kind in _CELLS))
def recurrent(labeller: Labeller, call: Call) -> list[Value]:
    gates, passes = _CELLS[call.name]
    states = call["hx"] if call.name == "lstm" else [call["hx"]]
    directions = 2 if call["bidirectional"] else 1
    per_cell = len(call["params"]) // (call["num_layers"] * directions)
    cells = [list(call["params"][i : i + per_cell]) for i in range(0, len(call["params"]), per_cell)]
    value, finals = call["input"], []
    for layer in range(call["num_layers"]):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            first = [labeller.take(state, 0, np.array([number])) for state in states]
            output, last = _cell(labeller, value, cells[number], first, bool(call["has_biases"]), gates, passes)
            outputs.append(output)
            finals.append(last)
        value = cat(labeller, outputs, 2) if directions > 1 else outputs[0]
    return [value, *(_stacked(labeller, [last[i] for last in finals]) for i in range(len(states)))]


def _stacked(labeller: Labeller, finals: list[Value]) -> Value:
    """Final states of all layers and directions: each has units of its own, so labels depend on that axis too."""
    _, batch, width = finals[0].shape
    rows = []
    for final in finals:
        part = final.part_on(2)
        if part is None or part.axes != (2,):
            labeller.give_up([final], final.shape, "hidden units belong to the batch or to time")
            part = Part((2,), labeller.facts.fresh((width,)))
            labeller.facts.pin(part.atoms, labeller.where)
        labeller.still(replace(final, parts=tuple(other for other in final.parts if other is not part)))
        rows.append(part.atoms)
    return labeller.value((len(finals), batch, width), [Part((0, 2), np.stack(rows))], [1])


def _cell(
    labeller: Labeller,
    value: Value,
    params: list[Value],
    states: list[Value],
    biases: bool,
    gates: int,
    passes: Passes,
) -> tuple[Value, list[Value]]:
    """Output over all steps, and the final states, of one layer in one direction."""
    weight_ih, weight_hh, *rest = params
    bias_ih, bias_hh = rest[:2] if biases else (None, None)
    projection = rest[-1] if len(rest) == (3 if biases else 1) else None
    from_input = linear(labeller, value, weight_ih, bias_ih)
    cell = _per_unit(labeller, from_input, gates, passes)  # (batch, time, units)
    hidden = cell if projection is None else linear(labeller, cell, projection, None)
    for state, like in zip(states, [hidden, cell], strict=False):
        _starts_like(labeller, state, like)
    again = _per_unit(labeller, linear(labeller, hidden, weight_hh, bias_hh), gates, passes)
    labeller.elementwise([cell, again])
    return hidden, [replace(v, shape=(1, states[0].shape[1], v.shape[2])) for v in (hidden, cell)][: len(states)]


def _per_unit(labeller: Labeller, value: Value, gates: int, passes: Passes) -> Value:
    """Gate by gate rows -> the units that own one row in each gate, with the multipliers of their candidates."""
    if gates == 1:
        labeller.still(value, passes)
        return value
    a, b, rows = value.shape
    split = labeller.reshape(value, [a, b, gates, rows // gates])
    own = [labeller.squeeze(labeller.take(split, 2, np.array([g])), [2]) for g in range(gates)]
    for gate, rows_of_gate in enumerate(own):
        labeller.still(rows_of_gate, passes if gate == _CANDIDATE else NOTHING)
    return labeller.elementwise(own, "product")


def _starts_like(labeller: Labeller, state: Value, like: Value) -> None:
    """The first state is zero, or made of the same units."""
    width = like.shape[-1]
    thin = []
    for value in (state, like):
        value = labeller.restrict(value, [2])
        thin.append(Value((1, 1, width), value.parts, value.fixed & {2}, value.zero))
    labeller.elementwise(thin)
