"""Units of a Pyro model that permute, from values of its joint density."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.discovery.model_density import ModelDensity, Terms
from pyro_symmetric.discovery.valid_sets import (
    Candidates,
    Exchange,
    Place,
    PlaceSet,
    Rearrangement,
    Searcher,
    SiteMove,
    Unexpressed,
    axes_by_length,
    in_words,
    stacked,
)
from pyro_symmetric.weights import Shapes, Weights

LONGEST_OF_BLOCKS = 64  # axes that may hold blocks of several positions a unit
# positions whose permutations are tried beside exchanges; two have no others
LEAST_REARRANGED = 3
MOST_REARRANGED = 8
ALL_ORDERS = 6  # positions all of whose orders are tried


class Factor(NamedTuple):
    """Units that permute.

    :param units: their positions.
    :param places: the axes along which they exchange.
    :param length: the number of units along these axes.
    :param outer: the units in each of which these permute by themselves.
    """

    units: tuple[int, ...]
    places: PlaceSet
    length: int
    outer: Factor | None = None

    @property
    def generators(self) -> tuple[SiteMove, ...]:
        """An exchange and a cycle, of which all permutations are products."""
        exchange = Exchange(self.units[0], self.units[1], self.length)
        return exchange, Rearrangement.cycle(self.units, self.length)


def permuting_units(searcher: Searcher) -> list[Factor]:
    """Return all units that permute."""
    factors = []
    for count, candidates in axes_by_length(searcher.movable_shapes).items():
        factors += permutations_along(searcher, count, candidates)
    factors += _blocks(searcher, factors)
    return [_placed_inside(factor, factors, searcher) for factor in factors]


def permutations_along(
    searcher: Searcher, count: int, candidates: Candidates
) -> list[Factor]:
    """Return the units of ``count`` positions that permute.

    An exchange of two positions and a cycle of all of them generate all permutations.
    Only where that fails, positions are compared with one another.
    """
    factors = []
    for places in searcher.valid_sets(Exchange(0, 1, count), candidates):
        units = tuple(range(count))
        if all(searcher.holds([(Rearrangement.cycle(units, count), places)])):
            factors.append(Factor(units, places, count))
    settled = {place for factor in factors for place in factor.places}
    remaining = {}
    for site, site_places in candidates.items():
        unsettled = [place for place in site_places if place not in settled]
        if unsettled:
            remaining[site] = unsettled
    if remaining:
        factors += _compared_permutations(searcher, count, remaining)
    return factors


def _compared_permutations(
    searcher: Searcher, count: int, candidates: Candidates
) -> list[Factor]:
    """Return the units that permute, where positions may differ from one another."""
    classes = position_classes(searcher, count, candidates)
    exchangeable = _Exchangeable(count)
    for second in range(count):
        for first in exchangeable.similar(second, candidates, classes):
            similar_places = _alike(candidates, classes, first, second)
            exchange = Exchange(first, second, count)
            if not exchangeable.known_hold(searcher, exchange, similar_places):
                valid = searcher.valid_sets(exchange, similar_places)
                exchangeable.add(first, second, valid)
        exchangeable.close(second, classes)
    return [*exchangeable.factors()]


def rearranged(
    searcher: Searcher,
    count: int,
    candidates: Candidates,
    factors: Sequence[Factor],
) -> list[Unexpressed]:
    """Return a permutation of ``count`` positions that holds and is no product of
    exchanges, such as a cycle, if there is one.
    """
    if not LEAST_REARRANGED <= count <= MOST_REARRANGED:
        return []
    full = [factor.places for factor in factors if len(factor.units) == count]
    unsettled = dict[str, list[Place]]()
    settled = frozenset[Place]().union(*full)
    for site, of_site in candidates.items():
        unsettled[site] = [place for place in of_site if place not in settled]
    classes = position_classes(searcher, count, unsettled)
    for size in dict.fromkeys((len(classes), 2, 1)):
        for chosen in itertools.combinations(classes, size):
            places = frozenset(chosen)
            labels = [*zip(*(classes[place] for place in chosen), strict=True)]
            known = [f.units for f in factors if f.places & places]
            moves = []
            for order in _orders(labels):
                if not _is_product(order, known):
                    moves.append((Rearrangement(order), places))
            for move, _ in itertools.compress(moves, searcher.holds(moves)):
                named = in_words(places)
                remark = (
                    f"the positions of {named} may take the order {move.sources}, "
                    "which no group here can express"
                )
                return [Unexpressed((move,), places, remark)]
    return []


def _orders(labels: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return orders of positions that keep their labels: all of few; of more, a cycle
    and the reverse.
    """
    units = range(len(labels))
    orders: Iterable[tuple[int, ...]] = [(*units[1:], 0), (*units[::-1],)]
    if len(labels) <= ALL_ORDERS:
        orders = itertools.permutations(units)
    return [o for o in orders if [labels[unit] for unit in o] == [*labels]]


