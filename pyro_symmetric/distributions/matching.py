r"""Random group elements that bring a draw close to the base density: the proposal of ``SinkhornImportance``.

For weights that are independent normals under the base, and a set of units, the log-density of a moved draw is a sum
over places, :math:`\log q(p \cdot w) = \sum_j A_{j\,p(j)} + \dots`, with

.. math:: A_{ji} = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big)

over all weights ``a`` of a unit, incoming and outgoing; of units with signs there are two such matrices. A matching is
drawn from ``A``, summed over the signs, then signs, given the matching. Sets of units are matched one after the other:
``A`` takes the sets drawn before as they are, and of those to come, which move the same weights along another axis,
what their own doubly stochastic matrices expect, at a third of its weight. Units inside others (rows in a head of
attention) are drawn uniformly, before all others.

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
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.matchings import doubly_stochastic, draw_matchings
from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import rows
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import Weights

SKETCH = 256  # weights of a unit, of those to another set, by which it is matched
FIT_DRAWS = 256  # to which normals are fitted if a base can't tell its moments, or if constrained values are permuted
# The weight of what is expected of sets to come. At 1, walks start with confident mistakes: the identity has a tiny
# probability then, and the bound a heavy tail. Of two layers of 64 overlapping units it finds less than half as much.
TRUST = 0.3
ROUNDING = 2e-3  # nats by which rounding may move a matrix, else it is made in float64
COMPETING = 50.0  # entries further than this below the best of their row are hardly ever drawn
FEW_PRODUCTS = 2**16  # up to which a matrix is made in float64 at once: to find out how far rounding goes takes longer


class UnitSet(NamedTuple):
    """The axes of a set of units: of sites that nothing else moves, and of others; and whether it is matched."""

    lone: tuple[Axis, ...]
    shared: tuple[Axis, ...]
    matched: bool


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode that it is filled in
def sets_of(group: Group, sites: frozenset[str]) -> dict[str, UnitSet]:
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
        self.group, self.like, self.batch = group or action.group.finite, value, value.shape[1:-1]
        self.draws = sites_of(action, value)
        self.loc, self.scale = _site_moments(base, action, value)
        self.sets = sets_of(self.group, frozenset(self.draws))
        self.blocks = unit_blocks(base, action, self.group)
        self.dims = {site: len(self.group.view_shapes[site]) for site in self.draws if self.group.members(site)}
        self.shared = {axis.site: None for one in self.sets.values() for axis in one.shared}
        self.placed, self.drawn = dict(self.draws), set[str]()
        self.expected: dict[str, tuple[Tensor, Tensor]] = {}
        self._lone: dict[str, Tensor] = {}

    def log_order(self, names: Iterable[str]) -> float:
        """The logarithm of the number of permutations and signs of some sets."""
        sets = [self.group[name] for name in names]
        permutations = sum(one.copies * math.lgamma(one.size + 1) for one in sets if "permute" in one.moves)
        return permutations + math.log(2) * sum(one.count for one in sets if "flip" in one.moves)

    def gains(self, elements: Element) -> Tensor:
        r""":math:`\log q(g \cdot w) - \log q(w)`, ``(K,) + batch``, with gradient, of what any of the elements moves.

        Of sites that only one set moves they are gathered from its matrix; others are moved.
        """
        shape = (elements.batch_shape[0], *self.batch)
        total, movers = self.like.new_zeros(shape, dtype=torch.float64), self.like.new_zeros(shape[0], dtype=torch.bool)
        for name, one in self.sets.items():
            if name not in elements.group.units:
                continue
            images = elements.images(name).expand(*shape, -1)
            turned = torch.zeros_like(images)
            moving = images != torch.arange(images.shape[-1], device=images.device)
            if name in elements.signs:
                signs = elements.signs[name].flatten(len(elements.batch_shape)).expand(*shape, -1)
                turned = (signs.gather(-1, images) < 0).long()
                moving = moving | (turned == 1)
            movers, moving = movers | moving.flatten(1).any(1), moving.flatten(0, -2).any(0)
            if not one.lone or not bool(moving.any()):
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
                before, dims = self.draws[site], self.dims[site]
                after = moved.on_site(site, before, dims)
                gain = -0.5 * (after - before) * (after + before - 2 * self.loc[site]) / self.scale[site].square()
                gained = gained + gain.flatten(-dims).sum(-1)
            total = total.index_add(0, some, gained.double())
        return total

    # matrices: one, or two where units have signs, ``(signs, L) + batch + (places, units)`` ---------------------------

    def of(self, name: str) -> Tensor:
        """The matrices of one set, up to a constant for each place, by what is known of others."""
        one = self.sets[name]
        if name not in self._lone:
            self._lone[name] = self.of_lone(name)
        return self._lone[name] + self._of(name, one.shared) if one.shared else self._lone[name]

    def of_lone(self, name: str, places: Tensor | None = None) -> Tensor:
        """The part that no other set concerns, for some places and units, or all."""
        return (self._of_blocks if name in self.blocks else self._of)(name, self.sets[name].lone, places)

    def _of(self, name: str, axes: Sequence[Axis], places: Tensor | None = None) -> Tensor:
        """The share of some axes: in the precision of the draws, and again in float64 where that isn't enough."""
        flipped, count = "flip" in self.group[name].moves, self.group[name].count if places is None else len(places)
        few = count * sum(self.placed[axis.site].numel() for axis in axes) <= FEW_PRODUCTS
        for dtype in (torch.float64,) if few else (self.like.dtype, torch.float64):
            even = odd = squares = self.like.new_zeros(1, *self.batch, count, count, dtype=dtype)
            for axis, *parts in self._seen(axes):
                own = (rows(part, axis, self.dims[axis.site]) for part in parts)
                value, square, loc, scale = ((v if places is None else v[..., places, :]).to(dtype) for v in own)
                precision = scale.square().reciprocal()
                squares = squares - 0.5 * precision @ square.mT
                linear = (loc * precision) @ value.mT
                even, odd = (even, odd + linear) if flipped and axis.exponent % 2 else (even + linear, odd)
            found = torch.stack([even + squares + odd, even + squares - odd]) if flipped else (even + squares)[None]
            found = found.nan_to_num(0.0, 1e30, -1e30)
            if dtype == torch.float64 or _rounding(found.detach(), squares.detach()) <= ROUNDING:
                break
        return found

    def _of_blocks(self, name: str, axes: Sequence[Axis], places: Tensor | None = None) -> Tensor:
        """The same of units with covariances of their own, by products of their entries."""
        chosen = slice(None) if places is None else places
        loc, precision = (part[chosen] for part in self.blocks[name])
        parts, found = [rows(self.draws[a.site].double(), a, self.dims[a.site])[..., chosen, :] for a in axes], []
        for sign in (1, -1) if "flip" in self.group[name].moves else (1,):
            units = torch.cat([sign ** (a.exponent % 2) * part for part, a in zip(parts, axes, strict=True)], -1)
            products = (units.unsqueeze(-1) * units.unsqueeze(-2)).flatten(-2)
            linear = (precision @ loc.unsqueeze(-1))[..., 0] @ units.mT
            found.append((linear - 0.5 * precision.flatten(-2) @ products.mT).nan_to_num(0.0, 1e30, -1e30))
        return torch.stack(found)

    # what is known of other sets --------------------------------------------------------------------------------------

    def _seen(self, axes: Sequence[Axis]) -> Iterator[tuple[Any, ...]]:
        """Sites, their squares, means and deviations, with all other units where they are drawn, or averaged over;
        without those of which nothing is known of some units that move the same entries.

        Of a wide matrix between two sets only those at places of the other where the base's units are furthest apart:
        products cost less than ``n**3``, and what is proposed still depends on the orbit of the draw alone.
        """
        for axis in axes:
            site, members = axis.site, self.group.members(axis.site)
            chosen: Any = slice(None)
            others = [p for dim, own in members.items() if dim != axis.dim for p in own if p[0] not in self.drawn]
            if not all(other in self.expected for other, _ in others):
                continue
            parts = [self.placed[site], self.placed[site].square(), self.loc[site], self.scale[site]]
            shape, dims = self.group.view_shapes[site], self.dims[site]
            between = len(shape) == len(members) == 2 and all(own[0][1].fills(shape[d]) for d, own in members.items())
            if between and shape[1 - axis.dim] > SKETCH:
                apart = ((parts[2] - parts[2].mean(axis.dim - 2, keepdim=True)) / parts[3]).square().sum(axis.dim - 2)
                chosen = apart.reshape(-1, apart.shape[-1]).sum(0).topk(SKETCH).indices
                short = slice(2 if others else 0, 4)
                parts[short] = [part.index_select(-1 - axis.dim, chosen) for part in parts[short]]
            for other, its in others:
                mix, signed = (part[..., chosen, :] for part in self.expected[other])
                parts[0] = TRUST * averaged(parts[0], its, signed if its.exponent % 2 else mix, dims)
                parts[1] = TRUST * averaged(parts[1], its, mix, dims)
            yield axis, *parts

    def expect(self, name: str) -> None:
        """Note what is expected of a set before it is drawn; what is known of others sharpens it."""
        found = self.of(name)
        mix = torch.eye(found.shape[-1], dtype=found.dtype, device=found.device).expand_as(found[0])
        if "permute" in self.group[name].moves:
            mix = doubly_stochastic(over_signs(found), 6)
        self.expected[name] = mix, mix if len(found) == 1 else mix * ((found[0] - found[1]) / 2).tanh()

    def place(self, names: Iterable[str], element: Element, sites: Iterable[str]) -> None:
        """Put drawn sets in place, at the sites that others will look at."""
        self.drawn.update(names)
        self.placed |= {site: element.on_site(site, self.draws[site], self.dims[site]) for site in sites}


