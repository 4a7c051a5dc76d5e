r"""What the Hamiltonian kernels share: a step size and a mass matrix that all chains learn together in warm-up.

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

**Chains that are stuck** at a step that suits the others go at a :class:`Pace` of their own until the mass matrix is
first renewed. Warm-up needs no invariant law, and these chains have yet to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.chain_findings import ACCEPTANCE
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.integrator import PhasePoint, find_step_size
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.kernels.mass import MASSES, MAX_DENSE, Mass, MassEstimate

STUCK = ACCEPTANCE[1]  # acceptance below which a chain hardly moves
DECAY = 0.6  # of the search's gain; averaging asks for more than 1/2 and less than 1
LARGEST_GAIN = 8.0  # near a target of 1 the curve is flat and Newton's step knows no bounds
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

    def update(self, acceptance: Tensor, target: float, follow: bool = False) -> StepSearch:
        """Learn from the mean acceptance ``()`` of one iteration.

        :param follow: whether the root may still move, as while chains are on their way: gains don't fall then.
        """
        count = min(self.count + 1, FOLLOWING) if follow else self.count + 1
        log_step = self.log_step + newton_gain(target) * count**-DECAY * (acceptance.double() - target)
        return StepSearch(log_step, torch.lerp(self.log_average, log_step, 2 / (count + 1)), count)


@dataclass(frozen=True, eq=False)
class Pace:
    """Each chain's share of the step size, while chains are on their way.

    A chain that hardly moves at a step with which most get along falls back to a share of it, which it adapts to its
    own acceptance until it has caught up. So a step that suits most isn't drawn down by a few, however many chains
    there are, and none is left behind.

    :param share: of the step size, in (0, 1], ``(C,)``.
    :param recent: acceptance, averaged over about the last five iterations, ``(C,)``.
    """

    share: Tensor
    recent: Tensor

    @classmethod
    def start(cls, like: Tensor) -> Pace:
        """All at full pace, for chains ``(C,)``."""
        return cls(torch.ones_like(like), torch.ones_like(like))

    def update(self, acceptance: Tensor, target: float) -> Pace:
        """Learn from the acceptance ``(C,)`` of one iteration; shares rise with one over half the target."""
        recent = torch.lerp(self.recent, acceptance, 0.2)
        most_move = recent.quantile(0.5, interpolation="higher") >= STUCK
        behind = (self.share < 1.0) | ((recent < STUCK) & most_move)
        caught_up = (self.share * (acceptance - 0.5 * target).exp()).clamp(max=1.0)
        return Pace(torch.where(behind, caught_up, self.share), recent)

    def pooled(self, acceptance: Tensor) -> Tensor:
        """The mean acceptance ``()`` of the chains at full pace, which speaks of the step size; of all if none is."""
        full = (self.share == 1.0).to(acceptance)
        return torch.where(full.any(), (acceptance * full).sum() / full.sum().clamp(min=1), acceptance.mean())


@dataclass(frozen=True, eq=False)
class HamiltonianTuning:
    """What warm-up learns.

    :param step_size: of the leapfrog, shared by the chains, ``()``.
    :param mass: the mass matrix, shared likewise.
    :param search: for the step size.
    :param estimate: running covariance of the current window.
    :param pace: of each chain, until the mass matrix is known; then ``None``.
    """

    step_size: Tensor
    mass: Mass
    search: StepSearch
    estimate: MassEstimate
    pace: Pace | None

    @property
    def blind(self) -> bool:
        """Whether the mass matrix is still unknown, so that long trajectories cost more than they teach."""
        return self.pace is not None

    @property
    def steps(self) -> Tensor:
        """Step sizes as :func:`~pyro_symmetric.mcmc.kernels.integrator.leapfrog` takes them, ``()`` or ``(C, 1)``."""
        return self.step_size if self.pace is None else (self.step_size * self.pace.share)[:, None]


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
        start = PhasePoint(z, torch.zeros_like(z), *density.energy_and_gradient(z))
        estimate = MassEstimate.start(z, self.mass, self.rank)
        mass = estimate.mass()
        step = z.new_tensor(0.1 if self.step_size is None else self.step_size)
        if self.step_size is None:
            step = find_step_size(density, start, step, mass, self.target_accept, generator)
        learns = self.adapt_mass and len(window_ends(num_warmup)[1]) > 0
        pace = Pace.start(start.energy) if learns else None
        return State(*start, HamiltonianTuning(step, mass, StepSearch.start(step), estimate, pace), generator)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        begin, ends = window_ends(num_warmup)
        tuning: HamiltonianTuning = state.tuning
        if self.adapt_mass and ends and begin <= iteration < ends[-1]:
            tuning = replace(tuning, estimate=tuning.estimate.update(state.z))
        if self.adapt_step_size:
            tuning = self._adapt_step_size(tuning, state.statistics["acceptance_rate"])
        if self.adapt_mass and iteration + 1 in ends:
            tuning = self._renew_mass(density, state, tuning)
        if self.adapt_step_size and iteration + 1 == num_warmup:
            tuning = replace(tuning, step_size=tuning.search.log_average.exp().to(state.z.dtype))
        return replace(state, tuning=tuning)

    # small steps ----------------------------------------------------------------------------------------------------

    def _adapt_step_size(self, tuning: HamiltonianTuning, acceptance: Tensor) -> HamiltonianTuning:
        pace, pooled = tuning.pace, acceptance.mean()
        if pace is not None:
            pooled, pace = pace.pooled(acceptance), pace.update(acceptance, self.target_accept)
        search = tuning.search.update(pooled, self.target_accept, follow=tuning.blind)
        return replace(tuning, search=search, step_size=search.log_step.exp().to(acceptance.dtype), pace=pace)

    def _renew_mass(self, density: Density, state: State, tuning: HamiltonianTuning) -> HamiltonianTuning:
        mass = tuning.estimate.mass()
        estimate = MassEstimate.start(state.z, self.mass, self.rank, mass.variance.sqrt())
        tuning = replace(tuning, mass=mass, estimate=estimate, pace=None)
        if not self.adapt_step_size:
            return tuning
        step = tuning.search.log_average.exp().to(state.z.dtype)
        at = PhasePoint(state.z, state.momentum, state.energy, state.gradient)
        step = find_step_size(density, at, step, mass, self.target_accept, state.generator)
        return replace(tuning, step_size=step, search=StepSearch.start(step))


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
