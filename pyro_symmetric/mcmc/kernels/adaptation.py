r"""The warm-up of kernels with full gradients: a step size and a mass matrix that all chains learn together.

**Windows.** As in Stan, the mass matrix is learnt from the draws of windows that double in length, between a first
phase in which chains arrive and a last one in which the step size settles (:func:`window_ends`).

**The mass matrix** is the covariance *within* chains, pooled over them (Welford 1962): chains of a network usually sit
in different modes, and the distance between modes says nothing about how far one trajectory may go. Variances are
shrunk towards a small constant as if by five draws, as Stan does, and a dense matrix's correlations likewise. Of fewer
draws than twice the coordinates a dense matrix is diagonal.

**The step size** :math:`\varepsilon` is a root: acceptance falls in :math:`x = \log \varepsilon`, and is to be the
target :math:`\delta`. It is found by stochastic approximation (Robbins & Monro 1951) with averaging (Polyak &
Juditsky 1992),

.. math:: x_{t+1} = x_t + \frac{c}{t^{0.6}} (\alpha_t - \delta), \qquad
    \bar x_t = \tfrac{2}{t + 1} x_t + \bigl(1 - \tfrac{2}{t + 1}\bigr) \bar x_{t-1},

where :math:`c` is Newton's gain for the acceptance curve of many coordinates, :math:`\alpha = 2 \Phi(-\tfrac12 s)` with
:math:`s \propto \varepsilon^2` (Beskos et al. 2013, arXiv 1001.4460, theorem 3.6):

.. math:: \frac1c = -\frac{d\alpha}{dx} = 2 s\, \varphi(\tfrac12 s) \quad\text{where}\quad \alpha = \delta.

Stan's dual averaging (Hoffman & Gelman 2014, eq. 6) has a gain that grows with :math:`\sqrt t` at first, so that steps
swing widely, and acceptance is more than the target at the mean of their logarithms: after 50 iterations, by 0.06 for 4
chains and a target of 0.65, where this one is off by 0.003.

Until the mass matrix is first known each chain has a step of its own: far out, each is at a scale of its own. From then
on all have one, by their mean acceptance, which so many chains tell after few iterations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.compiled import evaluated_once
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.integrator import PhasePoint, energy_error, find_step_size, leapfrog
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, Tuning
from pyro_symmetric.mcmc.kernels.mass import MASSES, MAX_DENSE, DenseMass, Mass

DECAY = 0.6  # of the search's gain; averaging asks for more than 1/2 and less than 1
LARGEST_GAIN = 8.0  # near a target of 1 the curve is flat and Newton's step knows no bounds
FURTHEST = 1.0  # that one iteration moves a log step size: near such a target a bad one would take it to nothing
FOLLOWING = 4  # the count at which a search stops that is to follow its root rather than to settle
BLIND_STEPS = 32  # while the mass matrix is unknown, longer trajectories cost more than they teach
MANY_DRAWS = 2  # for each coordinate, from which on correlations are learnt


# the step size ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepSizeAdaptation:
    """Stochastic approximation of the log step size at which acceptance is the target; tensors in double precision.

    :param log_step: :math:`x`, of the next iteration, ``(C,)``, or ``()``; likewise
    :param log_average: :math:`\\bar x`, what to keep in the end.
    :param target: :math:`\\delta`.
    :param gain: :math:`c`.
    :param most: the count at which gains fall no more; ``None``: there is none.
    :param count: :math:`t`, iterations so far.
    """

    log_step: Tensor
    log_average: Tensor
    target: float
    gain: float
    most: int | None
    count: int = 0

    @classmethod
    def start(
        cls, step_size: Tensor, target: float, follow: bool = False, gain: float | None = None
    ) -> StepSizeAdaptation:
        """Start from step sizes.

        :param follow: whether the root may still move, as while chains are on their way: gains don't fall then.
        :param gain: what takes the place of Newton's gain, for other curves than that of the acceptance.
        """
        x = step_size.double().log()
        return cls(x, x, target, newton_gain(target) if gain is None else gain, FOLLOWING if follow else None)

    def update(self, acceptance: Tensor) -> StepSizeAdaptation:
        """Learn from the acceptance of one iteration, in the shape of the step sizes."""
        count = min(self.count + 1, self.most or self.count + 1)
        change = self.gain * count**-DECAY * (acceptance.double() - self.target)
        log_step = self.log_step + change.clamp(-FURTHEST, FURTHEST)
        average = torch.lerp(self.log_average, log_step, 2 / (count + 1))
        return replace(self, log_step=log_step, log_average=average, count=count)


def newton_gain(target: float) -> float:
    """:math:`c`, the fall of the log step size for which acceptance rises by one unit, around the target."""
    half = -NormalDist().inv_cdf(target / 2)  # half of s
    return min(1 / (4 * half * NormalDist().pdf(half)), LARGEST_GAIN)


# the mass matrix ----------------------------------------------------------------------------------------------------


def window_ends(num_warmup: int, first: int = 75, last: int = 50, base: int = 25) -> tuple[int, tuple[int, ...]]:
    """When the mass matrix is learnt: the iteration where it begins, and those before which it is renewed.

    Short warm-ups use 15 % and 10 % of their length in place of ``first`` and ``last``; under 20 iterations there is
    nothing to learn from.
    """
    if num_warmup < 20:
        return num_warmup, ()
    if first + base + last > num_warmup:
        first, last = int(0.15 * num_warmup), int(0.1 * num_warmup)
        base = num_warmup - first - last
    ends: list[int] = []
    end, length = first, base
    while end < num_warmup - last:
        end += length
        length *= 2
        if end + length > num_warmup - last:  # the next window wouldn't fit: this one takes what is left
            end = num_warmup - last
        ends.append(end)
    return first, tuple(ends)


@dataclass(frozen=True, eq=False)
class MassEstimate:
    r"""Running covariance within chains, pooled over the chains (Welford 1962).

    :param mean: each chain's mean, ``(C, D)``.
    :param squares: sum of squared deviations over chains and draws, ``(D,)``.
    :param scatter: of a dense matrix the sum of the deviations' outer products, ``(D, D)``; else ``None``.
    :param count: draws of each chain so far.
    """

    mean: Tensor
    squares: Tensor
    scatter: Tensor | None
    count: int = 0

    @classmethod
    def start(cls, z: Tensor, kind: str = "diagonal") -> MassEstimate:
        """Nothing seen yet, for chains ``(C, D)``."""
        dim = z.shape[-1]
        return cls(torch.zeros_like(z), z.new_zeros(dim), z.new_zeros(dim, dim) if kind == "dense" else None)

    def update(self, z: Tensor) -> MassEstimate:
        """Take in one draw of every chain, ``(C, D)``."""
        count = self.count + 1
        delta = z - self.mean
        # These rows' outer products sum to the scatter about the chains' final means.
        rows = delta * ((count - 1) / count) ** 0.5
        scatter = None if self.scatter is None else torch.addmm(self.scatter, rows.mT, rows)
        return MassEstimate(self.mean + delta / count, self.squares + rows.square().sum(0), scatter, count)

    def mass(self) -> Mass:
        """The mass matrix that the draws so far suggest; of less than two draws the unit matrix."""
        degrees = len(self.mean) * max(self.count - 1, 0)
        share = degrees / (degrees + 5.0)
        if degrees < 1:
            variance = torch.ones_like(self.squares)
        else:
            variance = share * self.squares / degrees + 1e-3 * (1 - share)
        if self.scatter is None:
            return Mass(variance)
        eye = torch.eye(len(variance), dtype=torch.double, device=variance.device)
        if degrees < max(MANY_DRAWS * len(eye), 1):
            return DenseMass.of(torch.diag(variance))
        squares = self.squares.double()
        moves = squares > 0
        deviations = torch.where(moves, squares / degrees, variance.double()).sqrt()
        norms = torch.where(moves, squares, 1.0).sqrt()
        correlations = (self.scatter.double() / norms / norms[:, None]).fill_diagonal_(1.0)
        correlations = torch.lerp(correlations, eye, 1e-3 * (1 - share))
        return DenseMass.of((correlations * deviations * deviations[:, None]).to(variance.dtype))


# kernels that learn both --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HamiltonianTuning:
    """The results of warm-up.

    :param step_size: of the integrator, ``(C,)``; once the mass matrix is known, the same for all chains.
    :param search: for the step size.
    :param mass: the mass matrix, shared by the chains.
    :param estimate: running covariance of the current window; ``None`` outside of windows.
    :param blind: True while the mass matrix is still unknown.
    :param learns: whether warm-up still goes on.
    """

    step_size: Tensor
    search: StepSizeAdaptation
    mass: Mass
    estimate: MassEstimate | None
    blind: bool
    learns: bool

    @property
    def steps(self) -> Tensor:
        """Step sizes as the integrators take them, ``(C, 1)``."""
        return self.step_size[:, None]

    def noted(self: Tuning, z: Tensor) -> Tuning:
        """Take in a draw of all chains ``(C, D)``."""
        if not self.learns or self.estimate is None:
            return self
        return replace(self, estimate=self.estimate.update(z))


@dataclass(frozen=True, eq=False, repr=False)
class TunedKernel(Kernel):
    r"""Base of the kernels that follow trajectories with full gradients.

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: of the integrator, where adaptation starts or, with ``adapt_step_size=False``, stays. ``None``:
        found by doubling and halving at the starting points.
    :param adapt_step_size: whether warm-up adapts the step size.
    :param adapt_mass: whether warm-up learns the mass matrix; otherwise it is 1.
    :param mass: form of the mass matrix: ``"diagonal"``, or ``"dense"`` for up to a few hundred dimensions.
    """

    warmups = (150, 200, 300, 500, 900, 1700)  # whose windows are the same as far as they go

    model: Callable[..., Any]
    step_size: float | None = None
    adapt_step_size: bool = True
    adapt_mass: bool = True
    mass: str = "diagonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.one_of("mass", self.mass, MASSES)

    # what subclasses provide ----------------------------------------------------------------------------------------

    @abstractmethod
    def _accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        """The acceptance of one step of these sizes, or what stands for it, from there with fresh momenta, ``(C,)``."""

    @property
    @abstractmethod
    def _least_acceptance(self) -> float:
        """Acceptance of one step: a first step size is doubled or halved until it crosses this."""

    @abstractmethod
    def _search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        """The search for step sizes ``(C,)``, from there."""

    def _tuning(self, tuning: HamiltonianTuning, z: Tensor) -> HamiltonianTuning:
        """The tuning with all that this kernel learns besides, for chains that start at ``z``."""
        return tuning

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        if self.mass == "dense" and z.shape[-1] > MAX_DENSE:
            raise ValueError(
                f"mass is 'dense', but the model has {z.shape[-1]} coordinates; a matrix of that size fills the "
                "memory. Use mass='diagonal'"
            )
        start = PhasePoint(z, torch.zeros_like(z), *evaluated_once(density, z))
        step = torch.full_like(start.energy, 0.1 if self.step_size is None else self.step_size)
        blind = self.adapt_mass and len(window_ends(num_warmup)[1]) > 0
        mass = MassEstimate.start(z, self.mass).mass()
        tuning = HamiltonianTuning(step, self._search(step, blind), mass, None, blind, learns=num_warmup > 0)
        state = State(*start, self._tuning(tuning, z), generator)
        return state if self.step_size is not None else self._with_step(density, state, step)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        begin, ends = window_ends(num_warmup) if self.adapt_mass else (num_warmup, ())
        done = iteration + 1
        if done in ends:
            state = tuned(state, mass=state.tuning.estimate.mass(), estimate=None, blind=False)
            if self.adapt_step_size:
                state = self._with_step(density, state, _settled(state))
        if ends and (done == begin or done in ends[:-1]):
            state = tuned(state, estimate=MassEstimate.start(state.z, self.mass))
        if done == num_warmup:
            state = tuned(state, learns=False, **({"step_size": _settled(state)} if self.adapt_step_size else {}))
        return state

    # small steps ----------------------------------------------------------------------------------------------------

    def _with_step(self, density: Density, state: State, step: Tensor) -> State:
        """Step sizes for chains there, found from these ``(C,)``, and the search from there."""
        accepts, blind = partial(self._accepts, density, state), state.tuning.blind
        step = find_step_size(accepts, step, self._least_acceptance, alone=blind)
        return tuned(state, step_size=step, search=self._search(step, blind))

    def _learnt(self, tuning: Tuning, acceptance: Tensor) -> Tuning:
        """The tuning after an iteration of this acceptance, ``(C,)``."""
        if not (tuning.learns and self.adapt_step_size):
            return tuning
        search = tuning.search.update(acceptance if tuning.blind else acceptance.mean().expand_as(acceptance))
        return replace(tuning, search=search, step_size=search.log_step.exp().to(acceptance.dtype))


@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianKernel(TunedKernel):
    """Base of the kernels that accept or reject where trajectories end.

    :param target_accept: mean acceptance that the step size is adapted to. More pays where curvature varies, and costs
        elsewhere.
    """

    target_accept: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.fraction("target_accept", self.target_accept)

    @property
    def _least_acceptance(self) -> float:
        return self.target_accept

    def _accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        mass = state.tuning.mass
        start = PhasePoint(state.z, mass.draw(state.z, state.generator), state.energy, state.gradient)
        end = leapfrog(partial(evaluated_once, density), start, step_size[:, None], mass)
        return (-energy_error(end.total_energy(mass), start.total_energy(mass))).clamp(max=0).exp()

    def _search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        return StepSizeAdaptation.start(step_size, self.target_accept, follow)


# small steps --------------------------------------------------------------------------------------------------------


def tuned(state: State, **parts: Any) -> State:
    """The state with other parts of its tuning."""
    return replace(state, tuning=replace(state.tuning, **parts))


def _settled(state: State) -> Tensor:
    """The step size that a search has found, the median of chains that searched by themselves, ``(C,)``."""
    average: Tensor = state.tuning.search.log_average
    return average.median().exp().to(state.z.dtype).expand(len(average)).clone()