def over_signs(densities: Tensor) -> Tensor:
    """The matrices of a set of units summed over the signs of each unit, if they have any."""
    return densities.logsumexp(0) if len(densities) > 1 else densities[0]


def _rounding(found: Tensor, squares: Tensor) -> float:
    """Nats by which rounding may move the entries of a matrix that compete, of parts that cancel."""
    total = over_signs(found)
    competing = total >= total.amax(-1, keepdim=True) - COMPETING
    squares = squares.abs() * competing * (competing.sum(-1, keepdim=True) > 1)
    return float(squares.amax()) * torch.finfo(squares.dtype).eps


def averaged(value: Tensor, axis: Axis, mix: Tensor, dims: int) -> Tensor:
    """A site, ``(L,) + batch + view``, averaged over the units that may come to each place along one axis."""
    last, index = value.movedim(axis.dim - dims, -1), axis.index.to(value.device)
    units = last[..., index]
    mixed = (units.flatten(-dims - 1, -2) @ mix.to(value).mT).unflatten(-2, units.shape[-dims - 1 : -1])
    if axis.fills(last.shape[-1]):  # of some places, if the mix has fewer rows
        return mixed[..., 0, :].movedim(-1, axis.dim - dims)
    whole = last.expand(*mixed.shape[: -dims - 1], *last.shape[-dims:]).clone()
    whole[..., index] = mixed
    return whole.movedim(-1, axis.dim - dims)


