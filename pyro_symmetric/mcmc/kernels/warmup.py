r"""The warm-up of kernels with full gradients: a step size and a mass matrix that all chains learn together in warm-up.

**The step size** is searched for with every iteration (:mod:`~pyro_symmetric.mcmc.kernels.learning`).

**The mass matrix** is renewed at the ends of Stan's windows (:func:`window_ends`), from all chains' draws of the
window.

Before the first window a dense one is learnt from gradients (:mod:`~pyro_symmetric.mcmc.kernels.curvature`), every ten
iterations anew, with a step that each chain finds for itself. Meanwhile chains may fall from far out, where each has a
scale of its own: on unscaled columns, starts between -2 and 2 have energies of 1e12. So the first trajectories are
single steps, whose speed is forgotten at once; by longer ones chains were flung to where all is flat. Chains that are
lost all the same move to the places of others when the first window begins. So do chains that stand still throughout a
window, when it ends, if each chain that moves has a lower energy (:func:`stranded`): they lie where no step that suits
the others is ever accepted. With a dense mass matrix, so do chains in modes that hold next to nothing beside that of
the others (:mod:`~pyro_symmetric.mcmc.kernels.outweighed`). ``metadata["relocated_chains"]`` lists them all.

**Chains that are stuck** at a step that suits the others go at a :class:`Pace` of their own until the mass matrix is
first renewed. Warm-up needs no invariant law, and these chains have yet to arrive. Those that are stuck at the end of
warm-up, as some are if it is short, get a smaller step for good: steps that stay as they are leave the law of each
chain as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.programs import evaluated_once
from pyro_symmetric.mcmc.kernels.curvature import Curvature
from pyro_symmetric.mcmc.kernels.integrator import PhasePoint, find_step_size
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, Tuning, relocated, stranded
from pyro_symmetric.mcmc.kernels.learning import HIGHER, STUCK, Learnt, Pace, Stays, StepSearch
from pyro_symmetric.mcmc.kernels.mass import MASSES, MAX_DENSE, Mass, MassEstimate
from pyro_symmetric.mcmc.kernels.outweighed import Passed

PROBES, MOST_HALVINGS = 3, 12  # of steps for chains that are stuck when warm-up ends
BLIND_STEPS = 32  # while the mass matrix is unknown, longer trajectories cost more than they teach
FALLING = 3  # renewals until which trajectories are single steps, lest chains that fall are flung far by their speed
BETWEEN_FIRST = 10  # iterations from one mass matrix to the next while they are learnt from gradients


@dataclass(frozen=True, eq=False)
class HamiltonianTuning:
    """The results of warm-up.

    :param step_size: of the integrator, shared by the chains, ``()``.
    :param search: for the step size.
    :param pace: of each chain, until the mass matrix is known; afterwards of those that are stuck without.
    :param stays: how often chains are long refused.
    :param mass: the mass matrix, shared by the chains.
    :param estimate: running covariance of the current window; ``None`` outside of windows.
    :param began: where the chains were when the window began, ``(C, D)``.
    :param passed: where they have been since, if the mass matrix is dense; ``None`` outside of windows, or if that
        couldn't tell modes apart.
    :param curvature: what a first mass matrix is learnt from, before the first window; otherwise ``None``.
    :param blind: True if the mass matrix is still unknown, so that long trajectories cost more than they teach.
    :param learns: whether warm-up still goes on.
    :param relocated: whether each chain was lost and moved to the place of another, ``(C,)``; ``None`` if none was.
    """

    step_size: Tensor
    search: StepSearch
    pace: Pace
    stays: Stays
    mass: Mass
    estimate: MassEstimate | None
    began: Tensor
    passed: Passed | None
    curvature: Curvature | None
    blind: bool
    learns: bool
    relocated: Tensor | None

    @property
    def most_steps(self) -> int | None:
        """The most steps of a trajectory now, beside the kernel's own limit; ``None`` if it knows the mass."""
        if self.curvature is not None and self.curvature.renewals < FALLING:
            return 1
        return BLIND_STEPS if self.blind else None

    @property
    def steps(self) -> Tensor:
        """Step sizes as :func:`~pyro_symmetric.mcmc.kernels.integrator.leapfrog` takes them, ``(C, 1)``."""
        return Learnt.of(self).steps

    def noted(self: Tuning, z: Tensor, momentum: Tensor, energy: Tensor, gradient: Tensor) -> Tuning:
        """Take in a draw of all chains ``(C, D)``, its energy ``(C,)`` and the gradient there ``(C, D)``."""
        if not self.learns:
            return self
        if self.estimate is not None:
            passed = None if self.passed is None else self.passed.update(z, energy)
            return replace(self, estimate=self.estimate.update(z), passed=passed)
        if self.curvature is not None:
            return replace(self, curvature=self.curvature.update(z, gradient))
        return self


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

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.whole("rank", self.rank, 1)
        arguments.one_of("mass", self.mass, MASSES)

    # what subclasses provide ----------------------------------------------------------------------------------------

    @abstractmethod
    def _accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        """The acceptance ``(C,)`` of one step of this size, ``()`` or ``(C, 1)``, or what stands for it, from there
        with fresh momenta."""

    @property
    @abstractmethod
    def _least_acceptance(self) -> float:
        """Of one step: a first step size is doubled or halved until it crosses this."""

    @abstractmethod
    def _search(self, step_size: Tensor, target: float | None, follow: bool) -> StepSearch:
        """The search for the step size, ``()``, from there.

        :param target: that it had before; ``None``: there was none.
        """

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        if self.mass == "dense" and z.shape[-1] > MAX_DENSE:
            raise ValueError(
                f"mass is 'dense', but the model has {z.shape[-1]} coordinates; a matrix of that size fills the "
                "memory. Use mass='low-rank' or 'diagonal'"
            )
        start = PhasePoint(z, torch.zeros_like(z), *evaluated_once(density, z))
        step = z.new_tensor(0.1 if self.step_size is None else self.step_size)
        blind = self.adapt_mass and len(window_ends(num_warmup)[1]) > 0
        tuning = HamiltonianTuning(
            step,
            self._search(step, None, blind),
            Pace.start(start.energy),
            Stays.start(start.energy),
            MassEstimate.start(z, self.mass, self.rank).mass(),
            None,
            z,
            None,
            Curvature() if blind and self.mass == "dense" else None,
            blind,
            learns=num_warmup > 0,
            relocated=None,
        )
        state = State(*start, self._tuning(tuning, z), generator)
        return state if self.step_size is not None else self._with_step(density, state, step)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        begin, ends = window_ends(num_warmup) if self.adapt_mass else (num_warmup, ())
        if state.tuning.curvature is not None:
            state = self._first_mass(density, state, iteration, begin)
        if iteration + 1 == begin and ends:
            estimate = MassEstimate.start(state.z, self.mass, self.rank)
            state = tuned(state, estimate=estimate, passed=Passed.start(state.z) if self.mass == "dense" else None)
        if iteration + 1 in ends:
            state = relocated(state, *stranded(state.tuning.began, state.z, state.energy))
            if state.tuning.passed is not None and state.tuning.passed.z:
                state = relocated(state, *state.tuning.passed.outweighed())
            state = self._renew_mass(density, state, iteration + 1, ends)
        if iteration + 1 == num_warmup:
            state = self._settled(density, state)
        return state

    # small steps ----------------------------------------------------------------------------------------------------

    def _tuning(self, tuning: HamiltonianTuning, z: Tensor) -> HamiltonianTuning:
        """The tuning with all that this kernel learns besides, for chains that start at ``z``."""
        return tuning

    def _settled(self, density: Density, state: State) -> State:
        """The tuning that stays when warm-up ends."""
        if not self.adapt_step_size:
            return tuned(state, learns=False)
        return tuned(state, learns=False, step_size=state.tuning.search.log_average.exp().to(state.z.dtype))

    def _renew_mass(self, density: Density, state: State, iteration: int, ends: tuple[int, ...]) -> State:
        """The mass matrix of the window that ends; the next one begins, if there is one."""
        estimate = state.tuning.estimate
        mass, following, passed = estimate.mass(), None, None
        if iteration < ends[-1]:
            following = MassEstimate.start(state.z, self.mass, self.rank, mass.variance.sqrt())
            passed = Passed.start(state.z) if self.mass == "dense" else None
        parts = {"estimate": following, "passed": passed, "began": state.z, "pace": Pace.start(state.energy)}
        return self._with_mass(density, tuned(state, **parts, blind=False), mass)

    def _first_mass(self, density: Density, state: State, iteration: int, begin: int) -> State:
        """Learn the mass matrix from gradients, every few iterations anew, until the first window begins; in the end,
        chains that are lost continue from the places of others."""
        curvature: Curvature = state.tuning.curvature
        if len(curvature.positions) == BETWEEN_FIRST:
            if (mass := curvature.mass(state.energy)) is not None:
                state = self._with_mass(density, state, mass)
            if iteration + 1 + BETWEEN_FIRST > begin:
                state = relocated(state, *curvature.lost(state.energy))
            state = tuned(state, curvature=Curvature(renewals=curvature.renewals + 1))
        return tuned(state, curvature=None) if iteration + 1 == begin else state

    def _with_mass(self, density: Density, state: State, mass: Mass) -> State:
        """Another mass matrix, and the search of the step size anew."""
        state = tuned(state, mass=mass)
        if not self.adapt_step_size:
            return state
        return self._with_step(density, state, state.tuning.search.log_average.exp().to(state.z.dtype))

    def _with_step(self, density: Density, state: State, step: Tensor) -> State:
        """A step size for chains there, found from this one, and its search from there."""
        step = find_step_size(partial(self._accepts, density, state), step, self._least_acceptance)
        search = self._search(step, float(state.tuning.search.target), state.tuning.blind)
        return tuned(state, step_size=step, search=search)


