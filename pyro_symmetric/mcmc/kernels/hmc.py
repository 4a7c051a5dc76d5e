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

import torch

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.programs import run
from pyro_symmetric.mcmc.kernels.integrator import Outcome, PhasePoint, trajectory
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.randomness import normal, uniform
from pyro_symmetric.mcmc.kernels.warmup import HamiltonianKernel, HamiltonianTuning


@dataclass(frozen=True, eq=False, repr=False)
class HMC(HamiltonianKernel):
    r"""Hamiltonian Monte Carlo with adapted step size and mass matrix, and trajectories of a given length.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> kernel = ps.HMC(model, num_steps=5)
    >>> posterior = ps.sample(kernel, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["w"].shape
    torch.Size([4, 20, 3])

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
        return whole_steps(share * mean, self.max_steps, tuning.most_steps)


def whole_steps(steps: float, max_steps: int, most_now: int | None) -> int:
    """A number of leapfrog steps, rounded up, of at least 1 and at most what is allowed now."""
    limit = max_steps if most_now is None else min(max_steps, most_now)
    return max(1, min(math.ceil(steps - 1e-9), limit))


def transition(density: Density, state: State, num_steps: int) -> tuple[State, PhasePoint]:
    """One iteration of HMC with so many leapfrog steps: the next state, and where the trajectories ended."""
    tuning: HamiltonianTuning = state.tuning
    noise, chance = normal(state.z, state.generator), uniform(state.energy, state.generator)
    steps = tuning.steps.expand(len(state.z), 1).contiguous()
    found: Outcome = run(
        density,
        trajectory,
        state.z,
        state.energy,
        state.gradient,
        noise,
        chance,
        steps,
        tuning.mass,
        torch.tensor(num_steps, device="cpu"),
    )
    statistics = {
        "lp": -found.after.energy,
        "acceptance_rate": found.acceptance,
        "energy": found.energy,
        "diverging": found.diverging,
        "step_size": steps[:, 0],
        "n_steps": torch.full_like(found.energy, num_steps, dtype=torch.long),
    }
    return State(*found.after, tuning, state.generator, statistics), found.end
