r"""Chains in phase space, the leapfrog method that moves them, and a first guess of its step size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.eager import Evaluate
from pyro_symmetric.mcmc.kernels.mass import Mass
from pyro_symmetric.posterior.statistics import rounding

MAX_ENERGY_ERROR = 1000.0  # beyond it a trajectory counts as divergent, as in Stan and Pyro


class PhasePoint(NamedTuple):
    """Points of C chains in phase space; these fields a :class:`~pyro_symmetric.mcmc.State` has, too.

    :param z: positions ``(C, D)``; likewise ``momentum``.
    :param energy: potential energy at ``z``, ``(C,)``; ``gradient`` is its gradient ``(C, D)``.
    """

    z: Tensor
    momentum: Tensor
    energy: Tensor
    gradient: Tensor

    def total_energy(self, mass: Mass) -> Tensor:
        """Potential and kinetic energy, ``(C,)``."""
        return self.energy + mass.kinetic(self.momentum)


def choose(mask: Tensor, if_true: PhasePoint, if_false: PhasePoint) -> PhasePoint:
    """For each chain the one point or the other, by a mask ``(C,)``."""
    rows = mask[:, None]
    return PhasePoint(
        *(torch.where(mask if a.dim() == 1 else rows, a, b) for a, b in zip(if_true, if_false, strict=True))
    )


def leapfrog(evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass) -> PhasePoint:
    """One step along the Hamiltonian flow: reversible, volume-preserving, energy error O(step²).

    :param evaluate: points ``(C, D)`` -> energy ``(C,)`` and gradient ``(C, D)``.
    :param step_size: ``(C, 1)``; negative ones go back in time.
    """
    momentum = start.momentum - 0.5 * step_size * start.gradient
    z = start.z + step_size * mass.velocity(momentum)
    energy, gradient = evaluate(z)
    return PhasePoint(z, momentum - 0.5 * step_size * gradient, energy, gradient)


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """The change of a trajectory's energy, ``(C,)``; infinite where it left the support or all numbers behind.

    Far out, energies may be so large that rounding hides more than a unit. There what it may hide counts as none, or
    chains would be stuck: rounding alone would refuse every other step, however short. If that lasts while chains are
    sampled, :func:`~pyro_symmetric.posterior.diagnostics.blurred` says so.
    """
    error = after - before
    if error.dtype == torch.float32:
        blur = rounding(before)
        error = torch.where((blur > 1) & (error.abs() <= blur), 0.0, error)
    return error.nan_to_num(torch.inf, torch.inf, torch.inf)


def find_step_size(
    acceptance: Callable[[Tensor], Tensor], step_size: Tensor, target: float, alone: bool, max_tries: int = 60
) -> Tensor:
    """Double or halve step sizes ``(C,)`` until the acceptance of one step crosses ``target``, as Stan does.

    :param acceptance: step sizes -> acceptance, ``(C,)`` each, of chains whose momenta are drawn anew.
    :param alone: whether each chain finds its own; else their mean acceptance counts for all.
    """

    def accepts(step: Tensor) -> Tensor:
        found = acceptance(step)
        return (found if alone else found.mean().expand_as(found)) > target

    grow = accepts(step_size)
    factor, crossed = torch.where(grow, 2.0, 0.5).to(step_size), torch.zeros_like(grow)
    for _ in range(max_tries):
        step_size = torch.where(crossed, step_size, factor * step_size)
        crossed = crossed | (accepts(step_size) != grow)
        if bool(crossed.all()):
            break
    return step_size


def mapped(function: Callable[..., Tensor], *values: Any) -> Any:
    """Apply a function to every tensor of (nested) tuples and lists of one structure."""
    first = values[0]
    if isinstance(first, Tensor):
        return function(*values)
    parts = [mapped(function, *parts) for parts in zip(*values, strict=True)]
    return parts if isinstance(first, list) else type(first)(*parts)
