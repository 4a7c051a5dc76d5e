r"""Hamiltonian Monte Carlo of many chains at once (Duane et al. 1987; Neal 2011, arXiv 1206.1901).

Every iteration draws momenta :math:`p \sim \mathcal N(0, M)`, follows

.. math:: H(z, p) = U(z) + \tfrac12 p^\top M^{-1} p

by the leapfrog method and accepts each chain's end point with probability :math:`\min(1, e^{-\Delta H})`. The number of
steps is drawn anew each iteration, the same for all chains, independently of their state: that keeps every chain's
transition exact and all chains in step, so that one batched gradient serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.adaptation import DualAveraging, PooledVariance, window_ends
from pyro_symmetric.mcmc.kernel import Kernel, State, require_fraction, require_positive
from pyro_symmetric.mcmc.potential import Potential

MAX_ENERGY_ERROR = 1000.0  # beyond it a trajectory counts as divergent, as in Stan and Pyro
STUCK = 0.1  # a chain whose recent acceptance is below this leads the step size
BLIND_STEPS = 32  # while the mass matrix is unknown, longer trajectories cost more than they teach


@dataclass(frozen=True, eq=False)
class HMCTuning:
    """What HMC learns in warm-up.

    :param step_size: of the leapfrog, shared by the chains, ``()``.
    :param inverse_mass: diagonal of the inverse mass matrix: variances of the unconstrained coordinates, ``(D,)``.
    :param averaging: dual averaging of the step size.
    :param variance: running variances of the current window.
    :param recent_acceptance: each chain's acceptance, averaged over about its last five iterations, ``(C,)``.
    :param max_steps: limit of the steps of one iteration.
    """

    step_size: Tensor
    inverse_mass: Tensor
    averaging: DualAveraging
    variance: PooledVariance
    recent_acceptance: Tensor
    max_steps: int


@dataclass(frozen=True, eq=False, repr=False)
class HMC(Kernel):
    """Hamiltonian Monte Carlo with adapted step size and diagonal mass matrix.

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: of the leapfrog, where adaptation starts or, with ``adapt_step_size=False``, stays. ``None``:
        found by doubling and halving at the starting points.
    :param trajectory_length: mean length of a trajectory in integration time, in units where the mass matrix has made
        each coordinate's standard deviation 1. Correlated posteriors need long ones; where each gradient is dear, a few
        dozen ``num_steps`` bound the cost.
    :param num_steps: mean number of leapfrog steps, instead of a length.
    :param target_accept: mean acceptance that the step size is adapted to.
    :param jitter: lengths are uniform in ``mean * (1 - jitter, 1 + jitter)``, against resonance with the target's
        periods. With 1, on a standard Gaussian, successive draws are uncorrelated on average.
    :param max_steps: upper limit of the steps of one iteration.
    """

    model: Callable[..., Any]
    step_size: float | None = None
    trajectory_length: float = math.pi
    num_steps: int | None = None
    target_accept: float = 0.8
    adapt_step_size: bool = True
    adapt_mass: bool = True
    jitter: float = 1.0
    max_steps: int = 256

    def __post_init__(self) -> None:
        require_positive("step_size", self.step_size)
        require_positive("trajectory_length", self.trajectory_length)
        require_positive("num_steps", self.num_steps)
        require_positive("max_steps", self.max_steps)
        require_fraction("target_accept", self.target_accept)
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is {self.jitter}; it must lie between 0 (none) and 1")

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, potential: Potential, z: Tensor, num_warmup: int) -> State:
        energy, gradient = potential.value_and_grad(z)
        inverse_mass = torch.ones_like(z[0])
        step = z.new_tensor(0.1 if self.step_size is None else self.step_size)
        if self.step_size is None:
            step = find_step_size(potential, z, energy, gradient, step, inverse_mass, self.target_accept)
        blind = self.adapt_mass and len(window_ends(num_warmup)[1]) > 0
        tuning = HMCTuning(
            step,
            inverse_mass,
            DualAveraging.start(step),
            PooledVariance.start(z),
            torch.ones_like(energy),
            min(BLIND_STEPS, self.max_steps) if blind else self.max_steps,
        )
        return State(z, torch.zeros_like(z), energy, gradient, tuning)

    def step(self, potential: Potential, state: State) -> State:
        tuning: HMCTuning = state.tuning
        steps = self._draw_num_steps(tuning)
        momentum = torch.randn_like(state.z) * tuning.inverse_mass.rsqrt()
        before = state.potential + _kinetic(momentum, tuning.inverse_mass)
        z, p, energy, gradient = leapfrog(
            potential, state.z, momentum, state.gradient, tuning.step_size, tuning.inverse_mass, steps
        )
        error = energy + _kinetic(p, tuning.inverse_mass) - before
        error = torch.where(torch.isfinite(error), error, torch.inf)  # NaN: the trajectory left the support
        acceptance = (-error).clamp(max=0).exp()
        accept = torch.rand_like(acceptance) < acceptance
        chosen = accept[:, None]
        potential_energy = torch.where(accept, energy, state.potential)
        return replace(
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
                "n_steps": torch.full_like(acceptance, steps, dtype=torch.long),
            },
        )

    def adapt(self, potential: Potential, state: State, iteration: int, num_warmup: int) -> State:
        begin, ends = window_ends(num_warmup)
        tuning: HMCTuning = state.tuning
        if self.adapt_mass and ends and begin <= iteration < ends[-1]:
            tuning = replace(tuning, variance=tuning.variance.update(state.z))
        if self.adapt_step_size:
            recent = 0.8 * tuning.recent_acceptance + 0.2 * state.statistics["acceptance_rate"]
            averaging = tuning.averaging.update(
                _pooled(state.statistics["acceptance_rate"], recent), self.target_accept
            )
            step = averaging.log_step.exp().to(state.z.dtype)
            tuning = replace(tuning, averaging=averaging, step_size=step, recent_acceptance=recent)
        if self.adapt_mass and iteration + 1 in ends:
            tuning = self._renew_mass(potential, state, tuning)
        if self.adapt_step_size and iteration + 1 == num_warmup:
            tuning = replace(tuning, step_size=tuning.averaging.log_average.exp().to(state.z.dtype))
        return replace(state, tuning=tuning)

    # small steps ----------------------------------------------------------------------------------------------------

    def _renew_mass(self, potential: Potential, state: State, tuning: HMCTuning) -> HMCTuning:
        inverse_mass = tuning.variance.variance()
        variance = PooledVariance.start(state.z)
        tuning = replace(tuning, inverse_mass=inverse_mass, variance=variance, max_steps=self.max_steps)
        if not self.adapt_step_size:
            return tuning
        step = tuning.averaging.log_average.exp().to(state.z.dtype)
        step = find_step_size(
            potential, state.z, state.potential, state.gradient, step, inverse_mass, self.target_accept
        )
        return replace(tuning, step_size=step, averaging=DualAveraging.start(step))

    def _draw_num_steps(self, tuning: HMCTuning) -> int:
        low, high = 1 - self.jitter, 1 + self.jitter
        share = low + (high - low) * float(torch.rand(()))
        # The one place where an iteration waits for the device: a loop needs its length.
        mean = float(self.num_steps) if self.num_steps is not None else self.trajectory_length / float(tuning.step_size)
        return max(1, min(math.ceil(share * mean - 1e-9), tuning.max_steps))


def leapfrog(
    potential: Potential,
    z: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    step_size: Tensor,
    inverse_mass: Tensor,
    num_steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the Hamiltonian flow for ``num_steps`` steps: reversible, volume-preserving, energy error O(step²).

    :param z: positions ``(C, D)``; likewise ``momentum`` and ``gradient``, the potential's at ``z``.
    :return: positions, momenta, potential energy ``(C,)`` and gradient at the end.
    """
    p = momentum - 0.5 * step_size * gradient
    drift = step_size * inverse_mass
    for k in range(num_steps):
        z = z + drift * p
        energy, gradient = potential.value_and_grad(z)
        p = p - (step_size if k + 1 < num_steps else 0.5 * step_size) * gradient
    return z, p, energy, gradient


