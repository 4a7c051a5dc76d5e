"""Fused operators of PyTorch that no map over weights takes, by plain ones.

Within :class:`PlainOperators` recurrent layers (``nn.LSTM``, ``nn.GRU``, ``nn.RNN``, with layers, both directions,
dropout, projections and packed sequences) go through time by a loop, their cells are a few plain operators, and so is
weight normalisation. Networks without such layers don't need it (:func:`needs_plain_operators`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.parametrizations import _WeightNorm
from torch.overrides import TorchFunctionMode

# Layers whose operators are fused.
FUSED = (nn.RNNBase, nn.RNNCellBase, _WeightNorm)

State = tuple[Tensor, ...]
# input of one moment times its weights, (B, gates); state; weights and bias of the state; projection, if there is one
Step = Callable[[Tensor, State, Tensor, "Tensor | None", "Tensor | None"], State]


def needs_plain_operators(net: nn.Module) -> bool:
    """True if one of the network's layers can't be mapped over its weights as it is."""
    return any(isinstance(module, FUSED) for module in net.modules())


class PlainOperators(TorchFunctionMode):
    """A context in which such layers can be mapped over weights."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in PLAIN:
            return PLAIN[func](*args, **(kwargs or {}))
        if func is Tensor.data_ptr:  # of weights, to be laid out for cuDNN; mapped ones have no address
            return 0
        return func(*args, **(kwargs or {}))


def _long_short(given: Tensor, state: State, weight: Tensor, bias: Tensor | None, project: Tensor | None) -> State:
    hidden, cell = state
    take, keep, new, give = (given + linear(hidden, weight, bias)).chunk(4, -1)
    cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
    hidden = give.sigmoid() * cell.tanh()
    return (hidden if project is None else linear(hidden, project)), cell


def _gated(given: Tensor, state: State, weight: Tensor, bias: Tensor | None, _: Tensor | None) -> State:
    reset, update, new = given.chunk(3, -1)
    from_reset, from_update, from_new = linear(state[0], weight, bias).chunk(3, -1)
    new = (new + (reset + from_reset).sigmoid() * from_new).tanh()
    return (new + (update + from_update).sigmoid() * (state[0] - new),)


def _simple(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(given: Tensor, state: State, weight: Tensor, bias: Tensor | None, _: Tensor | None) -> State:
        return (activation(given + linear(state[0], weight, bias)),)

    return step


def _recurrent(step: Step, data: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The result of ``torch.lstm`` and its like, for whole sequences and for packed ones."""
    if isinstance(args[2], bool):
        *layers, batch_first = args
        inputs = data.transpose(0, 1) if batch_first else data
        outputs, *last = _layers(step, inputs, None, *layers)
        return (outputs.transpose(0, 1) if batch_first else outputs, *last)
    sizes, *layers = args
    inputs, inside = _unpacked(data, sizes)
    outputs, *last = _layers(step, inputs, inside, *layers)
    return (outputs[inside.nonzero(as_tuple=True)], *last)


def _unpacked(data: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """``(T, B, features)`` of a packed sequence, and where, ``(T, B)``, it holds something."""
    inside = (sizes[:, None] > torch.arange(int(sizes[0]), device=sizes.device)).to(data.device)
    return data[inside.flatten().cumsum(0).unflatten(0, inside.shape) - 1], inside


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    inputs = padded.transpose(0, 1) if batch_first else padded
    inside = lengths > torch.arange(int(lengths.max()), device=lengths.device)[:, None]
    return inputs[inside.to(padded.device).nonzero(as_tuple=True)], inside.sum(1)


def _pad(data: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    inputs, inside = _unpacked(data, sizes)
    filled = torch.where(inside.unflatten(-1, (-1, *[1] * (inputs.dim() - 2))), inputs, value)
    more = filled.new_full((max(0, total - len(filled)), *filled.shape[1:]), value)
    padded = torch.cat((filled, more))
    return padded.transpose(0, 1) if batch_first else padded, inside.sum(0).to(sizes.device)


def _cell(
    step: Step,
    data: Tensor,
    state: Tensor | Sequence[Tensor],
    from_input: Tensor,
    from_state: Tensor,
    bias: Tensor | None = None,
    bias_of_state: Tensor | None = None,
) -> Any:
    given = linear(data, from_input, bias)
    if isinstance(state, Tensor):
        return step(given, (state,), from_state, bias_of_state, None)[0]
    return step(given, tuple(state), from_state, bias_of_state, None)


def _weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    others = None if dim == -1 else [other for other in range(direction.dim()) if other != dim]
    return direction * (length / torch.linalg.vector_norm(direction, dim=others, keepdim=dim != -1))


def _layers(
    step: Step,
    inputs: Tensor,
    inside: Tensor | None,
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    rate: float,
    train: bool,
    both: bool,
) -> tuple[Tensor, ...]:
    """Layers on top of each other.

    :param inputs: ``(T, B, features)``.
    :param inside: ``(T, B)``, false where a sequence has ended; ``None``: none ends early.
    :param hidden: states at the start, each ``(layers * directions, B, features)``.
    :return: outputs ``(T, B, features)``, and the states at the end.
    """
    starts = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for number in range(layer * directions, (layer + 1) * directions):
            own = weights[number * each : (number + 1) * each]
            start = tuple(value[number] for value in starts)
            found, end = _through_time(step, inputs, inside, start, own, biased, bool(number % directions))
            outputs.append(found)
            ends.append(end)
        inputs = torch.cat(outputs, -1)
        if train and rate and layer < layers - 1:
            inputs = dropout(inputs, rate)
    return (inputs, *(torch.stack(values) for values in zip(*ends, strict=True)))


def _through_time(
    step: Step,
    inputs: Tensor,
    inside: Tensor | None,
    state: State,
    weights: Sequence[Tensor],
    biased: bool,
    backward: bool,
) -> tuple[Tensor, State]:
    """One layer in one direction."""
    from_input, from_state, *others = weights
    bias, bias_of_state = others[:2] if biased else (None, None)
    project = others[-1] if len(others) % 2 else None
    given = linear(inputs, from_input, bias)
    outputs: list[Tensor] = []
    for t in reversed(range(len(given))) if backward else range(len(given)):
        new = step(given[t], state, from_state, bias_of_state, project)
        if inside is not None:  # a sequence that hasn't begun, or has ended, stays as it is
            new = tuple(torch.where(inside[t, :, None], to, at) for to, at in zip(new, state, strict=True))
        state = new
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backward else outputs), state


PLAIN: dict[Any, Callable[..., Any]] = {
    torch.lstm: partial(_recurrent, _long_short),
    torch.gru: partial(_recurrent, _gated),
    torch.rnn_tanh: partial(_recurrent, _simple(torch.tanh)),
    torch.rnn_relu: partial(_recurrent, _simple(torch.relu)),
    torch.lstm_cell: partial(_cell, _long_short),
    torch.gru_cell: partial(_cell, _gated),
    torch.rnn_tanh_cell: partial(_cell, _simple(torch.tanh)),
    torch.rnn_relu_cell: partial(_cell, _simple(torch.relu)),
    torch._weight_norm: _weight_norm,
    torch._pack_padded_sequence: _pack,
    torch._pad_packed_sequence: _pad,
}
