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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 500
FAR = 0.3
CG_STEPS = 400


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

    :param arrays: the arrays; all have the same number of samples.
    :param num_units: the number of unknowns per sample.
    """

    def __init__(self, arrays: Sequence[Array], num_units: int):
        self.arrays = list(arrays)
        self.num_units = num_units
        self.samples = self.arrays[0].mass.shape[0]
        self.axes = max(len(array.units) for array in self.arrays)
        # The most units that multiply one entry.
        self.order = max(sum(len(units) for units in array.units) for array in self.arrays)
        self.mass0 = self.arrays[0].mass.new_zeros(self.samples)
        # All axes of all arrays lie behind one another, so that units are looked up and summed once, not per array.
        self._lengths = [length for array in self.arrays for length in array.mass.shape[1:]]
        depth = max(units.shape[0] for array in self.arrays for units in array.units)
        self._units = torch.cat([_padded(u, depth, num_units) for a in self.arrays for u in a.units], -1)
        self._exponents = torch.cat([_padded(e, depth, 0.0) for a in self.arrays for e in a.exponents], -1)
        span = self.mass0.new_ones(num_units + 1), self.mass0.new_ones(num_units + 1)
        for side, extreme in zip((1, -1), span, strict=True):
            for units, exponents in zip(self._units, side * self._exponents, strict=True):
                extreme.scatter_reduce_(0, units, exponents, "amax")
        self.span = (span[0] + span[1])[:-1]

    def lay_out(self, u: Tensor) -> Tensor:
        """:math:`\\sum_j e_j u_j` at each position of each axis: ``(samples, units)`` -> ``(samples, positions)``."""
        known = torch.cat([u, u.new_zeros(u.shape[0], 1)], -1)
        return sum_over_depth(known[:, self._units] * self._exponents)

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
        xs = multipliers.unsqueeze(-1).split(self._lengths, 1)
        ys = xs if replaced is None else replaced.unsqueeze(-1).split(self._lengths, 1)
        pieces: list[Tensor] = []
        start = 0
        for array in self.arrays:
            stop = start + array.mass.dim() - 1
            pieces += _sums_over_others(array.mass, xs[start:stop], None if replaced is None else ys[start:stop])
            start = stop
        return multipliers * torch.cat(pieces, 1).squeeze(-1)

    def value(self, u: Tensor) -> Tensor:
        """:math:`f(u)` of each sample."""
        marginals = self.marginals((2 * self.lay_out(u)).exp())
        pieces = iter(marginals.split(self._lengths, -1))
        total = self.mass0
        for array in self.arrays:
            axes = [next(pieces) for _ in range(array.mass.dim() - 1)]
            total = total + axes[0].sum(-1)
        return total

    def reach(self, start: Tensor, outgoing: bool = False) -> Tensor:
        """Units to which mass flows from outside (``outgoing``: from which mass flows out), ``(samples, units)``.

        An entry lets mass flow from the units with negative exponents to those with positive ones. A unit that is not
        reached can shrink (or grow) with all that lies before (behind) it, for nothing: its best scale is not finite.

        :param start: units that count as reached from the start.
        """
        sign = -1 if outgoing else 1
        reached = torch.cat([start, torch.ones_like(start[:, :1])], -1)
        while True:
            before = int(reached.sum())
            for array in reversed(self.arrays) if outgoing else self.arrays:
                self._flow(array, reached, sign)
            if int(reached.sum()) == before:
                return reached[:, :-1]

    def _flow(self, array: Array, reached: Tensor, sign: int) -> None:
        passes = []
        for units, exponents in zip(array.units, array.exponents, strict=True):
            passes.append((reached[:, units] | (sign * exponents >= 0)).all(1).to(array.mass.dtype).unsqueeze(-1))
        sums = _sums_over_others(array.mass, passes, None)
        for units, exponents, own, others in zip(array.units, array.exponents, passes, sums, strict=True):
            flow = (own * others).squeeze(-1)
            for row, exponent in zip(units, exponents, strict=True):
                hit = ((flow > 0) & (sign * exponent > 0)).long()
                count = torch.zeros_like(reached, dtype=torch.long).index_add_(1, row, hit)
                reached |= count > 0

    def without(self, removed: Tensor) -> Balance:
        """The same sum without the entries that a removed unit multiplies, ``(samples, units)``."""
        keep = torch.cat([~removed, torch.ones_like(removed[:, :1])], -1)
        arrays = []
        for array in self.arrays:
            mass = array.mass
            for d, (units, exponents) in enumerate(zip(array.units, array.exponents, strict=True)):
                kept = (keep[:, units] | (exponents == 0)).all(1)
                if not bool(kept.all()):
                    mass = mass * kept.reshape(kept.shape[0], *[-1 if i == d else 1 for i in range(mass.dim() - 1)])
            arrays.append(Array(mass, array.units, array.exponents))
        return Balance(arrays, self.num_units)


def minimise(balance: Balance, free: Tensor, tolerance: float = 1e-12) -> tuple[Tensor, Tensor]:
    """The minimum over the free units; the others stay at zero.

    :param free: bool ``(samples, units)``; each free unit must have mass on both sides.
    :param tolerance: how far the masses that pull a unit up and down may differ at the end, relative to their sum.
    :returns: ``u`` and, per sample, the largest relative difference that remains.
    """
    u = torch.zeros_like(free, dtype=torch.float64)
    for _ in range(STEPS):
        x = (2 * balance.lay_out(u)).exp()
        marginals = balance.marginals(x)
        sides = (balance.collect(marginals, side).clamp_min(1e-300) for side in (1, -1))
        up, down = (torch.where(free, mass, 1.0) for mass in sides)
        imbalance = ((up - down).abs() / (up + down)).amax(-1)
        worst = float(imbalance.max()) if len(imbalance) else 0.0
        if worst <= tolerance:
            break
        u = u + (_own_steps(balance, up, down) if worst > FAR else _newton_step(balance, x, marginals, up, down, free))
    return u, imbalance


# small steps --------------------------------------------------------------------------------------------------------


def _own_steps(balance: Balance, up: Tensor, down: Tensor) -> Tensor:
    """A share of the best step of each unit by itself: what is far off comes in, whatever its scale.

    If masses A and B pull a unit up and down, its best step is ``log(B / A) / 4`` with exponents 1 and -1, in general
    ``log(B / A) / (2 p + 2 q)`` with the largest exponents p and q, exact if there are no others. If at most ``k``
    units multiply one entry, all of them going a ``k``-th of their ways at once never raises the sum, by convexity.
    """
    return (down.log() - up.log()) / (2 * balance.span * balance.order)


def _newton_step(balance: Balance, x: Tensor, marginals: Tensor, up: Tensor, down: Tensor, free: Tensor) -> Tensor:
    """Newton's step, damped so that it never raises the sum."""
    direction = _newton_direction(balance, x, marginals, up - down, up + down, free)
    steepest = 2 * balance.axes * balance.lay_out(direction).abs().amax(-1, keepdim=True)
    return direction * torch.where(steepest > 0, steepest.log1p() / steepest, 1.0)


