r"""Random group elements that bring a draw close to the base density: the proposal of ``SinkhornImportance``.

For weights that are independent normals under the base, and a set of units, the log-density of a moved draw is a sum
over places, :math:`\log q(p \cdot w) = \sum_j A_{j\,p(j)} + \dots`, with

.. math:: A_{ji} = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big)

over all weights ``a`` of a unit, incoming and outgoing. ``A`` is made doubly stochastic (Sinkhorn & Knopp 1967), a
matching is drawn from it, row by row without replacement, then signs, given the matching, whose ``A`` has
:math:`\log (e^{A^+_{ji}} + e^{A^-_{ji}})` in place of :math:`A_{ji}`. Sets of units are matched one after the other:
``A`` takes the sets drawn before as they are, and of those to come, which move the same weights along another axis,
what their own doubly stochastic matrices expect, at a third of its weight. A unit that holds others (a head of
attention) is matched by its own weights and by what a matching of the units inside it would be worth; those follow,
inside the unit that has come to their place. The probability of an element is the product of those of its sets, each
given the ones before.

Any base that isn't a product of normals is matched by its means and deviations. The proposal depends on the draw's
orbit alone: moving the draw by ``h`` moves what is proposed along.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.permanent import doubly_stochastic, draw_matchings, soft_permanent
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import rows
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import Weights

# The weight of what is expected of sets to come. At 1, walks start with confident mistakes: the identity has a tiny
# probability then, and the bound a heavy tail. Of two layers of 64 overlapping units it finds less than half as much.
TRUST = 0.3
ROUNDING = 2e-3  # nats by which rounding may move a matrix, else it is made in float64
COMPETING = 50.0  # entries further than this below the best of their row are hardly ever drawn
FEW_PRODUCTS = 2**16  # up to which a matrix is made in float64 at once: to find out how far rounding goes takes longer


@dataclass(frozen=True, eq=False)
class Seat:
    """An axis along which a set of units lies, at the positions that no units inside these hold.

    :param beside: other sets that move the same positions along the same axis.
    :param lone: whether nothing else moves any entry of the site.
    """

    axis: Axis
    beside: frozenset[str]
    lone: bool


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode that it is filled in
def seats_of(group: Group, sites: frozenset[str]) -> dict[str, tuple[Seat, ...]]:
    """The sets of units that move entries of some sites, each followed by what lies inside it."""
    found: dict[str, tuple[Seat, ...]] = {}
    order = [name for root in group.roots for name in group.family(root)]
    for name in order:
        line, seats = {*group.ancestors(name), *group.family(name)}, []
        for axis in (axis for axis in group.axes(name) if axis.site in sites):
            members = group.members(axis.site)
            inner = [a.index.flatten() for u, a in members[axis.dim] if name in group.ancestors(u)]
            if inner:
                axis = replace(axis, index=axis.index[~torch.isin(axis.index[:, 0], torch.cat(inner))])
            others = ((u, a) for u, a in members[axis.dim] if u not in line)
            beside = frozenset(u for u, a in others if bool(torch.isin(a.index, axis.index).any()))
            if len(axis.index):
                seats.append(Seat(axis, beside, sum(map(len, members.values())) == 1))
        found[name] = tuple(seats)
    return {name: found[name] for name in order if any(found[part] for part in group.family(name))}


@dataclass(frozen=True, eq=False)
class Pairs:
    """The matrix ``A`` of a set of units, ``(L, N, count, count)``, places by units, through all copies.

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
        """The sum over all units in their own places, not flipped, ``(L, N)``."""
        return (self.even if self.odd is None else self.even + self.odd).diagonal(dim1=-2, dim2=-1).sum(-1)

    def __add__(self, other: Pairs) -> Pairs:
        odd = None if self.odd is None or other.odd is None else self.odd + other.odd
        return Pairs(self.even + other.even, odd)


