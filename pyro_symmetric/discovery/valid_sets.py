r"""Sets of axes along which positions of a model's sites may exchange or flip.

Let an involution, the exchange of positions ``i`` and ``j`` or a change of sign at
position ``k``, act along a set ``S`` of axes, the *places*, of several sites. ``S`` is
*valid* if the joint density doesn't change. Involutions along several axes commute, so
that if ``S`` and ``T`` are valid, so is their symmetric difference: valid sets form a
linear space over the field of two elements, :math:`F_2`.

If all sites but two lie at a fixed point of the involution, only the places of these
two matter. What is valid there, by trying all subsets of their few places, gives parity
checks that every valid set passes. The sets that pass the checks of all pairs are
verified at generic points.

A mixture of three components has the places ``locs[0]`` and ``weights[0]``. Of the four
subsets, exchanging along neither or along both leaves the density unchanged: the space
has the one basis vector (1, 1). Beside it, ``scale`` is no place, as it has no axis.

The problem is that of Nishihara, Minka & Tarlow 2013, arXiv 1312.5386, who analyse the
program; here only values of the density are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.arguments import Names
from pyro_symmetric.discovery.integer_algebra import echelon
from pyro_symmetric.discovery.model_density import SCALES, ModelDensity, Terms
from pyro_symmetric.weights import Shapes, Weights, keep_names, select_rows

LARGEST_SPACE = 10  # dimensions of a space that is enumerated if its basis fails


@dataclass(frozen=True, order=True)
class Place:
    """An axis of a site along which positions may move.

    :param blocks: the number of positions that belong to one unit: 1, or more if an
        axis holds several quantities of each unit, as ``theta`` with ``locs`` in
        ``theta[:3]`` and scales in ``theta[3:]``.
    :param interleaved: whether the positions of a unit are neighbours.
    """

    site: str
    dim: int
    blocks: int = 1
    interleaved: bool = False

    def index(self, count: int) -> Tensor:
        """Return the positions of each of ``count`` units, ``(blocks, count)``."""
        positions = torch.arange(self.blocks * count, device="cpu")
        if self.interleaved:
            return positions.reshape(count, self.blocks).T.contiguous()
        return positions.reshape(self.blocks, count)

    def received(
        self, value: Tensor, count: int, units: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """Let some of ``count`` units receive the entries of others."""
        index = self.index(count)
        order = torch.arange(index.numel(), device="cpu")
        order[index[:, units]] = index[:, sources]
        return value.index_select(self.dim, order.to(value.device))

    def __str__(self) -> str:
        return f"{self.site}[{self.dim}]"


PlaceSet = frozenset[Place]


def in_words(places: PlaceSet) -> str:
    """Return the names of places: ``A[0] and B[1]``."""
    return " and ".join(map(str, sorted(places)))


Candidates = Mapping[str, Sequence[Place]]  # site -> its places


class SiteMove(Protocol):
    """A move along any set of places of a site."""

    def act(self, value: Tensor, places: Sequence[Place]) -> Tensor:
        """Move a value without batch dimensions."""


@dataclass(frozen=True)
class Exchange:
    """The exchange of two of ``count`` units."""

    first: int
    second: int
    count: int

    def act(self, value: Tensor, places: Sequence[Place]) -> Tensor:
        pair = [self.first, self.second]
        for place in places:
            value = place.received(value, self.count, pair, pair[::-1])
        return value


@dataclass(frozen=True)
class Rearrangement:
    """A new order of all units.

    :param sources: for each unit, the one whose entries it receives.
    """

    sources: tuple[int, ...]

    @classmethod
    def cycle(cls, units: Sequence[int], count: int) -> Rearrangement:
        """Return a cycle of some of ``count`` units."""
        sources = [*range(count)]
        for receiver, source in itertools.pairwise([*units, units[0]]):
            sources[receiver] = source
        return cls((*sources,))

    def act(self, value: Tensor, places: Sequence[Place]) -> Tensor:
        count = len(self.sources)
        for place in places:
            value = place.received(value, count, [*range(count)], self.sources)
        return value


@dataclass(frozen=True)
class SignChange:
    """The change of sign of one unit, or of whole sites if ``position`` is ``None``."""

    position: int | None

    def act(self, value: Tensor, places: Sequence[Place]) -> Tensor:
        for place in places:
            if self.position is None:
                value = -value
                continue
            signs = value.new_ones(value.shape[place.dim])
            signs[self.position] = -1
            following = value.dim() - place.dim - 1
            value = value * signs.reshape(-1, *[1] * following)
        return value


@dataclass(frozen=True)
class SignPair:
    """The change of sign of two units."""

    first: int
    second: int

    def act(self, value: Tensor, places: Sequence[Place]) -> Tensor:
        for position in (self.first, self.second):
            value = SignChange(position).act(value, places)
        return value


class Unexpressed(NamedTuple):
    """Moves that leave the density unchanged, which no group here can express.

    :param generators: the moves, along ``places``.
    :param remark: what they move, in one sentence.
    :param stacks: sites that move as wholes, and are one site here: name -> sites.
    """

    generators: tuple[SiteMove, ...]
    places: PlaceSet
    remark: str
    stacks: Mapping[str, Sequence[str]] = {}


class Trial(NamedTuple):
    """A subset of the places of two sites, with the point that it moves to."""

    sites: Names
    places: PlaceSet
    point: Weights


@dataclass
class Searcher:
    """Finds valid sets of places of a density.

    :param density: the joint density.
    :param points: generic points at which sets are verified; the first is varied.
    :param before: the density there.
    :param movable: the sites that may move.
    """

    density: ModelDensity
    points: Weights
    before: Terms
    movable: set[str]

    @classmethod
    def of(cls, density: ModelDensity, movable: set[str]) -> Searcher:
        """Create a searcher of a density at one generic point of each scale."""
        points = select_rows(density.generic, slice(len(SCALES)))
        before = density.before.at(slice(len(SCALES)))
        return cls(density, points, before, movable)

    @property
    def movable_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the sites that may move."""
        shapes = self.density.shapes
        return keep_names(shapes, self.movable)

    def point(self, number: int) -> Weights:
        """Return one of the generic points."""
        return select_rows(self.points, number)

    @property
    def first_point(self) -> Weights:
        """The point at which pairs of sites vary."""
        return self.point(0)

    def moved(self, involution: SiteMove, places: PlaceSet, point: Weights) -> Weights:
        """Move a point along a set of places."""
        result = dict(point)
        for site in {place.site for place in places}:
            result[site] = involution.act(point[site], _of_site(places, site))
        return result

    def valid_sets(
        self, involution: SiteMove, candidates: Candidates
    ) -> list[PlaceSet]:
        """Return a basis of the sets of places along which the density is invariant."""
        places = [place for site in candidates for place in candidates[site]]
        checks = np.zeros((0, len(places)), dtype=int)
        for passed in self._valid_in_pairs(involution, candidates):
            columns = [places.index(place) for place in passed.places]
            pair_checks = np.zeros((len(passed.checks), len(places)), dtype=int)
            pair_checks[:, columns] = passed.checks
            checks = np.vstack([checks, pair_checks])
        basis = [_chosen(places, row) for row in annihilator(checks)]
        return self._verified(involution, basis)

    def holds(self, moves: Sequence[tuple[SiteMove, PlaceSet]]) -> list[bool]:
        """Return for each move whether the density is invariant at the generic
        points.
        """
        count = len(self.before.values)
        trials = []
        for involution, places in moves:
            for number in range(count):
                trials.append(self.moved(involution, places, self.point(number)))
        if not trials:
            return []
        moved = stacked(trials)
        before = self.before.at(list(range(count)) * len(moves))
        holds = self.density.same(self.density.terms(moved), before)
        holds &= self.density.inside(moved)
        return holds.reshape(len(moves), count).all(1).tolist()

    def _valid_in_pairs(
        self, involution: SiteMove, candidates: Candidates
    ) -> list[_PairChecks]:
        """Try all subsets of the places of each pair of sites, with the other sites at
        a fixed point.
        """
        point = self.first_point
        subsets = {
            site: self.subsets_inside(involution, site, candidates[site], point[site])
            for site in candidates
        }
        fixed = {
            site: self._fixed(involution, site, subsets[site], point[site])
            for site in candidates
        }
        pairs: list[Names] = [*itertools.combinations(candidates, 2)]
        trials = []
        for sites in pairs or [tuple(candidates)]:
            fixed_point = point | {
                site: fixed[site] for site in fixed if site not in sites
            }
            for chosen in itertools.product(*(subsets[site] for site in sites)):
                places = frozenset(itertools.chain.from_iterable(chosen))
                moved = self.moved(involution, places, fixed_point)
                trials.append(Trial(sites, places, moved))
        terms = self.density.terms(stacked([trial.point for trial in trials]))
        checks = []
        for sites, numbers in _grouped_by_sites(trials):
            unmoved = numbers[0]  # the first subset of each pair is empty
            before = terms.at([unmoved] * len(numbers))
            after = terms.at(numbers)
            agrees = self.density.same(after, before).tolist()
            valid = [
                trials[number].places
                for number, unchanged in zip(numbers, agrees, strict=True)
                if unchanged
            ]
            columns = [place for site in sites for place in candidates[site]]
            rows = [[place in subset for place in columns] for subset in valid]
            checks.append(_PairChecks(columns, annihilator(np.array(rows, int))))
        return checks

    def subsets_inside(
        self, involution: SiteMove, site: str, places: Sequence[Place], value: Tensor
    ) -> list[tuple[Place, ...]]:
        """Return the subsets of a site's places that keep it in its support."""
        subsets = list[tuple[Place, ...]]()
        for size in range(len(places) + 1):
            subsets.extend(itertools.combinations(places, size))
        images = torch.stack([involution.act(value, subset) for subset in subsets])
        inside = self.density.site_inside(site, images).tolist()
        return [subset for subset, stays in zip(subsets, inside, strict=True) if stays]

    def _fixed(
        self,
        involution: SiteMove,
        site: str,
        subsets: Sequence[tuple[Place, ...]],
        value: Tensor,
    ) -> Tensor:
        """Return a value that all subsets leave as it is: the mean of the images, or,
        if that isn't in the support, a copy of one unit at the place of the other.
        """
        mean = torch.stack([involution.act(value, subset) for subset in subsets]).mean(
            0
        )
        inside = bool(self.density.site_inside(site, mean[None]))
        if inside or not isinstance(involution, Exchange):
            return mean
        for place in {place for subset in subsets for place in subset}:
            value = place.received(
                value, involution.count, [involution.second], [involution.first]
            )
        return value

    def _verified(self, involution: SiteMove, basis: list[PlaceSet]) -> list[PlaceSet]:
        """Return a basis of the verified sets in the span of a basis."""
        good = self.holds([(involution, places) for places in basis])
        if all(good):
            return basis
        if len(basis) <= LARGEST_SPACE:
            span = _span(basis)
            good = self.holds([(involution, places) for places in span])
            return reduced([p for p, holds in zip(span, good, strict=True) if holds])
        return [places for places, holds in zip(basis, good, strict=True) if holds]


