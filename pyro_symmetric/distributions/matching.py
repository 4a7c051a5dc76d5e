r"""Random group elements that bring a draw close to the base density: the proposal of ``SinkhornImportance``.

For weights that are independent normals under the base, and a set of units, the log-density of a moved draw is a sum
over places, :math:`\log q(p \cdot w) = \sum_j A_{j\,p(j)} + \dots`, with

.. math:: A_{ji} = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big)

over all weights ``a`` of a unit, incoming and outgoing. ``A`` is made doubly stochastic (Sinkhorn & Knopp 1967), a
matching is drawn from it, row by row without replacement, then signs, given the matching, whose ``A`` has
:math:`\log (e^{A^+_{ji}} + e^{A^-_{ji}})` in place of :math:`A_{ji}`. Sets of units are matched one after the other:
``A`` takes the sets drawn before as they are, and of those to come, which move the same weights along another axis,
what their own doubly stochastic matrices expect, at a third of its weight. Units inside others (rows in a head of
attention) are drawn uniformly, before all others. The probability of an element is the product of those of its sets,
each given the ones before.

Any base that isn't a product of normals is matched by its means and deviations. The proposal depends on the draw's
orbit alone: moving the draw by ``h`` moves what is proposed along.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import rows
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import Weights

FIT_DRAWS = 256  # to which normals are fitted if a base can't tell its moments, or if constrained values are permuted
# The weight of what is expected of sets to come. At 1, walks start with confident mistakes: the identity has a tiny
# probability then, and the bound a heavy tail. Of two layers of 64 overlapping units it finds less than half as much.
TRUST = 0.3
ROUNDING = 2e-3  # nats by which rounding may move a matrix, else it is made in float64
COMPETING = 50.0  # entries further than this below the best of their row are hardly ever drawn
FEW_PRODUCTS = 2**16  # up to which a matrix is made in float64 at once: to find out how far rounding goes takes longer
FLOOR = -40.0  # log-densities further than this below the best of their row count alike; e^-40 leaves room in float32
SPREAD = 1e-4  # what each row spreads evenly over all columns, so that no matching has probability zero
TAIL = 6  # the least certain rows, matched together by all their permutations


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
    taken: dict[tuple[str, int], Tensor] = {}
    for name, one in group.units.items():
        axes = [axis for axis in group.axes(name) if axis.site in sites]
        alone = [sum(map(len, group.members(axis.site).values())) == 1 for axis in axes]
        places = {(axis.site, axis.dim): axis.index.flatten().cpu() for axis in axes}
        apart = not any(bool(torch.isin(index, taken[at]).any()) for at, index in places.items() if at in taken)
        matched = apart and one.parent is None and one.copies == 1
        if matched:
            taken |= {at: torch.cat([index, taken.get(at, index)]) for at, index in places.items()}
        if axes:
            lone, shared = (tuple(a for a, own in zip(axes, alone, strict=True) if own == k) for k in (True, False))
            found[name] = UnitSet(lone, shared, matched)
    return found


class Pairs(NamedTuple):
    """The matrix ``A`` of a set of units, ``(L,) + batch + (count, count)``, places by units.

    :param even: what doesn't depend on the units' signs.
    :param odd: what changes its sign with them; None if they have none.
    """

    even: Tensor
    odd: Tensor | None

    @property
    def total(self) -> Tensor:
        """Summed over the sign of each unit."""
        return self.even if self.odd is None else self.even + torch.logaddexp(self.odd, -self.odd)

    @property
    def at_rest(self) -> Tensor:
        """The sum over all units in their own places, not flipped."""
        return (self.even if self.odd is None else self.even + self.odd).diagonal(dim1=-2, dim2=-1).sum(-1)


class UnitDensities:
    """The matrices ``A`` of every set of units for some draws under one base.

    :param group: permutations and signs.
    :param draws: site -> draws in the group's view, ``(L,) + batch + view``.
    :param loc: site -> means, of the base's batch shape.
    :param scale: site -> deviations, likewise.
    :param like: the flat draws, ``(L,) + batch + (D,)``.
    :param blocks: set of units -> means ``(n, d)`` and precisions ``(n, d, d)`` of units that are correlated inside.
    :ivar placed: the draws with all units in place of the sets that are known, ``drawn``.
    :ivar expected: name -> probabilities that a place receives a unit, and the same times the unit's expected sign; of
        sets still to come.
    """

    def __init__(
        self, group: Group, draws: Weights, loc: Weights, scale: Weights, like: Tensor, blocks: Mapping[str, Any]
    ):
        self.group, self.draws, self.loc, self.scale, self.like, self.blocks = group, draws, loc, scale, like, blocks
        self.batch, self.sets = like.shape[1:-1], sets_of(group, frozenset(draws))
        self.dims = {site: len(group.view_shapes[site]) for site in draws if group.members(site)}
        self.shared = {axis.site: None for one in self.sets.values() for axis in one.shared}
        self.placed = dict(draws)
        self.drawn: set[str] = set()
        self.expected: dict[str, tuple[Tensor, Tensor]] = {}

    def log_order(self, names: Iterable[str]) -> float:
        """The logarithm of the number of permutations and signs of some sets."""
        sets = [self.group[name] for name in names]
        permutations = sum(one.copies * math.lgamma(one.size + 1) for one in sets if "permute" in one.moves)
        return permutations + sum(one.count * math.log(2) for one in sets if "flip" in one.moves)

    # densities of moved draws ---------------------------------------------------------------------------------------

    def gains(self, elements: Element) -> Tensor:
        r""":math:`\log q(g \cdot w) - \log q(w)`, ``(K,) + batch``, with gradient, of what any of the elements moves.

        Of sites that only one set moves they are gathered from its matrix; others are moved.
        """
        shape = (elements.batch_shape[0], *self.batch)
        total = self.like.new_zeros(shape, dtype=torch.float64)
        for name, one in self.sets.items():
            if not one.lone or name not in elements.group.units:
                continue
            images, signs = elements.images(name).expand(*shape, -1), elements.signs.get(name)
            moving = images != torch.arange(images.shape[-1], device=images.device)
            if signs is not None:
                signs = signs.flatten(len(elements.batch_shape)).expand(*shape, -1).gather(-1, images)
                moving = moving | (signs != 1)
            moving = moving.flatten(0, -2).any(0)
            places = moving.nonzero()[:, 0]
            if len(places) == 0:
                continue
            pairs, index = self.alone(name, places), (moving.cumsum(0) - 1)[images[..., places]].movedim(0, -1)
            gathered = pairs.even[0].gather(-1, index)
            if signs is not None and pairs.odd is not None:
                gathered = gathered + signs[..., places].movedim(0, -1).to(pairs.odd) * pairs.odd[0].gather(-1, index)
            total = total + gathered.sum(-2).movedim(-1, 0) - pairs.at_rest
        for site in self.shared:
            before, dims = self.draws[site], self.dims[site]
            after = elements.on_site(site, before, dims)
            gain = -0.5 * (after - before) * (after + before - 2 * self.loc[site]) / self.scale[site].square()
            total = total + gain.flatten(-dims).sum(-1)
        return total

    def alone(self, name: str, places: Tensor | None = None) -> Pairs:
        """The part of a set's matrix that no other set concerns, for some places and units, or all."""
        if name in self.blocks:
            return self._of_blocks(name, slice(None) if places is None else places)
        return self._of(name, self.sets[name].lone, places)

    def of(self, name: str) -> Pairs:
        """The matrix of one set, up to a constant for each place."""
        found = self.alone(name)
        if not self.sets[name].shared:
            return found
        more = self._of(name, self.sets[name].shared)
        odd = None if found.odd is None or more.odd is None else found.odd + more.odd
        return Pairs(found.even + more.even, odd)

    def _of(self, name: str, axes: Sequence[Axis], places: Tensor | None = None) -> Pairs:
        """The share of some axes: in the precision of the draws, and again in float64 where that isn't enough."""
        flipped, count = "flip" in self.group[name].moves, self.group[name].count if places is None else len(places)
        few = count * sum(self.placed[axis.site].numel() for axis in axes) <= FEW_PRODUCTS
        for dtype in (torch.float64,) if few else (self.like.dtype, torch.float64):
            even = odd = squares = self.like.new_zeros(1, *self.batch, count, count, dtype=dtype)
            for axis, *sites in self._seen(axes):
                own = [
                    rows(v, axis, self.dims[axis.site]) for v in (*sites, self.loc[axis.site], self.scale[axis.site])
                ]
                value, square, loc, scale = ((v if places is None else v[..., places, :]).to(dtype) for v in own)
                precision = scale.square().reciprocal()
                squares = squares - 0.5 * precision @ square.mT
                linear = (loc * precision) @ value.mT
                even, odd = (even, odd + linear) if self._flips(name, axis) else (even + linear, odd)
            even, odd = (part.nan_to_num(0.0, 1e30, -1e30) for part in (even + squares, odd))
            found = Pairs(even, odd if flipped else None)
            if dtype == torch.float64 or _rounding(found.total.detach(), squares.detach()) <= ROUNDING:
                break
        return found

    def _of_blocks(self, name: str, places: Any) -> Pairs:
        """The matrix of units with covariances of their own, by products of their entries."""
        axes, (loc, precision) = self.sets[name].lone, (part[places] for part in self.blocks[name])
        parts = [rows(self.draws[a.site].double(), a, self.dims[a.site])[..., places, :] for a in axes]
        flipped = [-part if a.exponent % 2 else part for part, a in zip(parts, axes, strict=True)]
        both = []
        for units in (torch.cat(parts, -1), torch.cat(flipped, -1)):
            products = (units.unsqueeze(-1) * units.unsqueeze(-2)).flatten(-2)
            found = (precision @ loc.unsqueeze(-1))[..., 0] @ units.mT - 0.5 * precision.flatten(-2) @ products.mT
            both.append(found.nan_to_num(0.0, 1e30, -1e30))
        here, there = both
        return Pairs((here + there) / 2, (here - there) / 2) if "flip" in self.group[name].moves else Pairs(here, None)

    def _flips(self, name: str, axis: Axis) -> bool:
        return "flip" in self.group[name].moves and axis.exponent % 2 == 1

    # what is known of other sets --------------------------------------------------------------------------------------

    def _seen(self, axes: Sequence[Axis]) -> Iterator[tuple[Axis, Tensor, Tensor]]:
        """Sites and their squares with all other units where they are drawn, or averaged over; without those of which
        nothing is known of some units that move the same entries."""
        for axis in axes:
            members = self.group.members(axis.site).items()
            others = [p for dim, own in members if dim != axis.dim for p in own if p[0] not in self.drawn]
            if all(other in self.expected for other, _ in others):
                value, dims = self.placed[axis.site], self.dims[axis.site]
                square = value.square()
                for other, its in others:
                    mix, signed = self.expected[other]
                    value = TRUST * averaged(value, its, signed if self._flips(other, its) else mix, dims)
                    square = TRUST * averaged(square, its, mix, dims)
                yield axis, value, square

    def expect(self, name: str) -> None:
        """Note what is expected of a set before it is drawn; what is known of others sharpens it."""
        found, permuted = self.of(name), "permute" in self.group[name].moves
        still = torch.eye(found.even.shape[-1], dtype=found.even.dtype, device=found.even.device)
        mix = doubly_stochastic(found.total, 6) if permuted else still.expand_as(found.even)
        self.expected[name] = mix, mix if found.odd is None else mix * found.odd.tanh()

    def place(self, names: Iterable[str], element: Element, sites: Iterable[str]) -> None:
        """Put drawn sets in place, at the sites that others will look at."""
        self.drawn.update(names)
        self.placed |= {site: element.on_site(site, self.draws[site], self.dims[site]) for site in sites}


