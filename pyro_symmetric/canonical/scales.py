r"""Sums of exponentials over units, :math:`f(u) = \sum_t m_t \exp(2 a_t \cdot u)`, minimised for a batch at once.

Every entry :math:`m_t` of an array (a squared weight) is multiplied by :math:`\exp(2 e\, u_i)` for each unit ``i`` that
its row, column, ... belongs to. The multipliers factorise over the axes, so that the sum is a product of arrays with
vectors; autograd gives its gradient and products with its Hessian. No array is ever exponentiated.

The minimum is found by steps that are exact for each unit by itself, until no unit is far off, then by Newton's
method with conjugate gradients. Along a direction ``p`` the function obeys :math:`|\varphi'''| \le L \varphi''` with
:math:`L = \max_t |2 a_t \cdot p|`, so that the step :math:`\log(1 + L) / L` never raises it and tends to a full one
(Sun & Tran-Dinh 2019, "Generalized self-concordant functions", case nu = 2): no line search is needed.

A library's L-BFGS comes as close in :math:`f`, but its line search stops where :math:`f` no longer tells points apart:
relative differences of 1e-8 to 1e-5 are left in the gradient, and of 1e-2 for units with next to no mass. On a batch of
samples it takes ten times as long, because one step must suit all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

STEPS = 500
# From which imbalance on Newton's method takes over.
FAR = 0.5
CG_STEPS = 400
# How many entries to stack: what a processor's cache holds, so that products from both sides read them once.
STACKED = 2**17
# An imbalance, or a curvature as a part of the diagonal's, that is hardly more than rounding.
ROUNDED = 1e-14
# The price of moving a set of units in a linear programme whose coefficients are exponents.
THRIFT = 1e-4


# The units that multiply each position of an axis, and their exponents, ``(depth, length)`` each.
Layers = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Array:
    """Entries :math:`m \\ge 0` and the units that their axes belong to.

    :param mass: float64 ``(samples, length_1, ..., length_k)``, ``k >= 1``.
    :param units: for each axis a LongTensor ``(depth, length)``: the units that multiply each position, ``num_units``
        for none. (``depth`` is 1 unless several factors meet at one position.)
    :param exponents: for each axis, ``(depth, length)``.
    """

    mass: Tensor
    units: tuple[Tensor, ...]
    exponents: tuple[Tensor, ...]


class Slope(NamedTuple):
    """The gradient of a function of positions, and its Hessian as a function of directions, ``(samples, P)`` each."""

    gradient: Tensor
    hessian: Callable[[Tensor], Tensor]


def slope_of(function: Callable[[Tensor], Tensor], positions: Tensor) -> Slope:
    """The derivatives of a function ``(samples, P) -> (samples,)`` somewhere."""
    with torch.inference_mode(False), torch.enable_grad():
        here = positions.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(here).sum(), here, create_graph=True)

    def hessian(change: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.autograd.grad(gradient, here, change.clone(), retain_graph=True)[0]

    return Slope(gradient.detach(), hessian)


class Balance:
    """The function ``f`` of a batch of samples, as a sum over arrays.

    Small arrays of one shape are stacked, and all axes of all stacks lie behind one another: in deep networks of narrow
    layers, calls of operators rather than their work are what takes time.

    :param arrays: the arrays; all have the same number of samples.
    :param num_units: the number of unknowns per sample.
    """

    def __init__(self, arrays: Sequence[Array], num_units: int):
        alike: dict[torch.Size, list[Array]] = {}
        for array in arrays:
            alike.setdefault(array.mass.shape, []).append(array)
        stacks = []
        for own in alike.values():
            together = max(1, STACKED // max(1, own[0].mass.numel()))
            stacks += [own[i : i + together] for i in range(0, len(own), together)]
        self.num_units = num_units
        # The most units that multiply one entry.
        self.order = max(sum(len(units) for units in array.units) for array in arrays)
        with torch.inference_mode(False):  # autograd takes nothing that was made in that mode
            self._masses = [torch.stack([a.mass.detach() for a in own], 1) for own in stacks]
        self._lengths = [len(own) * length for own in stacks for length in own[0].mass.shape[1:]]
        depth = max(units.shape[0] for array in arrays for units in array.units)
        units, exponents = (
            [
                _padded(getattr(a, kind)[d], depth, filler)
                for own in stacks
                for d in range(len(own[0].units))
                for a in own
            ]
            for kind, filler in (("units", num_units), ("exponents", 0.0))
        )
        self._units, self._exponents = torch.cat(units, -1), torch.cat(exponents, -1)
        highest = [self._exponents.new_ones(num_units + 1) for _ in range(2)]
        for side, powers in zip((1, -1), highest, strict=True):
            powers.scatter_reduce_(0, self._units.flatten(), side * self._exponents.flatten(), "amax")
        self.span = (highest[0] + highest[1])[:-1]

    def lay_out(self, u: Tensor) -> Tensor:
        """:math:`\\sum_j e_j u_j` at each position of each axis: ``(samples, units)`` -> ``(samples, positions)``."""
        known = torch.cat([u, u.new_zeros(u.shape[0], 1)], -1)
        if len(self._units) == 1:
            return known[:, self._units[0]] * self._exponents[0]
        return (known[:, self._units] * self._exponents).sum(1)

    def collect(self, positions: Tensor, side: int = 0) -> Tensor:
        """Sum positions over the units that they belong to, times their exponents: the transpose of the above.

        :param side: 1 or -1 sums only where exponents are positive or negative, times their magnitude.
        """
        factors = self._exponents if not side else (side * self._exponents).clamp_min(0.0)
        total = positions.new_zeros(positions.shape[0], self.num_units + 1)
        for units, exponents in zip(self._units, factors, strict=True):
            total.index_add_(1, units, positions * exponents)
        return total[:, :-1]

    def total(self, multipliers: Tensor) -> Tensor:
        """The sum of all entries of each sample, each times what multiplies its positions: ``(samples,)``."""
        sums = []
        for mass, axes in zip(self._masses, self._by_stack(multipliers), strict=True):
            left = mass
            for own in axes[
                :0:-1
            ]:  # vectors from the left: as columns a batch of them takes up to twenty times as long
                left = (own.unsqueeze(-2) @ left.flatten(2, -2).mT).reshape(left.shape[:-1])
            sums.append((left * axes[0]).sum((-1, -2)))
        return torch.stack(sums).sum(0)

    def masses_at(self, multipliers: Tensor) -> Tensor:
        """Sums over all other axes of each array, at each position: ``(samples, positions)``."""
        return multipliers * slope_of(self.total, multipliers).gradient

    def value(self, u: Tensor) -> Tensor:
        """:math:`f(u)` of each sample."""
        return self.total((2 * self.lay_out(u)).exp())

    def steepest(self, change: Tensor) -> Tensor:
        """A bound of :math:`|2 a_t \\cdot p|` over all entries, ``(samples, 1)``; exact if no entry is zero.

        :param change: what :meth:`lay_out` gives for ``p``.
        """
        sides = [
            torch.stack([(side * axis).amax(-1) for axis in axes]).sum(0).amax(-1)
            for axes in self._by_stack(change)
            for side in (1, -1)
        ]
        return 2 * torch.stack(sides, -1).amax(-1, keepdim=True)

    def reached(self, start: Tensor, outgoing: bool = False) -> Tensor:
        """Units to which mass flows from outside (``outgoing``: from which mass flows out), ``(samples, units)``.

        An entry lets mass flow from the units with negative exponents to those with positive ones. A unit that is not
        reached can shrink (or grow) with all that lies before (behind) it, for nothing: its best scale is not finite.

        :param start: units that count as reached from the start.
        """
        sign, found, count = -1 if outgoing else 1, start, -1
        while count < (count := int(found.sum())):
            known = torch.cat([found, torch.ones_like(found[:, :1])], -1)
            passes = (known[:, self._units] | (sign * self._exponents >= 0)).all(1).double()
            flow = self.masses_at(passes) > 0
            found = found | (self.collect(flow.double(), sign) > 0)
        return found

    def _by_stack(self, positions: Tensor) -> list[list[Tensor]]:
        """Positions by stack, then by axis: ``(samples, arrays, length)`` each."""
        pieces = iter(positions.split(self._lengths, 1))
        return [
            [next(pieces).unflatten(1, (mass.shape[1], length)) for length in mass.shape[2:]] for mass in self._masses
        ]


def without(array: Array, removed: Tensor) -> Array:
    """The same array without the entries that a removed unit multiplies, ``(samples, units)``."""
    keep, mass = torch.cat([~removed, torch.ones_like(removed[:, :1])], -1), array.mass
    for d, (units, exponents) in enumerate(zip(array.units, array.exponents, strict=True)):
        kept = (keep[:, units] | (exponents == 0)).all(1)
        mass = mass * kept.reshape(len(kept), *[-1 if i == d else 1 for i in range(mass.dim() - 1)])
    return Array(mass, array.units, array.exponents)


def receding(sites: Sequence[Sequence[Layers]], sets: Tensor, count: int) -> list[int]:
    r"""The sets of units that can shrink or grow together for nothing, although mass pulls each of them both ways.

    That is so if some direction ``d`` has :math:`a_t \cdot d \le 0` for all entries and less for one: a linear
    programme (Rockafellar 1970, "Convex analysis", theorem 27.1). Two multipliers that most entries have in common are
    an example, if a few shrink with one of them.

    :param sites: for each array, and each of its axes, the units that multiply positions, and their exponents.
    :param sets: the number of the set that each unit belongs to, all of which move alike; ``count`` for no unit (the
        last one), ``count + 1`` for units that are pinned: what they multiply is left out.
    :param count: the number of sets.
    """
    rows = {row for axes in sites for row in _directions(axes, sets, count)}
    if not rows:
        return []
    pulls = np.array(sorted(rows))
    # Few sets move: each costs a little. Variables are the positive and the negative part of the direction.
    costs = pulls.sum(0)
    found = linprog(
        np.concatenate([costs + THRIFT, THRIFT - costs]),
        np.hstack([pulls, -pulls]),
        np.zeros(len(pulls)),
        bounds=(0, 1),
    )
    direction = found.x[:count] - found.x[count:]
    moves = (pulls @ direction < -THRIFT).any()
    return (abs(direction) > THRIFT).nonzero()[0].tolist() if moves else []


def _directions(axes: Sequence[Layers], sets: Tensor, count: int) -> set[tuple[float, ...]]:
    """The different exponents that entries of an array have, by set."""
    found = []
    for units, exponents in axes:
        kinds = torch.cat([sets[units].double(), exponents]).unique(dim=1)  # positions are many, their kinds few
        members, powers = kinds.T.chunk(2, 1)
        own = torch.zeros(len(kinds.T), count + 2, dtype=torch.float64, device="cpu")
        own.scatter_add_(1, members.long(), powers)
        found.append(own[own[:, -1] == 0, :count])
    return {tuple(sum(parts).tolist()) for parts in itertools.product(*found)}


def minimise(balance: Balance, free: Tensor, tolerance: float = 1e-12) -> tuple[Tensor, Tensor]:
    """The minimum over the free units; the others stay at zero.

    :param free: bool ``(samples, units)``; each free unit must have mass on both sides.
    :param tolerance: how far the masses that pull a unit up and down may differ at the end, relative to their sum.
    :returns: ``u`` and, per sample, the largest relative difference that remains.
    """
    u = torch.zeros_like(free, dtype=torch.float64)
    worst = math.inf
    for _ in range(STEPS):
        slope = slope_of(lambda laid: balance.total((2 * laid).exp()), balance.lay_out(u))
        sides = (balance.collect(slope.gradient, side).clamp_min(1e-300) for side in (1, -1))
        up, down = (torch.where(free, mass, 1.0) for mass in sides)
        imbalance = ((up - down).abs() / (up + down)).amax(-1)
        before, worst = worst, float(imbalance.max()) if len(imbalance) else 0.0
        # One step more than the tolerance asks for mostly reaches what rounding leaves.
        if worst <= ROUNDED or max(worst, before) <= tolerance:
            break
        u = u + (_own_steps(balance, up, down) if worst > FAR else _newton_step(balance, slope, up, down, free))
    return u, imbalance


def least_logs(logs: Balance, counts: Balance, free: Tensor) -> Tensor:
    """The minimum of :math:`\\sum_t n_t (l_t / n_t + a_t \\cdot u)^2` over the free units: a linear problem.

    Units that no entry tells anything of stay at zero.

    :param logs: its masses are sums :math:`l_t` of logarithms.
    :param counts: its masses are the numbers :math:`n_t` of what was summed.
    :param free: bool ``(samples, units)``; the others stay at zero.
    """
    none = counts.lay_out(torch.zeros_like(free, dtype=torch.float64))
    numbers = counts.masses_at(none.exp())
    diagonal = counts.collect(numbers, 1) + counts.collect(numbers, -1)
    # Squares of sums are what exponentials of them have as second derivatives at zero.
    hessian = slope_of(lambda laid: counts.total(laid.exp()), none).hessian
    return conjugate_gradients(
        lambda p: free * counts.collect(hessian(counts.lay_out(p))),
        torch.where(free, -logs.collect(logs.masses_at(none.exp())), 0.0),
        torch.where(diagonal > 0, diagonal, 1.0),
        torch.full_like(diagonal[:, :1], ROUNDED**2),
    )


def conjugate_gradients(
    hessian: Callable[[Tensor], Tensor], downhill: Tensor, diagonal: Tensor, goal: Tensor, steps: int = CG_STEPS
) -> Tensor:
    """Solve ``H p = downhill`` for each sample, preconditioned by (about) the diagonal.

    A sample whose next direction doesn't bend upwards is left where it is; the very first one is taken if it bends
    downwards. Units that scale the same entries have directions that change nothing, and only rounding to follow.

    :param goal: the part of the squared residual that may remain, ``(samples, 1)``.
    """
    residual, z = downhill, downhill / diagonal
    p, direction = torch.zeros_like(z), z
    rho = (residual * z).sum(-1, keepdim=True)
    goal, running = rho * goal, rho > 0
    for number in range(steps):
        running = running & (rho > goal)
        if not bool(running.any()):
            break
        h = hessian(direction)
        curvature = (direction * h).sum(-1, keepdim=True)
        if number == 0:
            p = torch.where(running & (curvature < 0), direction, p)
        running = running & (curvature > ROUNDED * (diagonal * direction.square()).sum(-1, keepdim=True))
        alpha = torch.where(running, rho / curvature.clamp_min(1e-300), 0.0)
        p, residual = p + alpha * direction, residual - alpha * h
        z = residual / diagonal
        before, rho = rho, (residual * z).sum(-1, keepdim=True)
        direction = z + torch.where(before > 0, rho / before.clamp_min(1e-300), 0.0) * direction
    return p


# small steps --------------------------------------------------------------------------------------------------------


def _own_steps(balance: Balance, up: Tensor, down: Tensor) -> Tensor:
    """A share of the best step of each unit by itself: what is far off comes in, whatever its scale.

    If masses A and B pull a unit up and down, its best step is ``log(B / A) / 4`` with exponents 1 and -1, in general
    ``log(B / A) / (2 p + 2 q)`` with the largest exponents p and q, exact if there are no others. If at most ``k``
    units multiply one entry, all of them going a ``k``-th of their ways at once never raises the sum, by convexity.
    """
    return (down.log() - up.log()) / (2 * balance.span * balance.order)


def _newton_step(balance: Balance, slope: Slope, up: Tensor, down: Tensor, free: Tensor) -> Tensor:
    """Newton's step, damped so that it never raises the sum."""
    # Solving ever more exactly as the gradient falls makes the outer iteration converge faster than linearly.
    size = ((down - up) / (up + down)).abs().amax(-1, keepdim=True).clamp_min(1e-300)
    p = conjugate_gradients(
        lambda p: free * balance.collect(slope.hessian(balance.lay_out(p))),
        down - up,
        2 * (up + down),
        torch.maximum(size, 0.1 * ROUNDED / size).clamp_max(0.1) ** 2,
    )
    steepest = balance.steepest(balance.lay_out(p))
    return p * torch.where(steepest > 0, steepest.log1p() / steepest, 1.0)


def _padded(value: Tensor, depth: int, filler: float) -> Tensor:
    return torch.nn.functional.pad(value, (0, 0, 0, depth - len(value)), value=filler)
