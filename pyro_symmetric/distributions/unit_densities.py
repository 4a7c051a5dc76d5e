r"""Log-densities of one unit's weights under another unit's factors: what matchings of units are made from.

For a base density whose weights are independent normals, and a set of units, the log-density of a moved draw is a sum
over positions, :math:`\log q(p \cdot w) = \sum_j A_{j\,p(j)} + \dots`, with

.. math:: A_{ji} = \sum_{a} \log \mathcal N(w_{i,a} \mid m_{j,a}, s_{j,a})
   = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big) + c_j ,

over all weights ``a`` of a unit, incoming and outgoing: an inner product of features of the draw, :math:`(w, w^2)`,
with features of the base. If a weight lies between two sets of units (a matrix between two hidden layers), the features
of the draw are first moved by the other set's permutation, or averaged over a doubly stochastic matrix in its place.

A unit that holds others (an attention head, a group of channels) has what is its own, and what a matching of the units
inside it has: with :math:`C` the densities of those, numbered through all copies,

.. math:: A_{ji} = A^{\text{own}}_{ji} + \sum_{\text{sets inside}} \log \sum_{c \in S_d} \exp \sum_b C_{(j,b)(i,c(b))} .

Of units with a covariance each, ``A`` is the normal log-density with unit ``j``'s mean and precision: an inner product
of :math:`(w_i, w_i w_i^\top)` with features of the base.

A unit with a sign has :math:`\log (e^{A_{ji}^+} + e^{A_{ji}^-})` in place of :math:`A_{ji}`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.distributions.matchings import soft_permanent
from pyro_symmetric.distributions.normals import Normals
from pyro_symmetric.distributions.permanent import log_permanent
from pyro_symmetric.distributions.placements import Placements
from pyro_symmetric.distributions.unit_sets import UnitAxis, unit_sets
from pyro_symmetric.groups.group import Group
from pyro_symmetric.placement import as_tensor
from pyro_symmetric.weights import Weights

# Entries of a matrix further than this below the best of their row are never drawn.
COMPETING = 50.0
# Rounding errors, in nats, beyond which a matrix is computed again in float64.
ROUNDING = 2e-3
# Products up to which a matrix is made in float64 at once: to find out how far rounding goes takes longer. A GPU makes
# more of them while the host waits for the answer.
FEW_PRODUCTS = {"cpu": 2**16, "cuda": 2**21}


@dataclass(frozen=True, eq=False)
class PairDensities:
    """The log-densities ``A`` of one set of units, ``(L, N, count, count)``: places by units, through all copies.

    :param even: what doesn't depend on the units' signs.
    :param odd: what changes its sign with them; None if they have none.
    """

    even: Tensor
    odd: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Summed over the sign of each unit."""
        if self.odd is None:
            return self.even
        size = self.odd.abs()
        return self.even + size + torch.log1p((-2 * size).exp())

    def plus(self, values: Sequence[Tensor]) -> PairDensities:
        """With a number more for each pair: the same for both signs of the unit, or one for each."""
        if len(values) == 1 or self.odd is None:
            return PairDensities(self.even + values[0], self.odd)
        return PairDensities(self.even + (values[0] + values[1]) / 2, self.odd + (values[0] - values[1]) / 2)