@dataclass(frozen=True, eq=False)
class Known:
    """Knowledge of the other sets when one is matched.

    :param sites: the draws with all known sets in place, ``(L, N, *view)``.
    :param drawn: the names of these sets.
    :param expected: name -> probabilities that a place receives a unit, and the same times the unit's expected sign,
        ``(1, N, count, count)``; of sets still to come.
    """

    sites: Weights
    drawn: frozenset[str] = frozenset()
    expected: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class UnitDensities:
    """The matrices ``A`` of every set of units for some draws under one base.

    :param group: permutations and signs.
    :param draws: site -> draws in the group's view, ``(L, N, *view)``.
    :param loc: site -> means, ``(1 or N, *view)``.
    :param scale: site -> deviations, likewise.
    :param blocks: set of units -> means ``(n, d)`` and precisions ``(n, d, d)`` of units that are correlated inside.
    """

    group: Group
    draws: Weights
    loc: Weights
    scale: Weights
    blocks: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seats, self.like = seats_of(self.group, frozenset(self.draws)), next(iter(self.draws.values()))
        self._matrices: dict[str, Pairs] = {}

    @property
    def log_order(self) -> float:
        """The logarithm of the number of permutations and signs that move something."""
        moved = [self.group[name] for name in self.seats]
        permutations = sum(one.copies * math.lgamma(one.size + 1) for one in moved if "permute" in one.moves)
        return permutations + sum(one.count * math.log(2) for one in moved if "flip" in one.moves)

    def shared(self, names: Iterable[str]) -> set[str]:
        """The sites of some sets that others move, too."""
        return {seat.axis.site for name in names for seat in self.seats[name] if not seat.lone}

    # densities of moved draws ---------------------------------------------------------------------------------------

    def gains(self, elements: Element) -> Tensor:
        r""":math:`\log q(g \cdot w) - \log q(w)`, ``(K, N)``, with gradient, of what any of the elements moves.

        Of sites that only one set moves they are gathered from its matrix; others are moved.
        """
        total = self.like.new_zeros(elements.batch_shape, dtype=torch.float64)
        for name in self.seats:
            images, signs = elements.unit_index(name), elements.signs.get(name)
            moving = images != torch.arange(images.shape[-1], device=images.device)
            if signs is not None:
                signs = signs.flatten(2).gather(-1, images)
                moving = moving | (signs != 1)
            moving = moving.flatten(0, 1).any(0)
            places = moving.nonzero()[:, 0]
            if len(places) == 0:
                continue
            pairs, index = self.alone(name, places), (moving.cumsum(0) - 1)[images[..., places]].movedim(0, -1)
            gathered = pairs.even[0].gather(-1, index)
            if signs is not None and pairs.odd is not None:
                gathered = gathered + signs[..., places].movedim(0, -1).to(pairs.odd) * pairs.odd[0].gather(-1, index)
            total = total + gathered.sum(-2).mT - pairs.at_rest
        for site in self.shared(self.seats):
            before, dims = self.draws[site], self.draws[site].dim() - 2
            after = elements.on_site(site, before, dims)
            gain = -0.5 * (after - before) * (after + before - 2 * self.loc[site]) / self.scale[site].square()
            total = total + gain.flatten(2).sum(-1)
        return total

    def alone(self, name: str, places: Tensor | None = None) -> Pairs:
        """The part of a set's matrix that no other set concerns, for some places and units, or all."""
        if name in self.blocks:
            return self._of_blocks(name, places)
        return self._of(name, [seat for seat in self.seats[name] if seat.lone], Known(self.draws), places)

    def _of(self, name: str, seats: Sequence[Seat], known: Known, places: Tensor | None = None) -> Pairs:
        """The share of some axes: in the precision of the draws, and again in float64 where that isn't enough."""
        count = self.group[name].count if places is None else len(places)
        products = count * sum(known.sites[seat.axis.site].numel() for seat in seats)
        if self.like.dtype == torch.float64 or products <= FEW_PRODUCTS:
            return self._sum(name, seats, known, places, torch.float64)[0]
        found, squares = self._sum(name, seats, known, places, self.like.dtype)
        competing = found.total >= found.total.amax(-1, keepdim=True) - COMPETING
        squares = squares.abs() * competing * (competing.sum(-1, keepdim=True) > 1)
        if float(squares.amax()) * torch.finfo(squares.dtype).eps <= ROUNDING:
            return found
        return self._sum(name, seats, known, places, torch.float64)[0]

    def _sum(
        self, name: str, seats: Sequence[Seat], known: Known, places: Tensor | None, dtype: torch.dtype
    ) -> tuple[Pairs, Tensor]:
        """The matrix, and the part of it that other parts cancel."""
        flipped, count = "flip" in self.group[name].moves, self.group[name].count if places is None else len(places)
        even = odd = squares = self.like.new_zeros(1, self.like.shape[1], count, count, dtype=dtype)
        for axis, *sites in self._placed(name, seats, known):
            own = [
                rows(site, axis, site.dim() - 2)
                for site in (*sites, self.loc[axis.site][None], self.scale[axis.site][None])
            ]
            value, square, loc, scale = (part if places is None else part[..., places, :] for part in own)
            precision = scale.to(dtype).square().reciprocal()
            squares = squares - 0.5 * precision @ square.to(dtype).mT
            linear = (loc.to(dtype) * precision) @ value.to(dtype).mT
            even, odd = (even, odd + linear) if self._flips(name, axis) else (even + linear, odd)
        even, odd = (part.nan_to_num(0.0, 1e30, -1e30) for part in (even + squares, odd))
        return Pairs(even, odd if flipped else None), squares

    def _of_blocks(self, name: str, places: Tensor | None) -> Pairs:
        """The matrix of units with covariances of their own, by products of their entries."""
        chosen = slice(None) if places is None else places
        axes, (loc, precision) = [seat.axis for seat in self.seats[name]], (part[chosen] for part in self.blocks[name])
        parts = [rows(self.draws[a.site].double(), a, self.draws[a.site].dim() - 2)[..., chosen, :] for a in axes]
        linear = (precision @ loc.unsqueeze(-1)).squeeze(-1)

        def of(units: Tensor) -> Tensor:
            products = (units.unsqueeze(-1) * units.unsqueeze(-2)).flatten(-2)
            return (linear @ units.mT - 0.5 * precision.flatten(-2) @ products.mT).nan_to_num(0.0, 1e30, -1e30)

        here = of(torch.cat(parts, -1))
        if "flip" not in self.group[name].moves:
            return Pairs(here, None)
        there = of(torch.cat([-part if a.exponent % 2 else part for part, a in zip(parts, axes, strict=True)], -1))
        return Pairs((here + there) / 2, (here - there) / 2)

    # what is known of other sets --------------------------------------------------------------------------------------

    def of(self, name: str, known: Known) -> Pairs:
        """The matrix of one set, what lies inside its units included, up to a constant for each place."""
        if name not in self._matrices:
            self._matrices[name] = self.alone(name)
        found = self._matrices[name]
        if name in self.blocks:
            return found
        if seats := [seat for seat in self.seats[name] if not seat.lone]:
            found = found + self._of(name, seats, known)
        for child in (child for child in self.group.children(name) if child in self.seats):
            worth = self._matched(child, known)
            found = found + Pairs(worth, torch.zeros_like(worth))
        return found

    def _matched(self, name: str, known: Known) -> Tensor:
        """The worth of matchings inside each pair of outer units, ``(L, N, copies, copies)``."""
        pairs = blocks_of(self.of(name, known).total, self.group[name].copies)
        permuted = "permute" in self.group[name].moves and pairs.shape[-1] > 1
        return soft_permanent(pairs) if permuted else pairs.diagonal(dim1=-2, dim2=-1).sum(-1)

    def _placed(self, name: str, seats: Sequence[Seat], known: Known) -> Iterator[tuple[Axis, Tensor, Tensor]]:
        """Sites and their squares with all other units where they are drawn, or averaged over; without those of which
        nothing is known of some units that move the same entries."""
        for axis in (seat.axis for seat in seats if seat.beside <= known.drawn):
            members, value = self.group.members(axis.site), known.sites[axis.site]
            square, missing = value.square(), False
            for outer, own in members[axis.dim]:
                if outer in self.group.ancestors(name) and outer not in known.drawn and self._flips(outer, own):
                    value = value.index_fill(own.dim + 2, own.index.flatten().to(value.device), 0.0)  # of either sign
            for dim in members.keys() - {axis.dim}:
                names = [u for u, _ in members[dim] if u not in known.drawn]
                held = [(u, s) for u in names for s in self.seats[u] if (s.axis.site, s.axis.dim) == (axis.site, dim)]
                missing |= any(u not in known.expected for u in names) or any(s.beside for _, s in held)
                for u, seat in [] if missing else held:
                    mix, signed = known.expected[u]
                    line = (u, *self.group.ancestors(u))
                    flipping = any(self._flips(v, own) for v, own in members[dim] if v in line)
                    value = TRUST * averaged(value, seat.axis, signed if flipping else mix)
                    square = TRUST * averaged(square, seat.axis, mix)
            if not missing:
                yield axis, value, square

    def _flips(self, name: str, axis: Axis) -> bool:
        return "flip" in self.group[name].moves and axis.exponent % 2 == 1

    def expectations(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Expectations of each set before any is drawn; those found so far sharpen the next."""
        expected: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self.seats if self.shared(self.seats) else ():
            one, found = self.group[name], self.of(name, Known(self.draws, frozenset(), expected))
            inner = blocks_of(found.total, one.copies)
            still, copies = (torch.eye(n, dtype=inner.dtype, device=inner.device) for n in (one.size, one.copies))
            mix = doubly_stochastic(inner, 6) if "permute" in one.moves else still.expand_as(inner)
            sign = torch.ones_like(found.even) if found.odd is None else found.odd.tanh()
            whole, signed = (
                (mix * part[..., None, None]).transpose(-2, -3).flatten(-2).flatten(-3, -2)
                for part in ((copies, copies) if one.parent is None else expected[one.parent])
            )
            expected[name] = whole, signed * sign
        return expected


def blocks_of(matrix: Tensor, copies: int) -> Tensor:
    """``batch + (copies n, copies n)`` -> ``batch + (copies, copies, n, n)``."""
    size = matrix.shape[-1] // copies
    return matrix.unflatten(-1, (copies, size)).unflatten(-3, (copies, size)).transpose(-2, -3)


def averaged(value: Tensor, axis: Axis, mix: Tensor) -> Tensor:
    """A site, ``(L, N, *view)``, averaged over the units that may come to each place along one axis."""
    dim, index, mix = axis.dim + 2, axis.index.to(value.device), mix.to(value)
    units = value.index_select(dim, index.flatten()).unflatten(dim, index.shape).movedim(dim + 1, -1)
    mixed = (units.flatten(2, -2) @ mix.mT).unflatten(2, units.shape[2:-1])
    mixed = mixed.movedim(-1, dim + 1).flatten(dim, dim + 1)
    whole = value.expand(*mixed.shape[:2], *value.shape[2:]).clone()
    return whole.index_copy_(dim, index.flatten(), mixed)


# the proposal ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    """Draw elements for each of ``N`` draws.

    :return: the identity and ``count`` elements, batch shape ``(count + 1, N)``, and their log-probabilities.
    """
    group, like, shape = units.group, units.like, (count + 1, units.like.shape[1])
    known = Known(units.draws, frozenset(), units.expectations())
    permutations: Weights = {}
    signs: Weights = {}
    options: dict[str, Any] = {"batch_shape": shape, "device": like.device, "dtype": like.dtype}
    log_tau, element = like.new_zeros(shape, dtype=torch.float64), Element(group, **options)
    for number, name in enumerate(units.seats):
        one, pairs = group[name], units.of(name, known)
        # The copy that has come to each place, and the units that come to the places inside it.
        outer = torch.arange(one.copies, device=like.device) if one.parent is None else element.unit_index(one.parent)
        outer = outer.expand(*shape, one.copies).unsqueeze(-1)
        inside = torch.arange(one.size, device=like.device).expand(*shape, one.copies, one.size)
        if "permute" in one.moves and one.size > 1:
            own = blocks_of(pairs.total, one.copies).diagonal(dim1=-4, dim2=-3).movedim(-1, -3).flatten(1, 2)
            inside, told = (p.unflatten(1, (-1, one.copies)) for p in draw_matchings(own, count, like.dtype))
            log_tau = log_tau + told.sum(-1)
        images = torch.empty_like(inside).scatter_(-2, outer.expand_as(inside), inside)
        permutations[name] = images.reshape(*shape, *one.shape)
        if pairs.odd is not None:
            column = torch.arange(0, one.count, one.size, device=like.device).unsqueeze(-1) + inside
            odd = pairs.odd.expand(*shape, -1, -1).gather(-1, column.flatten(-2).unsqueeze(-1))[..., 0]
            drawn = torch.where(torch.rand_like(odd) < (2 * odd).sigmoid(), 1.0, -1.0).to(odd)
            drawn[0] = 1.0
            log_tau = log_tau + logsigmoid(2 * odd * drawn).sum(-1)
            source = (outer * one.size + inside).flatten(-2)
            signs[name] = torch.empty_like(drawn).scatter_(-1, source, drawn).reshape(*shape, *one.shape).to(like)
        element = Element(group, permutations, signs, **options)
        # In place are those sites that sets to come share: they see these units where they are drawn.
        coming = {axis.site for axis in group.axes(name)} & units.shared(list(units.seats)[number + 1 :])
        moved = {s: element.on_site(s, units.draws[s], units.draws[s].dim() - 2) for s in coming}
        known = replace(known, sites={**known.sites, **moved}, drawn=known.drawn | {name})
    return element, log_tau
