r"""Proposals of ``SinkhornImportance``: random matchings of a draw's units to the base's, by their log-densities in
each other's places, from which the terms of the average are gathered, too.

For weights that are independent normals under the base, and a set of units, the log-density of a moved draw is a sum
over places, :math:`\log q(p \cdot w) = \sum_j A_{j\,p(j)} + \dots`, with

.. math:: A_{ji} = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big)

over all weights ``a`` of a unit, incoming and outgoing; of units with signs there are two such matrices. A matching is
drawn from ``A``, summed over the signs, then signs, given the matching. Rows of which one column is far ahead take it;
the others draw from the doubly stochastic scaling of :math:`e^A` (Sinkhorn & Knopp 1967), one after the other without
replacement.

Sets of units are matched one after the other: first those whose units are all sure of their places, by a sketch of
their weights; then the others, whose ``A`` takes the sets drawn before as they are, and of those to come, which move
the same weights along another axis, what their own doubly stochastic matrices expect, at a third of its weight. Units
inside others (rows in a head of attention) are drawn uniformly, before all others.

Any base that isn't a product of normals is matched by its means and deviations. The proposal depends on the draw's
orbit alone: moving the draw by ``h`` moves what is proposed along.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Axis, Element, rows
from pyro_symmetric.weights import Weights

SKETCH = 256  # weights of a unit by which it is matched: of those to another set, and of all while it is sure
FIT_DRAWS = 256  # to which normals are fitted if a base can't tell its moments, or if constrained values are permuted
# The weight of what is expected of sets to come. At 1, walks start with confident mistakes: the identity has a tiny
# probability then, and the bound a heavy tail. Of two layers of 64 overlapping units it finds less than half as much.
TRUST = 0.3
ROUNDING = 2e-3  # nats by which rounding may move a matrix, else it is made in float64
FEW_PRODUCTS = 2**16  # up to which a matrix is made in float64 at once: to find out how far rounding goes takes longer
LARGEST = 1e12  # weights further out, of draws that are no numbers, count as this; its square is finite in float32
FLOOR = -40.0  # log-densities further than this below the best of their row count alike; e^-40 leaves room in float32
SPREAD = 1e-4  # what each row spreads evenly over all columns, so that no matching has probability zero
TAIL = 6  # the least certain rows, matched together by all their permutations
SURE = 30.0  # nats by which the best column of a row is ahead of all others if none of these is looked at
ELSEWHERE = 2e-9  # the share of uniform matchings beside sure rows, so that no matching has probability zero


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    """Draw elements for each draw: matched sets one after the other, others uniformly, as their share of the group.

    :return: the identity and ``count`` elements, batch shape ``(count + 1,) + batch``, and the logarithms of the
        probabilities of the matched sets, times the number of their elements.
    """
    group, like, shape = units.group, units.like, (count + 1, *units.batch)
    options: dict[str, Any] = {"batch_shape": shape, "device": like.device, "dtype": like.dtype}
    left = [name for name, one in units.sets.items() if one.matched]
    log_tau, permutations, signs = like.new_full(shape, units.log_order(left), dtype=torch.float64), {}, {}
    if others := units.sets.keys() - set(left):
        uniform = group.without(left).sample(shape, device=like.device, dtype=like.dtype)
        for move, numbers in uniform.numbers.items():  # the first is the identity
            numbers[0] = torch.arange(numbers.shape[-1], device=like.device) if move == "permute" else 1.0
        permutations, signs = dict(uniform.permutations), dict(uniform.signs)
        units.place(others, Element(group, permutations, signs, **options))

    def take(name: str, found: Tensor, column: Tensor, sure: Tensor) -> Tensor:
        """Draw a set, and put it in place; the log-probabilities."""
        own = torch.arange(group[name].size, device=like.device)
        if "permute" in group[name].moves and len(own) > 1:
            images, told = draw_matchings(found, count, column, sure, like.dtype)
        else:
            images, told = own.expand(*shape, -1), like.new_zeros((), dtype=torch.float64)
        permutations[name], flips = images, None
        if len(found) == 2:
            both = found.expand(2, *shape, -1, -1).gather(-1, images.expand(2, *images.shape).unsqueeze(-1))
            odds = (both[0] - both[1])[..., 0]
            flips = torch.where(torch.rand_like(odds) < odds.sigmoid(), 1.0, -1.0).to(odds)
            flips[0] = 1.0
            told = told + logsigmoid(odds * flips).sum(-1)
            signs[name] = torch.empty_like(flips).scatter_(-1, images, flips).to(like)
        units.drawn.add(name)
        if not units.shared or (bool((images == own).all()) and (flips is None or bool((flips > 0).all()))):
            return told
        moved = Element(group, permutations, signs, **options)
        # Of proposals that are all alike, as where units are far apart, later sets look at one.
        alike = all(bool((v == v[:1]).all()) for v in (*permutations.values(), *signs.values()))
        units.place([name], moved.select(slice(0, 1)) if alike else moved)
        return told

    before: list[str] = []
    while units.shared and left != before:
        before = list(left)
        for name in before:
            found, column, sure = units.of(name, quick=True)
            if bool(sure.all()):
                log_tau = log_tau + take(name, found, column, sure)
                left.remove(name)
            elif len(found) == 1:
                units.sure[name] = column, sure
    for name in left if units.shared else ():
        units.expect(name)
    for name in left:
        log_tau = log_tau + take(name, *units.of(name))
    return Element(group, permutations, signs, **options), log_tau


# densities ------------------------------------------------------------------------------------------------------------


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
        signs: tuple[int, ...] = (1, -1) if "flip" in self.group[name].moves else (1,)
        of_places, of_units = list[Tensor](), [list[Tensor]() for _ in signs]
        for axis, *parts in self._seen(axes, brief, known):
            parts = parts if places is None else [part[..., places, :] for part in parts]
            value, square, loc, scale = (part.to(dtype) for part in parts)
            precision = scale.square().reciprocal()
            of_places += [loc * precision, -0.5 * precision]
            for own, sign in zip(of_units, signs, strict=True):
                own += [sign ** (axis.exponent % 2) * value, square]
        if not of_places:  # nothing is known yet
            of_places = [self.like.new_zeros(self.group[name].count if places is None else len(places), 0, dtype=dtype)]
            of_units = [[self.like.new_zeros(1, *self.batch, *of_places[0].shape, dtype=dtype)] for _ in signs]
        elif name in self.blocks:
            loc, precision = (
                part.to(dtype) if places is None else part[places].to(dtype) for part in self.blocks[name]
            )
            of_places = [(precision @ loc.unsqueeze(-1))[..., 0], -0.5 * precision.flatten(-2)]
            units = [joined(own[::2]) for own in of_units]
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
            chosen, unknown, wide = None, self._unknown(axis), loc.shape[-1] > SKETCH
            other, between = unknown[0][0] if unknown else "", (unknown or wide) and self._between(axis.site)
            if unknown and not (between and other in (self.sure if known else self.expected)):
                continue
            if unknown and known:
                column, sure = self.sure[other]
                chosen = sure.flatten(0, -2).all(0).nonzero()[:, 0]
            if wide and (brief or between):
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

    def _between(self, site: str) -> bool:
        """True of a matrix whose rows are one set of units, and whose columns another."""
        shape, members = self.group.view_shapes[site], self.group.members(site)
        return len(shape) == len(members) == 2 and all(own[0][1].fills(shape[d]) for d, own in members.items())

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
    shape = np.broadcast_shapes(*(part.shape[:-1] for part in parts))  # several times faster than torch's
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
    values = action.layout.unflatten(flat)
    for site in action.nonlinear_sites:
        value = action.layout.transforms[site](values[site])
        if site in action.simplex_sites:
            logs = value.clamp(min=torch.finfo(flat.dtype).tiny).log()
            value = logs - logs.mean(-1, keepdim=True)
        values[site] = value
    return action.group.viewed(values)


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
        for name, one in sets_of(group, action.sites).items():
            units = torch.cat([rows(entries[a.site], a, entries[a.site].dim()) for a in one.lone + one.shared], -1)
            precisions = None if one.shared else base.precisions(units)
            if precisions is not None:
                found[name] = base.loc[units].double(), precisions
    return found


# random matchings -----------------------------------------------------------------------------------------------------


def over_signs(densities: Tensor) -> Tensor:
    """The matrices of a set of units summed over the signs of each unit, if they have any."""
    return densities.logsumexp(0) if len(densities) > 1 else densities[0]


def leading(densities: Tensor, permuted: bool = True) -> tuple[Tensor, Tensor]:
    """The best column of each row, ``(L,) + batch + (n,)``, and if there is no other, whose sign is known, too.

    None is sure unless each row has a best column of its own: then each other matching is worse by the margins.
    """
    best = densities.amax(0) if len(densities) > 1 else densities[0]
    own = torch.arange(densities.shape[-1], device=densities.device)
    column, sure = own.expand(best.shape[:-1]), torch.ones(best.shape[:-1], dtype=torch.bool, device=own.device)
    if permuted:
        highest = best.amax(-1)
        if not torch.equal(best.diagonal(dim1=-2, dim2=-1), highest):  # at a base's draws it often is, and this slow
            column = best.argmax(-1)
            sure = (column.sort(-1).values == own).all(-1, keepdim=True)
        others = best.scatter(-1, column.unsqueeze(-1), -math.inf).amax(-1)
        sure = sure & (highest - others > SURE)
    if len(densities) > 1:
        both = densities.take_along_dim(column.expand(2, *column.shape).unsqueeze(-1), -1)[..., 0]
        sure = sure & ((both[0] - both[1]).abs() > SURE)
    return column, sure


def doubly_stochastic(densities: Tensor, iterations: int = 12, dtype: torch.dtype | None = None) -> Tensor:
    """Sinkhorn's scaling of ``exp(densities)``, ``batch + (n, n)`` (Sinkhorn & Knopp 1967); rows sum to one exactly."""
    kernel = densities.log_softmax(-1).log_softmax(-2).to(dtype or densities.dtype).clamp(min=FLOOR).exp()
    columns = torch.ones_like(kernel[..., :1])
    for _ in range(iterations):
        columns = (kernel.mT @ (kernel @ columns).reciprocal()).reciprocal()
    scaled = kernel * columns.mT
    return scaled / scaled.sum(-1, keepdim=True)


