r"""Log-densities of units in each other's places: what ``SinkhornImportance`` proposes by, and terms are gathered from.

For weights that are independent normals under the base, and a set of units, the log-density of a moved draw is a sum
over places, :math:`\log q(p \cdot w) = \sum_j A_{j\,p(j)} + \dots`, with

.. math:: A_{ji} = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big)

over all weights ``a`` of a unit, incoming and outgoing; of units with signs there are two such matrices. A matching is
drawn from ``A``, summed over the signs, then signs, given the matching. Sets of units are matched one after the other:
first those whose units are all sure of their places, by a sketch of their weights; then the others, whose ``A`` takes
the sets drawn before as they are, and of those to come, which move the same weights along another axis, what their own
doubly stochastic matrices expect, at a third of its weight. Units inside others (rows in a head of attention) are drawn
uniformly, before all others.

Any base that isn't a product of normals is matched by its means and deviations. The proposal depends on the draw's
orbit alone: moving the draw by ``h`` moves what is proposed along.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyro_symmetric.distributions.matchings import doubly_stochastic, leading, over_signs
from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import rows
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import Weights

SKETCH = 256  # weights of a unit by which it is matched: of those to another set, and of all while it is sure
FIT_DRAWS = 256  # to which normals are fitted if a base can't tell its moments, or if constrained values are permuted
# The weight of what is expected of sets to come. At 1, walks start with confident mistakes: the identity has a tiny
# probability then, and the bound a heavy tail. Of two layers of 64 overlapping units it finds less than half as much.
TRUST = 0.3
ROUNDING = 2e-3  # nats by which rounding may move a matrix, else it is made in float64
FEW_PRODUCTS = 2**16  # up to which a matrix is made in float64 at once: to find out how far rounding goes takes longer
LARGEST = 1e12  # weights further out, of draws that are no numbers, count as this; its square is finite in float32


class UnitSet(NamedTuple):
    """The axes of a set of units: of sites that nothing else moves, and of others; and whether it is matched."""

    lone: tuple[Axis, ...]
    shared: tuple[Axis, ...]
    matched: bool


def sets_of(group: Group, sites: Iterable[str]) -> dict[str, UnitSet]:
    """The sets of units that move entries of some sites. Those are matched that lie inside no others, and whose places
    no set before them has."""
    found: dict[str, UnitSet] = {}
    taken: set[tuple[str, int, int]] = set()
    for name, one in group.units.items():
        axes = [axis for axis in group.axes(name) if axis.site in sites]
        places = {(axis.site, axis.dim, int(place)) for axis in axes for place in axis.index.flatten()}
        matched = one.parent is None and one.copies == 1 and taken.isdisjoint(places)
        taken |= places if matched else set()
        if axes:
            alone = [sum(map(len, group.members(axis.site).values())) == 1 for axis in axes]
            lone, shared = (tuple(a for a, own in zip(axes, alone, strict=True) if own == k) for k in (True, False))
            found[name] = UnitSet(lone, shared, matched)
    return found


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode that it is filled in
def _sets_in(action: Action, group: Group | None) -> tuple[Group, dict[str, UnitSet]]:
    group = group or action.group.finite
    return group, sets_of(group, action.sites)


class UnitDensities:
    """The matrices ``A`` of every set of units for some draws: exact for independent units, by means and deviations
    for any other base.

    :param value: draws, ``(L,) + batch_shape + (D,)``.
    :param group: permutations and signs, a part of the action's group; all of it by default.
    :ivar placed: the draws, by site in the group's view, with all units in place of the sets that are known, ``drawn``.
    :ivar expected: name -> probabilities that a place receives a unit, and the same times the unit's expected sign; of
        sets still to come.
    :ivar blocks: name -> means ``(n, d)`` and precisions ``(n, d, d)`` of units that are correlated inside.
    """

    def __init__(self, base: Distribution, action: Action, value: Tensor, group: Group | None = None):
        self.group, self.sets = _sets_in(action, group)
        self.like, self.batch = value, value.shape[1:-1]
        self.draws = sites_of(action, value)
        self.loc, self.scale = _site_moments(base, action, value)
        self.blocks = unit_blocks(base, action, self.group)
        self.shared = {axis.site: None for one in self.sets.values() for axis in one.shared}
        self.placed, self.drawn = dict(self.draws), set[str]()
        self.expected: dict[str, tuple[Tensor, Tensor]] = {}
        self.sure: dict[str, tuple[Tensor, Tensor]] = {}
        self._kept: dict[Any, Any] = {}

    def log_order(self, names: Iterable[str]) -> float:
        """The logarithm of the number of permutations and signs of some sets."""
        sets = [self.group[name] for name in names]
        permutations = sum(one.copies * math.lgamma(one.size + 1) for one in sets if "permute" in one.moves)
        return permutations + math.log(2) * sum(one.count for one in sets if "flip" in one.moves)

    def gains(self, elements: Element) -> Tensor:
        r""":math:`\log q(g \cdot w) - \log q(w)`, ``(K,) + batch``, with gradient, of what any of the elements moves.

        Of sites that only one set moves they are gathered from its matrix; others are moved.
        """
        shape, signs = (elements.batch_shape[0], *self.batch), elements.signs
        total, movers = self.like.new_zeros(shape, dtype=torch.float64), self.like.new_zeros(shape[0], dtype=torch.bool)
        for name in self.sets.keys() & elements.group.units.keys():
            images = elements.images(name).expand(*shape, -1)
            moving, turned = images != torch.arange(images.shape[-1], device=images.device), torch.zeros_like(images)
            if name in signs:
                own = signs[name].flatten(len(elements.batch_shape)).expand(*shape, -1)
                turned = (own.gather(-1, images) < 0).long()
                moving = moving | (turned == 1)
            movers, moving = movers | moving.flatten(1).any(1), moving.flatten(0, -2).any(0)
            if not self.sets[name].lone or not bool(moving.any()):
                continue
            places = moving.nonzero()[:, 0]
            densities = self.of_lone(name, places)[:, 0]
            index = (moving.cumsum(0) - 1)[images] + len(places) * turned
            index = index[..., places].movedim(0, -1)  # among the units as they are, then among those turned
            gathered = densities.movedim(0, -2).flatten(-2).gather(-1, index)
            at_rest = densities[0].diagonal(dim1=-2, dim2=-1).sum(-1)
            total = total + gathered.sum(-2).movedim(-1, 0) - at_rest
        if self.shared and bool(movers.any()):
            some = movers.nonzero()[:, 0]
            moved, gained = elements.select(some), self.like.new_zeros(len(some), *self.batch)
            for site in self.shared:
                before, dims = self.draws[site], self._dims(site)
                after = moved.on_site(site, before, dims)
                gain = -0.5 * (after - before) * (after + before - 2 * self.loc[site]) / self.scale[site].square()
                gained = gained + gain.flatten(-dims).sum(-1)
            total = total.index_add(0, some, gained.double())
        return total

    # matrices: one, or two where units have signs, ``(signs, L) + batch + (places, units)`` ---------------------------

    def of(self, name: str, quick: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The matrices of one set, up to a constant for each place; the best unit of each place, and if it is sure.

        :param quick: by a sketch, and by what is known of others alone. Expected positions never count as sure.
        """
        one, like = self.sets[name], self.like.dtype
        numbers = [self.draws[axis.site].numel() for axis in one.lone + one.shared]
        levels = [(torch.float64, False)]
        if self.group[name].count * sum(numbers) > FEW_PRODUCTS:
            long = max(numbers) > SKETCH * self.group[name].count * self.like[..., 0].numel()
            levels = [*[(like, True)][: long or quick], (like, False), *levels]
        trusted = quick or not any(self._unknown(axis) for axis in one.shared)
        return self._found(
            name, [a for a in (one.lone, one.shared) if a], levels[:1] if quick else levels, trusted, known=quick
        )

    def of_lone(self, name: str, places: Tensor | None = None) -> Tensor:
        """The part that no other set concerns, for some places and units, or all."""
        levels = [(self.like.dtype, False), (torch.float64, False)]
        return self._found(name, (self.sets[name].lone,), levels, True, places)[0]

    def _found(
        self,
        name: str,
        axes: Sequence[tuple[Axis, ...]],
        levels: Sequence[tuple[torch.dtype, bool]],
        trusted: bool,
        places: Tensor | None = None,
        known: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By more and more of the weights, in more and more digits, until all is sure or rounding doesn't matter."""
        for dtype, brief in levels:
            parts = [self._part(name, some, dtype, brief, places, known) for some in axes]
            found = sum((matrix for matrix, _, _ in parts[1:]), parts[0][0])
            with torch.no_grad():
                column, sure = leading(found, "permute" in self.group[name].moves)
                matched = [(p * u.take_along_dim(column.unsqueeze(-1), -2)).abs().sum(-1) for _, p, u in parts]
                rounding = torch.finfo(dtype).eps * sum(matched[1:], matched[0])
                sure = sure & (rounding < 1.0) if trusted else torch.zeros_like(sure)
                if bool(sure.all()) or (not brief and bool((rounding * ~sure <= ROUNDING).all())):  # false of NaN
                    break
        return found, column, sure

    def _part(
        self, name: str, axes: tuple[Axis, ...], dtype: torch.dtype, brief: bool, places: Tensor | None, known: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The share of some axes: a product of numbers of the places and of the units, and these."""
        brief = brief and name not in self.blocks  # whose precisions are of all weights of a unit
        key, kept = (name, dtype, brief), axes is self.sets[name].lone and places is None
        if kept and key in self._kept:
            return self._kept[key]
        signs, some = (1, -1) if "flip" in self.group[name].moves else (1,), slice(None) if places is None else places
        of_places = [self.like.new_zeros(self.group[name].count, 0, dtype=dtype)[some]]
        of_units = [[self.like.new_zeros(1, *self.batch, *of_places[0].shape, dtype=dtype)] for _ in signs]
        for axis, *parts in self._seen(axes, brief, known):
            value, square, loc, scale = (part[..., some, :].to(dtype) for part in parts)
            precision = scale.square().reciprocal()
            of_places += [loc * precision, -0.5 * precision]
            for own, sign in zip(of_units, signs, strict=True):
                own += [sign ** (axis.exponent % 2) * value, square]
        if name in self.blocks and axes:
            loc, precision = (part[some].to(dtype) for part in self.blocks[name])
            of_places = [(precision @ loc.unsqueeze(-1))[..., 0], -0.5 * precision.flatten(-2)]
            units = [joined(own[1::2]) for own in of_units]
            of_units = [[unit, (unit.unsqueeze(-1) * unit.unsqueeze(-2)).flatten(-2)] for unit in units]
        seen, units = joined(of_places), [joined(own) for own in of_units]
        products = [seen @ own.mT for own in units]
        found = torch.stack(products) if len(signs) > 1 else products[0][None], seen, units[0]
        if kept and not torch.is_grad_enabled():
            self._kept[key] = found
        return found

    def _seen(self, axes: Sequence[Axis], brief: bool, known: bool) -> Iterator[tuple[Any, ...]]:
        """Axes, and of each unit along them weights, their squares, means and deviations, with all other units where
        they are drawn, or averaged over; without axes along which nothing is known of others.

        Of a wide matrix between two sets, and of all if that will do, only those that tell the base's units apart.
        """
        for axis in axes:
            value, loc, scale = (self._rows(part[axis.site], axis) for part in (self.placed, self.loc, self.scale))
            chosen, unknown, members = None, self._unknown(axis), self.group.members(axis.site)
            shape, other = self.group.view_shapes[axis.site], unknown[0][0] if unknown else ""
            between = len(shape) == len(members) == 2 and all(own[0][1].fills(shape[d]) for d, own in members.items())
            if unknown and not (between and other in (self.sure if known else self.expected)):
                continue
            if unknown and known:
                column, sure = self.sure[other]
                chosen = sure.flatten(0, -2).all(0).nonzero()[:, 0]
            if loc.shape[-1] > SKETCH and (brief or between):
                chosen = _telling(loc, scale, chosen)
            if chosen is not None:
                loc, scale = (part.index_select(-1, chosen) for part in (loc, scale))
            if unknown and known:
                value = value.take_along_dim(column[..., chosen].unsqueeze(-2), -1)
            elif chosen is not None and not unknown:
                value = value.index_select(-1, chosen)
            value = value.nan_to_num(0.0).clamp(-LARGEST, LARGEST)
            square = value.square()
            if unknown and not known:
                every = slice(None) if chosen is None else chosen
                mix, signed = (part[..., every, :].to(value).mT for part in self.expected[other])
                square, value = TRUST * square @ mix, TRUST * value @ (signed if unknown[0][1].exponent % 2 else mix)
            yield axis, value, square, loc, scale

    def _rows(self, value: Tensor, axis: Axis) -> Tensor:
        return rows(value, axis, self._dims(axis.site))

    def _dims(self, site: str) -> int:
        return self.draws[site].dim() - 1 - len(self.batch)

    def _unknown(self, axis: Axis) -> list[tuple[str, Axis]]:
        """The units along other axes of the same site that aren't drawn."""
        members = self.group.members(axis.site).items()
        return [own for dim, pairs in members if dim != axis.dim for own in pairs if own[0] not in self.drawn]

    # what is known of other sets --------------------------------------------------------------------------------------

    def expect(self, name: str) -> None:
        """Note what is expected of a set before it is drawn; what is known of others sharpens it."""
        found = self.of(name)[0]
        mix = torch.eye(found.shape[-1], dtype=found.dtype, device=found.device).expand_as(found[0])
        if "permute" in self.group[name].moves:
            mix = doubly_stochastic(over_signs(found), 6)
        self.expected[name] = mix, mix if len(found) == 1 else mix * ((found[0] - found[1]) / 2).tanh()

    def place(self, names: Iterable[str], element: Element) -> None:
        """Put drawn sets in place, where others will look at."""
        self.drawn.update(names)
        sites = {axis.site for name, one in self.sets.items() if name not in self.drawn for axis in one.shared}
        self.placed |= {site: element.on_site(site, self.draws[site], self._dims(site)) for site in sites}


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Numbers one after the other, along the last axis; leading axes broadcast."""
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


def _telling(loc: Tensor, scale: Tensor, among: Tensor | None) -> Tensor:
    """The weights, at most ``SKETCH`` of them, in which some of the base's units are furthest apart."""
    some = slice(None, None, max(1, loc.shape[-2] // 64))
    loc, scale = loc.detach()[..., some, :], scale.detach()[..., some, :]
    apart = ((loc - loc.mean(-2, keepdim=True)) / scale).square()
    apart = apart.reshape(-1, apart.shape[-1]).sum(0)
    among = torch.arange(len(apart), device=apart.device) if among is None else among
    return among[apart[among].topk(min(SKETCH, len(among))).indices]


# any base as normals --------------------------------------------------------------------------------------------------


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Flat vectors -> what the group moves, by site in its view: coordinates, or constrained values where elements move
    those; of a simplex their centred logarithms, which are closer to normal."""
    values, pieces = {}, _pieces(action)
    for (site, shape), part in zip(pieces.items(), flat.split([s.numel() for s in pieces.values()], -1), strict=True):
        value = part.reshape((*flat.shape[:-1], *shape))
        if site in action.nonlinear_sites:
            value = action.layout.transforms[site](value)
            if site in action.simplex_sites:
                logs = value.clamp(min=torch.finfo(flat.dtype).tiny).log()
                value = logs - logs.mean(-1, keepdim=True)
            value = action.group.view(site, value)
        values[site] = value
    return values


@functools.lru_cache(maxsize=64)
def _pieces(action: Action) -> dict[str, torch.Size]:
    """The shapes of coordinates by site, in the group's view where elements move them as they are."""
    shapes = action.layout.unconstrained_shapes
    moved = {
        site: action.group.view(site, torch.empty(shape, device="meta")).shape
        for site, shape in shapes.items()
        if site in action.group.sites
    }
    return {site: shape if site in action.nonlinear_sites else moved.get(site, shape) for site, shape in shapes.items()}


def mean_field_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    """Means and deviations of a base that is a product of normals; None for any other."""
    while isinstance(base, Independent):
        base = base.base_dist
    return (base.loc, base.scale) if isinstance(base, Normal) else None


def _site_moments(base: Distribution, action: Action, value: Tensor) -> tuple[Weights, Weights]:
    """Means and deviations by site, of the base's batch shape: its own if it can tell, else those of draws."""
    moments = mean_field_moments(base)
    with torch.no_grad():
        with contextlib.suppress(NotImplementedError):
            moments = moments or (base.mean, base.stddev)
        if moments is None or action.nonlinear_sites:
            fitted = sites_of(action, base.sample(torch.Size([FIT_DRAWS])))
            tiny = torch.finfo(value.dtype).tiny ** 0.25  # its inverse square is finite
            scale = {site: v.std(0).clamp(min=tiny) for site, v in fitted.items()}
            return {site: v.mean(0) for site, v in fitted.items()}, scale
    loc, scale = (sites_of(action, moment) for moment in moments)
    return loc, scale


def unit_blocks(base: Distribution, action: Action, group: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and precisions of the sets that no others concern, if the base is normal in blocks of their units."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if isinstance(base, UnitBlocks) and not action.nonlinear_sites:
        entries = sites_of(action, torch.arange(action.dim, device=base.loc.device))
        for name, one in sets_of(group, entries).items():
            units = torch.cat([rows(entries[a.site], a, entries[a.site].dim()) for a in one.lone + one.shared], -1)
            precisions = None if one.shared else base.precisions(units)
            if precisions is not None:
                found[name] = base.loc[units].double(), precisions
    return found
