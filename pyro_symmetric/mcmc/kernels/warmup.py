r"""The warm-up of kernels with full gradients: a step size and a mass matrix that all chains learn together in warm-up.

**The step size** :math:`\varepsilon` is a root: the chains' mean acceptance falls in :math:`x = \log \varepsilon`, and
is to be the target :math:`\delta`. It is found by stochastic approximation (Robbins & Monro 1951) with averaging
(Polyak & Juditsky 1992),

.. math:: x_{t+1} = x_t + \frac{c}{t^{0.6}} (\alpha_t - \delta), \qquad
    \bar x_t = \tfrac{2}{t + 1} x_t + \bigl(1 - \tfrac{2}{t + 1}\bigr) \bar x_{t-1},

where :math:`c` is Newton's gain for the acceptance curve of many coordinates, :math:`\alpha = 2 \Phi(-\tfrac12 s)` with
:math:`s \propto \varepsilon^2` (Beskos et al. 2013, arXiv 1001.4460, theorem 3.6):

.. math:: \frac1c = -\frac{d\alpha}{dx} = 2 s\, \varphi(\tfrac12 s) \quad\text{where}\quad \alpha = \delta.

Stan's dual averaging (Hoffman & Gelman 2014, eq. 6) has a gain that grows with :math:`\sqrt t` at first, so that steps
swing widely, and acceptance is more than the target at the mean of their logarithms: after 50 iterations, by 0.06 for 4
chains and a target of 0.65, where this one is off by 0.003.

**The mass matrix** is renewed at the ends of Stan's windows (:func:`window_ends`), from all chains' draws of the
window.

Before the first window a dense one is learnt from gradients (:mod:`~pyro_symmetric.mcmc.kernels.curvature`), every ten
iterations anew, with a step that each chain finds for itself. Meanwhile chains may fall from far out, where each has a
scale of its own: on unscaled columns, starts between -2 and 2 have energies of 1e12. So the first trajectories are
single steps, whose speed is forgotten at once; by longer ones chains were flung to where all is flat. Chains that are
lost all the same move to the places of others when the first window begins. So do chains that stand still throughout a
window, when it ends, if each chain that moves has a lower energy (:func:`stranded`):
they lie where no step that suits the others is ever accepted. ``metadata["relocated_chains"]`` lists both.

**Chains that are stuck** at a step that suits the others go at a :class:`Pace` of their own until the mass matrix is
first renewed. Warm-up needs no invariant law, and these chains have yet to arrive. Those that are stuck at the end of
warm-up, as some are if it is short, get a smaller step for good: steps that stay as they are leave the law of each
chain as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.programs import evaluated_once
from pyro_symmetric.mcmc.kernels.curvature import Curvature
from pyro_symmetric.mcmc.kernels.integrator import PhasePoint, acceptance_of_one_step, find_step_size
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, relocated, stranded
from pyro_symmetric.mcmc.kernels.mass import MASSES, MAX_DENSE, Mass, MassEstimate
from pyro_symmetric.mcmc.kernels.stays import STUCK, Pace, Stays

DECAY = 0.6  # of the search's gain; averaging asks for more than 1/2 and less than 1
LARGEST_GAIN = 8.0  # near a target of 1 the curve is flat and Newton's step knows no bounds
FURTHEST = 1.0  # that one iteration moves a log step size: near such a target a bad one would take it to nothing
PROBES, MOST_HALVINGS = 3, 12  # of steps for chains that are stuck when warm-up ends
BLIND_STEPS = 32  # while the mass matrix is unknown, longer trajectories cost more than they teach
FALLING = 3  # renewals until which trajectories are single steps, lest chains that fall are flung far by their speed
BETWEEN_FIRST = 10  # iterations from one mass matrix to the next while they are learnt from gradients
FOLLOWING = 4  # the count at which a search stops that is to follow its root rather than to settle


@dataclass(frozen=True, eq=False)
class StepSearch:
    """Stochastic approximation of the log step size at which acceptance is the target.

    :param log_step: :math:`x`, of the next iteration, ``()`` in double precision.
    :param log_average: :math:`\\bar x`, what to keep in the end, likewise.
    :param count: :math:`t`, iterations so far.
    """

    log_step: Tensor
    log_average: Tensor
    count: int = 0

    @classmethod
    def start(cls, step_size: Tensor) -> StepSearch:
        """Start from a step size, ``()``."""
        log_step = step_size.double().log()
        return cls(log_step, log_step)

    def update(self, acceptance: Tensor, target: float, follow: bool = False, gain: float | None = None) -> StepSearch:
        """Learn from the mean acceptance ``()`` of one iteration.

        :param follow: whether the root may still move, as while chains are on their way: gains don't fall then.
        :param gain: what takes the place of Newton's gain, for other curves than that of the acceptance.
        """
        count = min(self.count + 1, FOLLOWING) if follow else self.count + 1
        gain = newton_gain(target) if gain is None else gain
        change = gain * count**-DECAY * (acceptance.double() - target)
        log_step = self.log_step + change.clamp(-FURTHEST, FURTHEST)
        return StepSearch(log_step, torch.lerp(self.log_average, log_step, 2 / (count + 1)), count)


@dataclass(frozen=True, eq=False)
class HamiltonianTuning:
    """The results of warm-up.

    :param step_size: of the integrator, shared by the chains, ``()``.
    :param mass: the mass matrix, shared likewise.
    :param search: for the step size.
    :param estimate: running covariance of the current window.
    :param began: where the chains were when the window began, ``(C, D)``.
    :param curvature: what a first mass matrix is learnt from, before the first window; otherwise ``None``.
    :param pace: of each chain, until the mass matrix is known; then ``None``, unless chains are stuck without.
    :param relocated: whether each chain was lost and moved to the place of another, ``(C,)``; ``None`` if none was.
    :param stays: how often chains are long refused, and the acceptance that is aimed at for that reason; ``None`` if
        every move is accepted.
    """

    step_size: Tensor
    mass: Mass
    search: StepSearch
    estimate: MassEstimate
    began: Tensor
    curvature: Curvature | None
    pace: Pace | None
    relocated: Tensor | None
    stays: Stays | None

    @property
    def blind(self) -> bool:
        """True if the mass matrix is still unknown, so that long trajectories cost more than they teach."""
        return self.pace is not None and self.pace.arriving

    @property
    def most_steps(self) -> int | None:
        """The most steps of a trajectory now, beside the kernel's own limit; ``None`` if it knows the mass."""
        if self.curvature is not None and self.curvature.renewals < FALLING:
            return 1
        return BLIND_STEPS if self.blind else None

    @property
    def steps(self) -> Tensor:
        """Step sizes as :func:`~pyro_symmetric.mcmc.kernels.integrator.leapfrog` takes them, ``()`` or ``(C, 1)``."""
        return self.step_size if self.pace is None else (self.step_size * self.pace.share)[:, None]


