"""Several descents of a batch of sources, the best of which is kept, source by source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.cost import Cost, Moments
from pyro_symmetric.alignment.descent.descent import Descent
from pyro_symmetric.alignment.descent.matcher import Matcher
from pyro_symmetric.alignment.parts.mover import Mover
from pyro_symmetric.alignment.parts.problem import Problem
from pyro_symmetric.alignment.parts.state import State

# Searches that take fewer seconds show no progress bar.
BAR_DELAY = 2.0
# How many numbers the sources that are descended together may hold, with their scores.
CHUNK_ENTRIES = 2**26


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a search found for a batch of sources.

    :param descent: the best descent of each source.
    :param initial: float64 ``(B,)``.
    :param shifts: site -> constants added first, ``(B,)``.
    :param starts: the cost at the end of every descent, ``(B,)`` each.
    """

    descent: Descent
    initial: Tensor
    shifts: dict[str, Tensor]
    starts: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Search:
    """Several descents, the best of which is kept, source by source."""

    problem: Problem
    cost: Cost
    restarts: int
    max_sweeps: int
    tolerance: float

    def __call__(self, reference: Moments, source: Moments, tick: Callable[[], object] = int) -> Outcome:
        """Search.

        :param reference: moments of one reference, or of one for each source.
        :param source: moments of the sources.
        :param tick: called after every descent.
        """
        unshifted = Matcher(self.problem.parts, reference, source, self.cost)
        rows = torch.arange(unshifted.batch)
        initial = unshifted.costs(unshifted.identity(), rows).sum(1)
        source, shifts = shifted(self.problem, self.cost, reference, source)
        matcher = Matcher(self.problem.parts, reference, source, self.cost) if shifts else unshifted
        threshold = self.tolerance * initial.abs()
        options: dict[str, Any] = {"max_sweeps": self.max_sweeps, "threshold": threshold}

        best = matcher.descend(*matcher.forward_start(), **options)
        starts = [best.cost]
        tick()
        for _ in range(self.restarts if matcher.kickable else 0):
            state, first, later = matcher.kicked_start(best.state, rows)
            found = matcher.descend(state, first, later=later, shuffled=True, **options)
            starts.append(found.cost)
            best = best.better(found)
            tick()
        worse = (best.cost > initial).nonzero().flatten()
        if len(worse):
            identity = matcher.identity().rows(worse)
            every = torch.ones(len(worse), len(matcher.moves), dtype=torch.bool)
            options["threshold"] = threshold[worse]
            found = matcher.descend(identity, every, rows=worse, **options)
            starts.append(best.cost.clone().index_put((worse,), found.cost))
            best = best.replaced(found, worse)
        return Outcome(best, initial, shifts, tuple(starts))


def shifted(problem: Problem, cost: Cost, reference: Moments, source: Moments) -> tuple[Moments, dict[str, Tensor]]:
    """Add to the biases in front of a softmax the constants that bring them closest; they concern nothing else."""
    shifts, result = {}, dict(source)
    for site in problem.shifts.sites:
        if site not in source or any(group.members(site) for group in problem.parts.rescalings.values()):
            continue
        difference = (reference[site][..., 0] - source[site][..., 0]).flatten(1)
        weight = torch.ones_like(reference[site][..., 0]) if cost.squared else reference[site][..., 1] ** -2
        weight = weight.flatten(1)
        shifts[site] = (difference * weight).sum(1) / weight.sum(1)
        amount = shifts[site].reshape(-1, *[1] * (source[site].dim() - 2))
        result[site] = torch.cat([source[site][..., :1] + amount.unsqueeze(-1), source[site][..., 1:]], -1)
    return result, shifts


def move_sources(problem: Problem, source: Moments, state: State) -> Moments:
    """All sites, moved."""
    example = next(iter(source.values()), torch.zeros(1))
    mover = Mover(problem.parts, example.device)
    return {site: mover.moved(value, site, state) for site, value in source.items()}


def chunks_of(problem: Problem, source: Moments) -> list[Tensor]:
    """Numbers of the sources to descend together, so that their weights and scores fit into memory."""
    batch = len(next(iter(source.values()), torch.zeros(1)))
    weights = sum(value[0].numel() for value in source.values())
    scores = sum(u.count**2 * len(u.places) for root in problem.parts.roots for u in root.tree())
    return list(torch.arange(batch).split(max(1, CHUNK_ENTRIES // max(1, 3 * weights + 2 * scores))))