# any base as normals --------------------------------------------------------------------------------------------------


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Flat vectors -> what the group moves, by site in its view: coordinates, or constrained values where elements move
    those; of a simplex their centred logarithms, which are closer to normal."""
    values = action.layout.unflatten(flat)
    for site in action.nonlinear_sites:
        values[site] = action.layout.transforms[site](values[site])
        if site in action.simplex_sites:
            logs = values[site].clamp(min=torch.finfo(flat.dtype).tiny).log()
            values[site] = logs - logs.mean(-1, keepdim=True)
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
        entries = group.viewed(action.layout.unflatten(torch.arange(action.dim, device=base.loc.device)))
        for name, one in sets_of(group, frozenset(entries)).items():
            units = torch.cat([rows(entries[a.site], a, entries[a.site].dim()) for a in one.lone + one.shared], -1)
            precisions = None if one.shared else base.precisions(units)
            if precisions is not None:
                found[name] = base.loc[units].double(), precisions
    return found


# the proposal ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    """Draw elements for each draw: matched sets one after the other, others uniformly, as their share of the group.

    :return: the identity and ``count`` elements, batch shape ``(count + 1,) + batch``, and the logarithms of the
        probabilities of the matched sets, times the number of their elements.
    """
    group, like, shape = units.group, units.like, (count + 1, *units.batch)
    options: dict[str, Any] = {"batch_shape": shape, "device": like.device, "dtype": like.dtype}
    names = [name for name, one in units.sets.items() if one.matched]
    log_tau, element = like.new_full(shape, units.log_order(names), dtype=torch.float64), Element(group, **options)
    if others := units.sets.keys() - set(names):
        uniform = group.without(names).sample(shape, device=like.device, dtype=like.dtype)
        for move, numbers in uniform.numbers.items():  # the first is the identity
            numbers[0] = torch.arange(numbers.shape[-1], device=like.device) if move == "permute" else 1.0
        element = Element(group, uniform.permutations, uniform.signs, **options)
        units.place(others, element, {a.site for other in others for a in units.sets[other].shared})
    permutations, signs = dict(element.permutations), dict(element.signs)
    for name in names if units.shared else ():
        units.expect(name)
    for number, name in enumerate(names):
        size, densities = group[name].size, units.of(name)
        images = torch.arange(size, device=like.device).expand(*shape, size)
        if "permute" in group[name].moves and size > 1:
            images, told = draw_matchings(over_signs(densities), count, like.dtype)
            log_tau = log_tau + told
        permutations[name] = images
        if len(densities) == 2:
            both = densities.expand(2, *shape, -1, -1).gather(-1, images.expand(2, *images.shape).unsqueeze(-1))
            odds = (both[0] - both[1])[..., 0]
            drawn = torch.where(torch.rand_like(odds) < odds.sigmoid(), 1.0, -1.0).to(odds)
            drawn[0] = 1.0
            log_tau = log_tau + logsigmoid(odds * drawn).sum(-1)
            signs[name] = torch.empty_like(drawn).scatter_(-1, images, drawn).to(like)
        element = Element(group, permutations, signs, **options)
        # Of proposals that are all alike, as where units are far apart, later sets look at one.
        alike = all(bool((v == v[:1]).all()) for v in (*element.permutations.values(), *element.signs.values()))
        placed = element.select(slice(0, 1)) if alike else element
        units.place([name], placed, {a.site for other in names[number + 1 :] for a in units.sets[other].shared})
    return element, log_tau
