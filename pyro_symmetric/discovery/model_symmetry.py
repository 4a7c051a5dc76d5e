"""The symmetry of any Pyro model, from values of its joint density.

Positions along the axes of sites are exchanged, and signs changed, at points where few
sites vary (:mod:`~pyro_symmetric.discovery.valid_sets`); what leaves the density
unchanged becomes units with their moves, verified at generic points in the support.
Nothing of the program is read: discrete sites that are summed out, masks, supports and
plates of any kind count as the density shows them.

With ``s`` sites that share an axis length ``n``, along ``d`` axes each, some ``4**d *
s**2`` evaluations of the density show whether all ``n`` positions permute; each
evaluation is one pass through the data. If they don't, about ``n * s`` more tell
positions apart that differ by their data.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_symmetric.discovery.integer_algebra import echelon
from pyro_symmetric.discovery.model_check import check_function, undisturbed
from pyro_symmetric.discovery.model_density import ModelDensity, Terms, simulated
from pyro_symmetric.discovery.symmetry import (
    AxisExplanation,
    Explanation,
    Names,
    Symmetry,
    named,
)
from pyro_symmetric.discovery.valid_sets import (
    Candidates,
    Cycle,
    Exchange,
    Place,
    PlaceSet,
    Searcher,
    SignChange,
    SiteMove,
)
from pyro_symmetric.discovery.verify import Change, broken_moves
from pyro_symmetric.groups import Axis, Element, Group, Units
from pyro_symmetric.groups.units import Move
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights

PRIOR_DRAWS = 8  # at which the prior of a network is compared
DATA_SETS = 3  # that are simulated if data are discrete
PERMUTE: frozenset[Move] = frozenset({"permute"})
FLIP: frozenset[Move] = frozenset({"flip"})
TRIED_SIGNS = 64  # positions of an axis, from the first on, whose signs are searched


_NO_CODE = (lambda: None).__code__


class Factor(NamedTuple):
    """Units that permute.

    :param units: their positions.
    :param places: the axes along which they exchange.
    :param length: the number of units along these axes.
    :param outer: the places of the units in each of which these permute by themselves.
    """

    units: tuple[int, ...]
    places: PlaceSet
    length: int
    outer: PlaceSet | None = None


class SignFlip(NamedTuple):
    """Positions whose signs flip, one by one, or whole sites.

    :param positions: empty if the sites flip as wholes.
    """

    positions: tuple[int, ...]
    places: PlaceSet

    @property
    def sites(self) -> frozenset[str]:
        """The sites whose signs change if all positions flip."""
        names = [place.site for place in self.places]
        return frozenset(name for name in names if names.count(name) % 2)


@dataclass
class Moves:
    """Moves that leave a model's density unchanged.

    :param factors: units that permute.
    :param flips: signs.
    :param remarks: what holds but can't be expressed by a group.
    :param notes: what else there is to say.
    """

    factors: list[Factor] = field(default_factory=list)
    flips: list[SignFlip] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@undisturbed()
def find_model_symmetry(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    only: Names | None = None,
    freeze: Names = (),
    accidents: bool = False,
) -> Symmetry:
    """Find the permutations and signs that leave a Pyro model's joint density
    unchanged; see :func:`~pyro_symmetric.find_symmetry`.

    :raises InconclusiveError: if the density isn't a function of the sites.
    """
    kwargs = dict(kwargs or {})
    density = ModelDensity(model, args, kwargs)
    sites = density.shapes.keys()
    movable = set(sites) if only is None else named("only", only, sites)
    movable -= named("freeze", freeze, sites)
    searcher = Searcher.of(density, movable)
    moves = _all_moves(searcher)
    dropped = Moves()
    if not accidents and (moves.factors or moves.flips):
        moves, dropped = _without_accidents(moves, searcher, model, args, kwargs)
    built = _built(moves, density.shapes)
    repaired = _repaired(built.group, density)
    remarks = [*moves.remarks, *built.remarks, *repaired.remarks]
    explanation = _explained(searcher, repaired.group, dropped)
    return Symmetry(
        repaired.group,
        explanation,
        at_least=bool(remarks),
        remarks=(*remarks, *moves.notes),
    )


def is_pyro_model(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether to find the symmetry of a density: of a function, or of a module
    that observes data (``pyro.sample`` in its ``forward``).

    A module that only samples its parameters is a network with random weights.
    """
    if not isinstance(model, nn.Module):
        return callable(model)
    forwards = [type(module).forward for module in model.modules()]
    may_sample = isinstance(model, PyroModule) or any(
        {"sample", "factor"} & set(getattr(forward, "__code__", _NO_CODE).co_names)
        for forward in forwards
    )
    if not may_sample:
        return False
    with undisturbed():
        nodes: dict[str, Any] = dict(
            poutine.trace(model).get_trace(*args, **kwargs).nodes
        )
    return any(
        site["type"] == "sample" and site["is_observed"] for site in nodes.values()
    )


