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

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_symmetric.arguments import Keywords, Model, Names
from pyro_symmetric.density.site_checks import hidden_sites
from pyro_symmetric.discovery.model_check import check_function, undisturbed
from pyro_symmetric.discovery.model_density import ModelDensity, Terms, simulated
from pyro_symmetric.discovery.model_group import Built, built_group
from pyro_symmetric.discovery.model_likelihood import moves_of_likelihood
from pyro_symmetric.discovery.model_permutations import (
    Factor,
    permutations_along,
    permuting_units,
    position_classes,
    rearranged,
)
from pyro_symmetric.discovery.model_signs import (
    SignFlip,
    flipping_signs,
    joint_signs,
    unexpressed_signs,
)
from pyro_symmetric.discovery.rotations import confirmed, may_rotate
from pyro_symmetric.discovery.symmetry import (
    AxisExplanation,
    Explanation,
    Selection,
    Symmetry,
    named,
)
from pyro_symmetric.discovery.valid_sets import (
    Exchange,
    Place,
    Searcher,
    Unexpressed,
    axes_by_length,
    stacked,
)
from pyro_symmetric.discovery.verify import broken_moves
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights, drop_names, keep_names, pick, select_rows

PRIOR_DRAWS = 8  # at which the prior of a network is compared
DATA_SETS = 3  # that are simulated if data are discrete
ATTEMPTS = 3  # to simulate data


_NO_CODE = (lambda: None).__code__


