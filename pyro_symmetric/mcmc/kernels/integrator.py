r"""Chains in phase space, the leapfrog method that moves them, and a first guess of its step size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.programs import Evaluate, compiles, run
from pyro_symmetric.mcmc.kernels.mass import Mass

MAX_ENERGY_ERROR = 1000.0  # beyond it a trajectory counts as divergent, as in Stan and Pyro


class PhasePoint(NamedTuple):
    """Where C chains are in phase space; these fields a :class:`~pyro_symmetric.mcmc.State` has, too.

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


def leapfrog(density: Density, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int = 1) -> PhasePoint:
    """Follow the Hamiltonian flow for ``num_steps`` steps: reversible, volume-preserving, energy error O(step²).

    :param step_size: ``()``, or ``(C, 1)`` for each chain its own; negative ones go back in time.
    """
    steps = torch.as_tensor(step_size).expand(len(start.z), 1).contiguous()
    if not compiles(density):
        return run(density, steps_of_leapfrog, start, steps, mass, num_steps=num_steps)
    for _ in range(num_steps):  # one program for trajectories of all lengths
        start = run(density, steps_of_leapfrog, start, steps, mass, num_steps=1)
    return start


def steps_of_leapfrog(
    evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int
) -> PhasePoint:
    """:func:`leapfrog` as arithmetic.

    :param step_size: ``(C, 1)``.
    """
    z, p = start.z, start.momentum - 0.5 * step_size * start.gradient
    energy, gradient = start.energy, start.gradient
    for k in range(num_steps):
        z = z + step_size * mass.velocity(p)
        energy, gradient = evaluate(z)
        p = p - (step_size if k + 1 < num_steps else 0.5 * step_size) * gradient
    return PhasePoint(z, p, energy, gradient)


def begun(
    evaluate: Evaluate, z: Tensor, energy: Tensor, gradient: Tensor, noise: Tensor, mass: Mass
) -> tuple[PhasePoint, Tensor]:
    """Chains with fresh momenta, of standard normal noise ``(C, D)``, and their total energies ``(C,)``."""
    start = PhasePoint(z, mass.momentum(noise), energy, gradient)
    return start, start.total_energy(mass)


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """How far a trajectory's energy has moved, ``(C,)``; infinite where it left the support or all numbers behind."""
    error = after - before
    return torch.where(torch.isfinite(error), error, torch.inf)


def find_step_size(
    density: Density,
    at: PhasePoint,
    step_size: Tensor,
    mass: Mass,
    target: float,
    generator: torch.Generator,
    max_tries: int = 60,
) -> Tensor:
    """Double or halve a step size until the mean acceptance of one leapfrog step crosses ``target``, as Stan does.

    :param at: where the chains are; their momenta are drawn anew.
    """

    def accepts(step: Tensor) -> bool:
        start = at._replace(momentum=mass.draw(at.z, generator))
        end = leapfrog(density, start, step, mass)
        error = energy_error(end.total_energy(mass), start.total_energy(mass))
        return bool((-error).clamp(max=0).exp().mean() > target)

    grow = accepts(step_size)
    for _ in range(max_tries):
        step_size = step_size * (2.0 if grow else 0.5)
        if accepts(step_size) != grow:
            break
    return step_size
