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

from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.compiled import run
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import BLIND_STEPS, HamiltonianKernel, HamiltonianTuning
from pyro_symmetric.mcmc.kernels.kernel import State, uniform
from pyro_symmetric.mcmc.kernels.phase_space import (
    MAX_ENERGY_ERROR,
    choose,
    energy_error,
    leapfrog,
    with_fresh_momenta,
)


@dataclass(frozen=True, eq=False, repr=False)
class HMC(HamiltonianKernel):
    r"""Hamiltonian Monte Carlo with adapted step size and mass matrix, and trajectories of a given length.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> kernel = ps.HMC(model, num_steps=5)
    >>> posterior = ps.sample(kernel, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["w"].shape
    torch.Size([4, 20, 3])

    Other settings are those of :class:`~pyro_symmetric.mcmc.NUTS`.

    :param trajectory_length: mean length of a trajectory in integration time, in units where the mass matrix has made
        each coordinate's standard deviation 1. Each one's is uniform between 0 and twice the mean, against resonance
        with the target's periods. :math:`\pi / 2` is the shortest for which successive draws of a Gaussian are
        uncorrelated on average. Correlations that the mass matrix doesn't hold need more:
        :class:`~pyro_symmetric.mcmc.kernels.adaptive_hmc.AdaptiveHMC` finds out how much.
    :param num_steps: mean number of leapfrog steps, instead of a length.
    :param max_steps: upper limit of the steps of one iteration.
    """

    trajectory_length: float = math.pi / 2
    num_steps: int | None = None
    max_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("trajectory_length", self.trajectory_length)
        arguments.whole("num_steps", self.num_steps, 1, none="trajectory_length over the step size")
        arguments.whole("max_steps", self.max_steps, 1)

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        fraction = uniform(tuning.step_size[0], state.generator).double()
        steps = 2 * fraction * (self.num_steps or self.trajectory_length)
        if self.num_steps is None:
            steps = steps / typical(tuning.step_size)
        return trajectory(density, state, whole_steps(steps, self.max_steps, tuning))


def trajectory(density: Density, state: State, num_steps: int) -> State:
    """An iteration: fresh momenta, so many steps, and Metropolis' decision."""
    tuning: HamiltonianTuning = state.tuning
    mass, steps = tuning.mass, tuning.step_size[:, None]
    start = end = with_fresh_momenta(state, mass)
    for _ in range(num_steps):
        end = run(density, leapfrog, end, steps, mass)
    before, after = start.total_energy(mass), end.total_energy(mass)
    error = energy_error(after, before)
    acceptance = (-error).clamp(max=0).exp()
    accept = uniform(error, state.generator) < acceptance
    at, diverging = choose(accept, end, start), error > MAX_ENERGY_ERROR
    statistics = {
        "lp": -at.energy,
        "acceptance_rate": acceptance,
        "energy": after.where(accept, before),
        "diverging": diverging,
        "step_size": tuning.step_size,
        "n_steps": diverging.long().fill_(num_steps),
    }
    return State(*at, tuning, state.generator, statistics)


def typical(step_size: Tensor) -> Tensor:
    """The step size ``()`` of all by which trajectories are measured, in double precision."""
    return step_size.median().double()


def whole_steps(steps: Tensor, max_steps: int, tuning: HamiltonianTuning) -> int:
    """A number of steps ``()``, rounded up, of at least 1 and at most what is allowed. The one place where an iteration
    waits for the device: a loop needs its length."""
    most = min(max_steps, BLIND_STEPS) if tuning.blind else max_steps
    return max(1, min(math.ceil(float(steps) - 1e-9), most))
