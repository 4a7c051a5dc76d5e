"""Where descents of a batch of sources ended, and the better of two, source by source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.alignment.parts.state import State

Events = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Descent:
    """Where a descent ended.

    :param state: the elements.
    :param cost: float64 ``(B,)``.
    :param events: the cost at the start and at each step that some sources accepted: (sources, their costs).
    :param converged: bool ``(B,)``: whether nothing was left that could still improve.
    """

    state: State
    cost: Tensor
    events: Events
    converged: Tensor

    def histories(self) -> list[tuple[float, ...]]:
        """The costs of each source; they never rise."""
        rows, costs = (torch.cat(parts) for parts in zip(*self.events, strict=True))
        order = rows.argsort(stable=True)
        pieces = costs[order].split(rows.bincount(minlength=len(self.cost)).tolist())
        return [tuple(piece.tolist()) for piece in pieces]

    def better(self, other: Descent, margin: Tensor | float = 0.0) -> Descent:
        """For each source the better of two descents; the other one has to be better by more than ``margin``."""
        chosen = other.cost < self.cost - margin
        if bool(chosen.all()):
            return other
        if not bool(chosen.any()):
            return self
        rows, number = chosen.nonzero().flatten(), chosen.long().cumsum(0) - 1
        events = [(number[own[chosen[own]]], costs[chosen[own]]) for own, costs in other.events]
        return self.replaced(Descent(other.state.rows(rows), other.cost[rows], events, other.converged[rows]), rows)

    def replaced(self, other: Descent, rows: Tensor) -> Descent:
        """The same, with another descent's outcome for some sources: ``other`` holds just these."""
        state = self.state.copy()
        state.put(rows, other.state)
        cost, converged = self.cost.clone(), self.converged.clone()
        cost[rows], converged[rows] = other.cost, other.converged
        taken = torch.isin(torch.arange(len(cost)), rows)
        events = [(own[~taken[own]], costs[~taken[own]]) for own, costs in self.events]
        return Descent(state, cost, events + [(rows[own], costs) for own, costs in other.events], converged)