@dataclass
class Moves:
    """Moves that leave a model's density unchanged.

    :param factors: units that permute.
    :param flips: signs.
    :param unexpressed: what holds but can't be expressed by a group.
    :param notes: what else there is to say.
    """

    factors: list[Factor] = field(default_factory=list)
    flips: list[SignFlip] = field(default_factory=list)
    unexpressed: list[Unexpressed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@undisturbed()
def find_model_symmetry(
    model: Model,
    args: Sequence[Any] = (),
    kwargs: Keywords | None = None,
    only: Selection | None = None,
    freeze: Selection = (),
    accidents: bool = False,
    verify: bool = True,
) -> Symmetry:
    """Find the permutations and signs that leave a Pyro model's joint density
    unchanged; see :func:`~pyro_symmetric.find_symmetry`.

    :raises InconclusiveError: if the density isn't a function of the sites.
    :raises ValueError: if ``poutine.block`` hides data.
    """
    kwargs = dict(kwargs or {})
    density = ModelDensity(model, args, kwargs)
    point = select_rows(density.generic, slice(1))
    if hidden := hidden_sites(lambda: density.terms(point), observed=True):
        raise ValueError(
            f"the model hides its observed sites {hidden} by poutine.block, so that "
            "these would be symmetries of its prior; find those of the model without "
            "the block, and pass them as symmetry="
        )
    sites = density.shapes.keys()
    movable = set(sites) if only is None else named("only", only, sites)
    movable -= named("freeze", freeze, sites)
    searcher = Searcher.of(density, movable)
    moves = _all_moves(searcher)
    dropped = Moves()
    if not accidents and (moves.factors or moves.flips or moves.unexpressed):
        moves, dropped = _without_accidents(moves, searcher)
    built = built_group(moves.factors, moves.flips, density.shapes)
    repaired = _repaired(built.group, density) if verify else Built(built.group, [])
    remarks = [move.remark for move in moves.unexpressed]
    remarks += [*built.remarks, *repaired.remarks]
    explanation = _explained(searcher, repaired.group, dropped)
    return Symmetry(
        repaired.group,
        explanation,
        at_least=bool(remarks),
        remarks=tuple(remarks),
        rotating=_rotating(repaired.group, density),
        notes=tuple(moves.notes),
    )


def is_pyro_model(model: Any, args: Sequence[Any], kwargs: Keywords) -> bool:
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
        nodes = dict(poutine.trace(model).get_trace(*args, **kwargs).nodes)
    return any(
        site["type"] == "sample" and site["is_observed"] for site in nodes.values()
    )


def of_bayesian_model(model: BayesianModel, symmetry: Symmetry) -> Symmetry:
    """Restrict the symmetry of a network to that of its posterior: to moves that leave
    the prior unchanged.
    """
    draws = {}
    for site, prior in model.priors().items():
        draws[site] = prior.sample((PRIOR_DRAWS,)).double()
    # no proper prior is invariant under scales or shifts
    group = symmetry.finite.without_buffers(symmetry.buffers)
    verdict = check_function(group, model.log_prior, draws)
    remarks = [*symmetry.remarks]
    for broken in verdict.broken:
        group = group.without([broken.name], broken.move)
        remarks.append(f"{broken.move} of {broken.name!r} changes the prior")
    missing = symmetry.at_least or bool(verdict.broken)  # a part of the units may move
    rotating = confirmed(
        group,
        [name for name in symmetry.rotating if name in group.names("permute")],
        lambda turning: [
            move.name for move in check_function(turning, model.log_prior, draws).broken
        ],
    )
    return replace(
        symmetry,
        group=group,
        at_least=missing,
        remarks=tuple(remarks),
        rotating=rotating,
    )


# the search ---------------------------------------------------------------------------


def _all_moves(searcher: Searcher) -> Moves:
    factors = permuting_units(searcher)
    unexpressed = unexpressed_signs(searcher) + _whole_sites(searcher)
    for count, candidates in axes_by_length(searcher.movable_shapes).items():
        unexpressed += rearranged(searcher, count, candidates, factors)
    flips = flipping_signs(searcher, factors)
    unexpressed += joint_signs(searcher, flips)
    return Moves(factors, flips, unexpressed)


# whole sites --------------------------------------------------------------------------


class _StackedDensity:
    """A density whose sites of loops, such as ``loc_0, loc_1``, are one site each, with
    a leading axis.

    :param stacks: common part of the names -> sites.
    """

    def __init__(self, density: ModelDensity, stacks: Mapping[str, Sequence[str]]):
        self.density = density
        self.stacks = stacks

    def stacked(self, points: Weights) -> Weights:
        """Stack the sites of points ``(points,) + shape``."""
        members = set(itertools.chain.from_iterable(self.stacks.values()))
        result = drop_names(points, members)
        for stack, sites in self.stacks.items():
            result[stack] = torch.stack([points[site] for site in sites], 1)
        return result

    def terms(self, points: Weights) -> Terms:
        return self.density.terms(self._unstacked(points))

    def inside(self, points: Weights) -> Tensor:
        return self.density.inside(self._unstacked(points))

    def same(self, after: Terms, before: Terms) -> Tensor:
        return self.density.same(after, before)

    def site_inside(self, site: str, values: Tensor) -> Tensor:
        inside = []
        for member, value in self._members(site, values):
            inside.append(self.density.site_inside(member, value))
        return torch.stack(inside).all(0)

    def _members(self, site: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        if site not in self.stacks:
            yield site, values
            return
        yield from zip(self.stacks[site], values.unbind(1), strict=True)

    def _unstacked(self, points: Weights) -> Weights:
        result = dict[str, Tensor]()
        for site, values in points.items():
            result.update(self._members(site, values))
        return pick(result, self.density.shapes)


def _on_stacks(searcher: Searcher, stacks: Mapping[str, Sequence[str]]) -> Searcher:
    """Return a searcher that moves sites as wholes."""
    density: Any = _StackedDensity(searcher.density, stacks)
    points = density.stacked(searcher.points)
    return Searcher(density, points, searcher.before, searcher.movable)


def _whole_sites(searcher: Searcher) -> list[Unexpressed]:
    """Return the sites that exchange as wholes, with advice."""
    families = _families(searcher)
    wholes = []
    for count in sorted({len(sites) for sites in families.values()}):
        stacks = {s: sites for s, sites in families.items() if len(sites) == count}
        of_stacks = _on_stacks(searcher, stacks)
        candidates = axes_by_length(searcher.movable_shapes).get(count, {})
        candidates = keep_names(candidates, of_stacks.points)
        candidates |= {stack: [Place(stack, 0)] for stack in stacks}
        factors = permutations_along(of_stacks, count, candidates)
        for factor in factors:
            wholes += _advice(factor, stacks)
        for move in rearranged(of_stacks, count, candidates, factors):
            names = [place.site for place in move.places if place.site in stacks]
            sites = " and ".join(", ".join(stacks[name]) for name in sorted(names))
            if names:
                remark = f"of the sites {sites}, {move.remark}"
                wholes.append(move._replace(remark=remark, stacks=stacks))
    return wholes


def _advice(factor: Factor, stacks: Mapping[str, Sequence[str]]) -> list[Unexpressed]:
    """Return the sites of loops among the places of a factor, with advice."""
    moved = [place for place in sorted(factor.places) if place.site in stacks]
    if not moved:
        return []
    exchanged = []
    for place in moved:
        sites = [stacks[place.site][unit] for unit in factor.units]
        exchanged.append(", ".join(sites))
    beside = sorted(str(place) for place in factor.places - {*moved})
    together = f", together with {', '.join(beside)}," if beside else ""
    names = [place.site.rstrip("_") or "site" for place in moved]
    lines = ", ".join(f"pyro.sample({name!r}, ...)" for name in names)
    remark = (
        f"the sites {' and '.join(exchanged)} exchange as wholes{together} which no "
        f"group here can express: sample them in one plate, with "
        f"pyro.plate('{names[0]}_plate', {len(factor.units)}): {lines}"
    )
    return [Unexpressed(factor.generators, factor.places, remark, stacks)]


def _families(searcher: Searcher) -> dict[str, list[str]]:
    """Return sites of equal shape and kind that may exchange: common part of the names
    -> sites, if these differ by a number; of others, the first name -> sites.
    """
    numbered = dict[tuple[str, Any], list[str]]()
    by_kind = dict[Any, list[str]]()
    for site, shape in searcher.movable_shapes.items():
        fn = searcher.density.target.sites[site]
        match = re.fullmatch(r"(.*?)(\d+)", site)
        if match:
            kind = (type(fn).__name__, tuple(shape))
            numbered.setdefault((match[1], kind), []).append(site)
        else:
            kind = (str(fn.support), tuple(shape))
            by_kind.setdefault(kind, []).append(site)
    families = {stem: sites for (stem, _), sites in numbered.items()}
    for sites in by_kind.values():
        families |= _similar_sites(searcher, sites)
    return {stem: sites for stem, sites in families.items() if len(sites) > 1}


def _level_point(searcher: Searcher) -> Weights:
    """Return a point at which each site has equal entries, and those of a support have
    the same, where that lies in the support.
    """
    values = dict[str, Tensor]()
    point = dict[str, Tensor]()
    for site, value in searcher.first_point.items():
        support = str(searcher.density.target.sites[site].support)
        level = values.setdefault(f"{support} {value.shape}", value).mean()
        level = level.expand_as(value)
        inside = searcher.density.site_inside(site, level[None])
        point[site] = level if inside else value
    return point


def _similar_sites(searcher: Searcher, sites: Sequence[str]) -> dict[str, list[str]]:
    """Return the sites that the density with one odd site can't tell apart, at a level
    point: the first name -> sites.
    """
    if len(sites) < 2:
        return {}
    first = sites[0]
    place = Place(first, 0)
    between = searcher.point(len(searcher.before.values) // 2)
    odd = {**_level_point(searcher), first: between[first]}
    at_odd = replace(searcher, points=stacked([odd]))
    of_stacks = _on_stacks(at_odd, {first: sites})
    classes = position_classes(of_stacks, len(sites), {first: [place]})
    families = dict[int, list[str]]()
    for site, label in zip(sites, classes.get(place, [0] * len(sites)), strict=True):
        families.setdefault(label, []).append(site)
    return {members[0]: members for members in families.values()}


# accidents of the data ----------------------------------------------------------------


def _without_accidents(moves: Moves, searcher: Searcher) -> tuple[Moves, Moves]:
    """Split moves into those that hold for simulated data as well, and the others.

    If the model can't simulate data, all are kept, with a note.
    """
    for _ in range(ATTEMPTS):  # the density of some simulated data is too rough
        # any other error is of a distribution without a sampler
        with contextlib.suppress(Exception):
            searchers = _of_simulated_data(searcher)
            break
    else:
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
        [move for move in candidates.unexpressed if next(holds)],
        moves.notes,
    )
    dropped = Moves(
        [factor for factor in moves.factors if factor not in chosen.factors],
        [flip for flip in moves.flips if flip not in chosen.flips],
    )
    return chosen, dropped


def _of_simulated_data(searcher: Searcher) -> list[Searcher]:
    """Return searchers of the model with simulated data; of several data sets if data
    are discrete, since rows may be equal by chance.
    """
    density = searcher.density
    first = simulated(density.target)
    models = [first.model]
    if first.is_discrete:
        models += [simulated(density.target).model for _ in range(DATA_SETS - 1)]
    densities = [density.with_model(model) for model in models]
    return [Searcher.of(density, searcher.movable) for density in densities]


def _hold(searcher: Searcher, moves: Moves) -> list[bool]:
    """Return for each factor, flip, and move that no group expresses, in this order,
    whether its generators hold.
    """
    results = []
    expressible: list[Factor | SignFlip] = [*moves.factors, *moves.flips]
    for expressed in expressible:
        holds = searcher.holds([(g, expressed.places) for g in expressed.generators])
        results.append(all(holds))
    for move in moves.unexpressed:
        search = _on_stacks(searcher, move.stacks)
        results.append(all(search.holds([(g, move.places) for g in move.generators])))
    return results


def _repaired(group: Group, density: ModelDensity) -> Built:
    """Try random elements at generic points, and drop the moves that change the
    density, with a remark for each.
    """
    count = len(density.before.values)
    if not group.units or not density.change(group.sample((count,))).broken:
        return Built(group, [])
    remarks = []
    for broken in broken_moves(group, density.change)[0]:
        group = group.without([broken.name], broken.move)
        remarks.append(f"{broken.move} of {broken.name!r} holds at some points only")
    return Built(group, remarks)


def _rotating(group: Group, density: ModelDensity) -> Names:
    """Return the units whose rotations leave the density unchanged, of those that
    permute and flip along all of their axes.
    """

    def broken(turning: Group) -> list[str]:
        return [move.name for move in broken_moves(turning, density.change)[0]]

    names = [
        name
        for name in group.names("permute")
        if may_rotate(group, group[name])
        and "flip" in group[name].moves
        and all(axis.exponent for axis in group[name].axes)
    ]
    return confirmed(group, names, broken)


# why axes move or stay ----------------------------------------------------------------


def _explained(searcher: Searcher, group: Group, dropped: Moves) -> Explanation:
    """Explain each axis of each site: the units that move it, or the density that
    changes.
    """
    places = [place for factor in dropped.factors for place in factor.places]
    places += [place for flip in dropped.flips for place in flip.places]
    accidental = {(place.site, place.dim) for place in places}
    axes = []
    allowed = moves_of_likelihood(searcher.density)
    for site, site_shape in searcher.density.shapes.items():
        shape = site_shape or torch.Size([1])
        for dim, length in enumerate(shape):
            movers = _movers(group, site, dim)
            if not (site_shape or movers or site in allowed):
                continue  # there is nothing to say of most scalars
            moved = set()
            for units in movers:
                moved |= _positions(units, site, dim, shape)
            reason = ""
            if site_shape and len(moved) < length:
                reason = _reason(searcher, Place(site, dim), length, sorted(moved))
            if (site, dim) in accidental:
                reason += "; " * bool(reason) + (
                    "more of its positions move for these data, but not for data that "
                    "the model simulates: accidents=True adds them"
                )
            if dim == 0 and site in allowed:
                reason = "; ".join(filter(None, [reason, allowed[site]]))
            names = tuple(units.name for units in movers)
            axes.append(AxisExplanation(site, dim, length, len(moved), names, reason))
    return Explanation(axes)


def _movers(group: Group, site: str, dim: int) -> list[Units]:
    return [
        units
        for units in group.units.values()
        if any(axis.site == site and _covers(axis, dim) for axis in units.axes)
    ]


def _covers(axis: Axis, dim: int) -> bool:
    return axis.dim <= dim < axis.dim + max(axis.span, 1)


def _positions(units: Units, site: str, dim: int, shape: torch.Size) -> set[int]:
    """Return the positions along an axis that units move."""
    positions = set()
    for axis in units.axes:
        if axis.site != site or not _covers(axis, dim):
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
    exchange = Exchange(first, second, length)
    moved_point = searcher.moved(exchange, frozenset({place}), searcher.first_point)
    after = searcher.density.terms(stacked([moved_point]))
    before = searcher.before.at(slice(1))
    changed = [name for name in searcher.density.changed_terms(after, before) if name]
    if not changed:
        return "exchanging its positions changes the density"
    named = ", ".join(map(repr, changed[:2]))
    return f"exchanging {first} and {second} changes the density of {named}"
