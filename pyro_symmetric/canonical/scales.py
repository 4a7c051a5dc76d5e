r"""Sums of exponentials of log-scales, :math:`f(u) = \sum_t m_t e^{2 a_t \cdot u} - 2 b \cdot u`, minimised in batches.

Every entry :math:`m_t` of a site (a squared weight) is multiplied by :math:`e^{2 e u_i}` for each unit ``i`` on its
row, column, ..., with the exponent ``e`` of that axis. The multipliers factorise over axes, so that the sum is a
product of arrays with vectors, and autograd gives its gradient and products with its Hessian.

Steps that are best for each unit by itself come first; once no unit is far off, Newton's method with conjugate
gradients. Along a direction ``p``, :math:`|\varphi'''| \le L \varphi''` with :math:`L = \max_t |2 a_t \cdot p|`, so
that the step :math:`\log(1 + L) / L` never raises the sum and tends to a full one: no line search is needed.

Source: Sun & Tran-Dinh 2019, "Generalized self-concordant functions", case nu = 2 (the step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.groups.group import Group

STEPS, CG_STEPS = 500, 400
# From which imbalance on Newton's method takes over, and at which it ends.
FAR, TOLERANCE = 0.5, 1e-12
# An imbalance, or a curvature as a part of the diagonal's, that is hardly more than rounding.
ROUNDED = 1e-14


class _Positions(NamedTuple):
    """Positions of all axes of some sites, end to end, and the units that multiply them."""

    dims: tuple[tuple[int, ...], ...]  # for each site, its axes that units multiply
    lengths: list[int]  # of these axes
    units: Tensor  # (depth, positions); the number of all units for none
    exponents: Tensor  # (depth, positions)


def places(group: Group) -> dict[str, slice]:
    """The range of each set of units among all that scale."""
    found, start = {}, 0
    for name in group.names("scale"):
        found[name] = slice(start, start + group[name].count)
        start += group[name].count
    return found


def evened(group: Group, weights: Mapping[str, Tensor], free: Tensor) -> Tensor:
    r"""The log-scales of the free units at which weights are nearest to one, ``(samples, units)``.

    With :math:`x_t` the squares of all weights that aren't zero, after rescaling, they minimise
    :math:`\sum_t x_t - \log x_t`. That has a minimum whatever the weights are, and every point of an orbit leads to it.

    :param weights: sites of the view, ``(samples, *view_shape)``.
    :param free: bool ``(samples, units)``; the others stay at zero.
    """
    squares = {site: value.double().square() for site, value in weights.items()}
    counts = Sum(group, {site: (value > 0).double() for site, value in squares.items()}).masses()
    return Sum(group, squares).minimise(free, counts)[0]


def by_units(values: Tensor, group: Group, shape: torch.Size) -> dict[str, Tensor]:
    """Numbers of all units that scale, ``(samples, units)``, by name."""
    return {name: values[:, at].reshape(*shape, *group[name].shape) for name, at in places(group).items()}


@lru_cache(maxsize=256)
def _positions(group: Group, sites: tuple[str, ...], device: torch.device) -> _Positions:
    where, dims, axes = places(group), [], []
    none = sum(group[name].count for name in where)
    for site in sites:
        own = {}
        for dim, members in group.members(site).items():
            own[dim] = [(name, axis) for name, axis in members if name in where and axis.exponent]
        dims.append(tuple(sorted(dim for dim, members in own.items() if members)))
        axes += [(group.view_shapes[site][dim], own[dim]) for dim in dims[-1]]
    lengths = [length for length, _ in axes]
    depth = max((len(members) for _, members in axes), default=1)
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        units = torch.full((depth, sum(lengths)), none, device="cpu")
        exponents = torch.zeros(depth, sum(lengths), dtype=torch.float64, device="cpu")
        start = 0
        for length, members in axes:
            for name, axis in members:
                at = start + axis.index.cpu()
                k = next(k for k in range(depth) if bool((units[k, at] == none).all()))
                units[k, at] = where[name].start + torch.arange(axis.index.shape[1], device="cpu")
                exponents[k, at] = float(axis.exponent)
            start += length
        used = max(1, int((units != none).any(1).sum()))
        units, exponents = units[:used], exponents[:used]
        return _Positions(tuple(dims), lengths, units.to(device), exponents.to(device))


class Sum:
    """The sum of squares of rescaled weights as a function of log-scales ``(samples, units)``.

    :param group: its units that scale are the unknowns, in its order.
    :param squares: site -> what is multiplied, ``(samples, *view_shape)``, float64, not negative; one site at least.
    """

    def __init__(self, group: Group, squares: Mapping[str, Tensor]):
        first = next(iter(squares.values()))
        self._at = _positions(group, tuple(squares), first.device)
        self.num_units = sum(group[name].count for name in group.names("scale"))
        self._terms = []
        self._constant = first.new_zeros(len(first), dtype=torch.float64)
        with torch.inference_mode(False):  # autograd takes nothing that was made in that mode
            for value, dims in zip(squares.values(), self._at.dims, strict=True):
                rest = [dim + 1 for dim in range(value.dim() - 1) if dim not in dims]
                term = value.detach().sum(rest) if rest else value.detach().clone()
                if dims:
                    self._terms.append(term)
                else:
                    self._constant = self._constant + term

    def without(self, removed: Tensor) -> Sum:
        """The same sum without the entries that a removed unit multiplies, ``(samples, units)``."""
        kept = self._all_of(~removed).double()
        left = Sum.__new__(Sum)
        left._at, left.num_units, left._constant = self._at, self.num_units, self._constant
        left._terms = [
            math.prod((along.reshape(shape) for along, shape in axes), start=term)
            for term, axes in zip(self._terms, self._by_term(kept), strict=True)
        ]
        return left

    def value(self, u: Tensor) -> Tensor:
        """``f(u)`` of each sample, without a linear term."""
        return self._total((2 * self._laid(u)).exp())

    def pulls(self, positions: Tensor, side: int) -> Tensor:
        """Sum positions over the units that multiply them with an exponent of this sign (0: any), times its size."""
        factors = (side * self._at.exponents).clamp_min(0.0) if side else self._at.exponents
        total = positions.new_zeros(len(positions), self.num_units + 1)
        for units, exponents in zip(self._at.units, factors, strict=True):
            total.index_add_(1, units, positions * exponents)
        return total[:, :-1]

    def masses(self, multipliers: Tensor | None = None) -> Tensor:
        """Sums over all other axes at each position, times multipliers of all positions: ``(samples, positions)``."""
        samples = len(self._constant)
        like = self._at.exponents
        multipliers = like.new_ones(samples, like.shape[1]) if multipliers is None else multipliers
        return multipliers * _slope(self._total, multipliers)[0] if self._terms else multipliers

    def bounded(self) -> Tensor:
        """Units whose best scale is finite, bool ``(samples, units)``.

        Entries let mass flow from the units with negative exponents to those with positive ones. A unit to which none
        flows from outside can shrink, with all before it, for nothing; one from which none flows out can grow. What
        such units multiply vanishes, so that others may hang on it.
        """
        free = torch.ones(len(self._constant), self.num_units, dtype=torch.bool, device=self._at.units.device)
        left = self
        while True:
            found = left._reached(1) & left._reached(-1) & free
            if torch.equal(found, free):
                return free
            free, left = found, self.without(~found)

    def _reached(self, sign: int) -> Tensor:
        found = torch.zeros(len(self._constant), self.num_units, dtype=torch.bool, device=self._at.units.device)
        count = -1
        while count < (count := int(found.sum())):
            passes = self._all_of(found, sign * self._at.exponents >= 0)
            found = found | (self.pulls((self.masses(passes.double()) > 0).double(), sign) > 0)
        return found

    def minimise(self, free: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""The minimum over the free units, bool ``(samples, units)``; the others stay at zero.

        :param counts: numbers ``n`` at positions, for the linear term :math:`b = \sum n a`; without, each free unit
            must have mass on both sides.
        :returns: ``u`` and, per sample, the largest difference of what pulls a unit up and down, relative to their sum.
        """
        with torch.inference_mode(False):
            u, imbalance = torch.zeros_like(free, dtype=torch.float64), free.new_zeros(len(free), dtype=torch.float64)
            add = [self.pulls(counts, side) if counts is not None else 0.0 for side in (-1, 1)]
            worst = math.inf
            # With exponents of at most p, a unit's best step by itself is log(down / up) / 4 p or more. If at most k
            # units multiply one entry, all of them going a k-th of their ways never raises the sum, by convexity.
            overlap = len(self._at.units) * max((len(dims) for dims in self._at.dims), default=1)
            cautious = 4 * overlap * self._at.exponents.abs().amax().clamp_min(1.0) if self._terms else 1.0
            for _ in range(STEPS if free.numel() and self._terms else 0):
                gradient, hessian = _slope(lambda laid: self._total((2 * laid).exp()), self._laid(u))
                sides = [self.pulls(gradient / 2, side).clamp_min(1e-300) for side in (1, -1)]
                up, down = (torch.where(free, own + more, 1.0) for own, more in zip(sides, add, strict=True))
                imbalance = ((up - down).abs() / (up + down)).amax(-1)
                before, worst = worst, float(imbalance.max())
                # One step more than the tolerance asks for mostly reaches what rounding leaves.
                if worst <= ROUNDED or max(worst, before) <= TOLERANCE:
                    break
                if worst > FAR:
                    u = u + (down.log() - up.log()) / cautious
                else:
                    u = u + self._newton_step(hessian, down - up, torch.where(free, sides[0] + sides[1], 1.0), free)
        return u, imbalance

    # small steps ----------------------------------------------------------------------------------------------------

    def _newton_step(
        self, hessian: Callable[[Tensor], Tensor], downhill: Tensor, diagonal: Tensor, free: Tensor
    ) -> Tensor:
        """Newton's step, damped so that it never raises the sum."""
        # Solving ever more exactly as the gradient falls makes the outer iteration converge faster than linearly.
        size = (downhill / diagonal).abs().amax(-1, keepdim=True).clamp_min(1e-300)
        p = conjugate_gradients(
            lambda p: free * self.pulls(hessian(self._laid(p)), 0) / 2,
            downhill,
            2 * diagonal,
            torch.maximum(size, 0.1 * ROUNDED / size).clamp_max(0.1) ** 2,
        )
        steepest = [
            torch.stack([along.abs().amax(-1) for along, _ in axes]).sum(0) for axes in self._by_term(self._laid(p))
        ]
        longest = 2 * torch.stack(steepest, -1).amax(-1, keepdim=True)
        return p * torch.where(longest > 0, longest.log1p() / longest, 1.0)

    def _laid(self, u: Tensor) -> Tensor:
        """:math:`\\sum_j e_j u_j` at each position."""
        known = torch.cat([u, u.new_zeros(len(u), 1)], -1)
        return (known[:, self._at.units] * self._at.exponents).sum(1)

    def _all_of(self, units: Tensor, anyway: Tensor | bool = False) -> Tensor:
        """Positions all of whose units are among these, ``(samples, positions)``."""
        known = torch.cat([units, torch.ones_like(units[:, :1])], -1)
        return (known[:, self._at.units] | anyway).all(1)

    def _by_term(self, positions: Tensor) -> list[list[tuple[Tensor, list[int]]]]:
        """Positions by site, then by axis, each with the shape in which it lies along the site."""
        pieces = iter(positions.split(self._at.lengths, 1))
        return [
            [(own := next(pieces), [len(own), *(own.shape[1] if k == dim else 1 for k in dims)]) for dim in dims]
            for dims in self._at.dims
            if dims
        ]

    def _total(self, multipliers: Tensor) -> Tensor:
        """The sum of all entries of each sample, each times what multiplies its positions: ``(samples,)``."""
        total = self._constant
        for term, axes in zip(self._terms, self._by_term(multipliers), strict=True):
            left = term
            for own, _ in axes[:0:-1]:  # vectors from the left: as columns, a batch takes up to twenty times as long
                left = (own.unsqueeze(-2) @ left.flatten(1, -2).mT).reshape(left.shape[:-1])
            total = total + (left * axes[0][0]).sum(-1)
        return total