def of_bayesian_model(model: BayesianModel, symmetry: Symmetry) -> Symmetry:
    """Restrict the symmetry of a network to that of its posterior: to moves that leave
    the prior unchanged.
    """
    draws = {
        site: prior.sample((PRIOR_DRAWS,)).double()
        for site, prior in model.priors().items()
    }
    # no proper prior is invariant under scales or shifts
    group = symmetry.finite.without_buffers(symmetry.buffers)
    verdict = check_function(group, model.log_prior, draws)
    remarks = [*symmetry.remarks]
    for broken in verdict.broken:
        group = group.without([broken.name], broken.move)
        remarks.append(f"{broken.move} of {broken.name!r} changes the prior")
    missing = symmetry.at_least or bool(verdict.broken)  # a part of the units may move
    return replace(symmetry, group=group, at_least=missing, remarks=tuple(remarks))


# the search ---------------------------------------------------------------------------


def _all_moves(searcher: Searcher) -> Moves:
    factors = list[Factor]()
    for count, candidates in _by_length(searcher.movable_shapes).items():
        factors += _permutations(searcher, count, candidates)
    factors += _blocks(searcher, factors)
    factors = [_placed_inside(factor, factors, searcher) for factor in factors]
    moves = Moves(factors, _signs(searcher, factors))
    moves.remarks += _whole_sites(searcher)
    return moves


def _by_length(shapes: Mapping[str, torch.Size]) -> dict[int, dict[str, list[Place]]]:
    """Return the axes by their length, of two positions or more."""
    by_length = dict[int, dict[str, list[Place]]]()
    for site, shape in shapes.items():
        for dim, length in enumerate(shape):
            if length > 1:
                candidates = by_length.setdefault(length, {})
                candidates.setdefault(site, []).append(Place(site, dim))
    return by_length


def _permutations(
    searcher: Searcher, count: int, candidates: Candidates
) -> list[Factor]:
    """Return the units of ``count`` positions that permute.

    An exchange of two positions and a cycle of all of them generate all permutations.
    Only where that fails, positions are compared with one another.
    """
    factors = list[Factor]()
    for places in searcher.valid_sets(Exchange(0, 1, count), candidates):
        units = tuple(range(count))
        if all(searcher.holds([(Cycle(units, count), places)])):
            factors.append(Factor(units, places, count))
    settled = {place for factor in factors for place in factor.places}
    remaining = dict[str, list[Place]]()
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
    classes = _position_classes(searcher, count, candidates)
    exchangeable = _Exchangeable(count)
    for second in range(count):
        for first in exchangeable.similar(second, candidates, classes):
            alike = _alike(candidates, classes, first, second)
            exchange = Exchange(first, second, count)
            if not exchangeable.known_hold(searcher, exchange, alike):
                valid = searcher.valid_sets(exchange, alike)
                exchangeable.add(first, second, valid)
        exchangeable.close(second, classes)
    return [*exchangeable.factors()]


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
        self, searcher: Searcher, exchange: Exchange, alike: Candidates
    ) -> bool:
        """Add an exchange along all known sets if they all hold, and use all places
        that look alike; return whether they do.
        """
        places = {place for site in alike for place in alike[site]}
        if not self.pairs or places != frozenset().union(*self.pairs):
            return False
        if not all(searcher.holds([(exchange, known) for known in self.pairs])):
            return False
        self.add(exchange.first, exchange.second, [*self.pairs])
        return True

    def close(self, position: int, classes: Mapping[Place, Sequence[int]]) -> None:
        """Keep a position that stands in a class of its own as a representative."""
        joined = [
            any(second == position for _, second in pairs)
            for pairs in self.pairs.values()
        ]
        if joined and all(joined):
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
    alike = dict[str, list[Place]]()
    for site, places in candidates.items():
        for place in places:
            if place not in classes or classes[place][first] == classes[place][second]:
                alike.setdefault(site, []).append(place)
    return alike


