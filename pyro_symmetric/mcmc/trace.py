"""How a run went, in about a thousand points however long it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernel import State

TRACE_POINTS = 2000
CURVES = ("potential", "acceptance_rate", "step_size")


class Trace:
    """Means over the chains at every ``stride``-th iteration, kept on the chains' device.

    Whenever there are ``TRACE_POINTS`` of them, every second one is dropped and the stride doubled. So what is kept
    depends on the iterations alone, not on where the run was broken or how many were first asked for.
    """

    def __init__(self, device: torch.device):
        self.values = torch.full((len(CURVES), TRACE_POINTS), torch.nan, device=device)
        self.stride = 1

    def record(self, iteration: int, state: State) -> None:
        """Note the state after an iteration, counted from 0."""
        if iteration % self.stride:
            return
        if iteration // self.stride == TRACE_POINTS:
            self.values[:, : TRACE_POINTS // 2] = self.values[:, ::2].clone()
            self.stride *= 2
        acceptance = state.statistics.get("acceptance_rate")
        column = self.values[:, iteration // self.stride]
        column[0] = state.potential.mean()
        column[1] = torch.nan if acceptance is None else acceptance.mean()
        column[2] = state.tuning.step_size

    def restore(self, values: Tensor, stride: int) -> None:
        """Take up a trace where it was left."""
        self.values.copy_(values)
        self.stride = stride

    def until(self, iterations: int) -> dict[str, Any]:
        """The curves over the first iterations, as JSON: ``iteration``, then those of ``CURVES``; not finite: None."""
        values = self.values[:, : -(-iterations // self.stride)].tolist()
        curves = {name: [_number(value) for value in row] for name, row in zip(CURVES, values, strict=True)}
        return {"iteration": list(range(0, iterations, self.stride)), **curves}


def _number(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None