def _rounding(total: Tensor, squares: Tensor) -> float:
    """Nats by which rounding may move the entries of a matrix that compete, of parts that cancel."""
    competing = total >= total.amax(-1, keepdim=True) - COMPETING
    squares = squares.abs() * competing * (competing.sum(-1, keepdim=True) > 1)
    return float(squares.amax()) * torch.finfo(squares.dtype).eps


def averaged(value: Tensor, axis: Axis, mix: Tensor, dims: int) -> Tensor:
    """A site, ``(L,) + batch + view``, averaged over the units that may come to each place along one axis."""
    last, index = value.movedim(axis.dim - dims, -1), axis.index.to(value.device)
    units = last[..., index]
    mixed = (units.flatten(-dims - 1, -2) @ mix.to(value).mT).unflatten(-2, units.shape[-dims - 1 : -1])
    whole = last.expand(*mixed.shape[: -dims - 1], *last.shape[-dims:]).clone()
    whole[..., index] = mixed
    return whole.movedim(-1, axis.dim - dims)


# any base as normals --------------------------------------------------------------------------------------------------


def units_of(base: Distribution, action: Action, value: Tensor, group: Group | None = None) -> UnitDensities:
    """The densities of units under a base: exact for independent units, by means and deviations for any other.

    :param value: draws, ``(L,) + batch_shape + (D,)``.
    :param group: a part of the action's group; all of it by default.
    """
    group, draws, blocks = group or action.group.finite, sites_of(action, value), {}
    moments = None if action.nonlinear_sites else mean_field_moments(base) or _told_moments(base)
    if moments is not None:
        loc, scale = (sites_of(action, moment) for moment in moments)
        blocks = unit_blocks(base, action, group)
    else:
        with torch.no_grad():
            fitted = sites_of(action, base.sample(torch.Size([FIT_DRAWS])))
        tiny = torch.finfo(value.dtype).tiny ** 0.25  # its inverse square is finite
        loc, scale = {s: v.mean(0) for s, v in fitted.items()}, {s: v.std(0).clamp(min=tiny) for s, v in fitted.items()}
    return UnitDensities(group, draws, loc, scale, value, blocks)


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