def find_step_size(
    potential: Potential,
    z: Tensor,
    energy: Tensor,
    gradient: Tensor,
    step_size: Tensor,
    inverse_mass: Tensor,
    target: float,
    max_tries: int = 60,
) -> Tensor:
    """Double or halve a step size until the mean acceptance of one leapfrog step crosses ``target``, as Stan does."""

    def accepts(step: Tensor) -> bool:
        momentum = torch.randn_like(z) * inverse_mass.rsqrt()
        _, p, new_energy, _ = leapfrog(potential, z, momentum, gradient, step, inverse_mass, 1)
        error = new_energy + _kinetic(p, inverse_mass) - energy - _kinetic(momentum, inverse_mass)
        return bool((-error.nan_to_num(torch.inf, torch.inf)).clamp(max=0).exp().mean() > target)

    grow = accepts(step_size)
    for _ in range(max_tries):
        step_size = step_size * (2.0 if grow else 0.5)
        if accepts(step_size) != grow:
            break
    return step_size


def _pooled(acceptance: Tensor, recent: Tensor) -> Tensor:
    """The chains' mean acceptance ``()``; but a chain that is stuck, which a mean would hide, speaks for all."""
    return torch.where(recent.min() < STUCK, recent.min(), acceptance.mean()).double()


def _kinetic(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    return 0.5 * (momentum.square() * inverse_mass).sum(-1)
