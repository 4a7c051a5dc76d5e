r"""Warm-up: a step size and a mass matrix that all chains learn together, for kernels with full gradients; and its end.

**Windows.** As in Stan, the mass matrix is learnt from the draws of windows that double in length, between a first
phase in which chains arrive and a last one in which the step size settles (:func:`window_ends`).

**The step size** :math:`\varepsilon` is a root: acceptance falls in :math:`x = \log \varepsilon`, and is to be the
target :math:`\delta`. It is found by stochastic approximation (Robbins & Monro 1951) with averaging (Polyak &
Juditsky 1992),

.. math:: x_{t+1} = x_t + \frac{c}{t^{0.6}} (\alpha_t - \delta), \qquad
    \bar x_t = \tfrac{2}{t + 1} x_t + \bigl(1 - \tfrac{2}{t + 1}\bigr) \bar x_{t-1},

where :math:`c` is Newton's gain for the acceptance curve of many coordinates, :math:`\alpha = 2 \Phi(-\tfrac12 s)` with
:math:`s \propto \varepsilon^2` (Beskos et al. 2013, arXiv 1001.4460, theorem 3.6):

.. math:: \frac1c = -\frac{d\alpha}{dx} = 2 s\, \varphi(\tfrac12 s) \quad\text{where}\quad \alpha = \delta.

Stan's dual averaging (Hoffman & Gelman 2014, eq. 6) swings widely at first: after 50 iterations of 4 chains with a
target of 0.65, its acceptance is off by 0.06, this one's by 0.003.

Until the mass matrix is first known each chain has a step of its own: far out, each is at a scale of its own. As it
arrives far longer ones may do, so that the first step is found anew after 1, 2, 4, 8, ... iterations. From then on all
chains have one, by their mean acceptance, which so many chains tell after few iterations.

**The mass matrix** is the covariance *within* chains, pooled over them (Welford 1962): chains of a network usually sit
in different modes, and the distance between modes says nothing about how far one trajectory may go.

**The end** of a warm-up whose length is ``"auto"``: when every chain has settled. A kernel names lengths at which its
warm-up may end (``Kernel.warmups``). At each of them the second half of the iterations is looked at, by the
rank-normalised split :math:`\hat R`: of every unconstrained coordinate, in units of each chain's own deviation from its
own mean, so that it compares the halves of each chain; and of the energy and the acceptance, of which all chains must
have one law. If the largest is below :data:`LIMIT`, warm-up ends there; at the last length it ends in any case. So a
run that ended after 300 iterations is, draw for draw, the run that was asked for 300.

Chains needn't be at the same place, nor spread alike: those of a mixture or a network sit in copies of one mode, which
no waiting brings together, and whether they may is for :func:`~pyro_symmetric.compare.diagnose` to say. For the same
reason one in :data:`MAY_DIFFER` chains, the farthest by their energy, are left out of what all must agree in. Means of
half chains of :math:`n` effective draws have :math:`\hat R^2 \approx 1 + 1/n`, so that the limit asks for about ten of
each half chain. Seen from the mean of its own chain a half is half as far away, squared, which is undone.
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
from pyro_symmetric.mcmc.density.compiled import evaluated_once
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel, Mass, State, energy_error, leapfrog, with_fresh_momenta
from pyro_symmetric.posterior.diagnostics import R_HAT
from pyro_symmetric.posterior.statistics import chain_statistics

DECAY = 0.6  # of the search's gain; averaging asks for more than 1/2 and less than 1
LARGEST_GAIN = 8.0  # near a target of 1 the curve is flat and Newton's step knows no bounds
FURTHEST = 1.0  # that one iteration moves a log step size: near such a target a bad one would take it to nothing
FOLLOWING = 4  # the count at which a search stops that is to follow its root rather than to settle
BLIND_STEPS = 16  # while the mass matrix is unknown, longer trajectories cost more than they teach
MOST_TRIES = 60  # of a first step size
MAX_DENSE = 10_000  # coordinates; a dense matrix of more fills the memory
MANY_DRAWS = 2  # for each coordinate, from which on correlations are learnt
FEW_DRAWS, SMALL = 5.0, 1e-3  # variances are shrunk towards a small constant as if by five draws, as Stan does
LIMIT = R_HAT[1]
MAY_DIFFER = 32  # of so many chains one may sit in a lower mode, which no warm-up helps, and hold up no others
LARGEST = 999.0  # what is said of chains that don't move at all
CHAINS, COORDINATES, DRAWS = 64, 512, 512  # that are kept at most; an even number of draws


@dataclass(frozen=True, eq=False)
class HamiltonianTuning:
    """The results of warm-up.

    :param step_size: of the integrator, ``(C,)``; once the mass matrix is known, the same for all chains.
    :param search: for the step size.
    :param mass: the mass matrix, shared by the chains.
    :param estimate: running covariance of the current window; ``None`` outside of windows.
    :param blind: True while the mass matrix is still unknown.
    :param length: of trajectories, if a kernel learns that.
    """

    step_size: Tensor
    search: StepSizeAdaptation
    mass: Mass
    estimate: MassEstimate | None
    blind: bool
    length: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class TunedKernel(Kernel):
    """Base of the kernels that follow trajectories with full gradients."""

    warmups = (150, 200, 300, 500, 900, 1700)  # whose windows are the same as far as they go

    model: Callable[..., Any]
    step_size: float | None = None
    adapt_step_size: bool = True
    adapt_mass: bool = True
    mass: str = "diagonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.one_of("mass", self.mass, ("diagonal", "dense"))

    # what subclasses provide ----------------------------------------------------------------------------------------

    @abstractmethod
    def search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        """The search for step sizes ``(C,)``, from there."""

    @abstractmethod
    def accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        """The acceptance ``(C,)``, or what the search takes for it, of one step from there with fresh momenta."""

    @abstractmethod
    def accepted(self, state: State) -> Tensor:
        """The same of the iteration that the state comes from."""

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        if self.mass == "dense" and z.shape[-1] > MAX_DENSE:
            raise ValueError(
                f"mass is 'dense', but the model has {z.shape[-1]} coordinates; a matrix of that size fills the "
                "memory. Use mass='diagonal'"
            )
        energy, gradient = evaluated_once(density, z)
        step = torch.full_like(energy, 0.1 if self.step_size is None else self.step_size)
        blind = self.adapt_mass and len(window_ends(num_warmup)[1]) > 0
        mass = MassEstimate.start(z, self.mass).mass()
        tuning = HamiltonianTuning(step, self.search(step, blind), mass, None, blind)
        state = State(z, torch.zeros_like(z), energy, gradient, tuning, generator)
        return state if self.step_size is not None else self._with_step(density, state, step)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        tuning: HamiltonianTuning = state.tuning
        done, (begin, ends) = iteration + 1, window_ends(num_warmup) if self.adapt_mass else (num_warmup, ())
        if tuning.estimate is not None:
            state = tuned(state, estimate=tuning.estimate.update(state.z))
        if self.adapt_step_size:
            found = self.accepted(state)
            search = tuning.search.update(found if tuning.blind else found.mean().expand_as(found))
            least = torch.finfo(found.dtype).tiny
            state = tuned(state, search=search, step_size=search.log_step.exp().to(found.dtype).clamp(min=least))
            if tuning.blind and done & iteration == 0:  # after 1, 2, 4, 8, ...: where they arrive steps may be longer
                state = self._with_step(density, state, state.tuning.step_size)
        if done in ends:
            state = tuned(state, mass=state.tuning.estimate.mass(), estimate=None, blind=False)
            if self.adapt_step_size:
                state = self._with_step(density, state, _settled(state))
        if ends and (done == begin or done in ends[:-1]):
            state = tuned(state, estimate=MassEstimate.start(state.z, self.mass))
        if done == num_warmup and self.adapt_step_size:
            state = tuned(state, step_size=_settled(state))
        return state

    def _with_step(self, density: Density, state: State, step: Tensor) -> State:
        """Step sizes, found by doubling or halving these ``(C,)`` until the acceptance of one step crosses the target,
        as Stan does, and the search from there. While the mass matrix is unknown each chain finds its own."""
        alone = state.tuning.blind
        energy, gradient = evaluated_once(density, state.z)  # as what follows: programs round otherwise
        here = replace(state, energy=energy, gradient=gradient)
        target, grow, crossed = self.search(step, alone).target, None, torch.zeros_like(step, dtype=torch.bool)
        for _ in range(MOST_TRIES):
            found = self.accepts(density, here, step)
            high: Tensor = (found if alone else found.mean().expand_as(found)) > target
            grow = high if grow is None else grow
            crossed = crossed | (high != grow)
            if bool(crossed.all()):
                break
            step = torch.where(crossed, step, torch.where(grow, 2.0, 0.5).to(step) * step)
            step = step.clamp(min=torch.finfo(step.dtype).tiny)
        return tuned(state, step_size=step, search=self.search(step, alone))


@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianKernel(TunedKernel):
    """Base of the kernels that accept or reject where trajectories end."""

    target_accept: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.fraction("target_accept", self.target_accept)

    def search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        return StepSizeAdaptation.start(step_size, self.target_accept, follow)

    def accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        mass = state.tuning.mass
        start = with_fresh_momenta(state, mass)
        end = leapfrog(lambda z: evaluated_once(density, z), start, step_size[:, None], mass)
        return (-energy_error(end.total_energy(mass), start.total_energy(mass))).clamp(max=0).exp()

    def accepted(self, state: State) -> Tensor:
        return state.statistics["acceptance_rate"]


def tuned(state: State, **parts: Any) -> State:
    """The state with other parts of its tuning."""
    return replace(state, tuning=replace(state.tuning, **parts))


def _settled(state: State) -> Tensor:
    """The step size that a search has found, the median of chains that searched by themselves, ``(C,)``."""
    average: Tensor = state.tuning.search.log_average
    return average.median().exp().to(state.z.dtype).expand(len(average)).clone()


# windows ------------------------------------------------------------------------------------------------------------


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
        if gain is None:
            half = -NormalDist().inv_cdf(target / 2)  # half of s
            gain = min(1 / (4 * half * NormalDist().pdf(half)), LARGEST_GAIN)
        return cls(x, x, target, gain, FOLLOWING if follow else None)

    def update(self, acceptance: Tensor) -> StepSizeAdaptation:
        """Learn from the acceptance of one iteration, in the shape of the step sizes."""
        count = min(self.count + 1, self.most or self.count + 1)
        change = self.gain * count**-DECAY * (acceptance.double() - self.target)
        log_step = self.log_step + change.clamp(-FURTHEST, FURTHEST)
        average = torch.lerp(self.log_average, log_step, 2 / (count + 1))
        return replace(self, log_step=log_step, log_average=average, count=count)


# the mass matrix ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MassEstimate:
    """Running covariance within chains, pooled over the chains.

    :param mean: each chain's mean, ``(C, D)``.
    :param scatter: sum of squared deviations over chains and draws, ``(D,)``; for a dense matrix of their outer
        products, ``(D, D)``, in double precision.
    :param count: draws of each chain so far.
    """

    mean: Tensor
    scatter: Tensor
    count: int = 0

    @classmethod
    def start(cls, z: Tensor, kind: str = "diagonal") -> MassEstimate:
        """Nothing seen yet, for chains ``(C, D)``."""
        dim = z.shape[-1]
        nothing = z.new_zeros(dim, dim, dtype=torch.double) if kind == "dense" else z.new_zeros(dim)
        return cls(torch.zeros_like(z), nothing)

    def update(self, z: Tensor) -> MassEstimate:
        """Take in one draw of every chain, ``(C, D)``."""
        count = self.count + 1
        delta = z - self.mean
        # These rows' squares sum to the scatter about the chains' final means.
        rows = (delta * ((count - 1) / count) ** 0.5).to(self.scatter)
        more = rows.square().sum(0) if self.scatter.dim() == 1 else rows.mT @ rows
        return MassEstimate(self.mean + delta / count, self.scatter + more, count)

    def mass(self) -> Mass:
        """The mass matrix that the draws so far suggest; of less than two draws the unit matrix. Of fewer draws than
        twice the coordinates there are no correlations in it, and of all they are shrunk as variances are."""
        dense = self.scatter.dim() == 2
        squares = self.scatter.diagonal() if dense else self.scatter
        degrees = len(self.mean) * max(self.count - 1, 0)
        share = degrees / (degrees + FEW_DRAWS)
        variance = squares / max(degrees, 1) * share + SMALL * (1 - share) if degrees else torch.ones_like(squares)
        if not dense:
            return Mass.of(variance)
        correlations = torch.eye(len(squares), dtype=squares.dtype, device=squares.device)
        if degrees >= MANY_DRAWS * len(squares):
            moves = squares > 0
            norms = torch.where(moves, squares, 1.0).sqrt()
            found = (self.scatter / norms / norms[:, None]).fill_diagonal_(1.0)
            correlations = found.lerp(correlations, SMALL * (1 - share))
            variance = torch.where(moves, squares / degrees, variance)
        deviations = variance.sqrt()
        return Mass.of((correlations * deviations * deviations[:, None]).to(self.mean.dtype))


# the end ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Agreement:
    """The places that chains have been at in warm-up, thinned; part of what a run resumes from.

    Every ``stride``-th iteration is kept. Whenever there are :data:`DRAWS`, every second one is dropped and the stride
    doubles. So what is kept depends on the iterations alone, not on where the run was broken.
    """

    stride: int = 1
    kept: tuple[Tensor, ...] = ()

    def update(self, iteration: int, z: Tensor, energy: Tensor, acceptance: Tensor | None = None) -> Agreement:
        """Take in places ``(C, D)``, energies and acceptances ``(C,)`` after an iteration, counted from 0."""
        if iteration % self.stride:
            return self
        full = len(self.kept) == DRAWS
        stride, kept = (2 * self.stride, self.kept[::2]) if full else (self.stride, self.kept)
        told = [energy, torch.ones_like(energy) if acceptance is None else acceptance.to(energy)]
        places = z[:, :: -(-z.shape[1] // COORDINATES)]
        return Agreement(stride, (*kept, torch.cat([places, torch.stack(told, 1)], 1)[:CHAINS]))

    def r_hat(self) -> float:
        """The largest one over the second half of the iterations, at most :data:`LARGEST`."""
        draws = torch.stack(self.kept[len(self.kept) // 2 :], 1).cpu()
        if not bool(draws.isfinite().all()):
            return LARGEST
        deviation, mean = torch.std_mean(draws[..., :-2].double(), 1, keepdim=True)
        places = (draws[..., :-2] - mean) / deviation.clamp(min=1e-300)
        halves = (1 + 2 * (chain_statistics(places).r_hat.square() - 1).clamp(min=0)).sqrt()
        levels = draws[..., -2].mean(1)
        nearest = (levels - levels.median()).abs().argsort()[: len(levels) - len(levels) // MAY_DIFFER]
        found = torch.cat([halves, chain_statistics(draws[nearest][..., -2:]).r_hat])
        found = found[~found.isnan()]  # coordinates that have one value everywhere
        return min(float(found.max()), LARGEST) if len(found) else LARGEST
