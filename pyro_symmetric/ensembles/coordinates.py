r"""Coordinates in which a network sees inputs and predicts targets of mean 0 and deviation 1, whatever the data's are.

An optimiser crawls if the columns of a table have unlike means and scales. With inputs of mean :math:`m` and deviation
:math:`s`, and targets of mean :math:`\mu` and deviation :math:`\sigma`, the first and the last linear layer are

.. math:: W_1 = V_1 / s, \quad b_1 = c_1 - W_1 m, \qquad W_L = \sigma V_L, \quad b_L = \sigma c_L + \mu,

and the optimiser moves :math:`V` and :math:`c`. The loss stays that of :math:`W` and :math:`b`, prior included.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyro_symmetric.weights import Weights


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A change of coordinates of weights of any batch shape.

    :param first: the linear layer that takes the inputs, by name, with the inputs' mean and deviation ``(features,)``.
    :param last: the one that predicts the targets, with their mean and deviation, scalars.
    """

    first: tuple[str, Tensor, Tensor] | None = None
    last: tuple[str, Tensor, Tensor] | None = None

    def weights(self, free: Weights) -> Weights:
        """The weights at these coordinates."""
        found = dict(free)
        if self.first is not None:
            name, mean, scale = self.first
            matrix = found[f"{name}.weight"] / scale
            found |= {f"{name}.weight": matrix, f"{name}.bias": found[f"{name}.bias"] - matrix @ mean}
        if self.last is not None:
            name, mean, scale = self.last
            bias = scale * found[f"{name}.bias"] + mean
            found |= {f"{name}.weight": scale * found[f"{name}.weight"], f"{name}.bias": bias}
        return found

    def free(self, weights: Weights) -> Weights:
        """The coordinates of these weights."""
        found = dict(weights)
        if self.last is not None:
            name, mean, scale = self.last
            bias = (found[f"{name}.bias"] - mean) / scale
            found |= {f"{name}.weight": found[f"{name}.weight"] / scale, f"{name}.bias": bias}
        if self.first is not None:
            name, mean, scale = self.first
            matrix = found[f"{name}.weight"]
            found |= {f"{name}.weight": matrix * scale, f"{name}.bias": found[f"{name}.bias"] + matrix @ mean}
        return found


def standardising(net: nn.Module, x: Tensor, y: Tensor | None, frozen: Collection[str] = ()) -> Coordinates:
    """Those for a table of inputs and for targets, as far as linear layers with biases take and predict them.

    :param x: inputs; others than ``(N, features)`` are left as they are.
    :param y: real targets; ``None`` for labels.
    :param frozen: parameters that must stay as they are.
    """
    first, last = _ends(net, x[:2], frozen)
    table = x.dim() == 2 and x.is_floating_point()
    return Coordinates(
        (first, *_moments(x)) if table and first is not None else None,
        (last, *_moments(y.reshape(-1))) if y is not None and last is not None and y.is_floating_point() else None,
    )


def _ends(net: nn.Module, x: Tensor, frozen: Collection[str]) -> tuple[str | None, str | None]:
    """The names of the linear layers that take ``x`` itself and that make the output itself."""
    calls: list[tuple[str, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, given, out, name=name: calls.append((name, given[0], out)))
        for name, module in net.named_modules()
        if name and type(module) is nn.Linear and module.bias is not None
    ]
    try:
        with torch.no_grad():
            output = net(x)
    finally:
        for hook in hooks:
            hook.remove()
    once = [call for call in calls if sum(call[0] == other[0] for other in calls) == 1]
    free = {name for name, _ in net.named_parameters()} - set(frozen)
    once = [call for call in once if {f"{call[0]}.weight", f"{call[0]}.bias"} <= free]
    first = [name for name, given, _ in once if given.data_ptr() == x.data_ptr() and given.shape == x.shape]
    last = [name for name, _, out in once if isinstance(output, Tensor) and out.data_ptr() == output.data_ptr()]
    return (first[0] if len(first) == 1 else None), (last[0] if len(last) == 1 else None)


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation, 1 for what is constant or holds NaN."""
    scale, mean = torch.std_mean(values, 0, correction=0)
    usable = (scale > 0) & scale.isfinite()
    return torch.where(usable, mean, 0.0), torch.where(usable, scale, 1.0)
