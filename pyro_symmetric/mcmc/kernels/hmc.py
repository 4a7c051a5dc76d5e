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
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.flat import Evaluate
from pyro_symmetric.mcmc.kernels.integrator import Outcome, PhasePoint, drawn, iterations, stretch_of, trajectory
from pyro_symmetric.mcmc.kernels.kernel import State, Stretch
from pyro_symmetric.mcmc.kernels.learning import Learnt, Plan, learnt
from pyro_symmetric.mcmc.kernels.mass import Mass
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

    def _moved(self, density: Density, state: State, count: int, most: int | None) -> Stretch:
        tuning: HamiltonianTuning = state.tuning
        fraction, noise, chance = drawn(
            density, state, count, (tuning.step_size, "uniform_"), (state.z, "normal_"), (state.energy, "uniform_")
        )
        rows = Row(noise, chance, 1 + self.jitter * (2 * fraction.double() - 1))
        length = self.trajectory_length if self.num_steps is None else float(self.num_steps)
        mean = torch.full_like(tuning.step_size, length, dtype=torch.double)
        plan = self._plan(tuning, limit(self.max_steps, most))
        in_steps = self.num_steps is not None
        at, known, found = iterations(
            density, state, _move, learnt, Visited.like, Learnt.of(tuning), rows, count, plan, mean, in_steps=in_steps
        )
        return stretch_of(state, at, replace(tuning, **vars(known)), found, found.statistics())


def limit(max_steps: int, most_now: int | None) -> int:
    """The most steps of a trajectory."""
    return max_steps if most_now is None else min(max_steps, most_now)


def whole_steps(steps: Tensor, most: int | Tensor) -> Tensor:
    """A number of leapfrog steps ``()``, rounded up, of at least 1 and at most what is allowed."""
    return (steps - 1e-9).ceil().clamp(max=most).clamp(min=1).long()


class Row(NamedTuple):
    """The numbers of an iteration: standard normal ones ``(C, D)``, uniform ones ``(C,)``, and the share ``()`` of the
    length that its trajectories have, in double precision."""

    noise: Tensor
    chance: Tensor
    share: Tensor


class Visited(NamedTuple):
    """The record of an iteration: positions ``(C, D)``, the energies' gradients there, and as in :class:`Outcome`; step
    sizes ``(C,)`` and their number ``()``."""

    z: Tensor
    slope: Tensor
    potential: Tensor
    acceptance: Tensor
    energy: Tensor
    diverging: Tensor
    step_size: Tensor
    n_steps: Tensor

    @classmethod
    def of(cls, found: Outcome, steps: Tensor, num_steps: Tensor) -> Visited:
        after = found.after
        return cls(
            after.z,
            after.gradient,
            after.energy,
            found.acceptance,
            found.energy,
            found.diverging,
            steps[:, 0],
            num_steps,
        )

    @classmethod
    def like(cls, at: PhasePoint) -> Visited:
        numbers = (at.energy,) * 3
        count = torch.zeros((), dtype=torch.long, device=at.z.device)
        return cls(at.z, at.z, *numbers, at.energy > 0, at.energy, count)

    def statistics(self) -> dict[str, Tensor]:
        """Of iterations, ``(B, C)`` each."""
        return {
            "lp": -self.potential,
            "acceptance_rate": self.acceptance,
            "energy": self.energy,
            "diverging": self.diverging,
            "step_size": self.step_size,
            "n_steps": self.n_steps[:, None].expand_as(self.energy),
        }


def _move(
    evaluate: Evaluate,
    at: PhasePoint,
    known: Learnt,
    row: Row,
    mass: Mass,
    plan: Plan,
    length: Tensor,
    in_steps: bool,
) -> tuple[PhasePoint, Tensor, Visited]:
    unit = torch.ones_like(length) if in_steps else known.step_size.double()
    found, record = moved(evaluate, at, known.steps, row, mass, whole_steps(row.share * length / unit, plan.most))
    return found.after, found.acceptance, record


def moved(
    evaluate: Evaluate, at: PhasePoint, sizes: Tensor, row: Row, mass: Mass, num_steps: Tensor
) -> tuple[Outcome, Visited]:
    """An iteration of so many steps ``()`` of these sizes ``(C, 1)``, and its record."""
    # The one place where an iteration waits for the device: a loop needs its length.
    found = trajectory(evaluate, at.z, at.energy, at.gradient, row.noise, row.chance, sizes, mass, num_steps.cpu())
    return found, Visited.of(found, sizes, num_steps)