@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianKernel(TunedKernel):
    """Base of the kernels that accept or reject where trajectories end.

    :param target_accept: mean acceptance that the step size is adapted to. Warm-up raises it to 0.95 if chains stay
        long at the same places (:mod:`~pyro_symmetric.mcmc.kernels.learning`), which takes at least 200 iterations:
        shorter warm-ups have a single window. More pays where curvature varies, and costs elsewhere: with 0.86,
        effective draws for a gradient were 1.3 times as many on a small network (HMC), 1.9 times on eight schools as
        centred effects, and 0.9 times on Gaussians and regressions.
    """

    target_accept: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.fraction("target_accept", self.target_accept)

    @abstractmethod
    def _moved(self, density: Density, state: State, most: int | None) -> State:
        """One iteration.

        :param most: steps of a trajectory, beside the kernel's own limit; ``None``: there is no other.
        """

    @property
    def _least_acceptance(self) -> float:
        return self.target_accept

    def step(self, density: Density, state: State) -> State:
        return self._moved(density, state, state.tuning.most_steps)

    def remarks(self, state: State) -> dict[str, Any]:
        return {**super().remarks(state), "target_accept": float(state.tuning.search.target)}

    def _learnt(self, tuning: Tuning, acceptance: Tensor) -> Tuning:
        """The tuning after an iteration of this acceptance ``(C,)``."""
        if not (tuning.learns and self.adapt_step_size):
            return tuning
        return replace(tuning, **vars(Learnt.of(tuning).update(acceptance, tuning.blind)))

    def _accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        share = step_size.expand(len(state.z), 1).squeeze(1)
        pace = replace(state.tuning.pace, share=share)
        tried = tuned(state, learns=False, step_size=torch.ones_like(share[0]), pace=pace)
        return self._moved(density, tried, 1).statistics["acceptance_rate"]

    def _search(self, step_size: Tensor, target: float | None, follow: bool) -> StepSearch:
        return StepSearch.start(step_size, self.target_accept if target is None else target, follow)

    def _with_step(self, density: Density, state: State, step: Tensor) -> State:
        if state.tuning.curvature is None:
            return super()._with_step(density, state, step)
        # Each chain finds its own, by the median of which most move.
        each = step.expand(len(state.z), 1)
        steps = find_step_size(partial(self._accepts, density, state), each, self._least_acceptance)
        step = steps.median()
        pace = replace(Pace.start(state.energy), share=(steps / step).clamp(max=1.0).squeeze(1))
        search = self._search(step, float(state.tuning.search.target), state.tuning.blind)
        return tuned(state, step_size=step, search=search, pace=pace)

    def _renew_mass(self, density: Density, state: State, iteration: int, ends: tuple[int, ...]) -> State:
        search, stays = state.tuning.search, state.tuning.stays
        if iteration > ends[0] and float(search.target) < HIGHER and stays.too_many():
            search = replace(search, target=torch.full_like(search.target, HIGHER))
        return super()._renew_mass(
            density, tuned(state, search=search, stays=Stays.start(state.energy)), iteration, ends
        )

    def _settled(self, density: Density, state: State) -> State:
        state = super()._settled(density, state)
        if not self.adapt_step_size:
            return state
        return tuned(state, pace=self._pace_of_the_stuck(density, state))

    def _pace_of_the_stuck(self, density: Density, state: State) -> Pace:
        """A smaller step for chains that the step size would leave where they are."""
        full = torch.ones_like(state.energy)
        share, recent = full, full
        for _ in range(MOST_HALVINGS):
            steps = state.tuning.step_size * share[:, None]
            recent = torch.stack([self._accepts(density, state, steps) for _ in range(PROBES)]).mean(0)
            # Who is behind halves the step until it moves well, not only a little.
            behind = recent < torch.where(share < 1, 0.5 * self.target_accept, STUCK)
            if not bool(behind.any()):
                break
            share = torch.where(behind, 0.5 * share, share)
        return Pace(share, recent)


# small steps --------------------------------------------------------------------------------------------------------


def tuned(state: State, **parts: Any) -> State:
    """The state with other parts of its tuning."""
    return replace(state, tuning=replace(state.tuning, **parts))


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