def _is_product(order: Sequence[int], known: Sequence[Sequence[int]]) -> bool:
    """Return whether an order is a product of exchanges of units."""
    for pair in enumerate(order):
        if pair[0] != pair[1] and not any({*pair} <= {*units} for units in known):
            return False
    return True


class _Exchangeable:
    """Positions that exchange along known sets of places.

    :ivar pairs: set of places -> pairs of positions that exchange along it.
    :ivar representatives: one position of each class, for some set of places;
        ``by_class``: those in a class of positions that look alike at a place.
    """

    def __init__(self, count: int):
        self.count = count
        self.pairs: dict[PlaceSet, list[tuple[int, int]]] = {}
        self.representatives: list[int] = []
        self.by_class: dict[tuple[Place, int], list[int]] = {}

    def similar(
        self,
        position: int,
        candidates: Candidates,
        classes: Mapping[Place, Sequence[int]],
    ) -> list[int]:
        """Return the representatives that aren't known to differ at all places."""
        similar = set[int]()
        for place in itertools.chain.from_iterable(candidates.values()):
            if place not in classes:
                return [*self.representatives]
            similar.update(self.by_class.get((place, classes[place][position]), ()))
        return sorted(similar)

    def add(self, first: int, second: int, valid: Iterable[PlaceSet]) -> None:
        for places in valid:
            self.pairs.setdefault(places, []).append((first, second))

    def known_hold(
        self, searcher: Searcher, exchange: Exchange, similar_places: Candidates
    ) -> bool:
        """Add an exchange along all known sets if they all hold, and use all places
        that look alike; return whether they do.
        """
        places = {place for site in similar_places for place in similar_places[site]}
        if not self.pairs or places != frozenset().union(*self.pairs):
            return False
        if not all(searcher.holds([(exchange, known) for known in self.pairs])):
            return False
        self.add(exchange.first, exchange.second, [*self.pairs])
        return True

    def close(self, position: int, classes: Mapping[Place, Sequence[int]]) -> None:
        """Keep a position that stands in a class of its own as a representative."""
        has_joined = bool(self.pairs)
        for pairs in self.pairs.values():
            has_joined &= any(second == position for _, second in pairs)
        if has_joined:
            return
        self.representatives.append(position)
        for place, labels in classes.items():
            self.by_class.setdefault((place, labels[position]), []).append(position)

    def factors(self) -> Iterator[Factor]:
        """Yield the classes of two positions or more."""
        for places, pairs in self.pairs.items():
            smallest = list(range(self.count))
            for first, second in pairs:
                low, high = sorted((smallest[first], smallest[second]))
                smallest = [low if label == high else label for label in smallest]
            for label in sorted(set(smallest)):
                units = tuple(u for u in range(self.count) if smallest[u] == label)
                if len(units) > 1:
                    yield Factor(units, places, self.count)


def _alike(
    candidates: Candidates,
    classes: Mapping[Place, Sequence[int]],
    first: int,
    second: int,
) -> dict[str, list[Place]]:
    """Return the places along which two positions aren't known to differ."""
    similar_places = dict[str, list[Place]]()
    for site, places in candidates.items():
        for place in places:
            if place not in classes or classes[place][first] == classes[place][second]:
                similar_places.setdefault(site, []).append(place)
    return similar_places


def position_classes(
    searcher: Searcher, count: int, candidates: Candidates
) -> dict[Place, list[int]]:
    """Group the positions of each place by the density with one odd position, all other
    positions and places of these sites being alike.

    Positions of different classes never exchange, so that the groups of a plate that
    differ by their data cost ``n`` values, not ``n**2``.
    """
    density = searcher.density
    point = searcher.first_point
    level_point = dict(point)
    for site, places in candidates.items():
        for place in places:
            level_point[site] = _levelled(density, level_point[site], place, count, 0)
    trials = list[Weights]()
    numbers = {}
    for site, places in candidates.items():
        for place in places:
            value = _levelled(density, point[site], place, count, 1)
            for beside in places:
                if beside != place:
                    value = _levelled(density, value, beside, count, 0)
            images = [value]
            for position in range(1, count):
                images.append(Exchange(0, position, count).act(value, [place]))
            if not density.site_inside(site, torch.stack(images)).all():
                continue  # nothing is known of the place alone
            numbers[place] = slice(len(trials), len(trials) + count)
            trials += [{**level_point, site: image} for image in images]
    if not trials:
        return {}
    terms = density.terms(stacked(trials))
    classes = {}
    for place, chosen in numbers.items():
        classes[place] = _classes(density, terms.at(chosen))
    return classes


