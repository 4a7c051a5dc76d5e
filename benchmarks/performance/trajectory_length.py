"""AdaptiveHMC beside ChEES as its paper has it (Hoffman, Radul & Sountsov 2021): effective draws for each gradient.

    python -m benchmarks.performance.trajectory_length --targets schools gaussian --seeds 1 2 --chains 16

Every contestant warms up by itself. ``worst`` and ``median`` are effective sample sizes (bulk, rank-normalised) of the
positions and their squares, for 1,000 gradients after warm-up. Mass matrix, windows and blind phase are the same for
all. What is the paper's: the slope of the criterion from each trajectory, with the mean of all chains as the centre;
Adam on the log length, without momentum; the average of its iterates; the harmonic mean of the acceptance, with a
target of 0.651.

Targets: ``schools``, eight schools, not centred; ``gaussian``, 50 dimensions, condition number 1,000, rotated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.performance.many_chain_kernels import schools
from pyro_symmetric.chain_statistics import chain_statistics
from pyro_symmetric.mcmc import HMC, NUTS, AdaptiveHMC, Kernel, State
from pyro_symmetric.mcmc.kernels.adaptive_hmc import radical_inverse
from pyro_symmetric.mcmc.kernels.hmc import limit, reached, whole_steps
from pyro_symmetric.mcmc.kernels.integrator import Outcome, PhasePoint, trajectory
from pyro_symmetric.mcmc.kernels.learning import Learnt
from pyro_symmetric.mcmc.kernels.randomness import normal, uniform
from pyro_symmetric.mcmc.kernels.warmup import HamiltonianKernel, HamiltonianTuning, tuned
from pyro_symmetric.mcmc.starts import starting_points

RATE, FORGETTING, LARGEST = 0.025, 0.95, 0.35  # Adam's


@dataclass(frozen=True, eq=False)
class Climb(HamiltonianTuning):
    """The log length and its average, the last slope, Adam's mean of squared slopes, and what was counted."""

    log_length: Tensor
    log_average: Tensor
    slope: Tensor
    squares: Tensor
    updates: int = 0
    trajectories: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class ChEES(HamiltonianKernel):
    """The paper's algorithm 1."""

    target_accept: float = 0.651
    max_steps: int = 512

    def adapt(self, density: Any, state: State, iteration: int, num_warmup: int) -> State:
        before: Climb = state.tuning
        if iteration + 1 == num_warmup:
            state = tuned(state, log_length=before.log_average)
        after = super().adapt(density, state, iteration, num_warmup)
        now: Climb = after.tuning
        if now.mass is before.mass:
            return after
        start = now.step_size.double().log() if before.blind else now.log_length
        return tuned(after, log_length=start, squares=0 * start, updates=0)

    def _tuning(self, tuning: HamiltonianTuning, z: Tensor) -> Climb:
        length = tuning.step_size.double().log()
        return Climb(**vars(tuning), log_length=length, log_average=length, slope=0 * length, squares=0 * length)

    def _moved(self, density: Any, state: State, most: int | None) -> State:
        tuning: Climb = state.tuning
        share, noise, chance = (
            radical_inverse(tuning.trajectories + 1),
            normal(state.z, state.generator),
            uniform(state.energy, state.generator),
        )
        allowed, sizes = limit(self.max_steps, most), tuning.steps
        num_steps = whole_steps(share * tuning.log_length.exp() / tuning.step_size.double(), allowed)
        found = trajectory(
            density.energy_and_gradient,
            state.z,
            state.energy,
            state.gradient,
            noise,
            chance,
            sizes,
            tuning.mass,
            num_steps,
        )
        if tuning.learns:
            tuning = self._after(tuning, state.z, found, float(num_steps * tuning.step_size))
        return reached(state, found, num_steps, replace(tuning, trajectories=tuning.trajectories + 1))

    def _after(self, tuning: Climb, before: Tensor, found: Outcome, time: float) -> Climb:
        acceptance = found.acceptance
        tuning = replace(tuning, slope=slope(tuning, before, found.end, acceptance.double(), time))
        if not tuning.blind:
            tuning = self._climbed(tuning)
            acceptance = (len(acceptance) / (1 / acceptance.clamp(min=1e-3)).sum()).expand_as(acceptance)
        return replace(tuning, **vars(Learnt.of(tuning).update(acceptance, tuning.blind)))

    def _climbed(self, tuning: Climb) -> Climb:
        updates = tuning.updates + 1
        squares = FORGETTING * tuning.squares + (1 - FORGETTING) * tuning.slope.square()
        climb = RATE * tuning.slope / ((squares / (1 - FORGETTING**updates)).sqrt() + 1e-8)
        step = tuning.search.log_average
        length = tuning.log_length + climb.clamp(-LARGEST, LARGEST)
        length = length.clamp(min=step, max=step + math.log(self.max_steps))
        average = tuning.log_average.lerp(length, updates**-0.5)
        return replace(tuning, log_length=length, log_average=average, squares=squares, updates=updates)