class _PairChecks(NamedTuple):
    """Parity checks of valid sets within the places of two sites."""

    places: list[Place]
    checks: np.ndarray


def axes_by_length(
    shapes: Shapes,
) -> dict[int, dict[str, list[Place]]]:
    """Return the axes by their length, of two positions or more."""
    by_length = dict[int, dict[str, list[Place]]]()
    for site, shape in shapes.items():
        for dim, length in enumerate(shape):
            if length > 1:
                candidates = by_length.setdefault(length, {})
                candidates.setdefault(site, []).append(Place(site, dim))
    return by_length


# linear algebra modulo two ------------------------------------------------------------


def annihilator(rows: np.ndarray) -> np.ndarray:
    """Return a basis of the vectors that have an even overlap with every row."""
    echelon_rows, pivots = echelon(rows, modulo_two=True)
    free = [column for column in range(rows.shape[1]) if column not in pivots]
    basis = np.zeros((len(free), rows.shape[1]), dtype=int)
    for number, column in enumerate(free):
        basis[number, column] = 1
        basis[number, pivots] = echelon_rows[:, column].astype(int)
    return basis


def reduced(sets: Sequence[PlaceSet]) -> list[PlaceSet]:
    """Return a basis of the span of sets under symmetric difference, each as small as
    row reduction makes it.
    """
    places = sorted(frozenset().union(*sets))
    rows = np.array([[place in chosen for place in places] for chosen in sets], int)
    if not rows.size:
        return []
    echelon_rows, _ = echelon(rows, modulo_two=True)
    return [_chosen(places, row) for row in echelon_rows]


def _chosen(places: Sequence[Place], row: np.ndarray) -> PlaceSet:
    """Return the places whose entries in a row aren't zero."""
    return frozenset(place for place, entry in zip(places, row, strict=True) if entry)


def _span(basis: Sequence[PlaceSet]) -> list[PlaceSet]:
    """Return all symmetric differences of sets of a basis but the empty one."""
    span = [PlaceSet()]
    for places in basis:
        span += [chosen ^ places for chosen in span]
    return span[1:]


def _of_site(places: PlaceSet, site: str) -> list[Place]:
    return sorted(place for place in places if place.site == site)


def stacked(points: Sequence[Weights]) -> Weights:
    """Stack points of a density to one batch."""
    return {site: torch.stack([point[site] for point in points]) for site in points[0]}


def _grouped_by_sites(
    trials: Sequence[Trial],
) -> Iterator[tuple[Names, list[int]]]:
    """Yield pairs of sites with the numbers of their trials."""
    numbered = enumerate(trials)
    for sites, group in itertools.groupby(numbered, lambda item: item[1].sites):
        yield sites, [number for number, _ in group]
