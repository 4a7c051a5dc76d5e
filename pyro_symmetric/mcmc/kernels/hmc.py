r"""Hamiltonian Monte Carlo of many chains at once (Duane et al. 1987; Neal 2011, arXiv 1206.1901).

Every iteration draws momenta :math:`p \sim \mathcal N(0, M)`, follows

.. math:: H(z, p) = U(z) + \tfrac12 p^\top M^{-1} p

by the leapfrog method and accepts each chain's end point with probability :math:`\min(1, e^{-\Delta H})`. The number of
steps is drawn anew each iteration, the same for all chains, independently of their state: that keeps every chain's
transition exact and all chains in step, so that one batched gradient serves them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.programs import Evaluate, run
from pyro_symmetric.mcmc.kernels.integrator import (
    MAX_ENERGY_ERROR,
    PhasePoint,
    begun,
    choose,
    energy_error,
    leapfrog,
)
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.mass import Mass
from pyro_symmetric.mcmc.kernels.randomness import normal, uniform
from pyro_symmetric.mcmc.kernels.warmup import HamiltonianKernel, HamiltonianTuning

BLIND_STEPS = 32  # while the mass matrix is unknown, longer trajectories cost more than they teach


@dataclass(frozen=True, eq=False, repr=False)
class HMC(HamiltonianKernel):
    r"""Hamiltonian Monte Carlo with adapted step size and mass matrix, and trajectories of a given length.

    :param trajectory_length: mean length of a trajectory in integration time, in units where the mass matrix has made
        each coordinate's standard deviation 1. With full jitter, :math:`\pi / 2` is the shortest for which successive
        draws of a Gaussian are uncorrelated on average. Correlations that the mass matrix doesn't hold need more:
        :class:`~pyro_symmetric.mcmc.kernels.adaptive_hmc.AdaptiveHMC` finds out how much.
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

    def step(self, density: Density, state: State) -> State:
        return transition(density, state, self._draw_num_steps(state))[0]

    def _draw_num_steps(self, state: State) -> int:
        tuning: HamiltonianTuning = state.tuning
        # The one place where an iteration waits for the device: a loop needs its length.
        fraction, step_size = torch.stack([uniform(tuning.step_size, state.generator), tuning.step_size]).tolist()
        share = 1 + self.jitter * (2 * fraction - 1)
        mean = self.trajectory_length / step_size if self.num_steps is None else self.num_steps
        return whole_steps(share * mean, self.max_steps, tuning.blind)


def whole_steps(steps: float, max_steps: int, blind: bool) -> int:
    """A number of leapfrog steps, rounded up, of at least 1 and at most what is allowed now."""
    limit = min(max_steps, BLIND_STEPS) if blind else max_steps
    return max(1, min(math.ceil(steps - 1e-9), limit))


def transition(density: Density, state: State, num_steps: int) -> tuple[State, PhasePoint]:
    """One iteration of HMC with so many leapfrog steps: the next state, and where the trajectories ended."""
    tuning: HamiltonianTuning = state.tuning
    noise = normal(state.z, state.generator)
    start, before = run(density, begun, state.z, state.energy, state.gradient, noise, tuning.mass)
    end = leapfrog(density, start, tuning.steps, tuning.mass, num_steps)
    chance = uniform(before, state.generator)
    after: PhasePoint
    after, found = run(density, _ended, start, end, before, chance, tuning.mass)
    statistics = {
        **found._asdict(),
        "step_size": tuning.steps.expand(len(before), 1)[:, 0],
        "n_steps": torch.full_like(before, num_steps, dtype=torch.long),
    }
    return State(*after, tuning, state.generator, statistics), end


class _Statistics(NamedTuple):
    lp: Tensor
    acceptance_rate: Tensor
    energy: Tensor
    diverging: Tensor


def _ended(
    evaluate: Evaluate, start: PhasePoint, end: PhasePoint, before: Tensor, chance: Tensor, mass: Mass
) -> tuple[PhasePoint, _Statistics]:
    error = energy_error(end.total_energy(mass), before)
    acceptance = (-error).clamp(max=0).exp()
    accept = chance < acceptance
    after = choose(accept, end, start)
    energy = before + torch.where(accept, error, 0.0)
    return after, _Statistics(-after.energy, acceptance, energy, error > MAX_ENERGY_ERROR)