def draw_matchings(
    densities: Tensor, count: int, column: Tensor, sure: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the identity and ``count`` matchings: rows that are sure take their best column, the others are drawn.

    With probability ``ELSEWHERE`` the matching is uniform instead; a uniform draw that keeps the sure rows is rejected.

    :param densities: ``A``, ``(signs, 1 or count + 1) + batch + (n, n)``.
    :param column: the best of each row, and whether it is ``sure``, as :func:`leading` finds them.
    :param dtype: that suffices for the probabilities.
    :return: the column that each row takes, ``(count + 1,) + batch + (n,)``, and log-probabilities.
    """
    n, shape = column.shape[-1], (count + 1, *column.shape[1:])
    own = torch.arange(n, device=column.device)
    left = int((~sure).sum(-1).amax())
    if 2 * left > n:
        return draw_all(over_signs(densities), count, own, dtype)
    rest = sure.long().argsort(-1)[..., :left]
    columns = column.gather(-1, rest)
    images, log_tau = column.expand(shape).clone(), torch.zeros(shape[:-1], dtype=torch.float64, device=own.device)
    if left:
        block = densities.take_along_dim(rest.expand(len(densities), *rest.shape).unsqueeze(-1), -2)
        block = over_signs(block.take_along_dim(columns.expand(len(densities), *columns.shape).unsqueeze(-2), -1))
        identity = (columns.unsqueeze(-2) == rest.unsqueeze(-1)).long().argmax(-1)
        taken, log_tau = draw_all(block, count, identity, dtype)
        images.scatter_(-1, rest.expand(*shape[:-1], -1), columns.expand(*shape[:-1], -1).gather(-1, taken))
    images[0] = own
    log_tau = log_tau + math.log1p(-ELSEWHERE)
    uniform = torch.rand(shape[:-1], device=own.device) < ELSEWHERE
    if bool(uniform.any()):
        uniform[0] = False
        every = torch.rand(images.shape, device=own.device).argsort(-1)
        images = torch.where(uniform.unsqueeze(-1), every, images)
        log_tau = log_tau.masked_fill(uniform, math.inf)
    free = torch.zeros_like(sure).scatter_(-1, rest, True)
    outside = ~((images == column) | free).all(-1)  # of all matchings that are drawn, only uniform ones can be
    return images, log_tau.masked_fill(outside, math.log(ELSEWHERE) - math.lgamma(n + 1))


def draw_all(
    densities: Tensor, count: int, identity: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Draw matchings of all rows: the most certain rows first, the last ones by all their permutations.

    :param identity: the column that each row takes in the first matching, which isn't drawn.
    """
    n, shape = densities.shape[-1], (count + 1, *densities.shape[1:])
    early, order = max(0, n - TAIL), torch.arange(n, device=densities.device).expand(shape[:-1])
    taken, log_tau = identity.expand(shape[:-1]).clone(), order.new_zeros(shape[:-2], dtype=torch.float64)
    if early:
        chances = (1 - SPREAD) * doubly_stochastic(densities, dtype=dtype) + SPREAD / n
        order = chances.square().sum(-1).argsort(-1, descending=True)
        chances = chances.gather(-2, order[..., :early].unsqueeze(-1).expand(*order.shape[:-1], early, n))
        order = order.expand(shape[:-1])
        taken = taken.gather(-1, order)  # by the rows in this order
        if count:
            taken[1:, ..., :early] = _without_replacement(chances, count)
            free = torch.ones_like(taken).scatter_(-1, taken[..., :early], 0)
            taken[1:, ..., early:] = free[1:].topk(n - early).indices.sort(-1).values
        # Of the columns that earlier rows leave free, those that this row and later ones take.
        free = chances.expand(count + 1, *chances.shape[1:])
        free = free.gather(-1, taken.unsqueeze(-2).expand(*shape[:-2], early, n))
        log_tau = (free.diagonal(dim1=-2, dim2=-1) / free.triu().sum(-1)).log().sum(-1, dtype=torch.float64)
    # The late rows and the columns that are left, in all orders; the first is the one at hand.
    orders, late = _orders(n - early, densities.device), torch.arange(n - early, device=densities.device)
    block = densities.expand(shape).take_along_dim(order[..., early:].unsqueeze(-1), -2)
    block = block.take_along_dim(taken[..., early:].unsqueeze(-2), -1)
    sums = block.flatten(-2)[..., orders + (n - early) * late].sum(-1).log_softmax(-1)
    drawn = (sums - torch.empty_like(sums).exponential_().log_()).argmax(-1)
    drawn[0] = 0
    taken[..., early:] = taken[..., early:].gather(-1, orders[drawn])
    return taken.gather(-1, order.argsort(-1)), log_tau + sums.gather(-1, drawn.unsqueeze(-1))[..., 0]


def _without_replacement(chances: Tensor, count: int) -> Tensor:
    """Draw a column for each row, no column twice, the first rows first: ``(L,) + batch + (rows, n)`` ->
    ``(count,) + batch + (rows,)``.

    All rows draw at once. Of those that want the same column the first keeps it, the others draw again, among the
    columns that no earlier row holds, until each has one: what the rows would have drawn one after the other.
    """
    shared, size, n = len(chances) == 1, *chances.shape[-2:]
    drawn = torch.multinomial(chances.reshape(-1, n), count if shared else 1, replacement=True)
    drawn = drawn.reshape(*chances.shape[:-1], -1)
    choice = drawn[0].movedim(-1, 0) if shared else drawn[1:, ..., 0]
    batch, choice = choice.shape[1:-1], choice.reshape(count, -1, size)
    chances, own = chances.reshape(len(chances), -1, size, n), torch.arange(size, device=chances.device)
    while True:
        holder = own.new_full((*choice.shape[:2], n), size)
        holder = holder.scatter_reduce(-1, choice, own.expand_as(choice), "amin")
        k, draw, row = (holder.gather(-1, choice) < own).nonzero(as_tuple=True)
        if len(k) == 0:
            return choice.reshape(count, *batch, size)
        left = chances[0 if shared else k + 1, draw, row] * (holder[k, draw] > row.unsqueeze(-1))
        choice = choice.index_put((k, draw, row), (left / torch.empty_like(left).exponential_()).argmax(-1))


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _orders(n: int, device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.permutations(range(n))), device=device)
