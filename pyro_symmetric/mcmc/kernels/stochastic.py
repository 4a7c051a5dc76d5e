r"""The common part of the stochastic-gradient samplers: mini-batches, warm-up, and what every iteration tells.

They follow a diffusion whose stationary law is the posterior, in steps that nothing accepts or rejects. Two things move
the law that they reach away from it, and both vanish with the step: the discretisation, by curvature, and the variance
``V`` of the mini-batches' gradients. Warm-up measures both (:class:`CurvatureEstimate`), so a kernel that is given no
``step_size`` takes one that keeps the predicted excess of the variance to a ``tolerance``.

Such a step is short where posteriors are narrow or data many, and then the wide directions take forever. So warm-up
learns the posterior's variances, too, pooled over the chains, at the ends of the windows in which Hamiltonian kernels
learn their mass matrix; steps are then taken in their units (a preconditioner that stays as it is needs no
correction). A ``step_size`` that is given is that of the plain recursion, in warm-up and afterwards.

**What explodes is told.** A chain whose energy rises in one iteration by more than ``MAX_ENERGY_ERROR + D``, both ends
evaluated on the same mini-batch, or which leaves all numbers behind, goes back to where the iteration began, and counts
as divergent. By ``D`` energies may rise, as from a mode to where its draws are.

Every draw brings the statistic ``virial``, :math:`(z - a) \cdot \nabla U(z) / D` averaged over the iteration's steps,
where :math:`a` is the other chains' mean in warm-up, or 0. Its mean is 1 under any posterior whose density vanishes at
infinity (integrate by parts), also with mini-batches, whose gradients are unbiased: the configurational temperature, to
be compared with 1 when a run has settled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import MassEstimate, tuned, window_ends
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, mini_batches, normal
from pyro_symmetric.mcmc.kernels.phase_space import MAX_ENERGY_ERROR

FIRST_ROUNDS = 6  # measurements of the curvature before the first step in new units


@dataclass(frozen=True, eq=False)
class StochasticTuning:
    """The results of warm-up.

    :param step_size: ``()``.
    :param preconditioner: what multiplies gradients, ``(D,)``: the posterior's variances as warm-up has found them; or
        each chain's own, ``(C, D)``.
    :param centre: what the virial is taken from, ``(C, D)``, or ``()`` for the origin.
    :param curvature: what warm-up has measured, or ``None`` if nothing is left to find.
    :param estimate: of the variances in the current window; ``None`` if they aren't learnt.
    """

    step_size: Tensor
    preconditioner: Tensor
    centre: Tensor
    curvature: CurvatureEstimate | None
    estimate: MassEstimate | None


@dataclass(frozen=True, eq=False, repr=False)
class StochasticGradientKernel(Kernel):
    """The base of all; subclasses say how chains move and which step is best."""

    model: Callable[..., Any]
    step_size: float | None = None
    _: KW_ONLY
    batch_size: int | None = None
    tolerance: float = 0.05
    num_steps: int = 10

    subsampled = True
    has_momentum = False
    learns_variances = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.whole("batch_size", self.batch_size, 1, none="all data")
        arguments.fraction("tolerance", self.tolerance)
        arguments.whole("num_steps", self.num_steps, 1)

    # what subclasses provide ----------------------------------------------------------------------------------------

    @abstractmethod
    def mover(self, tuning: StochasticTuning) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        """A step, which moves positions and momenta in place, given gradients and standard normal noise."""

    @abstractmethod
    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        """The step size ``()`` that keeps the tolerance."""

    def first_preconditioner(self, gradient: Tensor) -> Tensor:
        """The preconditioner before anything is learnt."""
        return torch.ones_like(gradient[0])

    @property
    def measures(self) -> bool:
        """True if warm-up has anything to measure."""
        return self.step_size is None

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        energy, gradient = density.energy_and_gradient(z, mini_batches(density.row_counts, len(z), generator))
        momentum = normal(z, generator) if self.has_momentum else torch.zeros_like(z)
        tuning = StochasticTuning(
            z.new_tensor(self.step_size or 0.0),
            self.first_preconditioner(gradient),
            z.new_zeros(()),
            CurvatureEstimate.start(z, generator) if self.measures else None,
            MassEstimate.start(z) if self.learns_variances and self.step_size is None else None,
        )
        return self._measured(density, State(z, momentum, energy, gradient, tuning, generator), FIRST_ROUNDS)

    def step(self, density: Density, state: State) -> State:
        tuning, generator, chains = state.tuning, state.generator, len(state.z)
        z, momentum, virial = state.z.clone(), state.momentum.clone(), torch.zeros_like(state.z)
        move = self.mover(tuning)
        for _ in range(self.num_steps):
            rows = mini_batches(density.row_counts, chains, generator)
            energy, gradient = density.energy_and_gradient(z, rows)
            virial.addcmul_(z - tuning.centre, gradient)
            move(z, momentum, gradient, normal(z, generator))
        extent = torch.linalg.vector_norm(z, torch.inf, dim=-1)  # the last step has moved z after the last energy
        error = energy - density.energy(state.z, rows) + 0 * extent  # NaN if either is no number
        diverging = ~(error <= MAX_ENERGY_ERROR + z.shape[-1])
        lost = diverging[:, None]
        energy = torch.where(diverging, state.energy, energy)
        statistics = {
            "lp": -energy,
            "virial": (virial.mean(-1) / self.num_steps).masked_fill(diverging, torch.nan),
            "diverging": diverging,
            "step_size": tuning.step_size.expand(chains),
            "n_steps": torch.full_like(energy, self.num_steps, dtype=torch.long),
        }
        if self.has_momentum:
            statistics["kinetic_temperature"] = momentum.square().mean(-1)
            momentum = torch.where(lost, normal(z, generator), momentum)
        gradient = torch.where(lost, state.gradient, gradient)
        return State(torch.where(lost, state.z, z), momentum, energy, gradient, tuning, generator, statistics)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        state = self._measured(density, state)
        begin, ends = window_ends(num_warmup)
        window = state.tuning.estimate
        if window is None or not ends or not begin <= iteration < ends[-1]:
            return state
        window = window.update(state.z)
        if iteration + 1 not in ends:
            return tuned(state, estimate=window)
        others = len(state.z) - 1
        state = tuned(
            state,
            preconditioner=window.mass().variance,
            estimate=MassEstimate.start(state.z),
            centre=(window.mean.sum(0) - window.mean) / others if others else state.tuning.centre,
            curvature=CurvatureEstimate.start(state.z, state.generator),
        )
        return self._measured(density, state, FIRST_ROUNDS)

    def _measured(self, density: Density, state: State, rounds: int = 1) -> State:
        """The state after a look at the curvature, with the step that it suggests."""
        tuning: StochasticTuning = state.tuning
        estimate = tuning.curvature
        if estimate is None:
            return state
        for _ in range(rounds):
            estimate = estimate.update(density, state.z, state.generator, tuning.preconditioner)
        step = self.best_step(estimate) if self.step_size is None else tuning.step_size
        return tuned(state, curvature=estimate, step_size=step)


@dataclass(frozen=True, eq=False)
class CurvatureEstimate:
    r"""Curvature and gradient noise where the chains are, averaged over warm-up with weights that grow linearly.

    With a preconditioner ``G`` both are those of the coordinates :math:`G^{-1/2} z`, in which the sampler is plain.

    :param direction: each chain's direction of largest curvature, unit vectors ``(C, D)``.
    :param curvature: each chain's largest curvature, ``(C,)``.
    :param noise: variance of the mini-batches' gradients, averaged over chains, ``(D,)``; 0 without mini-batches.
    :param count: measurements so far.
    """

    direction: Tensor
    curvature: Tensor
    noise: Tensor
    count: int = 0

    @property
    def stiffest(self) -> Tensor:
        """The largest of the chains' curvatures, ``()``."""
        return self.curvature.max()

    @classmethod
    def start(cls, z: Tensor, generator: torch.Generator) -> CurvatureEstimate:
        """Nothing measured yet, for chains ``(C, D)``: directions at random."""
        direction = torch.nn.functional.normalize(normal(z, generator), dim=-1)
        return cls(direction, torch.zeros_like(z[:, 0]), torch.zeros_like(z[0]))

    def update(
        self, density: Density, z: Tensor, generator: torch.Generator, preconditioner: Tensor
    ) -> CurvatureEstimate:
        """Measure once more, at ``z`` of shape ``(C, D)``: three gradients of each chain.

        :param preconditioner: its diagonal, ``(C, D)`` or ``(D,)``.
        """
        scale = preconditioner.sqrt()
        rows = mini_batches(density.row_counts, len(z), generator)
        _, gradient = density.energy_and_gradient(z, rows)
        along = scale * self.direction
        # The cube root of the precision balances the rounding of a difference against the curvature's own change.
        length = torch.finfo(z.dtype).eps ** (1 / 3) * (1 + z.square().mean(-1, keepdim=True).sqrt())
        distance = length / along.norm(dim=-1, keepdim=True)
        product = along.mul_(distance).add_(z)  # from here on in place: chains of networks are large
        product = density.energy_and_gradient(product, rows)[1].sub(gradient).mul_(scale).div_(distance)
        curvature = product.norm(dim=-1, keepdim=True)
        usable = torch.isfinite(curvature) & (curvature > 0)
        noise = torch.zeros_like(z[0])
        if rows is not None:
            others = mini_batches(density.row_counts, len(z), generator)
            change = gradient - density.energy_and_gradient(z, others)[1]
            # What is no number counts as 0.
            noise = (scale * change).square_().mul_(0.5).nan_to_num_(0.0, 0.0, 0.0).mean(0)
        weight = 2 / (self.count + 2)
        return CurvatureEstimate(
            torch.where(usable, product.div_(curvature), self.direction),
            self.curvature.lerp(torch.where(usable[:, 0], curvature[:, 0], self.curvature), weight),
            self.noise.lerp(noise, weight),
            self.count + 1,
        )
