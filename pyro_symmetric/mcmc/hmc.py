r"""Hamiltonian Monte Carlo of many chains at once (Duane et al. 1987; Neal 2011, arXiv 1206.1901).

Every iteration draws momenta :math:`p \sim \mathcal N(0, M)`, follows

.. math:: H(z, p) = U(z) + \tfrac12 p^\top M^{-1} p

by the leapfrog method and accepts each chain's end point with probability :math:`\min(1, e^{-\Delta H})`. The number of
steps is drawn anew each iteration, the same for all chains, independently of their state: that keeps every chain's
transition exact and all chains in step, so that one batched gradient serves them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.integrator import MAX_ENERGY_ERROR, energy_error, leapfrog
from pyro_symmetric.mcmc.kernel import State
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.warmup import HamiltonianKernel, Tuning

BLIND_STEPS = 32  # while the mass matrix is unknown, longer trajectories cost more than they teach


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Where the chains' trajectories ended, accepted or not.

    :param z: positions ``(C, D)``; likewise ``momentum``.
    :param acceptance: probability of accepting each, ``(C,)``.
    """

    z: Tensor
    momentum: Tensor
    acceptance: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class HMC(HamiltonianKernel):
    r"""Hamiltonian Monte Carlo with adapted step size and mass matrix, and trajectories of a given length.

    :param trajectory_length: mean length of a trajectory in integration time, in units where the mass matrix has made
        each coordinate's standard deviation 1. With full jitter, :math:`\pi / 2` is the shortest for which successive
        draws of a Gaussian are uncorrelated on average. Correlations that the mass matrix doesn't hold need more:
        :class:`~pyro_symmetric.mcmc.chees.ChEES` finds out how much.
    :param num_steps: mean number of leapfrog steps, instead of a length.
    :param jitter: lengths are uniform in ``mean * (1 - jitter, 1 + jitter)``, against resonance with the target's
        periods.
    :param max_steps: upper limit of the steps of one iteration.
    """

    trajectory_length: float = math.pi / 2
    num_steps: int | None = None
    jitter: float = 1.0
    max_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("trajectory_length", self.trajectory_length)
        arguments.whole("num_steps", self.num_steps, 1, none="trajectory_length over the step size")
        arguments.whole("max_steps", self.max_steps, 1)
        arguments.number("jitter", self.jitter, least=0, most=1)

    def step(self, potential: Potential, state: State) -> State:
        return transition(potential, state, self._draw_num_steps(state.tuning))[0]

    def _draw_num_steps(self, tuning: Tuning) -> int:
        low, high = 1 - self.jitter, 1 + self.jitter
        share = low + (high - low) * float(torch.rand(()))
        # The one place where an iteration waits for the device: a loop needs its length.
        mean = float(self.num_steps) if self.num_steps is not None else self.trajectory_length / float(tuning.step_size)
        return whole_steps(share * mean, self.max_steps, tuning.blind)


def whole_steps(steps: float, max_steps: int, blind: bool) -> int:
    """A number of leapfrog steps, rounded up, of at least 1 and at most what is allowed now."""
    limit = min(max_steps, BLIND_STEPS) if blind else max_steps
    return max(1, min(math.ceil(steps - 1e-9), limit))


def transition(potential: Potential, state: State, num_steps: int) -> tuple[State, Trajectory]:
    """One iteration of HMC with so many leapfrog steps: the next state, and where the trajectories ended."""
    tuning: Tuning = state.tuning
    momentum = tuning.mass.draw(state.z)
    before = state.potential + tuning.mass.kinetic(momentum)
    z, p, energy, gradient = leapfrog(
        potential, state.z, momentum, state.gradient, tuning.step_size, tuning.mass, num_steps
    )
    error = energy_error(energy + tuning.mass.kinetic(p), before)
    acceptance = (-error).clamp(max=0).exp()
    accept = torch.rand_like(acceptance) < acceptance
    chosen = accept[:, None]
    potential_energy = torch.where(accept, energy, state.potential)
    after = replace(
        state,
        z=torch.where(chosen, z, state.z),
        momentum=torch.where(chosen, p, momentum),
        potential=potential_energy,
        gradient=torch.where(chosen, gradient, state.gradient),
        statistics={
            "lp": -potential_energy,
            "acceptance_rate": acceptance,
            "energy": before + torch.where(accept, error, 0.0),
            "diverging": error > MAX_ENERGY_ERROR,
            "step_size": tuning.step_size.expand(len(z)),
            "n_steps": torch.full_like(acceptance, num_steps, dtype=torch.long),
        },
    )
    return after, Trajectory(z, p, acceptance)
