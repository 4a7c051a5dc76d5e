r"""Microcanonical samplers: Langevin dynamics whose bias is kept small, and trajectories that are accepted or rejected.

:class:`MCLMC` follows :mod:`microcanonical dynamics <pyro_symmetric.mcmc.kernels.isokinetic>` whose directions are
refreshed a little before every step, and accepts every step. In the limit of small steps its draws are the posterior's.
At a finite step they are biased, and the error of the energy tells how much (Robnik & Seljak 2023, arXiv 2303.18221):
its square per step and coordinate, :math:`\eta = \mathbb E (\Delta E)^2 / D`, falls with :math:`\varepsilon^6`, the
bias of variances with :math:`\varepsilon^2 \propto \eta^{1/3}`. Warm-up finds the step for which :math:`\eta` is what
was asked, over all chains: with the Robbins-Monro search of the other kernels, whose curve is here
:math:`1 - \eta / \eta_0`, with the slope :math:`-6`.

**The length** :math:`L` after which directions are forgotten is to be 0.4 autocorrelation lengths of the draws, as in
the paper. Each iteration lasts for :math:`L`. So if correlations fall geometrically, by the factor :math:`\rho` with
each draw, the autocorrelation length is :math:`L (1 + \rho) / (1 - \rho)`, and the rule is

.. math:: \rho = \frac{1 - 0.4}{1 + 0.4} = \frac37,

which warm-up solves for :math:`\log L`, with :math:`\rho` the mean over all chains and whitened coordinates, about each
chain's own average. For a Gaussian that gives :math:`L = 1.3`; the fastest decay of both means and squares is at 1.

:class:`AdjustedMCLMC` draws directions anew each iteration and accepts the end of a trajectory with probability
:math:`\min(1, e^{-\Delta E})`: no bias (Robnik, Cohn-Gordon & Seljak 2025, arXiv 2503.01707). How long trajectories
should be it learns as :class:`~pyro_symmetric.mcmc.kernels.adaptive_hmc.AdaptiveHMC` does.
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
from pyro_symmetric.mcmc.density.programs import run
from pyro_symmetric.mcmc.kernels.adaptive_hmc import (
    AdaptiveHMC,
    AdaptiveTuning,
    learnt_with_length,
    radical_inverse,
    steps_of,
)
from pyro_symmetric.mcmc.kernels.hmc import limit, whole_steps
from pyro_symmetric.mcmc.kernels.integrator import MAX_ENERGY_ERROR, PhasePoint, choose, decided
from pyro_symmetric.mcmc.kernels.isokinetic import GRADIENTS, directed, isokinetic, refreshed, steps_of_isokinetic
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.kernels.learning import Learnt, StepSearch
from pyro_symmetric.mcmc.kernels.mass import Mass
from pyro_symmetric.mcmc.kernels.randomness import normal, uniform
from pyro_symmetric.mcmc.kernels.warmup import HamiltonianTuning, TunedKernel, tuned

CORRELATION = 3 / 7  # of successive draws, which makes L 0.4 autocorrelation lengths
STEP_GAIN = 1 / 6  # of the search for log eps: Newton's, for an error that goes with the sixth power
LENGTH_GAIN = 1.0  # the change of log L for a correlation that is off by 1
LARGEST_RATIO = 100.0  # of an energy error to what was asked, that the search takes from one chain
LARGEST_EXCESS = 4.0  # of the mean ratio over 1, so that no iteration halves the step more than once
DIVERGED = 1e4  # of the same ratio, beyond which an iteration is taken back


def one_step_errors(density: Density, state: State, step_size: Tensor) -> Tensor:
    """Energy errors ``(C,)`` of one step in random directions, infinite where it left all numbers behind."""
    mass = state.tuning.mass
    momentum = directed(mass.draw(state.z, state.generator), mass)
    start = PhasePoint(state.z, momentum, state.energy, state.gradient)
    change = isokinetic(density, start, step_size, mass)[1]
    return torch.where(torch.isfinite(change), change, torch.inf)


@dataclass(frozen=True, eq=False)
class MicrocanonicalTuning(HamiltonianTuning):
    """The tuning of every kernel with full gradients, and the length after which directions are forgotten.

    :param length: search for it, in log.
    :param centre: each chain's average, weighted to the last iterations, ``(C, D)``.
    :param count: iterations that the centre is of.
    """

    length: StepSearch
    centre: Tensor
    count: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class MCLMC(TunedKernel):
    r"""Microcanonical Langevin dynamics of many chains: no step is rejected, so draws have a bias, which is asked for.

    For posteriors of many dimensions and for networks, whose chains best start from a deep ensemble,
    ``initial=ps.ensemble(...)``, as MILE does (Sommer et al., ICLR 2025). An iteration lasts for the length
    after which directions are forgotten.

    **The bias**: a Gaussian's variances come out 2 % too small at the default. It shrinks with the third root of
    ``energy_error``. No comparison of chains shows it, since they agree on the biased law. The statistic
    ``energy_error`` of the draws says what was kept, in units of what was asked, and
    :func:`~pyro_symmetric.compare.diagnose` judges it. :class:`AdjustedMCLMC` has no bias.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    >>> posterior = ps.sample(ps.MCLMC(model), num_samples=100, num_warmup=100, num_chains=8, seed=0, progress=False)
    >>> bool((posterior.samples["w"].std() - 1).abs() < 0.05)
    True

    :param energy_error: :math:`\eta`, the mean squared energy error of a step and coordinate that the step size is
        adapted to. For predictions of networks 0.05 is enough; MILE takes 0.1 to 0.5.
    :param length: :math:`L` after which directions are forgotten, where adaptation starts or, with
        ``adapt_length=False``, stays; in the units of HMC's trajectory lengths, :math:`\sqrt D` times those of the
        papers. An iteration lasts as long.
    :param adapt_length: whether warm-up learns it.
    :param max_steps: upper limit of the steps of one iteration, each of two gradients.
    """

    energy_error: float = 5e-4
    length: float = 1.0
    adapt_length: bool = True
    max_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("energy_error", self.energy_error)
        arguments.positive("length", self.length)
        arguments.whole("max_steps", self.max_steps, 1)

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        require_directions(self, z)
        return super().init(density, z, num_warmup, generator)

    def step(self, density: Density, state: State) -> State:
        tuning: MicrocanonicalTuning = state.tuning
        length = tuning.length.log_step.exp()
        # The one place where an iteration waits for the device: a loop needs its length.
        most, steps = limit(self.max_steps, tuning.most_steps), tuning.steps
        num_steps = int(whole_steps(length / tuning.step_size.double() - 0.5, most))
        spread = torch.expm1(2 * steps / length.to(steps.dtype)).sqrt()
        start = at = PhasePoint(state.z, state.momentum, state.energy, state.gradient)
        squares = torch.zeros_like(state.energy)
        for _ in range(num_steps):
            noise = normal(state.z, state.generator)
            at, squares = run(density, _langevin, at, squares, noise, steps, spread, tuning.mass)
        ratio = squares / (num_steps * state.z.shape[-1] * self.energy_error)
        kept = ratio < DIVERGED  # neither too much, nor NaN
        # What is taken back turns round, so that it doesn't meet the same end again.
        at = choose(kept, at, start._replace(momentum=-start.momentum))
        statistics = {
            "lp": -at.energy,
            "energy_error": torch.where(kept, ratio, torch.nan),
            "diverging": ~kept,
            **_cost(tuning, ratio, num_steps),
        }
        if tuning.learns:
            tuning = self._learnt(tuning, correlation(state.z, at.z, tuning), at, ratio, kept)
        return State(*at, tuning, state.generator, statistics)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        length: StepSearch = state.tuning.length
        if self.adapt_length and iteration + 1 == num_warmup:
            state = tuned(state, length=replace(length, log_step=length.log_average))
        return super().adapt(density, state, iteration, num_warmup)

    @property
    def _least_acceptance(self) -> float:
        return math.exp(-1)

    def _accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        return (-one_step_errors(density, state, step_size).square() / (state.z.shape[-1] * self.energy_error)).exp()

    def _search(self, step_size: Tensor, target: float | None, follow: bool) -> StepSearch:
        return StepSearch.start(step_size, 0.0, follow, STEP_GAIN)

    def _tuning(self, tuning: HamiltonianTuning, z: Tensor) -> MicrocanonicalTuning:
        length = StepSearch.start(z.new_tensor(self.length), CORRELATION, gain=LENGTH_GAIN)
        return MicrocanonicalTuning(**vars(tuning), length=length, centre=z)

    def _learnt(
        self, tuning: MicrocanonicalTuning, correlation: Tensor, at: PhasePoint, ratio: Tensor, kept: Tensor
    ) -> MicrocanonicalTuning:
        """The tuning after an iteration that ended there, with draws of this correlation ``()`` and these energy
        errors in units of what is asked ``(C,)``."""
        if self.adapt_length:
            length, log_step = tuning.length, tuning.search.log_step
            if not tuning.blind:
                length = length.update(correlation)
                longest = log_step + math.log(self.max_steps)
                length = replace(length, log_step=length.log_step.clamp(min=log_step, max=longest))
            centre = torch.lerp(tuning.centre, at.z, 2 / (tuning.count + 2))
            tuning = replace(tuning, length=length, centre=centre, count=tuning.count + 1)
        tuning = tuning.noted(at.z, at.energy, at.gradient)
        return (
            self._with_learnt_step(tuning, torch.where(kept, ratio, LARGEST_RATIO)) if self.adapt_step_size else tuning
        )

    def _with_learnt_step(self, tuning: MicrocanonicalTuning, ratio: Tensor) -> MicrocanonicalTuning:
        ratio = ratio.clamp(max=LARGEST_RATIO)
        pooled, pace = tuning.pace.pooled(ratio), tuning.pace
        if tuning.blind:
            pace = pace.update(1 / (1 + ratio), pooled.new_tensor(0.5))
        search = tuning.search.update((1 - pooled).clamp(min=-LARGEST_EXCESS))
        return replace(tuning, search=search, step_size=search.log_step.exp().to(ratio.dtype), pace=pace)


@dataclass(frozen=True, eq=False, repr=False)
class AdjustedMCLMC(AdaptiveHMC):
    r"""Microcanonical trajectories that are accepted or rejected: exact, and nothing needs to be set.

    What :class:`~pyro_symmetric.mcmc.kernels.adaptive_hmc.AdaptiveHMC` is with Hamiltonian trajectories. A step has
    two gradients.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    >>> kernel = ps.AdjustedMCLMC(model)
    >>> posterior = ps.sample(kernel, num_samples=100, num_warmup=100, num_chains=8, seed=0, progress=False)
    >>> bool((posterior.samples["w"].std() - 1).abs() < 0.05)
    True
    """

    target_accept: float = 0.9

    steps = Kernel.steps  # its iteration is several programs

    def _accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        return (-one_step_errors(density, state, step_size)).clamp(max=0).exp()

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        require_directions(self, z)
        return super().init(density, z, num_warmup, generator)

    def step(self, density: Density, state: State) -> State:
        tuning: AdaptiveTuning = state.tuning
        known, most = (Learnt.of(tuning), tuning.length), limit(self.max_steps, tuning.most_steps)
        steps = steps_of(known, radical_inverse(tuning.iteration + 1), most)
        # The one place where an iteration waits for the device: a loop needs its length.
        after, end = self._transition(density, state, int(steps))
        if tuning.learns:
            seen = state.z, end.z, after.z, after.statistics["acceptance_rate"], steps
            learnt, length = learnt_with_length(known, seen, tuning.mass, self._plan(tuning, most))
            tuning = replace(tuning, **vars(learnt), length=length).noted(after.z, after.energy, after.gradient)
        return replace(after, tuning=replace(tuning, iteration=tuning.iteration + 1))

    @staticmethod
    def _transition(density: Density, state: State, num_steps: int) -> tuple[State, PhasePoint]:
        tuning: HamiltonianTuning = state.tuning
        at = PhasePoint(state.z, state.momentum, state.energy, state.gradient)
        start = run(density, _begun, at, normal(state.z, state.generator), tuning.mass)
        end, change = isokinetic(density, start, tuning.steps, tuning.mass, num_steps)
        after: PhasePoint
        after, found = run(density, _ended, start, end, change, uniform(change, state.generator))
        return State(*after, tuning, state.generator, {**found._asdict(), **_cost(tuning, change, num_steps)}), end


# small steps --------------------------------------------------------------------------------------------------------


class _Adjusted(NamedTuple):
    lp: Tensor
    acceptance_rate: Tensor
    diverging: Tensor


def _begun(evaluate: Evaluate, start: PhasePoint, noise: Tensor, mass: Mass) -> PhasePoint:
    return start._replace(momentum=directed(mass.momentum(noise), mass))


def _ended(
    evaluate: Evaluate, start: PhasePoint, end: PhasePoint, change: Tensor, chance: Tensor
) -> tuple[PhasePoint, _Adjusted]:
    error = torch.where(torch.isfinite(change), change, torch.inf)
    after, acceptance, _ = decided(start, end, error, chance)
    return after, _Adjusted(-after.energy, acceptance, error > MAX_ENERGY_ERROR)


def _langevin(
    evaluate: Evaluate,
    start: PhasePoint,
    squares: Tensor,
    noise: Tensor,
    step_size: Tensor,
    spread: Tensor,
    mass: Mass,
) -> tuple[PhasePoint, Tensor]:
    """One step of directions refreshed by noise; to the squares ``(C,)`` that of its energy error is added."""
    turned = start._replace(momentum=refreshed(start.momentum, noise, spread, mass))
    end, change = steps_of_isokinetic(evaluate, turned, step_size, mass, num_steps=1)
    return end, squares + change.square()


def _cost(tuning: HamiltonianTuning, like: Tensor, num_steps: int) -> dict[str, Tensor]:
    steps = tuning.steps.expand(len(like), 1)[:, 0]
    return {"step_size": steps, "n_steps": torch.full_like(like, GRADIENTS * num_steps, dtype=torch.long)}


def correlation(before: Tensor, after: Tensor, tuning: MicrocanonicalTuning) -> Tensor:
    """Of draws ``(C, D)`` of two successive iterations, ``()`` in double precision; 0 if nothing moved yet."""
    first, last = (tuning.mass.whiten(z - tuning.centre) for z in (before, after))
    squares = (first.square().sum() + last.square().sum()).double() / 2
    return torch.where(squares > 0, torch.linalg.vecdot(first, last).sum().double() / squares, 0.0)


def require_directions(kernel: TunedKernel, z: Tensor) -> None:
    """:raises ValueError: if there is but one coordinate, and nothing to turn."""
    if z.shape[-1] < 2:
        raise ValueError(
            f"model has {z.shape[-1]} coordinate, but {type(kernel).__name__} needs at least 2, as its chains move by "
            "turning; use HMC or NUTS"
        )
