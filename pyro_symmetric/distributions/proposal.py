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
from collections.abc import Generator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.conditional_walk import ConditionalWalk, has_conditionals
from pyro_symmetric.distributions.placements import Drawn, Expected, Placements
from pyro_symmetric.distributions.questions import (
    Answer,
    Matrix,
    Question,
    made_doubly_stochastic,
    matched,
    side_by_side,
)
from pyro_symmetric.distributions.unit_densities import PairDensities, UnitDensities, blocks, own_blocks
from pyro_symmetric.groups.element import Element
from pyro_symmetric.placement import asks

Walking = Generator[Question, Answer, tuple[dict[str, Drawn], Tensor]]


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    """Draw ``count`` elements for each of the ``N`` draws that these densities are of.

    :return: the elements, batch shape ``(count, N)``, and the log-probabilities of the identity and of these,
        ``(count + 1, N)``.
    """
    walkers = walkers_of(units, count)
    drawn, log_tau = zip(*walk(walkers, None, scored=len(walkers) == 1), strict=True)
    moves, log_probability = drawn[0], log_tau[0]
    if len(walkers) > 1:
        moves = _one_of(drawn, torch.randint(len(walkers), (1, *log_probability.shape, 1), device=units.like.device))
        by_walker = torch.stack([told for _, told in walk(walkers, moves)])
        log_probability = by_walker.logsumexp(0) - math.log(len(walkers))
    return _element(units, moves, (count, len(units.like))), log_probability


def walk(
    walkers: Sequence[Walker | ConditionalWalk], given: Mapping[str, Drawn] | None, scored: bool = True
) -> list[tuple[dict[str, Drawn], Tensor]]:
    """The moves of several walks, or of each the probabilities of given ones, side by side.

    :param scored: whether probabilities are wanted; else they are partly left out.
    """
    results = [one.walk(given) if isinstance(one, ConditionalWalk) else None for one in walkers]
    walking = {k: one.steps(given, scored) for k, one in enumerate(walkers) if isinstance(one, Walker)}
    found = side_by_side(walking, partial(matched, precision=walkers[0].units.like.dtype))
    return [found[k] if own is None else own for k, own in enumerate(results)]


def _element(units: UnitDensities, moves: Mapping[str, Drawn], batch: tuple[int, int]) -> Element:
    """The moves as elements, without the identity."""
    permutations, signs = {}, {}
    for name, drawn in moves.items():
        one = units.group[name]
        if drawn.images is not None:
            inside = drawn.images[1:] if one.copies == 1 else drawn.images[1:] % one.size
            permutations[name] = inside.reshape(*batch, *one.shape)
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
    expected = side_by_side(
        {k: _expectations(units, order, sweeps) for k, (order, sweeps) in enumerate(chosen)},
        partial(made_doubly_stochastic, precision=units.like.dtype),
    )
    return [*conditional, *(Walker(units, count, order, expected[k]) for k, (order, _) in enumerate(chosen))]