@torch.no_grad()
def _told_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    try:
        return base.mean, base.stddev
    except NotImplementedError:
        return None


def unit_blocks(base: Distribution, action: Action, group: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and precisions of the sets that no others concern, if the base is normal in blocks of their units."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if isinstance(base, UnitBlocks) and not action.nonlinear_sites:
        for name, units in _unit_entries(action, group).items():
            precisions = base.precisions(entries := units.to(base.loc.device))
            if precisions is not None:
                found[name] = base.loc[entries].double(), precisions
    return found


@functools.lru_cache(maxsize=64)
def _unit_entries(action: Action, group: Group) -> dict[str, Tensor]:
    """Set of units -> the entries of each in the flat vector, ``(n, d)``; of sets that no others concern."""
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        entries = group.viewed(action.layout.unflatten(torch.arange(action.dim, device="cpu")))
        return {
            name: torch.cat([rows(entries[axis.site], axis, entries[axis.site].dim()) for axis in one.lone], -1)
            for name, one in sets_of(group, frozenset(entries)).items()
            if not one.shared
        }


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
        size, pairs = group[name].size, units.of(name)
        images = torch.arange(size, device=like.device).expand(*shape, size)
        if "permute" in group[name].moves and size > 1:
            images, told = draw_matchings(pairs.total, count, like.dtype)
            log_tau = log_tau + told
        permutations[name] = images
        if pairs.odd is not None:
            odd = pairs.odd.expand(*shape, -1, -1).gather(-1, images.unsqueeze(-1))[..., 0]
            drawn = torch.where(torch.rand_like(odd) < (2 * odd).sigmoid(), 1.0, -1.0).to(odd)
            drawn[0] = 1.0
            log_tau = log_tau + logsigmoid(2 * odd * drawn).sum(-1)
            signs[name] = torch.empty_like(drawn).scatter_(-1, images, drawn).to(like)
        element = Element(group, permutations, signs, **options)
        units.place([name], element, {a.site for other in names[number + 1 :] for a in units.sets[other].shared})
    return element, log_tau


def doubly_stochastic(densities: Tensor, iterations: int = 12, dtype: torch.dtype | None = None) -> Tensor:
    """Sinkhorn's scaling of ``exp(densities)``, ``batch + (n, n)``; the rows add up to one exactly."""
    kernel = densities.log_softmax(-1).log_softmax(-2).to(dtype or densities.dtype).clamp(min=FLOOR).exp()
    columns = torch.ones_like(kernel[..., :1])
    for _ in range(iterations):
        columns = (kernel.mT @ (kernel @ columns).reciprocal()).reciprocal()
    scaled = kernel * columns.mT
    return scaled / scaled.sum(-1, keepdim=True)


def draw_matchings(densities: Tensor, count: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Draw the identity and ``count`` matchings: the most certain rows first, the last ones by all their permutations.

    :param densities: ``A``, ``(1 or count + 1,) + batch + (n, n)``.
    :param dtype: that suffices for the probabilities.
    :return: the column that each row takes, ``(count + 1,) + batch + (n,)``, and log-probabilities.
    """
    n, shape = densities.shape[-1], (count + 1, *densities.shape[1:])
    early = max(0, n - TAIL)
    chances = (1 - SPREAD) * doubly_stochastic(densities, dtype=dtype) + SPREAD / n
    order = chances.square().sum(-1).argsort(-1, descending=True)
    chances = chances.gather(-2, order[..., :early].unsqueeze(-1).expand(*order.shape[:-1], early, n))
    order = order.expand(shape[:-1])
    taken = order.clone()  # by the rows in this order; by the identity, each row's own column
    if early and count:
        taken[1:, ..., :early] = _without_replacement(chances, count)
        free = torch.ones_like(taken).scatter_(-1, taken[..., :early], 0)
        taken[1:, ..., early:] = free[1:].topk(n - early).indices.sort(-1).values
    # The late rows and the columns that are left, in all orders; the first is the one at hand.
    orders, late = _orders(n - early, densities.device), torch.arange(n - early, device=densities.device)
    block = densities.expand(shape).take_along_dim(order[..., early:].unsqueeze(-1), -2)
    block = block.take_along_dim(taken[..., early:].unsqueeze(-2), -1)
    sums = block.flatten(-2)[..., orders + (n - early) * late].sum(-1).log_softmax(-1)
    drawn = (sums - torch.empty_like(sums).exponential_().log_()).argmax(-1)
    drawn[0] = 0
    taken[..., early:] = taken[..., early:].gather(-1, orders[drawn])
    # Of the columns that earlier rows leave free, those that this row and later ones take.
    free = chances.expand(count + 1, *chances.shape[1:]).gather(-1, taken.unsqueeze(-2).expand(*shape[:-2], early, n))
    log_tau = (free.diagonal(dim1=-2, dim2=-1) / free.triu().sum(-1)).log().sum(-1, dtype=torch.float64)
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