def _levelled(
    density: ModelDensity, value: Tensor, place: Place, count: int, start: int
) -> Tensor:
    """Make the units from ``start`` on similar_places: by their mean if that lies in
    the support, else by copies of one.
    """
    index = place.index(count)
    by_unit = value.index_select(place.dim, index.flatten().to(value.device))
    by_unit = by_unit.unflatten(place.dim, index.shape)
    axis = place.dim + 1
    head = by_unit.narrow(axis, 0, start)
    tail = by_unit.narrow(axis, start, count - start)
    for representative in (tail.mean(axis, keepdim=True), tail.narrow(axis, 0, 1)):
        level = torch.cat([head, representative.expand_as(tail)], axis)
        level = level.flatten(place.dim, axis)
        back = index.flatten().argsort().to(level.device)
        level = level.index_select(place.dim, back)
        if density.site_inside(place.site, level[None]):
            return level
    return value


def _classes(density: ModelDensity, terms: Terms) -> list[int]:
    """Number the classes of equal rows, which follow one another if they are sorted by
    their sum.
    """
    order = terms.values.sum(1).argsort()
    following = terms.at(order[1:])
    before = terms.at(order[:-1])
    differs = ~density.same(following, before)
    labels = torch.zeros_like(order)
    labels[order[1:]] = differs.cumsum(0)
    return labels.tolist()


def _blocks(searcher: Searcher, factors: Sequence[Factor]) -> list[Factor]:
    """Return the units that lie as blocks along an axis, several positions of which
    belong to one unit.
    """
    shapes = searcher.movable_shapes
    moved = {(place.site, place.dim) for factor in factors for place in factor.places}
    free = []
    for site, shape in shapes.items():
        for dim, length in enumerate(shape):
            if length > 1 and (site, dim) not in moved:
                free.append((site, dim))
    lengths = sorted({shapes[site][dim] for site, dim in free})
    in_blocks = []
    for count in _divisors(lengths):
        for interleaved in (False, True):
            candidates = _block_candidates(free, shapes, count, interleaved)
            if candidates:
                in_blocks += permutations_along(searcher, count, candidates)
                taken = {(p.site, p.dim) for factor in in_blocks for p in factor.places}
                free = [axis for axis in free if axis not in taken]
    return in_blocks


def _block_candidates(
    free: Sequence[tuple[str, int]],
    shapes: Shapes,
    count: int,
    interleaved: bool,
) -> dict[str, list[Place]]:
    """Return the free axes that hold ``count`` units, if some of them hold blocks."""
    candidates = dict[str, list[Place]]()
    for site, dim in free:
        blocks, remainder = divmod(shapes[site][dim], count)
        if remainder == 0:
            place = Place(site, dim, blocks, interleaved and blocks > 1)
            candidates.setdefault(site, []).append(place)
    places = itertools.chain.from_iterable(candidates.values())
    return candidates if any(place.blocks > 1 for place in places) else {}


def _divisors(lengths: Iterable[int]) -> list[int]:
    """Return the numbers of units, larger ones first, that lengths may hold blocks
    of.
    """
    divisors = set[int]()
    for length in lengths:
        if length <= LONGEST_OF_BLOCKS:
            smaller = range(2, length // 2 + 1)
            divisors.update(count for count in smaller if length % count == 0)
    return sorted(divisors, reverse=True)


def _placed_inside(
    factor: Factor, factors: Sequence[Factor], searcher: Searcher
) -> Factor:
    """Note the units in each of which these permute by themselves: their axes lie
    beside those of the outer units, and an exchange in one outer unit alone holds.
    """
    for outer in factors:
        outer_dims = {place.site: place.dim for place in outer.places}
        sites = {place.site for place in factor.places}
        nested = (
            outer.places != factor.places
            and len(outer_dims) == len(outer.places)
            and len(sites) == len(factor.places)
            and sites <= outer_dims.keys()
        )
        if nested:
            inner = _ExchangeInside(factor, outer_dims, outer.units[0])
            if all(searcher.holds([(inner, factor.places)])):
                return factor._replace(outer=outer)
    return factor


@dataclass(frozen=True)
class _ExchangeInside:
    """The exchange of the first two units of a factor within one outer unit."""

    factor: Factor
    outer_dims: Mapping[str, int]
    outer_unit: int

    def act(self, value: Tensor, places: Sequence[Place]) -> Tensor:
        exchange = Exchange(
            self.factor.units[0], self.factor.units[1], self.factor.length
        )
        for place in places:
            dim = self.outer_dims[place.site]
            exchanged = exchange.act(value, [place])
            result = value.clone()
            result.select(dim, self.outer_unit).copy_(
                exchanged.select(dim, self.outer_unit)
            )
            value = result
        return value
