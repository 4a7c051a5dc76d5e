"""Several descents of a batch of sources, the best of which is kept, source by source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.alignment.descent import Descent, Ended
from pyro_symmetric.alignment.scores.protocol import Scores

# Searches that take fewer seconds show no progress bar.
BAR_DELAY = 2.0


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found for a batch of sources.

    :param ended: the best end of each source.
    :param initial: the cost at the identity, float64 ``(B,)``.
    :param ends: the cost at the end of every descent, ``(B,)`` each.
    """

    ended: Ended
    initial: Tensor
    ends: tuple[Tensor, ...]


@dataclass(frozen=True)
class Search:
    """How to search.

    :param restarts: how many further descents, each from a kick of the best end so far.
    :param max_sweeps: how often at most one descent goes through what waits.
    :param tolerance: which part of the initial cost a step must gain.
    """

    restarts: int
    max_sweeps: int
    tolerance: float

    def descent(self, scores: Scores) -> Descent:
        """A descent whose steps must gain enough."""
        descent = Descent(scores, self.max_sweeps)
        descent.threshold = self.tolerance * descent.initial.abs()
        return descent

    def __call__(self, scores: Scores, tick: Callable[[], object] = int) -> Found:
        """Search for the best element of each source.

        :param tick: called after every descent.
        """
        descent = self.descent(scores)
        best = descent.descend(*descent.forward_start())
        ends = [best.cost]
        tick()
        for _ in range(self.restarts if descent.kickable else 0):
            element, first, later = descent.kicked_start(best.element)
            found = descent.descend(element, first, later=later, shuffled=True)
            ends.append(found.cost)
            best = best.better(found)
            tick()
        worse = (best.cost > descent.initial).nonzero().flatten()
        if len(worse):
            every = torch.ones(len(worse), len(descent.moves), dtype=torch.bool)
            found = descent.descend(descent.identity().select(worse), every, rows=worse)
            ends.append(best.cost.index_copy(0, worse, found.cost))
            best = best.replaced(found, worse)
        return Found(best, descent.initial, tuple(ends))
