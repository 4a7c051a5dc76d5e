r"""The common part of the stochastic-gradient samplers: mini-batches, warm-up, and what every iteration tells.

They follow a diffusion whose stationary law is the posterior, in steps that nothing accepts or rejects. Two things move
the law that they reach away from it, and both vanish with the step: the discretisation, by curvature, and the variance
``V`` of the mini-batches' gradients. Warm-up measures both (:mod:`~pyro_symmetric.mcmc.kernels.curvature`), so a kernel
that is given no ``step_size`` takes one that keeps the predicted excess of the variance to a ``tolerance``.

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
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import MassEstimate, window_ends
from pyro_symmetric.mcmc.kernels.curvature import CurvatureEstimate
from pyro_symmetric.mcmc.kernels.integrator import MAX_ENERGY_ERROR
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.kernels.randomness import Batches, normal

FIRST_ROUNDS = 6  # measurements of the curvature before the first step in new units


@dataclass(frozen=True, eq=False)
class StochasticTuning:
    """The numbers that change beside the chains.

    :param step_size: of the latest gradient step, ``()``.
    :param base_step_size: of warm-up, ``()``; found there, or given.
    :param batches: the stream of mini-batches.
    :param curvature: what warm-up has measured, or ``None`` if nothing is left to find.
    :param variance: what steps are preconditioned by, ``(D,)``: the posterior's variances as warm-up has found them;
        ones before that.
    :param estimate: of the variances in the current window; ``None`` if they aren't learnt.
    :param centre: what the virial is taken from, ``(C, D)``, or ``()`` for the origin.
    :param second_moment: each chain's average of squared gradients per row, ``(C, D)``, of kernels that precondition by
        it, or ``None``.
    :param iteration: iterations so far.
    :param num_warmup: how many of all iterations are warm-up.
    """

    step_size: Tensor
    base_step_size: Tensor
    batches: Batches
    curvature: CurvatureEstimate | None
    variance: Tensor
    estimate: MassEstimate | None
    centre: Tensor
    second_moment: Tensor | None
    iteration: int
    num_warmup: int

    @property
    def warming_up(self) -> bool:
        return self.iteration < self.num_warmup


class Gradients:
    """The gradients of one iteration, each on every chain's next mini-batch.

    :param steps: of the iteration. The energy is evaluated at the last one only, there and where it began.
    """

    def __init__(self, density: Density, state: State, steps: int):
        self.density, self.state, self.steps = density, state, steps
        self.batches: Batches = state.tuning.batches
        self.last = state.gradient
        self.energy = self.energy_before = state.energy
        self._virial = torch.zeros_like(state.z)  # of each coordinate, as one sum in the end costs less than many
        self._count = 0

    def __call__(self, z: Tensor) -> Tensor:
        """The gradient at ``z``, ``(C, D)`` each."""
        rows, self.batches = self.batches.next(self.state.generator)
        self._count += 1
        if self._count < self.steps:
            self.last = self.density.energy_and_gradient(z, rows)[1]
        else:
            self.energy_before = self.density.energy(self.state.z, rows)
            self.energy, self.last = self.density.energy_and_gradient(z, rows)
        self._virial.addcmul_(z - self.state.tuning.centre, self.last)
        return self.last

    def virial(self) -> Tensor:
        """``(C,)``, the average over the steps."""
        return self._virial.sum(-1) / (self._count * self._virial.shape[-1])


@dataclass(frozen=True, eq=False, repr=False)
class StochasticGradientKernel(Kernel):
    r"""The base of all; subclasses say how chains move and which step is best.

    After warm-up the step of iteration :math:`t = 0, 1, \dots` is :math:`\varepsilon_t = \varepsilon (1 + t / b)^{-
    \gamma}`.

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: ``None`` finds it in warm-up.
    :param batch_size: rows of a mini-batch, cut from the model's tensor arguments and drawn by each chain for itself.
        ``None``: all data, or what the model's plates with ``subsample_size`` draw. The model's likelihood must count a
        mini-batch ``N / B`` times, as a plate with its full ``size`` does; a warning says if it doesn't.
    :param replacement: draw each batch independently instead of going through the data in random order.
    :param tolerance: with ``step_size=None``, the relative excess of the variance that the step may cause: by
        discretisation where curvature is largest, and by mini-batch noise on average over coordinates.
    :param num_steps: gradient steps for each iteration; the sampler's ``thinning`` multiplies it.
    :param decay: ``γ`` in [0, 1]; 0 keeps the step. Welling & Teh ask for more than 1/2 for convergence, and for draws
        weighted by their ``step_size``, which is among the statistics; draws here are stored unweighted.
    :param decay_offset: ``b``, iterations.
    """

    model: Callable[..., Any]
    step_size: float | None = None
    _: KW_ONLY
    batch_size: int | None = None
    replacement: bool = False
    tolerance: float = 0.05
    num_steps: int = 10
    decay: float = 0.0
    decay_offset: float = 100.0

    subsampled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.whole("batch_size", self.batch_size, 1, none="all data")
        arguments.fraction("tolerance", self.tolerance)
        arguments.whole("num_steps", self.num_steps, 1)
        arguments.positive("decay_offset", self.decay_offset)
        arguments.number("decay", self.decay, least=0, most=1)

    # what subclasses provide ----------------------------------------------------------------------------------------

    @abstractmethod
    def move(self, z: Tensor, momentum: Tensor, gradient: Gradients, tuning: StochasticTuning) -> StochasticTuning:
        """Move chains in place, through ``num_steps`` steps of size ``tuning.step_size``; returns the tuning."""

    @abstractmethod
    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        """The step size ``()`` that keeps the tolerance."""

    @property
    def has_momentum(self) -> bool:
        return False

    @property
    def measures(self) -> bool:
        """True if warm-up has anything to measure."""
        return self.step_size is None

    def first_moment(self, density: Density, gradient: Tensor) -> Tensor | None:
        """The tuning's first ``second_moment``."""
        return None

    def preconditioner(self, tuning: StochasticTuning) -> Tensor:
        """The diagonal, ``(C, D)`` or ``(D,)``, of what multiplies gradients."""
        return tuning.variance

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        rows, batches = Batches(density.row_counts, len(z), self.replacement).next(generator)
        energy, gradient = density.energy_and_gradient(z, rows)
        momentum = normal(z, generator) if self.has_momentum else torch.zeros_like(z)
        base = z.new_tensor(self.step_size or 0.0)
        tuning = StochasticTuning(
            base,
            base,
            batches,
            CurvatureEstimate.start(z, generator) if self.measures else None,
            variance=torch.ones_like(z[0]),
            estimate=MassEstimate.start(z) if self.step_size is None else None,
            centre=z.new_zeros(()),
            second_moment=self.first_moment(density, gradient),
            iteration=0,
            num_warmup=num_warmup,
        )
        state = State(z, momentum, energy, gradient, tuning, generator)
        return replace(state, tuning=self._measured(density, state, tuning, FIRST_ROUNDS))

    def step(self, density: Density, state: State) -> State:
        before: StochasticTuning = state.tuning
        since = max(before.iteration - before.num_warmup, 0)
        tuning = replace(before, step_size=before.base_step_size * (1 + since / self.decay_offset) ** -self.decay)
        gradients, z, momentum = Gradients(density, state, self.num_steps), state.z.clone(), state.momentum.clone()
        tuning = self.move(z, momentum, gradients, tuning)
        extent = torch.linalg.vector_norm(z, torch.inf, dim=-1)  # the last step has moved z after the last energy
        error = gradients.energy - gradients.energy_before + 0 * extent  # NaN if either is no number
        diverging = ~(error <= MAX_ENERGY_ERROR + z.shape[-1])
        lost = diverging[:, None]
        energy = torch.where(diverging, state.energy, gradients.energy)
        statistics = {
            "lp": -energy,
            "virial": gradients.virial().masked_fill(diverging, torch.nan),
            "diverging": diverging,
            "step_size": tuning.step_size.expand(len(energy)),
            "n_steps": torch.full_like(energy, self.num_steps, dtype=torch.long),
        }
        if self.has_momentum:
            statistics["kinetic_temperature"] = momentum.square().mean(-1)
            momentum = torch.where(lost, normal(momentum, state.generator), momentum)
        return State(
            torch.where(lost, state.z, z),
            momentum,
            energy,
            torch.where(lost, state.gradient, gradients.last),
            replace(tuning, batches=gradients.batches, iteration=tuning.iteration + 1),
            state.generator,
            statistics,
        )

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        tuning = self._measured(density, state, state.tuning)
        begin, ends = window_ends(num_warmup)
        if tuning.estimate is not None and ends and begin <= iteration < ends[-1]:
            window = tuning.estimate.update(state.z)
            tuning = replace(tuning, estimate=window)
            if iteration + 1 in ends:
                tuning = self._renewed(density, state, tuning, window)
        return replace(state, tuning=tuning)

    # small steps ----------------------------------------------------------------------------------------------------

    def _measured(self, density: Density, state: State, tuning: StochasticTuning, rounds: int = 1) -> StochasticTuning:
        """Look at the curvature, and take the step that it suggests."""
        if tuning.curvature is None:
            return tuning
        estimate = tuning.curvature
        for _ in range(rounds):
            estimate = estimate.update(density, state.z, state.generator, self.preconditioner(tuning))
        tuning = replace(tuning, curvature=estimate)
        if self.step_size is not None:
            return tuning
        step = self.best_step(estimate)
        return replace(tuning, base_step_size=step, step_size=step)

    def _renewed(
        self, density: Density, state: State, tuning: StochasticTuning, window: MassEstimate
    ) -> StochasticTuning:
        """At the end of a window: variances, a step in these units, and the mean of each chain's others."""
        others = len(state.z) - 1
        tuning = replace(
            tuning,
            variance=window.mass().variance,
            estimate=MassEstimate.start(state.z),
            centre=(window.mean.sum(0) - window.mean) / others if others else tuning.centre,
            curvature=CurvatureEstimate.start(state.z, state.generator),
        )
        return self._measured(density, state, tuning, FIRST_ROUNDS)
