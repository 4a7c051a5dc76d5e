r"""The leapfrog method, which all Hamiltonian kernels share, and a first guess of its step size."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_symmetric.mcmc.mass import Mass
from pyro_symmetric.mcmc.potential import Potential

MAX_ENERGY_ERROR = 1000.0  # beyond it a trajectory counts as divergent, as in Stan and Pyro


def leapfrog(
    potential: Potential,
    z: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    step_size: Tensor,
    mass: Mass,
    num_steps: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the Hamiltonian flow for ``num_steps`` steps: reversible, volume-preserving, energy error O(step²).

    :param z: positions ``(C, D)``; likewise ``momentum`` and ``gradient``, the potential's at ``z``.
    :param step_size: ``()``, or ``(C, 1)`` for each chain its own; negative ones go back in time.
    :return: positions, momenta, potential energy ``(C,)`` and gradient at the end.
    """
    p = momentum - 0.5 * step_size * gradient
    for k in range(num_steps):
        z = z + step_size * mass.velocity(p)
        energy, gradient = potential.value_and_grad(z)
        p = p - (step_size if k + 1 < num_steps else 0.5 * step_size) * gradient
    return z, p, energy, gradient


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """How far a trajectory's energy has moved, ``(C,)``; infinite where it left the support or all numbers behind."""
    error = after - before
    return torch.where(torch.isfinite(error), error, torch.inf)


def find_step_size(
    potential: Potential,
    z: Tensor,
    energy: Tensor,
    gradient: Tensor,
    step_size: Tensor,
    mass: Mass,
    target: float,
    max_tries: int = 60,
) -> Tensor:
    """Double or halve a step size until the mean acceptance of one leapfrog step crosses ``target``, as Stan does."""

    def accepts(step: Tensor) -> bool:
        momentum = mass.draw(z)
        _, p, new_energy, _ = leapfrog(potential, z, momentum, gradient, step, mass)
        error = energy_error(new_energy + mass.kinetic(p), energy + mass.kinetic(momentum))
        return bool((-error).clamp(max=0).exp().mean() > target)

    grow = accepts(step_size)
    for _ in range(max_tries):
        step_size = step_size * (2.0 if grow else 0.5)
        if accepts(step_size) != grow:
            break
    return step_size