def _newton_direction(
    balance: Balance, x: Tensor, marginals: Tensor, gradient: Tensor, diagonal: Tensor, free: Tensor
) -> Tensor:
    """Solve ``H p = -g`` by conjugate gradients, preconditioned by (about) the diagonal, for ``f / 2``.

    Its gradient is :math:`g = \\sum m a`, its Hessian :math:`H = 2 \\sum m a a^T`.
    """

    def hessian(p: Tensor) -> Tensor:
        change = balance.lay_out(p)
        return 2 * balance.collect(change * marginals + balance.marginals(x, replaced=x * change)) * free

    p = torch.zeros_like(gradient)
    residual = -gradient
    z = residual / diagonal
    direction = z
    rho = (residual * z).sum(-1, keepdim=True)
    # Solving ever more exactly as the gradient falls makes the outer iteration converge faster than linearly.
    size = (gradient.abs() / diagonal).amax(-1, keepdim=True)
    goal = rho * (size.clamp(1e-8, 0.1)) ** 2
    for _ in range(CG_STEPS):
        if bool((rho <= goal).all()):
            break
        h = hessian(direction)
        curvature = (direction * h).sum(-1, keepdim=True)
        alpha = torch.where(curvature > 0, rho / curvature.clamp_min(1e-300), 0.0)
        p = p + alpha * direction
        residual = residual - alpha * h
        z = residual / diagonal
        new = (residual * z).sum(-1, keepdim=True)
        direction = z + torch.where(rho > 0, new / rho.clamp_min(1e-300), 0.0) * direction
        rho = new
    return p


def _sums_over_others(mass: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor] | None) -> list[Tensor]:
    """For each axis, ``(.., n, 1)``: the array times ``xs`` (``ys`` on each other axis in turn), summed over those."""
    k = len(xs)
    if k == 1:
        return [mass.unsqueeze(-1) if ys is None else torch.zeros_like(xs[0])]
    if k == 2:
        rows, columns = xs if ys is None else ys
        return [torch.bmm(mass, columns), torch.bmm(mass.mT, rows)]
    if ys is None:
        return [_contract(mass, xs, d) for d in range(k)]
    mixed = [[ys[i] if i == j else xs[i] for i in range(k)] for j in range(k)]
    return [torch.stack([_contract(mass, mixed[j], d) for j in range(k) if j != d]).sum(0) for d in range(k)]


def _contract(mass: Tensor, vectors: Sequence[Tensor], kept: int) -> Tensor:
    """Multiply ``(samples, length_1, ...)`` by a vector along each axis but one, and sum over these axes."""
    operands = [part for i, v in enumerate(vectors) if i != kept for part in (v.squeeze(-1), [0, i + 1])]
    return torch.einsum(mass, list(range(mass.dim())), *operands, [0, kept + 1]).unsqueeze(-1)


def sum_over_depth(value: Tensor) -> Tensor:
    """Sum ``(samples, depth, positions)`` over the depth."""
    return value[:, 0] if value.shape[1] == 1 else value.sum(1)


def _padded(value: Tensor, depth: int, filler: float) -> Tensor:
    return torch.nn.functional.pad(value, (0, 0, 0, depth - len(value)), value=filler)
