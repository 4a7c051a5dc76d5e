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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.flat import Evaluate, scan
from pyro_symmetric.mcmc.density.programs import in_stretches, run
from pyro_symmetric.mcmc.kernels.integrator import Outcome, PhasePoint, trajectory
from pyro_symmetric.mcmc.kernels.kernel import State, Stretch, longest_stretch
from pyro_symmetric.mcmc.kernels.mass import Mass
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
        tuning: HamiltonianTuning = state.tuning
        # The one place where an iteration waits for the device: a loop needs its length.
        fraction, step_size = torch.stack([uniform(tuning.step_size, state.generator), tuning.step_size]).tolist()
        return transition(density, state, self._num_steps(fraction, step_size, tuning.most_steps))[0]

    def steps(self, density: Density, state: State, count: int) -> Stretch:
        if not in_stretches(density):
            return super().steps(density, state, count)
        step_size: Tensor = state.tuning.step_size
        fractions = step_size.new_empty(count)
        noise, chance = numbers(state, count, fractions)
        size, most = float(step_size), state.tuning.most_steps
        lengths = [self._num_steps(fraction, size, most) for fraction in fractions.tolist()]
        return transitions(density, state, noise, chance, lengths)

    def _num_steps(self, fraction: float, step_size: float, most_now: int | None) -> int:
        share = 1 + self.jitter * (2 * fraction - 1)
        mean = self.trajectory_length / step_size if self.num_steps is None else self.num_steps
        return whole_steps(share * mean, self.max_steps, most_now)


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


# many iterations as one program --------------------------------------------------------------------------------------


class _Visited(NamedTuple):
    """The record of an iteration: positions ``(C, D)`` and their energies, and as in :class:`Outcome`; ``(C,)``."""

    z: Tensor
    potential: Tensor
    acceptance: Tensor
    energy: Tensor
    diverging: Tensor


def numbers(state: State, count: int, fractions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Standard normal numbers ``(B, C, D)`` and uniform ones ``(B, C)`` of so many iterations, in the order in which
    single iterations draw them, and room for more: one program serves stretches of all lengths.

    :param fractions: ``(count,)``, to be filled with uniform numbers, one at the beginning of each iteration.
    """
    size, generator = max(count, longest_stretch(state.z)), state.generator
    noise, chance = state.z.new_empty(size, *state.z.shape), state.energy.new_empty(size, len(state.z))
    for number in range(count):
        if fractions is not None:
            fractions[number].uniform_(generator=generator)
        noise[number].normal_(generator=generator)
        chance[number].uniform_(generator=generator)
    return noise, chance


def transitions(density: Density, state: State, noise: Tensor, chance: Tensor, num_steps: list[int]) -> Stretch:
    """Iterations of HMC with these numbers of leapfrog steps."""
    tuning: HamiltonianTuning = state.tuning
    count = len(num_steps)
    lengths = torch.ones(len(noise), dtype=torch.long, device="cpu")
    lengths[:count] = torch.tensor(num_steps, device="cpu")
    steps = tuning.steps.expand(len(state.z), 1).contiguous()
    after: PhasePoint
    found: _Visited
    after, found = run(
        density,
        _stretched,
        state.z,
        PhasePoint(state.z, state.momentum, state.energy, state.gradient),
        (noise, chance, lengths),
        torch.tensor(count, device="cpu"),
        steps,
        tuning.mass,
    )
    found = _Visited(*[value[:count] for value in found])
    statistics = {
        "lp": -found.potential,
        "acceptance_rate": found.acceptance,
        "energy": found.energy,
        "diverging": found.diverging,
        "step_size": steps[:, 0].expand_as(found.energy),
        "n_steps": lengths[:count, None].expand(count, len(state.z)),
    }
    last = State(*after, tuning, state.generator, {name: value[-1] for name, value in statistics.items()})
    return Stretch(last, found.z, found.potential, statistics)


def _stretched(
    evaluate: Evaluate, z: Tensor, start: PhasePoint, rows: Any, count: Tensor, step_size: Tensor, mass: Mass
) -> tuple[PhasePoint, _Visited]:
    like = _Visited(z, start.energy, start.energy, start.energy, start.energy > 0)
    found = scan(evaluate, count, _visited, start, rows, like, step_size, mass)
    return found[0], found[1]


def _visited(
    evaluate: Evaluate, at: PhasePoint, row: tuple[Tensor, Tensor, Tensor], step_size: Tensor, mass: Mass
) -> tuple[PhasePoint, _Visited]:
    noise, chance, num_steps = row
    found = trajectory(evaluate, at.z, at.energy, at.gradient, noise, chance, step_size, mass, num_steps)
    after = found.after
    return after, _Visited(after.z, after.energy, found.acceptance, found.energy, found.diverging)
