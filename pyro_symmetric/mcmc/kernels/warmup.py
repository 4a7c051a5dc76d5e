r"""What the Hamiltonian kernels share: a step size and a mass matrix that all chains learn together in warm-up.

The step size follows dual averaging of the chains' pooled acceptance. The mass matrix is renewed at the ends of Stan's
windows (:func:`~pyro_symmetric.mcmc.kernels.adaptation.window_ends`), from all chains' draws of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.chain_findings import ACCEPTANCE
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import DualAveraging, window_ends
from pyro_symmetric.mcmc.kernels.integrator import Point, find_step_size
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.kernels.mass import MASSES, MAX_DENSE, Mass, MassEstimate

STUCK = ACCEPTANCE[1]  # acceptance below which a chain hardly moves
STUCK_SHARE = 0.05  # of the chains, up to 20 the worst; if these are stuck at the beginning, they lead the step size


@dataclass(frozen=True, eq=False)
class Tuning:
    """What warm-up learns.

    :param step_size: of the leapfrog, shared by the chains, ``()``.
    :param mass: the mass matrix, shared likewise.
    :param averaging: dual averaging of the step size.
    :param estimate: running covariance of the current window.
    :param recent_acceptance: each chain's acceptance, averaged over about its last five iterations, ``(C,)``.
    :param blind: whether the mass matrix is still unknown, so that long trajectories cost more than they teach.
    """

    step_size: Tensor
    mass: Mass
    averaging: DualAveraging
    estimate: MassEstimate
    recent_acceptance: Tensor
    blind: bool


@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianKernel(Kernel):
    """Base of the kernels that follow Hamiltonian trajectories with full gradients.

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: of the leapfrog, where adaptation starts or, with ``adapt_step_size=False``, stays. ``None``:
        found by doubling and halving at the starting points.
    :param target_accept: mean acceptance that the step size is adapted to.
    :param adapt_step_size: whether warm-up adapts the step size.
    :param adapt_mass: whether warm-up learns the mass matrix; otherwise it is 1.
    :param mass: form of the mass matrix: ``"diagonal"``, ``"low-rank"`` for strong correlations, or ``"dense"`` for up
        to a few hundred dimensions. See :mod:`~pyro_symmetric.mcmc.kernels.mass`.
    :param rank: of a low-rank mass matrix, at most.
    """

    model: Callable[..., Any]
    step_size: float | None = None
    target_accept: float = 0.8
    adapt_step_size: bool = True
    adapt_mass: bool = True
    mass: str = "diagonal"
    rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.whole("rank", self.rank, 1)
        arguments.fraction("target_accept", self.target_accept)
        arguments.one_of("mass", self.mass, MASSES)

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        if self.mass == "dense" and z.shape[-1] > MAX_DENSE:
            raise ValueError(
                f"mass is 'dense', but the model has {z.shape[-1]} coordinates; a matrix of that size fills the "
                "memory. Use mass='low-rank' or 'diagonal'"
            )
        start = Point(z, torch.zeros_like(z), *density.energy_and_gradient(z))
        estimate = MassEstimate.start(z, self.mass, self.rank)
        mass = estimate.mass()
        step = z.new_tensor(0.1 if self.step_size is None else self.step_size)
        if self.step_size is None:
            step = find_step_size(density, start, step, mass, self.target_accept, generator)
        blind = self.adapt_mass and len(window_ends(num_warmup)[1]) > 0
        tuning = Tuning(step, mass, DualAveraging.start(step), estimate, torch.ones_like(start.energy), blind)
        return State(*start, tuning, generator)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        begin, ends = window_ends(num_warmup)
        tuning: Tuning = state.tuning
        if self.adapt_mass and ends and begin <= iteration < ends[-1]:
            tuning = replace(tuning, estimate=tuning.estimate.update(state.z))
        if self.adapt_step_size:
            tuning = self._adapt_step_size(tuning, state.statistics["acceptance_rate"])
        if self.adapt_mass and iteration + 1 in ends:
            tuning = self._renew_mass(density, state, tuning)
        if self.adapt_step_size and iteration + 1 == num_warmup:
            tuning = replace(tuning, step_size=tuning.averaging.log_average.exp().to(state.z.dtype))
        return replace(state, tuning=tuning)

    # small steps ----------------------------------------------------------------------------------------------------

    def _adapt_step_size(self, tuning: Tuning, acceptance: Tensor) -> Tuning:
        recent = 0.8 * tuning.recent_acceptance + 0.2 * acceptance
        averaging = tuning.averaging.update(self._pooled(acceptance, recent, tuning.blind).double(), self.target_accept)
        step = averaging.log_step.exp().to(acceptance.dtype)
        return replace(tuning, averaging=averaging, step_size=step, recent_acceptance=recent)

    def _pooled(self, acceptance: Tensor, recent: Tensor, blind: bool) -> Tensor:
        """The chains' mean acceptance ``()``.

        At the beginning, while the mass matrix is unknown, chains that are stuck lead the step, since a mean would
        hide them: of a simple regression one in ten starts so far out that the others' step never moves it. Not for
        good, and of many chains not the very worst: it is worse the more they are, so that the step would depend on
        their number.
        """
        if not blind:
            return acceptance.mean()
        low = recent.quantile(STUCK_SHARE, interpolation="lower")
        return torch.where(low < STUCK, low, acceptance.mean())

    def _renew_mass(self, density: Density, state: State, tuning: Tuning) -> Tuning:
        mass = tuning.estimate.mass()
        estimate = MassEstimate.start(state.z, self.mass, self.rank, mass.variance.sqrt())
        tuning = replace(tuning, mass=mass, estimate=estimate, blind=False)
        if not self.adapt_step_size:
            return tuning
        step = tuning.averaging.log_average.exp().to(state.z.dtype)
        at = Point(state.z, state.momentum, state.energy, state.gradient)
        step = find_step_size(density, at, step, mass, self.target_accept, state.generator)
        return replace(tuning, step_size=step, averaging=DualAveraging.start(step))