def _position_classes(
    searcher: Searcher, count: int, candidates: Candidates
) -> dict[Place, list[int]]:
    """Group the positions of each place by the density with one odd position, all other
    positions and places of these sites being alike.

    Positions of different classes never exchange, so that the groups of a plate that
    differ by their data cost ``n`` values, not ``n**2``.
    """
    density, point = searcher.density, searcher.first_point
    level_point = dict(point)
    for site, places in candidates.items():
        for place in places:
            level_point[site] = _levelled(density, level_point[site], place, count, 0)
    trials, numbers = list[Weights](), dict[Place, slice]()
    for site, places in candidates.items():
        for place in places:
            value = _levelled(density, point[site], place, count, 1)
            for beside in places:
                if beside != place:
                    value = _levelled(density, value, beside, count, 0)
            images = [value]
            for position in range(1, count):
                images.append(Exchange(0, position, count).act(value, [place]))
            if not bool(density.site_inside(site, torch.stack(images)).all()):
                continue  # nothing is known of the place alone
            numbers[place] = slice(len(trials), len(trials) + count)
            trials += [{**level_point, site: image} for image in images]
    if not trials:
        return {}
    stacked = {site: torch.stack([t[site] for t in trials]) for site in trials[0]}
    terms = density.terms(stacked)
    return {
        place: _classes(density, Terms(*(part[chosen] for part in terms)))
        for place, chosen in numbers.items()
    }


def _levelled(
    density: ModelDensity, value: Tensor, place: Place, count: int, start: int
) -> Tensor:
    """Make the units from ``start`` on alike: by their mean if that lies in the
    support, else by copies of one.
    """
    index = place.index(count)
    by_unit = value.index_select(place.dim, index.flatten())
    by_unit = by_unit.unflatten(place.dim, index.shape)
    axis = place.dim + 1
    head = by_unit.narrow(axis, 0, start)
    tail = by_unit.narrow(axis, start, count - start)
    for representative in (tail.mean(axis, keepdim=True), tail.narrow(axis, 0, 1)):
        level = torch.cat([head, representative.expand_as(tail)], axis)
        level = level.flatten(place.dim, axis)
        level = level.index_select(place.dim, index.flatten().argsort())
        if bool(density.site_inside(place.site, level[None])):
            return level
    return value


def _classes(density: ModelDensity, terms: Terms) -> list[int]:
    """Number the classes of equal rows, which follow one another if they are sorted by
    their sum.
    """
    order = terms.values.sum(1).argsort()
    following = Terms(*(part[order[1:]] for part in terms))
    before = Terms(*(part[order[:-1]] for part in terms))
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
    free = [
        (site, dim)
        for site, shape in shapes.items()
        for dim in range(len(shape))
        if shape[dim] > 1 and (site, dim) not in moved
    ]
    lengths = sorted({shapes[site][dim] for site, dim in free})
    in_blocks = list[Factor]()
    for count in _divisors(lengths):
        for interleaved in (False, True):
            candidates = _block_candidates(free, shapes, count, interleaved)
            if candidates:
                in_blocks += _permutations(searcher, count, candidates)
                taken = {(p.site, p.dim) for factor in in_blocks for p in factor.places}
                free = [axis for axis in free if axis not in taken]
    return in_blocks