def _slope(function: Callable[[Tensor], Tensor], positions: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The gradient of a function ``(samples, P) -> (samples,)``, and its Hessian's product with directions."""
    with torch.inference_mode(False), torch.enable_grad():
        here = positions.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(here).sum(), here, create_graph=True)
    return gradient.detach(), lambda change: torch.autograd.grad(gradient, here, change, retain_graph=True)[0]


def conjugate_gradients(
    hessian: Callable[[Tensor], Tensor], downhill: Tensor, diagonal: Tensor, goal: Tensor
) -> Tensor:
    """Solve ``H p = downhill`` for each sample, preconditioned by (about) the diagonal.

    A sample whose next direction doesn't bend upwards is left where it is: units that scale the same entries have
    directions that change nothing, and only rounding to follow.

    :param goal: the part of the squared residual that may remain, ``(samples, 1)``.
    """
    residual, z = downhill, downhill / diagonal
    p, direction = torch.zeros_like(z), z
    rho = (residual * z).sum(-1, keepdim=True)
    goal, running = rho * goal, rho > 0
    for _ in range(CG_STEPS):
        running = running & (rho > goal)
        if not bool(running.any()):
            break
        h = hessian(direction)
        curvature = (direction * h).sum(-1, keepdim=True)
        running = running & (curvature > ROUNDED * (diagonal * direction.square()).sum(-1, keepdim=True))
        alpha = torch.where(running, rho / curvature.clamp_min(1e-300), 0.0)
        p, residual = p + alpha * direction, residual - alpha * h
        z = residual / diagonal
        before, rho = rho, (residual * z).sum(-1, keepdim=True)
        direction = z + torch.where(before > 0, rho / before.clamp_min(1e-300), 0.0) * direction
    return p