class UnitDensities:
    """The log-densities ``A`` of every set of units, for one base density and one batch of draws.

    :param group: whose units they are.
    :param base: the normals, in the group's view; leading dimension 1 if all draws share them.
    :param draws: site -> ``(N, *view_shape)``.
    :ivar like: the draws of one site, which tell ``N``, the precision and the device.
    """

    def __init__(self, group: Group, base: Normals, draws: Weights):
        self.group, self.base, self.draws = group, base, draws
        self.like = next(iter(draws.values()))
        self.sets = unit_sets(group, tuple(draws), self.like.device)
        self._known: dict[Any, PairDensities] = {}
        self._features: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self._places: dict[tuple[UnitAxis, ...], Tensor] = {}
        self._still: dict[str, Tensor] = {}  # set -> the share of sites that nothing else moves

    def densities(self, name: str, placements: Placements) -> PairDensities:
        """The matrix ``A`` of one set, what lies inside its units included, up to a constant for each place.

        :param placements: of the neighbours. Sites that units share with a set that isn't placed don't count.
        """
        if name in self._known:
            return self._known[name]
        own = self.sets[name]
        result = self.own_densities(name, placements)
        for child in own.inside:
            signs = (1.0, -1.0) if name in self.sets[child].outer_signs else (1.0,)
            inner = [self.densities(child, placements.assuming(name, sign)).total for sign in signs]
            result = result.plus([self._summed(child, total) for total in inner])
        if not own.waits and not own.outer_signs:
            self._known[name] = result
        return result

    def _summed(self, name: str, total: Tensor) -> Tensor:
        """Log-sums over the matchings of each pair of copies: ``(L, N, count, count)`` -> ``(.., copies, copies)``."""
        pairs = blocks(total, self.sets[name].units.copies)
        return self.log_sum(pairs) if self.sets[name].is_permuted else trace(pairs)

    def log_sum(self, pairs: Tensor) -> Tensor:
        """The logarithm of the sum over all matchings, ``batch + (n, n)`` -> ``batch``; here nearly."""
        return soft_permanent(pairs)

    def own_densities(self, name: str, placements: Placements) -> PairDensities:
        """The part of the matrix that is the units' own; zero, if nothing is known of what else moves them."""
        if name in self.base.blocks:
            return self._block_densities(name)
        if self._is_small(name):
            return PairDensities(self._product(name, placements))
        densities, squares = self._sum_of(name, placements, self.like.dtype)
        if densities.even.dtype != torch.float64 and _rounding_error(densities.total, squares) > ROUNDING:
            densities, _ = self._sum_of(name, placements, torch.float64)
        return densities

    def _is_small(self, name: str) -> bool:
        one = self.sets[name]
        if one.is_flipped or any(axis.signed for axis in one.axes):
            return False
        products = one.units.count * sum(self.draws[axis.own.site].numel() for axis in one.axes)
        return products <= FEW_PRODUCTS.get(self.like.device.type, 0)

    def _sum_of(self, name: str, placements: Placements, dtype: torch.dtype) -> tuple[PairDensities, Tensor]:
        """The matrix, computed in the given precision, and the part of it that other parts cancel."""
        own = self.sets[name]
        evens: list[Tensor] = []
        odds: list[Tensor] = []
        squares: list[Tensor] = []
        for axis in filter(placements.tell, own.axes):
            value, square, field, precision = self._features_of(axis.own.site, dtype)
            linear = axis.rows(placements.placed(value[None], axis, True), 2).mT
            quadratic = axis.rows(placements.placed(square[None], axis, False), 2).mT
            (odds if axis.flips else evens).append(axis.rows(field, 1) @ linear)
            squares.append(-0.5 * (axis.rows(precision, 1) @ quadratic))
        # If no flipped site counts yet, signs are open: expected to be zero, not plus one.
        nothing = self.like.new_zeros(1, 1, own.units.count, own.units.count, dtype=dtype)
        square, odd = sum(squares[1:], squares[0]) if squares else nothing, sum(odds[1:], odds[0]) if odds else nothing
        even = _finite(sum(evens, square))
        return PairDensities(even, _finite(odd) if own.is_flipped else None), square

    def _product(self, name: str, placements: Placements) -> Tensor:
        """The matrix of units without signs, in float64, by as few products as there are shapes of moved entries."""
        told = list(filter(placements.tell, self.sets[name].axes))
        still = [axis for axis in told if not axis.neighbours]
        if still and name not in self._still:
            self._still[name] = self._product_of(still, [self._pairs_of(axis.own.site)[0][None] for axis in still])
        alike: dict[Any, tuple[list[UnitAxis], list[Tensor]]] = {}
        for axis in told:
            if axis.neighbours:
                pairs, places = self._pairs_of(axis.own.site)
                moved = placements.placed(pairs[None], axis, True)
                axes, sites = alike.setdefault((moved.shape[:2], len(places)), ([], []))
                axes.append(axis)
                sites.append(moved)
        products = [self._product_of(axes, sites) for axes, sites in alike.values()]
        if still:
            products.append(self._still[name])
        if not products:
            count = self.sets[name].units.count
            return self.like.new_zeros(1, 1, count, count, dtype=torch.float64)
        return _finite(sum(products[1:], products[0]))

    def _product_of(self, axes: list[UnitAxis], sites: list[Tensor]) -> Tensor:
        """The share of some axes, of sites ``(L, N, *view_shape, 2)`` with all others in place."""
        if tuple(axes) not in self._places:
            self._places[tuple(axes)] = _joined([axis.rows(self._pairs_of(axis.own.site)[1], 1) for axis in axes])
        units = _joined([axis.rows(moved, 2) for axis, moved in zip(axes, sites, strict=True)])
        return self._places[tuple(axes)] @ units.mT

    def _block_densities(self, name: str) -> PairDensities:
        """The matrix of units with covariances of their own, by squares and products of a unit's entries, in float64.

        Both are centred at the mean of all places, so that they cancel less.
        """
        own, block = self.sets[name], self.base.blocks[name]
        units = torch.cat([axis.rows(self.draws[axis.own.site], 1) for axis in own.axes], -1).double()
        centre = block.loc.detach().mean(0)
        field = (block.precision @ (block.loc - centre).unsqueeze(-1)).squeeze(-1)

        def of(value: Tensor) -> Tensor:
            value = value - centre
            products = (value.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-2)
            total = field @ value.mT - 0.5 * (block.precision.flatten(-2) @ products.mT)
            return total.nan_to_num(0.0, 0.0, -1e30)[None]

        if not own.is_flipped:
            return PairDensities(of(units))
        signs = [
            torch.full_like(axis.rows(self.draws[axis.own.site], 1)[0, 0], -1.0 if axis.flips else 1.0)
            for axis in own.axes
        ]
        both = of(units), of(units * torch.cat(signs))
        return PairDensities((both[0] + both[1]) / 2, (both[0] - both[1]) / 2)

    def _features_of(self, site: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Draws and their squares, and their factors in a log-density: :math:`m / s^2`, and :math:`1 / s^2`, which
        counts minus a half.

        All are centred so that squares cancel less: the centre is one number for all positions that are exchanged, and
        zero if signs are flipped.
        """
        if (site, dtype) not in self._features:
            loc, by_dim = self.base.loc[site], self.group.members(site)
            members = [member for axes in by_dim.values() for member in axes]
            flipped = any("flip" in self.group[name].moves and axis.exponent % 2 for name, axis in members)
            centre = 0.0 if flipped else loc.detach().mean([dim + 1 for dim in by_dim], keepdim=True)
            precision = self.base.scale[site].to(dtype).square().reciprocal_()
            value, loc = (self.draws[site] - centre).to(dtype), (loc - centre).to(dtype)
            self._features[site, dtype] = (value, value.square(), loc * precision, precision)
        return self._features[site, dtype]

    def _pairs_of(self, site: str) -> tuple[Tensor, Tensor]:
        """Both features of each entry side by side, ``(.., *view_shape, 2)``, of the draws and of the base, in float64,
        made at once for all sites of small sets. Each site is centred at the mean of its first entry."""
        if not self._pairs:
            small = {axis.own.site for name, one in self.sets.items() if self._is_small(name) for axis in one.axes}
            sites = [one for one in self.draws if one in small]
            values, loc, scale = (
                torch.cat([part[one].reshape(len(part[one]), -1) for one in sites], -1).double()
                for part in (self.draws, self.base.loc, self.base.scale)
            )
            lengths = tuple(self.draws[one][0].numel() for one in sites)
            centre = loc[:, _firsts(lengths, loc.device)]
            values, loc, precision = values - centre, loc - centre, scale.square().reciprocal()
            pairs = torch.stack([values, values.square()], -1), torch.stack([loc * precision, -0.5 * precision], -1)
            for one, *own in zip(sites, *(part.split(lengths, 1) for part in pairs), strict=True):
                shape = self.draws[one].shape[1:]
                self._pairs[one] = own[0].reshape(-1, *shape, 2), own[1].reshape(-1, *shape, 2)
        return self._pairs[site]


class ExactUnitDensities(UnitDensities):
    """The matrices with exact sums over matchings.

    Every entry of a site must be moved by sets of which each lies inside the other only, along one axis; other sets
    must be applied to the draws already.
    """

    def log_sum(self, pairs: Tensor) -> Tensor:
        return log_permanent(pairs)

    def _is_small(self, name: str) -> bool:
        return False  # exact sums over matchings take longer in float64 than the matrix

    def own_densities(self, name: str, placements: Placements) -> PairDensities:
        around = sorted({member.name for axis in self.sets[name].axes for member in axis.around})
        key = ("own", name, *(placements.assumed[outer] for outer in around))
        if key not in self._known:
            self._known[key] = super().own_densities(name, placements)
        return self._known[key]

    def gain(self) -> Tensor:
        r""":math:`\log \sum_g q(g \cdot w) - \log q(w)` over all elements, ``(N,)``."""
        total: Tensor | float = 0.0
        upright = Placements(assumed=dict.fromkeys(self.sets, 1.0))
        for name, own in self.sets.items():
            densities = self.own_densities(name, upright)
            total = total - trace(densities.even if densities.odd is None else densities.even + densities.odd)
            if own.units.parent is None:
                whole = own_blocks(self.densities(name, Placements()).total, own.units.copies)
                total = total + (self.log_sum(whole) if own.is_permuted else trace(whole)).sum(-1)
        return as_tensor(total)[0]


# small steps --------------------------------------------------------------------------------------------------------


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


def _finite(densities: Tensor) -> Tensor:
    """Of a draw that isn't finite, too, which is matched anyhow; its density says what it is."""
    return densities.nan_to_num(0.0, 0.0, -1e30)


@functools.lru_cache(maxsize=64)
def _firsts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """For each entry of several sites, one after the other, the number of its site's first."""
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        starts = [sum(lengths[:site]) for site in range(len(lengths))]
        return torch.tensor(starts, device=device).repeat_interleave(torch.tensor(lengths, device=device))


def blocks(matrix: Tensor, copies: int) -> Tensor:
    """``batch + (copies n, copies n)`` -> ``batch + (copies, copies, n, n)``."""
    if copies == 1:
        return matrix[..., None, None, :, :]
    size = matrix.shape[-1] // copies
    return matrix.unflatten(-1, (copies, size)).unflatten(-3, (copies, size)).transpose(-2, -3)


def own_blocks(matrix: Tensor, copies: int) -> Tensor:
    """The blocks on the diagonal: ``batch + (copies, n, n)``."""
    if copies == 1:
        return matrix.unsqueeze(-3)
    return blocks(matrix, copies).diagonal(dim1=-4, dim2=-3).movedim(-1, -3)


def trace(matrix: Tensor) -> Tensor:
    """The sum of the diagonal, ``batch + (n, n)`` -> ``batch``."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _rounding_error(densities: Tensor, squares: Tensor) -> float:
    """About how far rounding may have moved the entries that compete: those near the best of their row, if several."""
    competing = densities >= densities.amax(-1, keepdim=True) - COMPETING
    competing &= competing.sum(-1, keepdim=True) > 1
    return float((squares.abs() * competing).amax()) * torch.finfo(densities.dtype).eps
