r"""Random group elements that bring a draw close to the base density: the proposal of ``SinkhornImportance``.

For each set of units in turn, the matrix ``A`` of unit densities is made doubly stochastic and a matching is drawn from
it, then signs, given the matching. What lies inside units follows its outer units: the heads are matched first, by what
a matching of their rows would be worth; then the rows of each head, to those of the head that has come to its place.
Sets drawn before enter ``A`` by their matchings, those still to come by their doubly stochastic matrices, which a sweep
of the same kind (mean-field, without draws) has found before. The probability of an element is the product of those of
its sets, conditional on the ones before.

If sets share sites, such a walk may start with a confident mistake, which gives the identity a tiny probability and the
bound a heavy tail. So the proposal is then a mixture of several walks, each of which makes other mistakes.

If a normal base correlates units, they are placed one after the other instead
(:mod:`~pyro_symmetric.distributions.conditional_walk`); if sets share sites, both kinds of walks are mixed.

The proposal depends on the draw's orbit alone: moving the draw by ``h`` moves what is proposed along, whatever ``h``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.conditional_walk import ConditionalWalk, has_conditionals
from pyro_symmetric.distributions.matchings import (
    certain_first,
    doubly_stochastic,
    draw_matchings,
    log_probability,
    with_spread,
)
from pyro_symmetric.distributions.placements import Drawn, Expected, Placements
from pyro_symmetric.distributions.unit_densities import UnitDensities, blocks, own_blocks
from pyro_symmetric.groups.element import Element


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    """Draw ``count`` elements for each of the ``N`` draws that these densities are of.

    :return: the elements, batch shape ``(count, N)``, and the log-probabilities of the identity and of these,
        ``(count + 1, N)``.
    """
    walkers = walkers_of(units, count)
    drawn, log_tau = zip(*(walker.walk(None) for walker in walkers), strict=True)
    moves, log_probability = drawn[0], log_tau[0]
    if len(walkers) > 1:
        moves = _one_of(drawn, torch.randint(len(walkers), (1, *log_probability.shape, 1), device=units.like.device))
        by_walker = torch.stack([walker.walk(moves)[1] for walker in walkers])
        log_probability = by_walker.logsumexp(0) - math.log(len(walkers))
    return _element(units, moves, (count, len(units.like))), log_probability


def _element(units: UnitDensities, moves: Mapping[str, Drawn], batch: tuple[int, int]) -> Element:
    """The moves as elements, without the identity."""
    permutations, signs = {}, {}
    for name, drawn in moves.items():
        one = units.group[name]
        if drawn.images is not None:
            permutations[name] = (drawn.images[1:] % one.size).reshape(*batch, *one.shape)
        if drawn.signs is not None:
            signs[name] = drawn.signs[1:].reshape(*batch, *one.shape)
    like = units.like
    return Element(units.group, permutations, signs, batch_shape=batch, device=like.device, dtype=like.dtype)


def _one_of(drawn: Sequence[Mapping[str, Drawn]], which: Tensor) -> dict[str, Drawn]:
    """For each element that of the walk whose number is drawn, ``(1, K + 1, N, 1)``."""

    def chosen(parts: Sequence[Tensor | None]) -> Tensor | None:
        known = [part for part in parts if part is not None]
        return torch.stack(known).take_along_dim(which, 0)[0] if known else None

    return {
        name: Drawn(chosen([moves[name].images for moves in drawn]), chosen([moves[name].signs for moves in drawn]))
        for name in drawn[0]
    }


def walkers_of(units: UnitDensities, count: int) -> Sequence[Walker | ConditionalWalk]:
    """The walks that are mixed; the choice is by trial on random bases, from overlapping to separated units."""
    sets, forward = units.sets, list(units.sets)
    # The last sets first, but what lies inside units after these.
    backward: list[str] = []
    for name in forward:
        parent = sets[name].units.parent
        backward.insert(0 if parent is None else backward.index(parent) + 1, name)
    waits = any(one.waits for one in sets.values())
    conditional: list[ConditionalWalk] = []
    if has_conditionals(units):
        conditional = [ConditionalWalk(units, count, order) for order in ((forward, backward) if waits else (forward,))]
        if not waits:
            return conditional
    if not waits:
        chosen = [(forward, 0)]
    elif any(one.units.parent is not None for one in sets.values()):
        chosen = [(forward, 0), (backward, 0), (forward, 1), (backward, 1)]
    elif any(one.is_flipped or any(name in axis.neighbours for axis in one.axes) for name, one in sets.items()):
        # Signs, and matrices that one set moves on both sides, mislead a sweep that starts from nothing more often.
        chosen = [(forward, 0), (forward, 1), (backward, 2)]
    else:
        chosen = [(forward, 1), (backward, 1)]
    return [*conditional, *(Walker(units, count, order, sweeps) for order, sweeps in chosen)]


class Walker:
    """Goes through the sets of units, and draws ``count`` elements for each draw, or scores given ones.

    :param order: in which it goes through the sets.
    :param sweeps: how many sweeps find out what to expect of sets to come.
    """

    def __init__(self, units: UnitDensities, count: int, order: Sequence[str], sweeps: int):
        self._units, self._order = units, order
        self._shape = (count + 1, len(units.like))
        self._expected = _expectations(units, order, sweeps)

    def walk(self, given: Mapping[str, Drawn] | None) -> tuple[dict[str, Drawn], Tensor]:
        """Moves (the identity first), each ``(K + 1, N, count)``, and their log-probabilities, ``(K + 1, N)``.

        :param given: moves to score; drawn if ``None``.
        """
        drawn: dict[str, Drawn] = {}
        shared: dict[str, Drawn] = {}
        where: dict[str | None, Tensor] = {}
        total = self._units.like.new_zeros(self._shape)
        for name in self._order:
            densities = self._units.densities(name, Placements(shared, self._expected))
            own = Drawn(None) if given is None else given[name]
            outer = where.get(self._units.group[name].parent)
            images, where[name], log_tau = self._match(name, densities.total, outer, own.images)
            total, signs = total + log_tau, None
            if densities.odd is not None:
                signs, log_tau = self._flip(densities.odd, where[name], own.signs)
                total = total + log_tau
            drawn[name] = shared[name] = Drawn(images, signs)
            # If no draw moves a unit, all of them see the same neighbour, and one matrix serves all.
            if signs is None and images is not None and torch.equal(images, images[:1].expand_as(images)):
                shared[name] = Drawn(images[:1])
        return drawn, total

    def _match(
        self, name: str, densities: Tensor, outer: Tensor | None, given: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor | float]:
        """Draw, or take, the moves of one set of units.

        :param outer: the unit outside that comes to each place, ``(K + 1, N, copies)``; None if these lie in none.
        :return: the moves within copies as they are before the outer ones, where each unit comes from with both, and
            log-probabilities.
        """
        units = self._units.group[name]
        copies, n = units.copies, units.size
        start = torch.arange(0, units.count, n, device=densities.device).unsqueeze(-1)
        source = start if outer is None else outer.unsqueeze(-1) * n  # the first unit of the copy that comes to a place
        if not self._units.sets[name].is_permuted:
            inside = torch.arange(n, device=densities.device)
            return None, (source + inside).expand(*self._shape, copies, n).flatten(-2), 0.0
        places = None if outer is None else outer.unsqueeze(-1).expand(*self._shape, copies, n)
        if given is not None:
            given = given.unflatten(-1, (copies, n))
            given = (given if places is None else given.gather(-2, places)) - source
        inside, log_tau = self._match_copies(_blocks_of(densities, copies, outer), given)
        images = inside + source
        where = images.flatten(-2)
        if places is not None:  # from the places of copies to the copies that come to them
            images = images.scatter(-2, places, images)
        return images.flatten(-2), where, log_tau

    def _match_copies(self, densities: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Match the units of each copy, ``(L, N, copies, n, n)``: ``(K + 1, N, copies, n)``, and log-probabilities."""
        copies, n = densities.shape[2], densities.shape[-1]
        batch = self._shape[1] * copies
        # Constants of a place don't matter, but would swallow what does when late rows are added up.
        densities = (densities - densities.amax(-1, keepdim=True)).expand(-1, self._shape[1], -1, -1, -1).flatten(1, 2)
        rows = with_spread(doubly_stochastic(densities))
        rank = certain_first(rows).expand(self._shape[0], batch, n)
        if given is None:
            own = (densities[1:], rows[1:]) if len(rows) > 1 else (densities, rows)
            identity = torch.arange(n, device=densities.device).expand(1, batch, n)
            matched = torch.cat([identity, draw_matchings(*own, rank[1:])])
        else:
            matched = given.flatten(1, 2)
        log_tau = log_probability(densities, rows, rank, matched).unflatten(1, (-1, copies)).sum(-1)
        return matched.unflatten(1, (-1, copies)), log_tau

    def _flip(self, odd: Tensor, where: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw, or take, the signs of matched units: independent, given the matching."""
        log_odds = 2 * odd.expand(*self._shape, *odd.shape[-2:]).gather(-1, where.unsqueeze(-1)).squeeze(-1)
        if given is None:
            drawn = torch.where(torch.rand_like(log_odds) < log_odds.sigmoid(), 1.0, -1.0).to(log_odds.dtype)
            drawn[0] = 1.0
            given = torch.empty_like(drawn).scatter_(-1, where, drawn)  # from places to units
        return given, logsigmoid(given.gather(-1, where) * log_odds).sum(-1)


def _blocks_of(densities: Tensor, copies: int, outer: Tensor | None) -> Tensor:
    """The block of the copy that comes to each place: ``(L, N, count, count)`` -> ``(.., copies, n, n)``."""
    if outer is None or torch.equal(outer, torch.arange(copies, device=outer.device).expand_as(outer)):
        return own_blocks(densities, copies)
    pairs = blocks(densities, copies)
    return pairs.take_along_dim(outer[..., None, None, None], -3).squeeze(-3)


def _expectations(units: UnitDensities, order: Sequence[str], sweeps: int) -> dict[str, Expected]:
    """Expectations of the sets that others wait for; those known so far sharpen the next."""
    axes = (axis for one in units.sets.values() for axis in one.axes)
    awaited = {member.name for axis in axes for members in axis.across for member in members}
    expected: dict[str, Expected] = {}
    for _ in range(sweeps):
        for name in order:
            if name in awaited:
                expected[name] = _expectation(units, name, expected)
    return expected


def _expectation(units: UnitDensities, name: str, expected: Mapping[str, Expected]) -> Expected:
    densities, one = units.densities(name, Placements({}, expected)), units.sets[name]
    copies, n = one.units.copies, one.units.size
    if one.is_permuted:
        matrix = doubly_stochastic(blocks(densities.total, copies))
    else:
        matrix = torch.eye(n, dtype=densities.even.dtype, device=densities.even.device).expand(
            *densities.even.shape[:2], copies, copies, n, n
        )
    parent = one.units.parent
    around = torch.eye(copies, dtype=matrix.dtype, device=matrix.device) if parent is None else expected[parent].matrix
    matrix = (matrix * around[..., None, None]).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    return Expected(matrix, None if densities.odd is None else densities.odd.tanh())
