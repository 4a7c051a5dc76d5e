r"""The common part of the stochastic-gradient samplers: chains on their way, schedules of the step size, statistics.

They follow a diffusion whose stationary law is the posterior, in steps that nothing accepts or rejects. Two things move
the law that they reach away from it, and both vanish with the step: the discretisation, by curvature, and the variance
``V`` of the mini-batches' gradients. :class:`~pyro_symmetric.mcmc.kernels.landscape.Landscape` measures both, so a
kernel that is given no ``step_size`` takes one that keeps the predicted excess of the variance to a ``tolerance``.

Such a step is short where posteriors are narrow or data many, and then the wide directions take forever. So warm-up
learns two things more, at the ends of the windows in which Hamiltonian kernels learn their mass matrix: the posterior's
variances, pooled over the chains, in whose units the step is then taken (a preconditioner that stays as it is needs no
correction), and an :class:`~pyro_symmetric.mcmc.kernels.anchors.Anchor` of each chain, its mean in the window, which is
kept if it lets the step grow by more than it costs. A ``step_size`` that is given is that of the plain recursion.

Every draw brings the statistic ``virial``, :math:`(z - a) \cdot \nabla U(z) / D` averaged over the iteration's steps,
where :math:`a` is the other chains' mean in warm-up, or 0. Its mean is 1 under any posterior whose density vanishes at
infinity (integrate by parts), also with mini-batches, whose gradients are unbiased: the configurational temperature, to
be compared with 1 when a run has settled.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.anchors import Anchor, batches_of_a_pass
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, relocated
from pyro_symmetric.mcmc.kernels.landscape import Landscape
from pyro_symmetric.mcmc.kernels.randomness import Batches, normal
from pyro_symmetric.mcmc.kernels.spread import Spread
from pyro_symmetric.mcmc.kernels.walk import WATCHED, Walk
from pyro_symmetric.mcmc.kernels.warmup import window_ends

LOOKED_FOR_LOST = 10  # iterations of warm-up from one look for lost chains to the next
LOST = 3  # iterations on end that a chain broke off, so that it is taken to be lost
FIRST_ROUNDS = 6  # measurements of the landscape before the first step in new units


@dataclass(frozen=True, eq=False)
class StochasticTuning:
    """The numbers that change beside the chains.

    :param step_size: of the latest gradient step, ``()``.
    :param base_step_size: what the schedule multiplies, ``()``; found in warm-up, or given.
    :param batches: the stream of mini-batches.
    :param landscape: what warm-up has measured, or ``None`` if nothing is left to find.
    :param variance: what steps are preconditioned by, ``(D,)``: the posterior's variances as warm-up has found them;
        ``None`` before that.
    :param spread: of the chains in the current window, to learn them from; ``None`` if they aren't learnt.
    :param anchor: what helps mini-batches' gradients, or ``None``.
    :param centre: what the virial is taken from, ``(C, D)``; ``None`` for the origin.
    :param second_moment: each chain's average of squared gradients per row, ``(C, D)``, of kernels that precondition by
        it, or ``None``.
    :param iteration: iterations so far.
    :param num_warmup: how many of all iterations are warm-up.
    :param broken_off: iterations on end in which each chain left all numbers behind, ``(C,)``.
    :param relocated: whether each chain was lost in warm-up and moved to the place of another, ``(C,)``; ``None`` if
        none was.
    """

    step_size: Tensor
    base_step_size: Tensor
    batches: Batches
    landscape: Landscape | None
    variance: Tensor | None
    spread: Spread | None
    anchor: Anchor | None
    centre: Tensor | None
    second_moment: Tensor | None
    iteration: int
    num_warmup: int
    broken_off: Tensor
    relocated: Tensor | None = None

    @property
    def warming_up(self) -> bool:
        return self.iteration < self.num_warmup


@dataclass(frozen=True, eq=False, repr=False)
class StochasticGradientKernel(Kernel):
    """The base of all; subclasses say how chains walk and which step is best.

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: ``None`` finds it in warm-up.
    :param batch_size: rows of a mini-batch, cut from the model's tensor arguments and drawn by each chain for itself.
        ``None``: all data, or what the model's plates with ``subsample_size`` draw. The model's likelihood must count a
        mini-batch ``N / B`` times, as a plate with its full ``size`` does; a warning says if it doesn't.
    :param replacement: draw each batch independently instead of going through the data in random order.
    :param tolerance: with ``step_size=None``, the relative excess of the variance that the step may cause: by
        discretisation where curvature is largest, and by mini-batch noise on average over coordinates.
    """

    model: Callable[..., Any]
    step_size: float | None = None
    _: KW_ONLY
    batch_size: int | None = None
    replacement: bool = False
    tolerance: float = 0.05

    subsampled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.whole("batch_size", self.batch_size, 1, none="all data")
        arguments.fraction("tolerance", self.tolerance)

    # what subclasses provide ----------------------------------------------------------------------------------------

    @abstractmethod
    def walk(self, walk: Walk, tuning: StochasticTuning) -> StochasticTuning:
        """Move the chains through one iteration; returns the tuning with its new ``step_size``."""

    @abstractmethod
    def steps_of(self, tuning: StochasticTuning) -> int:
        """The number of gradient steps of the iteration to come."""

    @abstractmethod
    def best_step(self, landscape: Landscape) -> Tensor:
        """The step size ``()`` that keeps the tolerance."""

    @property
    def has_momentum(self) -> bool:
        return False

    @property
    def measures(self) -> bool:
        """True if warm-up has anything to measure."""
        return self.step_size is None

    def _watches(self, tuning: StochasticTuning) -> bool:
        """True if the chains' spread is learnt from the iteration to come."""
        begin, ends = window_ends(tuning.num_warmup)
        return bool(ends) and begin <= tuning.iteration < ends[-1]

    def first_moment(self, density: Density, gradient: Tensor) -> Tensor | None:
        """The tuning's first ``second_moment``."""
        return None

    def preconditioner(self, tuning: StochasticTuning) -> Tensor | None:
        """The diagonal, ``(C, D)`` or ``(D,)``, of what multiplies gradients; ``None`` for none."""
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
            Landscape.start(z, generator) if self.measures else None,
            variance=None,
            spread=Spread.start(z) if self.step_size is None else None,
            anchor=None,
            centre=None,
            second_moment=self.first_moment(density, gradient),
            iteration=0,
            num_warmup=num_warmup,
            broken_off=torch.zeros_like(energy, dtype=torch.long),
        )
        state = State(z, momentum, energy, gradient, tuning, generator)
        return replace(state, tuning=self._measured(density, state, tuning, FIRST_ROUNDS))

    def step(self, density: Density, state: State) -> State:
        walk = Walk(density, state, self.steps_of(state.tuning))
        if state.tuning.spread is not None and self._watches(state.tuning):
            walk.spread = state.tuning.spread
        tuning = self.walk(walk, state.tuning)
        # A chain that left all numbers behind goes back to where the iteration began, and is counted.
        extent = torch.linalg.vector_norm(walk.z, torch.inf, dim=-1) + walk.energy  # momenta have moved z by themselves
        found = extent - extent == 0
        diverging = ~found
        lost = diverging[:, None]
        energy = torch.where(found, walk.energy, state.energy)
        if walk.spread is not None and tuning.spread is not None:
            tuning = replace(tuning, spread=walk.spread.unless(lost.any(), tuning.spread))
        statistics = {
            "lp": -energy,
            "virial": walk.virial().masked_fill(diverging, torch.nan),
            "diverging": diverging,
            "step_size": tuning.step_size.expand(len(energy)),
            "n_steps": torch.full_like(energy, walk.count + walk.spent, dtype=torch.long),
        }
        momentum = walk.r
        if self.has_momentum:
            statistics["kinetic_temperature"] = walk.r.square().mean(-1)
            momentum = torch.where(lost, normal(walk.r, state.generator), walk.r, out=walk.r)
        return State(
            torch.where(lost, state.z, walk.z, out=walk.z),
            momentum,
            energy,
            torch.where(lost, state.gradient, walk.last_gradient),
            replace(
                tuning,
                batches=walk.batches,
                iteration=tuning.iteration + 1,
                broken_off=(tuning.broken_off + 1) * diverging,
            ),
            state.generator,
            statistics,
        )

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        if (iteration + 1) % LOOKED_FOR_LOST == 0 or iteration + 1 == num_warmup:
            state = _found_again(state)
        tuning: StochasticTuning = state.tuning
        tuning = self._measured(density, state, tuning)
        if tuning.spread is not None and iteration + 1 in window_ends(num_warmup)[1]:
            tuning = self._renewed(density, state, tuning, tuning.spread)
        if iteration + 1 == num_warmup:
            tuning = self._settled(tuning)
        return replace(state, tuning=tuning)

    # small steps ----------------------------------------------------------------------------------------------------

    def _measured(self, density: Density, state: State, tuning: StochasticTuning, rounds: int = 1) -> StochasticTuning:
        """Look at the landscape, and take the step that it suggests."""
        if tuning.landscape is None:
            return tuning
        landscape, preconditioner = tuning.landscape, self.preconditioner(tuning)
        for _ in range(rounds):
            landscape = landscape.update(density, state.z, state.generator, preconditioner, tuning.anchor)
        return self._stepping(replace(tuning, landscape=landscape))

    def _stepping(self, tuning: StochasticTuning) -> StochasticTuning:
        if self.step_size is not None or tuning.landscape is None:
            return tuning
        base = self.best_step(tuning.landscape)
        return replace(tuning, base_step_size=base, step_size=base)

    def _renewed(self, density: Density, state: State, tuning: StochasticTuning, window: Spread) -> StochasticTuning:
        """At the end of a window: variances, an anchor where each chain was on average, and a step in these units."""
        cost, learnt = batches_of_a_pass(density), self._preconditioned(density, tuning, window)
        learnt = replace(learnt, spread=Spread.start(state.z), centre=window.mean_of_others, anchor=None)
        if cost is not None and cost <= window.count * WATCHED:  # as many as the window had
            learnt = replace(learnt, anchor=Anchor.at(density, window.mean))
        learnt = replace(learnt, landscape=Landscape.start(state.z, state.generator))
        learnt = self._settled(self._measured(density, state, learnt, FIRST_ROUNDS))
        if learnt.anchor is None and learnt.variance is tuning.variance:  # in the same units as before
            learnt = self._stepping(replace(learnt, landscape=tuning.landscape))
        return learnt

    def _preconditioned(self, density: Density, tuning: StochasticTuning, window: Spread) -> StochasticTuning:
        exact = tuning.anchor is not None or not density.row_counts
        return replace(tuning, variance=window.variance(by_slope=exact))

    def _settled(self, tuning: StochasticTuning) -> StochasticTuning:
        """Keep an anchor only if it pays."""
        landscape = tuning.landscape
        if tuning.anchor is None or landscape is None or landscape.anchor_pays:
            return tuning
        landscape = replace(landscape, noise=landscape.bare_noise)
        return self._stepping(replace(tuning, anchor=None, landscape=landscape))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SteadyKernel(StochasticGradientKernel):
    r"""Kernels whose step stays, or falls as a power of the iteration.

    After warm-up the step of iteration :math:`t = 0, 1, \dots` is :math:`\varepsilon_t = \varepsilon (1 + t / b)^{-
    \gamma}`. In warm-up it falls to ``ε`` from ``warmup_factor`` times that by a cosine; if variances are learnt, until
    they are first known, as steps in units of the posterior need no help to go far.

    :param num_steps: gradient steps for each iteration; the sampler's ``thinning`` multiplies it.
    :param warmup_factor: warm-up starts with steps so many times larger.
    :param decay: ``γ`` in [0, 1]; 0 keeps the step. Welling & Teh ask for more than 1/2 for convergence, and for draws
        weighted by their ``step_size``, which is among the statistics; draws here are stored unweighted.
    :param decay_offset: ``b``, iterations.
    """

    num_steps: int = 10
    warmup_factor: float = 3.0
    decay: float = 0.0
    decay_offset: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("num_steps", self.num_steps, 1)
        arguments.positive("warmup_factor", self.warmup_factor)
        arguments.positive("decay_offset", self.decay_offset)
        arguments.number("decay", self.decay, least=0, most=1)

    def steps_of(self, tuning: StochasticTuning) -> int:
        return self.num_steps

    def scheduled(self, tuning: StochasticTuning) -> Tensor:
        """The step size of the iteration to come, ``()``."""
        if tuning.warming_up:
            ends = window_ends(tuning.num_warmup)[1] if tuning.spread is not None else ()
            passed = tuning.iteration / (ends[0] if ends else tuning.num_warmup)
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, passed)))
            return tuning.base_step_size * (1 + (self.warmup_factor - 1) * share)
        since = tuning.iteration - tuning.num_warmup
        return tuning.base_step_size * (1 + since / self.decay_offset) ** -self.decay


def _found_again(state: State) -> State:
    """Chains that break off whatever they do continue from the places of others, with the others' memories."""
    tuning: StochasticTuning = state.tuning
    return relocated(state, tuning.broken_off >= LOST, tuning.broken_off == 0, _of_others)


def _of_others(tuning: StochasticTuning, sources: Tensor) -> StochasticTuning:
    anchor, moment = tuning.anchor, tuning.second_moment
    return replace(
        tuning,
        broken_off=tuning.broken_off[sources],
        anchor=None if anchor is None else Anchor(anchor.z[sources], anchor.energy[sources], anchor.gradient[sources]),
        second_moment=None if moment is None else moment[sources],
    )
