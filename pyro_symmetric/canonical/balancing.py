r"""Sums of exponentials over units, :math:`f(u) = \sum_t m_t \exp(2 a_t \cdot u)`, minimised for a batch at once.

Every entry :math:`m_t` of an array (a squared weight) is multiplied by :math:`\exp(2 e\, u_i)` for each unit ``i`` that
its row, column, ... belongs to. Because the multipliers factorise over the axes, a value, a gradient and a product with
the Hessian each cost a few matrix-vector products with the arrays of :math:`m`; no array is ever exponentiated.

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
from collections.abc import Sequence
from dataclasses import dataclass

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
        self._masses = [torch.stack([a.mass for a in own], 1) if own[1:] else own[0].mass[:, None] for own in stacks]
        self._has_volumes = any(mass.dim() > 4 for mass in self._masses)  # with three axes or more
        self._lengths = [len(own) * length for own in stacks for length in own[0].mass.shape[1:]]
        firsts = [i == 0 for own in stacks for i, n in enumerate(own[0].mass.shape[1:]) for _ in range(len(own) * n)]
        # Positions of one axis of each stack: their marginals count every entry once.
        self._once = torch.tensor(firsts, device="cpu").nonzero().flatten().to(arrays[0].mass.device)
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

    def marginals(self, multipliers: Tensor, replaced: Tensor | None = None) -> Tensor:
        """Sums over all other axes of each array, at each position: ``(samples, positions)``.

        :param multipliers: what multiplies each position.
        :param replaced: if given, this stands for the multipliers of each *other* axis in turn, and the sums of these
            are added up; the position's own axis keeps its multiplier.
        """
        given = self._by_stack(multipliers if replaced is None else replaced)
        kept = given if replaced is None or not self._has_volumes else self._by_stack(multipliers)
        sums = [
            value
            for mass, xs, ys in zip(self._masses, kept, given, strict=True)
            for value in _sums_over_others(mass, xs, None if replaced is None else ys)
        ]
        return multipliers * torch.cat(sums, 1)

    def value(self, u: Tensor) -> Tensor:
        """:math:`f(u)` of each sample."""
        return self.total(self.marginals((2 * self.lay_out(u)).exp()))

    def total(self, marginals: Tensor) -> Tensor:
        """The sum of all entries of each sample, from sums at each position."""
        return marginals[:, self._once].sum(-1)

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

    def _by_stack(self, positions: Tensor) -> list[list[Tensor]]:
        """Positions by stack, then by axis: ``(samples, arrays, length)`` each."""
        pieces = iter(positions.split(self._lengths, 1))
        return [
            [next(pieces).unflatten(1, (mass.shape[1], length)) for length in mass.shape[2:]] for mass in self._masses
        ]


def reached(arrays: Sequence[Array], start: Tensor, outgoing: bool = False) -> Tensor:
    """Units to which mass flows from outside (``outgoing``: from which mass flows out), ``(samples, units)``.

    An entry lets mass flow from the units with negative exponents to those with positive ones. A unit that is not
    reached can shrink (or grow) with all that lies before (behind) it, for nothing: its best scale is not finite.

    :param start: units that count as reached from the start.
    """
    sign = -1 if outgoing else 1
    found = torch.cat([start, torch.ones_like(start[:, :1])], -1)
    count = -1
    while count < (count := int(found.sum())):
        for array in reversed(arrays) if outgoing else arrays:
            axes = list(zip(array.units, array.exponents, strict=True))
            passes = [(found[:, units] | (sign * powers >= 0)).all(1)[:, None].to(array.mass) for units, powers in axes]
            sums = _sums_over_others(array.mass[:, None], passes)
            for (units, powers), own, others in zip(axes, passes, sums, strict=True):
                flow = own[:, 0] * others > 0
                for row, exponents in zip(units, sign * powers, strict=True):
                    found |= (
                        torch.zeros_like(found, dtype=torch.long).index_add_(1, row, (flow & (exponents > 0)).long())
                        > 0
                    )
    return found[:, :-1]


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
        x = (2 * balance.lay_out(u)).exp()
        marginals = balance.marginals(x)
        sides = (balance.collect(marginals, side).clamp_min(1e-300) for side in (1, -1))
        up, down = (torch.where(free, mass, 1.0) for mass in sides)
        imbalance = ((up - down).abs() / (up + down)).amax(-1)
        before, worst = worst, float(imbalance.max()) if len(imbalance) else 0.0
        # One step more than the tolerance asks for mostly reaches what rounding leaves.
        if worst <= ROUNDED or max(worst, before) <= tolerance:
            break
        u = u + (_own_steps(balance, up, down) if worst > FAR else _newton_step(balance, x, marginals, up, down, free))
    return u, imbalance


def least_logs(logs: Balance, counts: Balance, free: Tensor) -> Tensor:
    """The minimum of :math:`\\sum_t n_t (l_t / n_t + a_t \\cdot u)^2` over the free units: a linear problem.

    It is solved by conjugate gradients; units that no entry tells anything of stay at zero.

    :param logs: its masses are sums :math:`l_t` of logarithms.
    :param counts: its masses are the numbers :math:`n_t` of what was summed.
    :param free: bool ``(samples, units)``; the others stay at zero.
    """
    ones = torch.ones_like(counts.lay_out(torch.zeros_like(free, dtype=torch.float64)))
    numbers = counts.marginals(ones)
    diagonal = counts.collect(numbers, 1) + counts.collect(numbers, -1)
    diagonal = torch.where(diagonal > 0, diagonal, 1.0)
    residual = torch.where(free, -logs.collect(logs.marginals(ones)), 0.0)
    u, z = torch.zeros_like(residual), residual / diagonal
    direction, rho = z, (residual * z).sum(-1, keepdim=True)
    goal = ROUNDED**2 * rho
    for _ in range(CG_STEPS):
        if bool((rho <= goal).all()):
            break
        change = counts.lay_out(direction)
        h = free * counts.collect(change * numbers + counts.marginals(ones, replaced=change))
        curvature = (direction * h).sum(-1, keepdim=True)
        alpha = torch.where(
            _bends(curvature, diagonal, direction) & (rho > goal), rho / curvature.clamp_min(1e-300), 0.0
        )
        u, residual = u + alpha * direction, residual - alpha * h
        z = residual / diagonal
        before, rho = rho, torch.where(alpha > 0, (residual * z).sum(-1, keepdim=True), 0.0)
        direction = z + torch.where(before > 0, rho / before.clamp_min(1e-300), 0.0) * direction
    return u


# small steps --------------------------------------------------------------------------------------------------------


def _own_steps(balance: Balance, up: Tensor, down: Tensor) -> Tensor:
    """A share of the best step of each unit by itself: what is far off comes in, whatever its scale.

    If masses A and B pull a unit up and down, its best step is ``log(B / A) / 4`` with exponents 1 and -1, in general
    ``log(B / A) / (2 p + 2 q)`` with the largest exponents p and q, exact if there are no others. If at most ``k``
    units multiply one entry, all of them going a ``k``-th of their ways at once never raises the sum, by convexity.
    """
    return (down.log() - up.log()) / (2 * balance.span * balance.order)


def _newton_step(balance: Balance, x: Tensor, marginals: Tensor, up: Tensor, down: Tensor, free: Tensor) -> Tensor:
    """Newton's step, damped so that it never raises the sum.

    Conjugate gradients, preconditioned by (about) the diagonal, solve ``H p = -g`` for ``f / 2``, whose gradient is
    :math:`g = \\sum m a` and whose Hessian is :math:`H = 2 \\sum m a a^T`.
    """
    diagonal, residual = up + down, down - up
    z = residual / diagonal
    p, direction = torch.zeros_like(z), z
    rho = (residual * z).sum(-1, keepdim=True)
    # Solving ever more exactly as the gradient falls makes the outer iteration converge faster than linearly.
    size = z.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    goal = rho * torch.maximum(size, 0.1 * ROUNDED / size).clamp_max(0.1) ** 2
    for _ in range(CG_STEPS):
        if bool((rho <= goal).all()):
            break
        change = balance.lay_out(direction)
        h = 2 * free * balance.collect(change * marginals + balance.marginals(x, replaced=x * change))
        curvature = (direction * h).sum(-1, keepdim=True)
        alpha = torch.where(_bends(curvature, diagonal, direction), rho / curvature.clamp_min(1e-300), 0.0)
        p, residual = p + alpha * direction, residual - alpha * h
        z = residual / diagonal
        before, rho = rho, torch.where(alpha > 0, (residual * z).sum(-1, keepdim=True), 0.0)
        direction = z + torch.where(before > 0, rho / before.clamp_min(1e-300), 0.0) * direction
    steepest = balance.steepest(balance.lay_out(p))
    return p * torch.where(steepest > 0, steepest.log1p() / steepest, 1.0)


def _bends(curvature: Tensor, diagonal: Tensor, direction: Tensor) -> Tensor:
    """True if conjugate gradients may follow a direction. Units that scale the same entries have directions that change
    nothing, along which there is only rounding to follow."""
    return curvature > ROUNDED * (diagonal * direction.square()).sum(-1, keepdim=True)


def _sums_over_others(mass: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor] | None = None) -> list[Tensor]:
    """For each axis of a stack: its entries times ``xs`` (``ys`` on each other axis in turn), summed over the others.

    :param mass: ``(samples, arrays, length_1, ...)``.
    :param xs: for each axis ``(samples, arrays, length)``; of one or two axes only needed if ``ys`` isn't given.
    :return: for each axis ``(samples, arrays * length)``.
    """
    k = len(xs)
    if k == 1:
        return [(mass if ys is None else torch.zeros_like(mass)).flatten(1)]
    if k == 2:
        rows, columns = xs if ys is None else ys
        # Vectors as rows from the left: the other way round, a batch of matrices takes up to twenty times as long.
        flat = mass.flatten(0, 1)
        rows, columns = rows.reshape(len(flat), 1, -1), columns.reshape(len(flat), 1, -1)
        samples = mass.shape[0]
        return [torch.bmm(columns, flat.mT).reshape(samples, -1), torch.bmm(rows, flat).reshape(samples, -1)]
    if ys is None:
        return [_contract(mass, xs, d).flatten(1) for d in range(k)]
    mixed = [[ys[i] if i == j else xs[i] for i in range(k)] for j in range(k)]
    terms = [[_contract(mass, mixed[j], d) for j in range(k) if j != d] for d in range(k)]
    return [torch.stack(own).sum(0).flatten(1) for own in terms]


def _contract(mass: Tensor, vectors: Sequence[Tensor], kept: int) -> Tensor:
    """Multiply by a vector along each axis but one, and sum over these axes."""
    operands = [part for i, v in enumerate(vectors) if i != kept for part in (v, [0, 1, i + 2])]
    return torch.einsum(mass, list(range(mass.dim())), *operands, [0, 1, kept + 2])


def _padded(value: Tensor, depth: int, filler: float) -> Tensor:
    return torch.nn.functional.pad(value, (0, 0, 0, depth - len(value)), value=filler)
