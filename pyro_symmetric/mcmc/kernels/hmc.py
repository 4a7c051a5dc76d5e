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
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.programs import run
from pyro_symmetric.mcmc.kernels.integrator import Outcome, trajectory
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

    def _moved(self, density: Density, state: State, most: int | None) -> State:
        tuning: HamiltonianTuning = state.tuning
        fraction = uniform(tuning.step_size, state.generator).double()
        steps = (1 + self.jitter * (2 * fraction - 1)) * (self.num_steps or self.trajectory_length)
        if self.num_steps is None:
            steps = steps / tuning.step_size.double()
        num_steps = whole_steps(steps, limit(self.max_steps, most))
        found = moved(density, state, num_steps)
        return reached(state, found, num_steps, self._learnt(tuning, found.acceptance))


def limit(max_steps: int, most_now: int | None) -> int:
    """The most steps of a trajectory."""
    return max_steps if most_now is None else min(max_steps, most_now)


def whole_steps(steps: Tensor, most: int) -> Tensor:
    """A number of leapfrog steps ``()``, rounded up, of at least 1 and at most what is allowed."""
    return (steps - 1e-9).ceil().clamp(max=most).clamp(min=1).long()


def moved(density: Density, state: State, num_steps: Tensor) -> Outcome:
    """An iteration of so many steps ``()``."""
    tuning: HamiltonianTuning = state.tuning
    start = state.z, state.energy, state.gradient
    numbers = normal(state.z, state.generator), uniform(state.energy, state.generator)
    # The one place where an iteration waits for the device: a loop needs its length.
    found: Outcome = run(density, trajectory, *start, *numbers, tuning.steps, tuning.mass, num_steps.cpu())
    return found


def reached(before: State, found: Outcome, num_steps: Tensor, tuning: HamiltonianTuning) -> State:
    """The state after an iteration that found this, in so many steps ``()``, with what was learnt of it."""
    after, energy = found.after, found.energy
    statistics = {
        "lp": -after.energy,
        "acceptance_rate": found.acceptance,
        "energy": energy,
        "diverging": found.diverging,
        "step_size": before.tuning.steps[:, 0],
        "n_steps": num_steps.expand_as(energy),
    }
    return State(*after, tuning.noted(*after), before.generator, statistics)