def slope(tuning: Climb, before: Tensor, end: PhasePoint, acceptance: Tensor, time: float) -> Tensor:
    """Of the criterion in the log length, ``()``: the mean of ``t (|x'|² - |x|²) x'.v'``, weighted by acceptance."""
    arrived = (acceptance > 1e-4)[:, None]
    velocity = tuning.mass.velocity(torch.where(arrived, end.momentum, 0.0))
    first, last, speed = (
        tuning.mass.whiten(value).double() for value in (before, torch.where(arrived, end.z, before), velocity)
    )
    share = torch.where(arrived[:, 0], acceptance, 0.0)
    share = share / share.sum().clamp(min=1e-9)
    first, last = first - first.mean(0), last - share @ last
    change = last.square().sum(-1) - first.square().sum(-1)
    found = (share * time * change * (last * speed).sum(-1)).sum()
    return torch.where(torch.isfinite(found), found, 0.0)


KERNELS = {"AdaptiveHMC": AdaptiveHMC, "ChEES": ChEES, "HMC": HMC, "NUTS": NUTS}


# targets ------------------------------------------------------------------------------------------------------------


class Gaussian:
    """Rotated, of variances from 10^-1.5 to 10^1.5."""

    def __init__(self, dim: int = 50):
        variances = torch.logspace(-1.5, 1.5, dim, dtype=torch.float64)
        basis = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64))[0]
        self.dim, self.whitener = dim, basis / variances.sqrt()
        self.precision = self.whitener @ self.whitener.T

    def energy_and_gradient(self, z: Tensor, rows: None = None) -> tuple[Tensor, Tensor]:
        gradient = z @ self.precision
        return 0.5 * (z * gradient).sum(-1), gradient


def target(name: str, chains: int) -> tuple[Any, Callable[[Tensor], Tensor], Tensor, int]:
    """The density, what is looked at, where chains start, and gradients for each."""
    if name == "gaussian":
        gaussian = Gaussian()
        return gaussian, lambda z: z @ gaussian.whitener, 2 * torch.randn(chains, gaussian.dim).double(), 6000
    found = schools(Path())
    return found.density, found.predict, starting_points(found.density, chains), 3000


def measure(name: str, kernel: Kernel, chains: int, seed: int, warmup: int) -> None:
    torch.manual_seed(seed)
    density, look, z, budget = target(name, chains)
    evaluate, count = density.energy_and_gradient, [0]

    def counted(z: Tensor, rows: Any = None) -> tuple[Tensor, Tensor]:
        count[0] += len(z)
        return evaluate(z)

    density.energy_and_gradient = counted
    state = kernel.init(density, z, warmup, torch.Generator().manual_seed(seed))
    for iteration in range(warmup):
        state = kernel.adapt(density, kernel.step(density, state), iteration, warmup)
    count[0], draws = 0, []
    while count[0] < budget * chains:
        state = kernel.step(density, state)
        draws.append(look(state.z))
    x = torch.stack(draws, 1)
    found = chain_statistics(torch.cat([x, x.square()], -1))
    worst, median = (float(value) * 1000 / count[0] for value in (found.ess_bulk.min(), found.ess_bulk.median()))
    head = f"  {name:<9} {seed:>3} {type(kernel).__name__:<12}"
    print(f"{head} {worst:>8.2f} {median:>8.2f} {float(found.r_hat.max()):>7.3f} {float(state.tuning.step_size):>7.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=("schools", "gaussian"), default=["schools", "gaussian"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), default=list(KERNELS))
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"  {'target':<9} seed {'kernel':<11} {'worst':>8} {'median':>8} {'R-hat':>7} {'step':>7}")
    for name in options.targets:
        for seed in options.seeds:
            for kernel in options.kernels:
                measure(name, KERNELS[kernel](None), options.chains, seed, options.warmup)


if __name__ == "__main__":
    main()