def _block_candidates(
    free: Sequence[tuple[str, int]],
    shapes: Mapping[str, torch.Size],
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
    places = [place for site in candidates for place in candidates[site]]
    return candidates if any(place.blocks > 1 for place in places) else {}


def _divisors(lengths: Iterable[int]) -> list[int]:
    """Return the numbers of units, larger ones first, that lengths may hold blocks
    of.
    """
    divisors = {
        count
        for length in lengths
        if length <= TRIED_SIGNS
        for count in range(2, length // 2 + 1)
        if length % count == 0
    }
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
                return factor._replace(outer=outer.places)
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


# signs --------------------------------------------------------------------------------


def _signs(searcher: Searcher, factors: Sequence[Factor]) -> list[SignFlip]:
    density = searcher.density
    movable = searcher.movable_shapes
    real = {site: shape for site, shape in movable.items() if density.is_real(site)}
    flips = list[SignFlip]()
    for count, candidates in _by_length(real).items():
        flips += _position_signs(searcher, count, candidates, factors)
    whole = {site: [Place(site, 0)] for site in real}
    if not whole:
        return flips
    spanned = [flip.sites for flip in flips if _covers_axis(flip, density.shapes)]
    for places in searcher.valid_sets(SignChange(None), whole):
        flip = SignFlip((), places)
        if _is_independent(flip.sites, spanned):
            spanned.append(flip.sites)
            flips.append(flip)
    return flips


def _position_signs(
    searcher: Searcher, count: int, candidates: Candidates, factors: Sequence[Factor]
) -> list[SignFlip]:
    """Return the sets of places along which signs of single positions flip.

    Positions that exchange along all places have the same signs, so that one of them is
    searched.
    """
    alike = _exchangeable_everywhere(count, candidates, factors)
    flipping = dict[PlaceSet, list[int]]()
    for position in range(count):
        if alike[position] != position:  # its representative was searched before
            for positions in flipping.values():
                if alike[position] in positions:
                    positions.append(position)
            continue
        if not flipping and position >= TRIED_SIGNS:
            break
        change = SignChange(position)
        holds = searcher.holds([(change, places) for places in flipping])
        valid = [*flipping] if flipping and all(holds) else None
        for places in valid or searcher.valid_sets(change, candidates):
            flipping.setdefault(places, []).append(position)
    return [SignFlip(tuple(p), places) for places, p in flipping.items()]


def _exchangeable_everywhere(
    count: int, candidates: Candidates, factors: Sequence[Factor]
) -> list[int]:
    """Return for each position the first one with which it exchanges along each of the
    places.
    """
    places = {place for site in candidates for place in candidates[site]}
    labels = [[0] * count for _ in places]
    for place, label in zip(places, labels, strict=True):
        label[:] = range(count)
        for factor in factors:
            if place in factor.places and factor.outer is None:
                for unit in factor.units:
                    label[unit] = factor.units[0]
    columns = [*zip(*labels, strict=True)]
    return [columns.index(column) for column in columns]


def _covers_axis(flip: SignFlip, shapes: Mapping[str, torch.Size]) -> bool:
    return all(
        len(flip.positions) == shapes[place.site][place.dim] for place in flip.places
    )


def _is_independent(sites: frozenset[str], spanned: Sequence[frozenset[str]]) -> bool:
    """Return whether a flip of whole sites is no product of others."""
    names = sorted(sites.union(*spanned))
    rows = np.array([[n in chosen for n in names] for chosen in (*spanned, sites)], int)
    rank_before = len(echelon(rows[:-1], modulo_two=True)[1]) if spanned else 0
    return len(echelon(rows, modulo_two=True)[1]) > rank_before


# whole sites --------------------------------------------------------------------------


class _StackedDensity:
    """A density whose sites of a loop, such as ``loc_0, loc_1``, are one site with a
    leading axis.
    """

    def __init__(self, density: ModelDensity, stack: str, members: Sequence[str]):
        self.density, self.stack, self.members = density, stack, members

    def stacked(self, points: Weights) -> Weights:
        """Stack the members of points ``(points,) + shape``."""
        result = {s: v for s, v in points.items() if s not in self.members}
        result[self.stack] = torch.stack([points[m] for m in self.members], 1)
        return result

    def terms(self, points: Weights) -> Terms:
        return self.density.terms(self._unstacked(points))

    def inside(self, points: Weights) -> Tensor:
        return self.density.inside(self._unstacked(points))

    def same(self, after: Terms, before: Terms) -> Tensor:
        return self.density.same(after, before)

    def site_inside(self, site: str, values: Tensor) -> Tensor:
        if site != self.stack:
            return self.density.site_inside(site, values)
        inside = [
            self.density.site_inside(member, values[:, number])
            for number, member in enumerate(self.members)
        ]
        return torch.stack(inside).all(0)

    def _unstacked(self, points: Weights) -> Weights:
        result = {s: v for s, v in points.items() if s != self.stack}
        for number, member in enumerate(self.members):
            result[member] = points[self.stack][:, number]
        return {site: result[site] for site in self.density.shapes}


def _whole_sites(searcher: Searcher) -> list[str]:
    """Return advice on sites that a loop makes and that exchange as wholes."""
    remarks = list[str]()
    for stack, members in _families(searcher).items():
        density: Any = _StackedDensity(searcher.density, stack, members)
        points = density.stacked(searcher.points)
        stacked = Searcher(density, points, searcher.before, searcher.movable)
        count = len(members)
        by_length = _by_length(searcher.movable_shapes)
        candidates = {
            site: places
            for site, places in by_length.get(count, {}).items()
            if site not in members
        }
        candidates[stack] = [Place(stack, 0)]
        exchange = Exchange(0, 1, count)
        for places in stacked.valid_sets(exchange, candidates):
            if Place(stack, 0) not in places:
                continue
            beside = sorted(str(place) for place in places if place.site != stack)
            together = f" with {', '.join(beside)}" if beside else ""
            name = stack.rstrip("_") or "site"
            remarks.append(
                f"the sites {', '.join(members)} exchange as wholes{together}, which no "
                f"group here can express: sample them in one plate, with "
                f"pyro.plate('{name}_plate', {count}): pyro.sample('{name}', ...)"
            )
    return remarks


def _families(searcher: Searcher) -> dict[str, list[str]]:
    """Return sites of equal shape whose names differ by a number: common part of the
    name -> sites.
    """
    families = dict[tuple[str, Any], list[str]]()
    for site, shape in searcher.movable_shapes.items():
        match = re.fullmatch(r"(.*?)(\d+)", site)
        if match:
            fn = searcher.density.target.sites[site]
            kind = (type(fn).__name__, tuple(shape))
            families.setdefault((match[1], kind), []).append(site)
    return {stem: sites for (stem, _), sites in families.items() if len(sites) > 1}


# accidents of the data ----------------------------------------------------------------


def _without_accidents(
    moves: Moves,
    searcher: Searcher,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Moves, Moves]:
    """Split moves into those that hold for simulated data as well, and the others.

    If the model can't simulate data, all are kept, with a note.
    """
    try:
        searchers = _of_simulated_data(searcher, model, args, kwargs)
    except Exception:  # a distribution without a sampler, of Pyro's or the user's
        moves.notes.append(
            "the model can't simulate data, so that moves may hold by accident of the "
            "data"
        )
        return moves, Moves()
    if all(all(_hold(simulated_search, moves)) for simulated_search in searchers):
        return moves, Moves()
    candidates = _all_moves(searchers[0])
    verdicts = [_hold(search, candidates) for search in (searcher, *searchers)]
    holds = map(all, zip(*verdicts, strict=True))
    chosen = Moves(
        [factor for factor in candidates.factors if next(holds)],
        [flip for flip in candidates.flips if next(holds)],
        moves.remarks,
        moves.notes,
    )
    dropped = Moves(
        [factor for factor in moves.factors if factor not in chosen.factors],
        [flip for flip in moves.flips if flip not in chosen.flips],
    )
    return chosen, dropped


def _of_simulated_data(
    searcher: Searcher,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Searcher]:
    """Return searchers of the model with simulated data; of several data sets if data
    are discrete, since rows may be equal by chance.
    """
    first = simulated(model, args, kwargs)
    models = [first.model]
    if first.is_discrete:
        models += [simulated(model, args, kwargs).model for _ in range(DATA_SETS - 1)]
    densities = [ModelDensity(simulation, args, kwargs) for simulation in models]
    return [Searcher.of(density, searcher.movable) for density in densities]


def _hold(searcher: Searcher, moves: Moves) -> list[bool]:
    """Return for each factor, then for each flip, whether its generators hold."""
    results = list[bool]()
    for factor in moves.factors:
        first, second = factor.units[:2]
        exchange = Exchange(first, second, factor.length)
        cycle = Cycle(factor.units, factor.length)
        results.append(_all_hold(searcher, [exchange, cycle], factor.places))
    for flip in moves.flips:
        flipped: list[SiteMove] = [SignChange(p) for p in flip.positions]
        flipped = flipped or [SignChange(None)]
        results.append(_all_hold(searcher, flipped, flip.places))
    return results


def _all_hold(
    searcher: Searcher, generators: Sequence[SiteMove], places: PlaceSet
) -> bool:
    return all(searcher.holds([(generator, places) for generator in generators]))


# the group ----------------------------------------------------------------------------


class Built(NamedTuple):
    """A group, and what it couldn't take in."""

    group: Group
    remarks: list[str]


def _built(moves: Moves, shapes: Mapping[str, torch.Size]) -> Built:
    """Build the group of all moves."""
    builder = _Builder(shapes)
    outermost = [factor for factor in moves.factors if factor.outer is None]
    flips = list(moves.flips)
    for factor in outermost:
        flips = builder.add_outer(factor, flips)
    for factor in moves.factors:
        if factor.outer is not None:
            builder.add_inner(factor)
    for flip in flips:
        builder.add_flip(flip)
    return builder.built()


class _Builder:
    """Collects units for a group.

    :ivar names: the places of outermost factors -> the names of their units.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]):
        self.shapes = shapes
        self.units: dict[str, Units] = {}
        self.names: dict[PlaceSet, str] = {}
        self.remarks: list[str] = []

    def add_outer(self, factor: Factor, flips: list[SignFlip]) -> list[SignFlip]:
        """Add units that permute, with their signs if these flip along some of the same
        places; return the flips that are left.
        """
        joint = [
            flip
            for flip in flips
            if flip.places <= factor.places and set(factor.units) <= set(flip.positions)
        ]
        flip = joint[0] if len(joint) == 1 else SignFlip((), frozenset())
        chosen = torch.tensor(factor.units, device="cpu")
        axes = tuple(
            Axis(
                place.site,
                place.dim,
                place.index(factor.length)[:, chosen],
                exponent=int(place in flip.places),
            )
            for place in sorted(factor.places)
        )
        moves = PERMUTE | FLIP if flip.places else PERMUTE
        name = self._name(factor.places)
        self.units[name] = Units(name, len(factor.units), axes, moves=moves)
        self.names[factor.places] = name
        if not flip.places:
            return flips
        left = tuple(p for p in flip.positions if p not in factor.units)
        others = [other_flip for other_flip in flips if other_flip is not flip]
        return [*others, SignFlip(left, flip.places)] if left else others

    def add_inner(self, factor: Factor) -> None:
        """Add units that permute inside others."""
        assert factor.outer is not None
        parent = self.units[self.names[factor.outer]]
        outer_dims = {place.site: place.dim for place in factor.outer}
        axes = list[Axis]()
        for place in sorted(factor.places):
            first, last = sorted((place.dim, outer_dims[place.site]))
            if last != first + 1 or place.blocks > 1:
                self.remarks.append(
                    f"units along {place} permute in each of the {parent.size} units "
                    f"of {parent.name!r}; a group can express that if the two axes are "
                    "neighbours"
                )
                return
            shape = self.shapes[place.site]
            grid = torch.arange(shape[first] * shape[last], device="cpu")
            grid = grid.reshape(shape[first], shape[last])
            by_outer = grid if outer_dims[place.site] < place.dim else grid.T
            index = by_outer[:, list(factor.units)].reshape(1, -1)
            axes.append(Axis(place.site, first, index, span=2))
        name = self._name(factor.places)
        self.units[name] = Units(
            name,
            len(factor.units),
            tuple(axes),
            parent=parent.name,
            copies=parent.size,
        )

    def add_flip(self, flip: SignFlip) -> None:
        """Add units, or whole sites, that only change their signs."""
        scalars = sorted(p.site for p in flip.places if not self.shapes[p.site])
        if scalars:
            names = ", ".join(sorted({place.site for place in flip.places}))
            self.remarks.append(
                f"the signs of {names} flip together, which no group here can express, "
                f"as {scalars[0]!r} has no axis: give it one, with .expand([1])"
            )
            return
        if not flip.positions:
            self._add_whole(flip)
            return
        index = torch.tensor([flip.positions], device="cpu")
        axes = tuple(
            Axis(place.site, place.dim, index, exponent=1)
            for place in sorted(flip.places)
        )
        name, count = self._name(flip.places), len(flip.positions)
        for places, around in self.names.items():
            parent = self.units[around]
            if flip.places <= places and parent.size == count and parent.copies == 1:
                self.units[name] = Units(name, 1, axes, around, count, FLIP)
                return
        self.units[name] = Units(name, count, axes, moves=FLIP)

    def built(self) -> Built:
        """Return the group, without the flips that don't fit its permutations."""
        try:
            return Built(Group(self.units.values(), self.shapes), self.remarks)
        except ValueError as error:
            permuting = [
                replace(
                    units,
                    moves=PERMUTE,
                    axes=tuple(replace(axis, exponent=0) for axis in units.axes),
                )
                for units in self.units.values()
                if "permute" in units.moves
            ]
            remark = f"signs are left out, which don't fit the permutations: {error}"
            return Built(Group(permuting, self.shapes), [*self.remarks, remark])

    def _add_whole(self, flip: SignFlip) -> None:
        axes = list[Axis]()
        for site in sorted(flip.sites):
            entries = torch.arange(self.shapes[site].numel(), device="cpu")
            axes.append(
                Axis(site, 0, entries[:, None], exponent=1, span=len(self.shapes[site]))
            )
        name = self._name(flip.places)
        self.units[name] = Units(name, 1, tuple(axes), moves=FLIP)

    def _name(self, places: PlaceSet) -> str:
        """Return a new name: that of the first site, with a number if it is taken."""
        site = min(place.site for place in places)
        numbered = (f"{site}~{number}" for number in itertools.count(2))
        return next(n for n in itertools.chain([site], numbered) if n not in self.units)


def _repaired(group: Group, density: ModelDensity) -> Built:
    """Try random elements at generic points, and drop the moves that change the
    density, with a remark for each.
    """
    points, before = density.generic, density.before

    def change(element: Element) -> Change:
        moved = element(points)
        after = density.terms(moved)
        same = density.same(after, before) & density.inside(moved)
        sizes = (after.values - before.values).sum(1).abs()
        return Change(not bool(same.all()), float(sizes.nan_to_num(torch.inf).max()))

    count = len(before.values)
    if not group.units or not change(group.sample((count,))).broken:
        return Built(group, [])
    remarks = list[str]()
    for broken in broken_moves(group, change)[0]:
        group = group.without([broken.name], broken.move)
        remarks.append(f"{broken.move} of {broken.name!r} holds at some points only")
    return Built(group, remarks)


# why axes move or stay ----------------------------------------------------------------


def _explained(searcher: Searcher, group: Group, dropped: Moves) -> Explanation:
    """Explain each axis of each site: the units that move it, or the density that
    changes.
    """
    places = [place for factor in dropped.factors for place in factor.places]
    places += [place for flip in dropped.flips for place in flip.places]
    accidental = {(place.site, place.dim) for place in places}
    axes = list[AxisExplanation]()
    for site, shape in searcher.density.shapes.items():
        for dim, length in enumerate(shape):
            movers = _movers(group, site, dim)
            moved = set[int]()
            for units in movers:
                moved |= _positions(units, site, dim, shape)
            reason = ""
            if len(moved) < length:
                reason = _reason(searcher, Place(site, dim), length, sorted(moved))
            if (site, dim) in accidental:
                reason += (
                    "; more of its positions move for these data, but not for data that "
                    "the model simulates: accidents=True adds them"
                )
            names = tuple(units.name for units in movers)
            axes.append(AxisExplanation(site, dim, length, len(moved), names, reason))
    return Explanation(axes)


def _movers(group: Group, site: str, dim: int) -> list[Units]:
    return [
        units
        for units in group.units.values()
        if any(a.site == site and a.dim <= dim < a.dim + a.span for a in units.axes)
    ]


def _positions(units: Units, site: str, dim: int, shape: torch.Size) -> set[int]:
    """Return the positions along an axis that units move."""
    positions = set[int]()
    for axis in units.axes:
        if axis.site != site or not axis.dim <= dim < axis.dim + axis.span:
            continue
        inner = shape[dim + 1 : axis.dim + axis.span].numel()
        along = axis.index.flatten().div(inner, rounding_mode="floor") % shape[dim]
        positions |= set(along.tolist())
    return positions


def _reason(searcher: Searcher, place: Place, length: int, moved: Sequence[int]) -> str:
    """Return why positions stay: what an exchange of two of them changes."""
    if length == 1:
        return "it has one position"
    staying = [position for position in range(length) if position not in moved]
    first, second = (*staying, *moved)[:2]
    point = searcher.first_point
    exchange = Exchange(first, second, length)
    after = searcher.density.terms(
        {
            site: value[None]
            for site, value in searcher.moved(
                exchange, frozenset({place}), point
            ).items()
        }
    )
    before = Terms(*(part[:1] for part in searcher.before))
    changed = [name for name in searcher.density.changed_terms(after, before) if name]
    if not changed:
        return "exchanging its positions changes the density"
    named = ", ".join(map(repr, changed[:2]))
    return f"exchanging {first} and {second} changes the density of {named}"
