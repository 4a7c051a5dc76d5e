r"""Random group elements that bring a draw close to the base density: the proposal of ``SinkhornImportance``.

For each factor in turn, the matrix ``A`` of unit densities is made doubly stochastic and a matching is drawn from it.
The factors drawn before enter ``A`` by their matchings, those still to come by their doubly stochastic matrices, which
a sweep of the same kind (mean-field, without draws) has found before. The probability of an element is the product of
those of its factors, conditional on the ones before.

Where factors share sites, such a walk may start with a confident mistake, which gives the identity a tiny probability
and the bound a heavy tail. So the proposal is then a mixture of several walks, each of which makes other mistakes.

The proposal depends on the draw's orbit alone: moving the draw by ``h`` moves what is proposed along, whatever ``h``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.matchings import (
    certain_first,
    doubly_stochastic,
    draw_matchings,
    log_probability,
    with_spread,
)
from pyro_symmetric.distributions.units import Placement, UnitDensities, UnitScores


@dataclass(frozen=True)
class Walk:
    """One way through the factors: in which order, and how many sweeps find out what to expect of those to come."""

    order: Sequence[str]
    sweeps: int


@dataclass(frozen=True)
class Proposals:
    """The identity and ``K`` drawn elements, for each of ``N`` draws.

    :param images: set of units -> ``(K, N, n)``, without the identity.
    :param signs: set of units -> ``(K, N, n)``, for those that are flipped.
    :param log_probability: of the identity and of the drawn elements, ``(K + 1, N)``.
    """

    images: dict[str, Tensor]
    signs: dict[str, Tensor]
    log_probability: Tensor


@torch.no_grad()
def propose(units: UnitDensities, count: int, batch: int, like: Tensor) -> Proposals:
    """Draw ``count`` elements for each of ``batch`` draws.

    :param units: the densities to match by.
    :param like: a tensor whose dtype and device are used.
    """
    walkers = [_Walker(units, walk, count, batch, like) for walk in walks(units)]
    drawn, log_tau = zip(*(walker.walk(None) for walker in walkers), strict=True)
    elements, log_probability = drawn[0], log_tau[0]
    if len(walkers) > 1:
        elements = _one_of(drawn, torch.randint(len(walkers), (count + 1, batch, 1), device=like.device))
        scores = torch.stack([walker.walk(elements)[1] for walker in walkers])
        log_probability = scores.logsumexp(0) - math.log(len(walkers))
    images = {name: placement.where[1:] for name, placement in elements.items()}
    signs = {name: placement.signs[1:] for name, placement in elements.items() if placement.signs is not None}
    return Proposals(images, signs, log_probability)


def _one_of(drawn: Sequence[Mapping[str, Placement]], which: Tensor) -> dict[str, Placement]:
    """For each element that of the walk whose number is drawn."""
    result = {}
    for name, first in drawn[0].items():
        where, signs = first.where, first.signs
        for m, other in enumerate(drawn[1:], 1):
            where = torch.where(which == m, other[name].where, where)
            flipped = other[name].signs
            if signs is not None and flipped is not None:
                signs = torch.where(which == m, flipped, signs)
        result[name] = Placement(where, signs)
    return result


def walks(units: UnitDensities) -> list[Walk]:
    """The walks that are mixed; the choice is by trial on random bases, from overlapping to separated units."""
    forward, backward = units.factors, units.factors[::-1]
    if not any(units.neighbours(name) for name in forward):
        return [Walk(forward, 0)]  # no factor waits for another
    if units.sets.sign_of or any(name in units.neighbours(name) for name in forward):
        # Signs, and matrices that one factor moves on both sides, mislead a sweep that starts from nothing more often.
        return [Walk(forward, 0), Walk(forward, 1), Walk(backward, 2)]
    return [Walk(forward, 1), Walk(backward, 1)]


class _Walker:
    """Walks through the factors, drawing elements or scoring given ones."""

    def __init__(self, units: UnitDensities, walk: Walk, count: int, batch: int, like: Tensor):
        self._units, self._order, self._like = units, walk.order, like
        self._shape = (count + 1, batch)
        self._soft = _expected_placements(units, walk, like)

    def walk(self, given: Mapping[str, Placement] | None) -> tuple[dict[str, Placement], Tensor]:
        """Elements (the identity first), each ``(K + 1, N, n)``, and their log-probabilities, ``(K + 1, N)``.

        :param given: elements to score; drawn where ``None``.
        """
        placements: dict[str, Placement] = dict(self._soft)
        elements: dict[str, Placement] = {}
        total = self._like.new_zeros(self._shape)
        for name in self._order:
            scores = _scores(self._units, name, placements, self._like)
            where, log_tau = self._match(name, scores.total, None if given is None else given[name].where)
            total = total + log_tau
            signs = None
            if name in self._units.sets.sign_of:
                signs, log_tau = self._flip(scores.odd, where, None if given is None else given[name].signs)
                total = total + log_tau
            elements[name] = placements[name] = Placement(where, signs)
            # Where no draw moves a unit, all of them see the same neighbour, and one matrix serves all.
            if signs is None and torch.equal(where, where[:1].expand_as(where)):
                placements[name] = Placement(where[:1])
        return elements, total

    def _match(self, name: str, scores: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Draw, or take, the images of one set of units; with their log-probabilities."""
        n = scores.shape[-1]
        identity = torch.arange(n, device=scores.device).expand(1, self._shape[1], n)
        if name in self._units.sets.fixed:
            return identity.expand(*self._shape, n), 0.0
        # Constants of a position don't matter, but would swallow what does when late rows are added up.
        scores = (scores - scores.amax(-1, keepdim=True)).expand(-1, self._shape[1], -1, -1)
        rows = with_spread(doubly_stochastic(scores))
        rank = certain_first(rows).expand(*self._shape, n)
        if given is None:
            own = (scores[1:], rows[1:]) if len(rows) > 1 else (scores, rows)
            given = torch.cat([identity, draw_matchings(*own, rank[1:])])
        return given, log_probability(scores, rows, rank, given)

    def _flip(self, odd: Tensor | None, where: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw, or take, the signs of matched units: independent, given the matching."""
        log_odds = torch.zeros_like(where, dtype=self._like.dtype)
        if odd is not None:
            shape = (*self._shape, *odd.shape[-2:])
            log_odds = 2 * odd.expand(shape).gather(-1, where.unsqueeze(-1)).squeeze(-1)
        if given is None:
            drawn = torch.where(torch.rand_like(log_odds) < log_odds.sigmoid(), 1.0, -1.0).to(log_odds.dtype)
            drawn[0] = 1.0
            given = torch.empty_like(drawn).scatter_(-1, where, drawn)  # from positions to units
        return given, logsigmoid(given.gather(-1, where) * log_odds).sum(-1)


def _expected_placements(units: UnitDensities, walk: Walk, like: Tensor) -> dict[str, Placement]:
    """What to expect of the factors that others wait for; those known so far sharpen the next."""
    placements: dict[str, Placement] = {}
    for _ in range(walk.sweeps):
        for name in walk.order:
            if units.neighbours(name):
                scores = _scores(units, name, placements, like)
                n = scores.even.shape[-1]
                fixed = name in units.sets.fixed
                matrix = torch.eye(n).to(scores.even) if fixed else doubly_stochastic(scores.total)
                placements[name] = scores.expected_placement(matrix)
    return placements


def _scores(units: UnitDensities, name: str, placements: Mapping[str, Placement], like: Tensor) -> UnitScores:
    scores = units.scores(name, placements)
    if scores is None:  # nothing is known of this factor yet: all its units are alike
        n = units.group.factors[name]
        zeros = like.new_zeros(1, 1, n, n)
        return UnitScores(zeros, zeros if name in units.sets.sign_of else None)
    return scores