class Walker:
    """Goes through the sets of units, and draws ``count`` elements for each draw, or scores given ones.

    :param order: in which it goes through the sets.
    :param expected: what to expect of sets to come.
    """

    def __init__(self, units: UnitDensities, count: int, order: Sequence[str], expected: Mapping[str, Expected]):
        self.units, self._order, self._expected = units, order, expected
        self._shape = (count + 1, len(units.like))
        # Of the first set, which knows of no draws.
        self._first: Matrix | None = None
        self._first_densities: PairDensities | None = None

    def walk(self, given: Mapping[str, Drawn] | None) -> tuple[dict[str, Drawn], Tensor]:
        """Moves (the identity first), each ``(K + 1, N, count)``, and their log-probabilities, ``(K + 1, N)``.

        :param given: moves to score; drawn if ``None``.
        """
        return walk([self], given)[0]

    def steps(self, given: Mapping[str, Drawn] | None, scored: bool = True) -> Walking:
        """The same, set by set; asks for each set's matchings."""
        drawn: dict[str, Drawn] = {}
        shared: dict[str, Drawn] = {}
        where: dict[str | None, Tensor] = {}
        told: list[Tensor] = []
        for name in self._order:
            first = name == self._order[0]
            densities = self._first_densities if first else None
            if densities is None:
                densities = self.units.densities(name, Placements(shared, self._expected))
            if first:
                self._first_densities = densities
            own = Drawn(None) if given is None else given[name]
            outer = where.get(self.units.group[name].parent)
            images, where[name], log_tau = yield from self._match(name, densities.total, outer, own.images, scored)
            told, signs = told if log_tau is None else [*told, log_tau], None
            if densities.odd is not None:
                signs, log_tau = self._flip(densities.odd, where[name], own.signs)
                told = [*told, log_tau]
            drawn[name] = shared[name] = Drawn(images, signs)
            # If no draw moves a unit, all of them see the same neighbour, and one matrix serves all.
            if (
                signs is None
                and images is not None
                and asks(images)
                and torch.equal(images, images[:1].expand_as(images))
            ):
                shared[name] = Drawn(images[:1])
        return drawn, sum(told[1:], told[0]) if told else self.units.like.new_zeros(self._shape)

    def _match(
        self, name: str, densities: Tensor, outer: Tensor | None, given: Tensor | None, scored: bool
    ) -> Generator[Question, Answer, tuple[Tensor | None, Tensor, Tensor | None]]:
        """Draw, or take, the moves of one set of units.

        :param outer: the unit outside that comes to each place, ``(K + 1, N, copies)``; None if these lie in none.
        :return: the moves within copies as they are before the outer ones, where each unit comes from with both, and
            log-probabilities; None if there are none to tell.
        """
        units = self.units.group[name]
        copies, n = units.copies, units.size
        if copies == 1 and outer is None and self.units.sets[name].is_permuted:  # no copies to find one's way among
            matrix = self._first if name == self._order[0] else None
            own = densities.expand(-1, self._shape[1], -1, -1)
            images, log_tau, matrix = yield Question(matrix or own, given, self._shape[0] - 1, scored)
            if name == self._order[0]:
                self._first = matrix
            return images, images, log_tau
        start = torch.arange(0, units.count, n, device=densities.device).unsqueeze(-1)
        source = start if outer is None else outer.unsqueeze(-1) * n  # the first unit of the copy that comes to a place
        if not self.units.sets[name].is_permuted:
            inside = torch.arange(n, device=densities.device)
            return None, (source + inside).expand(*self._shape, copies, n).flatten(-2), None
        places = None if outer is None else outer.unsqueeze(-1).expand(*self._shape, copies, n)
        if given is not None:
            given = given.unflatten(-1, (copies, n))
            given = (given if places is None else given.gather(-2, places)) - source
        matrix = self._first if name == self._order[0] else None
        own = _blocks_of(densities, copies, outer).expand(-1, self._shape[1], -1, -1, -1).flatten(1, 2)
        given = None if given is None else given.flatten(1, 2)
        inside, log_tau, matrix = yield Question(matrix or own, given, self._shape[0] - 1, scored)
        if name == self._order[0]:
            self._first = matrix
        images = inside.unflatten(1, (-1, copies)) + source
        where = images.flatten(-2)
        if places is not None:  # from the places of copies to the copies that come to them
            images = images.scatter(-2, places, images)
        if log_tau is not None and copies > 1:
            log_tau = log_tau.unflatten(1, (-1, copies)).sum(-1)
        return images.flatten(-2), where, log_tau

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
    if outer is None or (
        asks(outer) and torch.equal(outer, torch.arange(copies, device=outer.device).expand_as(outer))
    ):
        return own_blocks(densities, copies)
    pairs = blocks(densities, copies)
    return pairs.take_along_dim(outer[..., None, None, None], -3).squeeze(-3)


def _expectations(
    units: UnitDensities, order: Sequence[str], sweeps: int
) -> Generator[Tensor, Tensor, dict[str, Expected]]:
    """Expectations of the sets that others wait for; those known so far sharpen the next. Asks for matrices to be made
    doubly stochastic."""
    axes = (axis for one in units.sets.values() for axis in one.axes)
    awaited = {member.name for axis in axes for members in axis.across for member in members}
    expected: dict[str, Expected] = {}
    for _ in range(sweeps):
        for name in order:
            if name in awaited:
                expected[name] = yield from _expectation(units, name, expected)
    return expected


def _expectation(
    units: UnitDensities, name: str, expected: Mapping[str, Expected]
) -> Generator[Tensor, Tensor, Expected]:
    densities, one = units.densities(name, Placements({}, expected)), units.sets[name]
    copies, n = one.units.copies, one.units.size
    if one.is_permuted:
        matrix = yield blocks(densities.total, copies)
    else:
        matrix = torch.eye(n, dtype=densities.even.dtype, device=densities.even.device).expand(
            *densities.even.shape[:2], copies, copies, n, n
        )
    odd, parent = densities.odd, one.units.parent
    if copies == 1 and parent is None:
        return Expected(matrix[..., 0, 0, :, :], None if odd is None else odd.tanh())
    around = torch.eye(copies, dtype=matrix.dtype, device=matrix.device) if parent is None else expected[parent].matrix
    matrix = (matrix * around[..., None, None]).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    return Expected(matrix, None if odd is None else odd.tanh())
