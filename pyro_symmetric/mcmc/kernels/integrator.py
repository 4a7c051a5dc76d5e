r"""Chains in phase space, the leapfrog method that moves them, and a first guess of its step size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.chain_statistics import rounding
from pyro_symmetric.mcmc.density.flat import Evaluate, repeat
from pyro_symmetric.mcmc.kernels.mass import Mass

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


def leapfrog(
    evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int | Tensor = 1
) -> PhasePoint:
    """Follow the Hamiltonian flow for ``num_steps`` steps: reversible, volume-preserving, energy error O(step²).

    :param evaluate: points ``(C, D)`` -> energy ``(C,)`` and gradient ``(C, D)``.
    :param step_size: ``()``, or ``(C, 1)`` for each chain its own; negative ones go back in time.
    :param num_steps: a number, or a tensor ``()`` on the CPU, so that one program serves trajectories of all lengths.
    """
    begun = _kicked(start, 0.5 * step_size)
    end: PhasePoint = repeat(evaluate, num_steps, _moved_and_kicked, begun, step_size, mass)
    return _kicked(end, -0.5 * step_size)


def one_step(evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass) -> PhasePoint:
    """:func:`leapfrog` of one step."""
    momentum = start.momentum - 0.5 * step_size * start.gradient
    z = start.z + step_size * mass.velocity(momentum)
    energy, gradient = evaluate(z)
    return PhasePoint(z, momentum - 0.5 * step_size * gradient, energy, gradient)


def _moved_and_kicked(evaluate: Evaluate, at: PhasePoint, step_size: Tensor, mass: Mass) -> PhasePoint:
    z = at.z + step_size * mass.velocity(at.momentum)
    return _kicked(PhasePoint(z, at.momentum, *evaluate(z)), step_size)


def _kicked(at: PhasePoint, step_size: Tensor) -> PhasePoint:
    return at._replace(momentum=at.momentum - step_size * at.gradient)


class Outcome(NamedTuple):
    """The outcome of an iteration of HMC, for C chains.

    :param after: where the chains are now.
    :param end: where their trajectories ended.
    :param acceptance: the probability of going there, ``(C,)``.
    :param energy: total energy of what was chosen, ``(C,)``.
    :param diverging: ``(C,)``.
    """

    after: PhasePoint
    end: PhasePoint
    acceptance: Tensor
    energy: Tensor
    diverging: Tensor


def trajectory(
    evaluate: Evaluate,
    z: Tensor,
    energy: Tensor,
    gradient: Tensor,
    noise: Tensor,
    chance: Tensor,
    step_size: Tensor,
    mass: Mass,
    num_steps: Tensor,
) -> Outcome:
    """An iteration of HMC as arithmetic: from points with their energies and gradients, with momenta of standard normal
    noise ``(C, D)``, by so many steps of sizes ``(C, 1)``, to the end where a uniform number ``(C,)`` accepts it."""
    start = PhasePoint(z, mass.momentum(noise), energy, gradient)
    before = start.total_energy(mass)
    end = leapfrog(evaluate, start, step_size, mass, num_steps)
    error = energy_error(end.total_energy(mass), before)
    after, acceptance, accept = decided(start, end, error, chance)
    return Outcome(after, end, acceptance, before + torch.where(accept, error, 0.0), error > MAX_ENERGY_ERROR)


def decided(start: PhasePoint, end: PhasePoint, error: Tensor, chance: Tensor) -> tuple[PhasePoint, Tensor, Tensor]:
    """Metropolis' decision by energy errors and uniform numbers ``(C,)``: the next points, the acceptance ``(C,)`` and
    whether each end was accepted."""
    acceptance = (-error).clamp(max=0).exp()
    accept = chance < acceptance
    return choose(accept, end, start), acceptance, accept


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """The change of a trajectory's energy, ``(C,)``; infinite where it left the support or all numbers behind.

    Far out, energies may be so large that rounding hides more than a unit. There what it may hide counts as none, or
    chains would be stuck: rounding alone would refuse every other step, however short. If that lasts while chains are
    sampled, :func:`~pyro_symmetric.diagnostics.blurred` says so.
    """
    error = after - before
    if error.dtype == torch.float32:
        blur = rounding(before)
        error = torch.where((blur > 1) & (error.abs() <= blur), 0.0, error)
    return error.nan_to_num(torch.inf, torch.inf, torch.inf)


def find_step_size(
    acceptance: Callable[[Tensor], Tensor], step_size: Tensor, target: float, max_tries: int = 60
) -> Tensor:
    """Double or halve a step size until the acceptance of one step crosses ``target``, as Stan does.

    :param acceptance: of chains, ``(C,)``, whose momenta are drawn anew, with a step size.
    :param step_size: of all chains, ``()``, whose mean acceptance counts; or of each one by itself, ``(C, 1)``.
    :return: in the shape of ``step_size``.
    """

    def accepts(step: Tensor) -> Tensor:
        found = acceptance(step)
        return (found[:, None] if step.dim() else found.mean()) > target

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