@dataclass(frozen=True, eq=False, repr=False)
class TunedKernel(Kernel):
    r"""Base of the kernels that follow trajectories with full gradients.

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: of the integrator, where adaptation starts or, with ``adapt_step_size=False``, stays. ``None``:
        found by doubling and halving at the starting points.
    :param adapt_step_size: whether warm-up adapts the step size.
    :param adapt_mass: whether warm-up learns the mass matrix; otherwise it is 1.
    :param mass: form of the mass matrix: ``"diagonal"``, ``"low-rank"`` for strong correlations, or ``"dense"`` for up
        to a few hundred dimensions. See :mod:`~pyro_symmetric.mcmc.kernels.mass`.
    :param rank: of a low-rank mass matrix, at most.
    """

    warmups = (150, 200, 300, 500, 900, 1700)  # whose windows are the same as far as they go

    model: Callable[..., Any]
    step_size: float | None = None
    adapt_step_size: bool = True
    adapt_mass: bool = True
    mass: str = "diagonal"
    rank: int = 16

    judged_by = "acceptance_rate"  # the statistic that the step size is adapted to

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.whole("rank", self.rank, 1)
        arguments.one_of("mass", self.mass, MASSES)

    # what subclasses provide ----------------------------------------------------------------------------------------

    @abstractmethod
    def _find_step(
        self, density: Density, at: PhasePoint, step_size: Tensor, mass: Mass, generator: torch.Generator
    ) -> Tensor:
        """A first step size for chains there, found from this one and in its shape: ``()``, or ``(C, 1)`` of each."""

    @abstractmethod
    def _adapt_step_size(self, tuning: HamiltonianTuning, judged: Tensor) -> HamiltonianTuning:
        """Learn from what an iteration found, ``(C,)``."""

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        if self.mass == "dense" and z.shape[-1] > MAX_DENSE:
            raise ValueError(
                f"mass is 'dense', but the model has {z.shape[-1]} coordinates; a matrix of that size fills the "
                "memory. Use mass='low-rank' or 'diagonal'"
            )
        start = PhasePoint(z, torch.zeros_like(z), *evaluated_once(density, z))
        estimate = MassEstimate.start(z, self.mass, self.rank)
        mass = estimate.mass()
        step = z.new_tensor(0.1 if self.step_size is None else self.step_size)
        learns = self.adapt_mass and len(window_ends(num_warmup)[1]) > 0
        pace = Pace.start(start.energy) if learns else None
        curvature = Curvature() if learns and self.mass == "dense" else None
        tuning = HamiltonianTuning(step, mass, StepSearch.start(step), estimate, z, curvature, pace, None, None)
        if self.step_size is None:
            tuning = self._with_step(density, start, tuning, step, generator)
        return State(*start, tuning, generator)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        begin, ends = window_ends(num_warmup)
        tuning: HamiltonianTuning = state.tuning
        if self.adapt_mass and ends and begin <= iteration < ends[-1]:
            tuning = replace(tuning, estimate=tuning.estimate.update(state.z))
        if self.adapt_step_size:
            tuning = self._adapt_step_size(tuning, state.statistics[self.judged_by])
        if tuning.curvature is not None:
            state, tuning = self._first_mass(density, state, tuning, iteration, begin)
        if self.adapt_mass and iteration + 1 in ends:
            state, tuning = relocated(state, tuning, *stranded(tuning.began, state.z, state.energy))
            if tuning.stays is not None:
                tuning = replace(tuning, stays=tuning.stays.renewed(judge=iteration + 1 > ends[0]))
            tuning = self._renew_mass(density, state, replace(tuning, began=state.z))
        if self.adapt_step_size and iteration + 1 == num_warmup:
            tuning = self._settled(density, state, tuning)
        return replace(state, tuning=tuning)

    def remarks(self, state: State) -> dict[str, Any]:
        relocated, stays = state.tuning.relocated, state.tuning.stays
        found = {} if relocated is None else {"relocated_chains": relocated.nonzero().flatten().tolist()}
        return found if stays is None else {**found, "target_accept": stays.target}

    # small steps ----------------------------------------------------------------------------------------------------

    def _settled(self, density: Density, state: State, tuning: HamiltonianTuning) -> HamiltonianTuning:
        """The tuning that stays when warm-up ends."""
        return replace(tuning, step_size=tuning.search.log_average.exp().to(state.z.dtype))

    def _renew_mass(self, density: Density, state: State, tuning: HamiltonianTuning) -> HamiltonianTuning:
        mass = tuning.estimate.mass()
        estimate = MassEstimate.start(state.z, self.mass, self.rank, mass.variance.sqrt())
        return self._with_mass(density, state, replace(tuning, estimate=estimate, pace=None), mass)

    def _first_mass(
        self, density: Density, state: State, tuning: HamiltonianTuning, iteration: int, begin: int
    ) -> tuple[State, HamiltonianTuning]:
        """Learn the mass matrix from gradients, every few iterations anew, until the first window begins; in the end,
        chains that are lost continue from the places of others."""
        assert tuning.curvature is not None
        curvature = tuning.curvature.update(state.z, state.gradient)
        if len(curvature.positions) == BETWEEN_FIRST:
            if (mass := curvature.mass(state.energy)) is not None:
                tuning = self._with_mass(density, state, tuning, mass)
            if iteration + 1 + BETWEEN_FIRST > begin:
                state, tuning = relocated(state, tuning, *curvature.lost(state.energy))
            curvature = Curvature(renewals=curvature.renewals + 1)
        return state, replace(tuning, curvature=curvature if iteration + 1 < begin else None)

    def _with_mass(self, density: Density, state: State, tuning: HamiltonianTuning, mass: Mass) -> HamiltonianTuning:
        """Another mass matrix, and the search of the step size anew."""
        tuning = replace(tuning, mass=mass)
        if not self.adapt_step_size:
            return tuning
        step = tuning.search.log_average.exp().to(state.z.dtype)
        at = PhasePoint(state.z, state.momentum, state.energy, state.gradient)
        return self._with_step(density, at, tuning, step, state.generator)

    def _with_step(
        self, density: Density, at: PhasePoint, tuning: HamiltonianTuning, step: Tensor, generator: torch.Generator
    ) -> HamiltonianTuning:
        """A step size for chains there, found from this one, and its search from there."""
        step = self._find_step(density, at, step, tuning.mass, generator)
        return replace(tuning, step_size=step, search=StepSearch.start(step))


