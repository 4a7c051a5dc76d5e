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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
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

    def _by_stack(self, positions: Tensor) -> list[list[Tensor]]:
        """Positions by stack, then by axis: ``(samples, arrays, length)`` each."""
        pieces = iter(positions.split(self._lengths, 1))
        return [
            [next(pieces).unflatten(1, (mass.shape[1], length)) for length in mass.shape[2:]] for mass in self._masses
        ]


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


def _padded(value: Tensor, depth: int, filler: float) -> Tensor:
    return torch.nn.functional.pad(value, (0, 0, 0, depth - len(value)), value=filler)