@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianKernel(TunedKernel):
    """Base of the kernels that accept or reject where trajectories end.

    :param target_accept: mean acceptance that the step size is adapted to. Warm-up raises it to 0.95 if chains stay
        long at the same places (:mod:`~pyro_symmetric.mcmc.kernels.stays`). More pays where curvature varies, and costs
        elsewhere: with 0.86, effective draws for a gradient were 1.3 times as many on a small network (HMC), 1.9 times
        on eight schools as centred effects, and 0.9 times on Gaussians and regressions.
    """

    target_accept: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.fraction("target_accept", self.target_accept)

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        state = super().init(density, z, num_warmup, generator)
        return replace(state, tuning=replace(state.tuning, stays=Stays.start(self.target_accept, state.energy)))

    def _find_step(
        self, density: Density, at: PhasePoint, step_size: Tensor, mass: Mass, generator: torch.Generator
    ) -> Tensor:
        return find_step_size(density, at, step_size, mass, self.target_accept, generator, self._acceptance_of_one_step)

    def _with_step(
        self, density: Density, at: PhasePoint, tuning: HamiltonianTuning, step: Tensor, generator: torch.Generator
    ) -> HamiltonianTuning:
        if tuning.curvature is None:
            return super()._with_step(density, at, tuning, step, generator)
        # Each chain finds its own, by the median of which most move.
        steps = self._find_step(density, at, step.expand(len(at.z), 1), tuning.mass, generator)
        step = steps.median()
        pace = replace(Pace.start(at.energy), share=(steps / step).clamp(max=1.0).squeeze(1))
        return replace(tuning, step_size=step, search=StepSearch.start(step), pace=pace)

    def _adapt_step_size(self, tuning: HamiltonianTuning, acceptance: Tensor) -> HamiltonianTuning:
        assert tuning.stays is not None
        pace, pooled, stays = tuning.pace, acceptance.mean(), tuning.stays.update(acceptance)
        if pace is not None:
            pooled, pace = pace.pooled(acceptance), pace.update(acceptance, stays.target)
        search = tuning.search.update(pooled, stays.target, follow=tuning.blind)
        step_size = search.log_step.exp().to(acceptance.dtype)
        return replace(tuning, search=search, step_size=step_size, pace=pace, stays=stays)

    def _settled(self, density: Density, state: State, tuning: HamiltonianTuning) -> HamiltonianTuning:
        tuning = super()._settled(density, state, tuning)
        return replace(tuning, pace=self._pace_of_the_stuck(density, state, tuning))

    def _pace_of_the_stuck(self, density: Density, state: State, tuning: HamiltonianTuning) -> Pace | None:
        """A smaller step for chains that the step size would leave where they are; ``None`` if there are none."""
        at = PhasePoint(state.z, state.momentum, state.energy, state.gradient)
        full = torch.ones_like(state.energy)
        share, recent = full, full
        for _ in range(MOST_HALVINGS):
            steps = tuning.step_size * share[:, None]
            tries = [
                self._acceptance_of_one_step(density, at, steps, tuning.mass, state.generator) for _ in range(PROBES)
            ]
            recent = torch.stack(tries).mean(0)
            # Who is behind halves the step until it moves well, not only a little.
            behind = recent < torch.where(share < 1, 0.5 * self.target_accept, STUCK)
            if not bool(behind.any()):
                break
            share = torch.where(behind, 0.5 * share, share)
        return Pace(share, recent, arriving=False) if bool((share < 1).any()) else None

    def _acceptance_of_one_step(
        self, density: Density, at: PhasePoint, step_size: Tensor, mass: Mass, generator: torch.Generator
    ) -> Tensor:
        """With fresh momenta, ``(C,)``, by this kernel's own iteration, so that no other program is needed."""
        return acceptance_of_one_step(density, at, step_size, mass, generator)


# small steps --------------------------------------------------------------------------------------------------------


def newton_gain(target: float) -> float:
    """:math:`c`, the fall of the log step size for which acceptance rises by one unit, around the target."""
    half = -NormalDist().inv_cdf(target / 2)  # half of s
    return min(1 / (4 * half * NormalDist().pdf(half)), LARGEST_GAIN)


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
