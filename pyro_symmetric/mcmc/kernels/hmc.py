r"""Hamiltonian Monte Carlo of many chains at once (Duane et al. 1987; Neal 2011, arXiv 1206.1901).

Every iteration draws momenta :math:`p \sim \mathcal N(0, M)`, follows

.. math:: H(z, p) = U(z) + \tfrac12 p^\top M^{-1} p

by the leapfrog method and accepts each chain's end point with probability :math:`\min(1, e^{-\Delta H})`. The number of
steps is drawn anew each iteration, the same for all chains, independently of their state: that keeps every chain's
transition exact and all chains in step, so that one batched gradient serves them all.

**AdaptiveHMC**: chains learn together how long a trajectory should be. They last :math:`t = u T`, with :math:`u` from a
Halton sequence on (0, 1) and one :math:`T` for all chains. Their worth is the squared change of the squared distance
from a centre,

.. math:: g(t) = \mathbb E\left[\tfrac14\left(\|x' - m\|^2 - \|x - m\|^2\right)^2\right],

in coordinates :math:`x = W z` that the mass matrix has whitened: the criterion ChEES of Hoffman, Radul & Sountsov
(2021, "An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte Carlo", AISTATS). In warm-up
:math:`T` goes to where

.. math:: \frac{1}{\bar t} \cdot \frac{\bar g}{2 \max g - \bar g}, \qquad
    \bar g = \frac1T \int_0^T g(\lceil t \rceil)\, dt, \quad \bar t = \frac1T \int_0^T \lceil t \rceil\, dt,

is greatest: the effective share of the draws for the cost of one. Here :math:`\lceil t \rceil` is the time rounded up
to whole steps. Trajectories with the greatest square are taken to forget where they came from. Then the squared
distances of successive draws have the correlation :math:`\rho = 1 - \bar g / \max g`, and the share is that of a chain
whose correlations fall geometrically, :math:`(1 - \rho) / (1 + \rho)`.

Trajectories of all times up to :math:`T` are made anyway, so that the whole curve :math:`g` is known up to there, bin
by bin; :math:`T` stays a bin ahead of the best, to see what comes next. The paper climbs the slope of :math:`g` in
:math:`T` by Adam, an estimate that is noisier the longer trajectories are, and doesn't divide by the cost; its centre
is the average of all chains, whose distance from a chain says where its mode lies and not how it moves. Here it is each
chain's own average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.compiled import run
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import BLIND_STEPS, HamiltonianKernel, HamiltonianTuning, tuned
from pyro_symmetric.mcmc.kernels.kernel import (
    MAX_ENERGY_ERROR,
    State,
    choose,
    energy_error,
    leapfrog,
    uniform,
    with_fresh_momenta,
)

START = math.pi  # T, until it is learnt: so uniform times leave draws of a standard Gaussian uncorrelated
BINS, BINS_OF_TWO, SHORTEST = 64, 2, 2.0**-20  # of the curve: two for each doubling of the time, from 1e-6 to 4096
FADING = 0.98  # of the curve, with every iteration
RATE = 0.1  # the largest change of log T in one iteration
MIN_CHAINS = 2  # below, each square is a single trajectory's, and nothing is learnt


@dataclass(frozen=True, eq=False, repr=False)
class HMC(HamiltonianKernel):
    r"""Hamiltonian Monte Carlo with adapted step size and mass matrix, and trajectories of a given length.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> kernel = ps.HMC(model, num_steps=5)
    >>> posterior = ps.sample(kernel, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["w"].shape
    torch.Size([4, 20, 3])

    Other settings are those of :class:`~pyro_symmetric.mcmc.NUTS`.

    :param trajectory_length: mean length of a trajectory in integration time, in units where the mass matrix has made
        each coordinate's standard deviation 1. Each one's is uniform between 0 and twice the mean, against resonance
        with the target's periods. :math:`\pi / 2` is the shortest for which successive draws of a Gaussian are
        uncorrelated on average. Correlations that the mass matrix doesn't hold need more:
        :class:`AdaptiveHMC` finds out how much.
    :param num_steps: mean number of leapfrog steps, instead of a length.
    :param max_steps: upper limit of the steps of one iteration.
    """

    trajectory_length: float = math.pi / 2
    num_steps: int | None = None
    max_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("trajectory_length", self.trajectory_length)
        arguments.whole("num_steps", self.num_steps, 1, none="trajectory_length over the step size")
        arguments.whole("max_steps", self.max_steps, 1)

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        fraction = uniform(tuning.step_size[0], state.generator).double()
        steps = 2 * fraction * (self.num_steps or self.trajectory_length)
        if self.num_steps is None:
            steps = steps / typical(tuning.step_size)
        return trajectory(density, state, whole_steps(steps, self.max_steps, tuning))


def trajectory(density: Density, state: State, num_steps: int) -> State:
    """An iteration: fresh momenta, so many steps, and Metropolis' decision."""
    tuning: HamiltonianTuning = state.tuning
    mass, steps = tuning.mass, tuning.step_size[:, None]
    start = end = with_fresh_momenta(state, mass)
    for _ in range(num_steps):
        end = run(density, leapfrog, end, steps, mass)
    before, after = start.total_energy(mass), end.total_energy(mass)
    error = energy_error(after, before)
    acceptance = (-error).clamp(max=0).exp()
    accept = uniform(error, state.generator) < acceptance
    at, diverging = choose(accept, end, start), error > MAX_ENERGY_ERROR
    statistics = {
        "lp": -at.energy,
        "acceptance_rate": acceptance,
        "energy": after.where(accept, before),
        "diverging": diverging,
        "step_size": tuning.step_size,
        "n_steps": diverging.long().fill_(num_steps),
    }
    return State(*at, tuning, state.generator, statistics)


def typical(step_size: Tensor) -> Tensor:
    """The step size ``()`` of all by which trajectories are measured, in double precision."""
    return step_size.median().double()


def whole_steps(steps: Tensor, max_steps: int, tuning: HamiltonianTuning) -> int:
    """A number of steps ``()``, rounded up, of at least 1 and at most what is allowed. The one place where an iteration
    waits for the device: a loop needs its length."""
    most = min(max_steps, BLIND_STEPS) if tuning.blind else max_steps
    return max(1, math.ceil(min(float(steps), most) - 1e-9))  # infinite for steps of 0


# trajectories whose length is learnt ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class AdaptiveHMC(HamiltonianKernel):
    r"""HMC whose trajectory length is learnt from many chains, from about 8 on; nothing needs to be set.

    The criterion is that of ChEES (Hoffman, Radul & Sountsov 2021) for the cost of a trajectory.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), torch.tensor([1.0, 2.0, 10.0])).to_event(1))
    >>> kernel = ps.AdaptiveHMC(model)
    >>> posterior = ps.sample(kernel, num_samples=20, num_warmup=20, num_chains=8, seed=0, progress=False)
    >>> posterior.samples["w"].shape
    torch.Size([8, 20, 3])

    Other settings are those of :class:`~pyro_symmetric.mcmc.NUTS`.

    :param max_steps: upper limit of the leapfrog steps of one iteration.
    """

    max_steps: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("max_steps", self.max_steps, 1)

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        state = super().init(density, z, num_warmup, generator)
        return tuned(state, length=TrajectoryLength.start(START, z))

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        length: TrajectoryLength = tuning.length
        time = radical_inverse(length.iteration + 1) * length.log_length.exp()
        state = trajectory(density, state, whole_steps(time / typical(tuning.step_size), self.max_steps, tuning))
        return tuned(state, length=replace(length, iteration=length.iteration + 1))

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        before: HamiltonianTuning = state.tuning
        length: TrajectoryLength = before.length
        first, last = (before.mass.whiten(z - length.centre).square().sum(-1) for z in (length.last, state.z))
        square = (0.25 * (last - first).double().square()).mean()  # what is refused has changed nothing
        length = length.seen(state.statistics["n_steps"][0] * typical(state.statistics["step_size"]), square)
        learns = len(state.z) >= MIN_CHAINS
        if learns and not before.blind:
            # By the average step: a single small one would cut off what took long to learn.
            length = length.update(before.search.log_average.median() + math.log(self.max_steps))
        if learns and iteration + 1 == num_warmup:
            length = replace(length, log_length=length.log_average)
        length = replace(length, centre=length.centre.lerp(state.z, 2 / (iteration + 2)), last=state.z)
        state = super().adapt(density, state, iteration, num_warmup)
        if state.tuning.mass is not before.mass:
            # Squares and times in other units say nothing of those to come.
            log_length = length.log_length.clamp(max=math.log(START))
            length = replace(length, log_length=log_length, curve=torch.zeros_like(length.curve), updates=0)
            if before.blind:  # so do the places that chains come from
                length = replace(length, centre=state.z)
        return tuned(state, length=length)


def radical_inverse(index: int) -> float:
    """The Halton sequence in base 2: 1/2, 1/4, 3/4, 1/8, 5/8, ... for 1, 2, 3, 4, 5, ..."""
    return int(f"{index:b}"[::-1], 2) / 2 ** index.bit_length()


@dataclass(frozen=True, eq=False)
class TrajectoryLength:
    """The expected square as a function of time, and the longest trajectory that it advises.

    :param log_length: :math:`\\log T`, of the next iteration, ``()``; times are in units of the whitened coordinates.
    :param log_average: the average of what was advised, weighted to the last iterations, ``()``.
    :param curve: sums over the trajectories whose time lay in each bin of squares, times and ones, older ones fading
        as new ones come, ``(3, BINS)``.
    :param centre: each chain's average, weighted to the last iterations, ``(C, D)``.
    :param last: where the chains were an iteration ago, ``(C, D)``.
    :param updates: how often the length was adapted since the curve was begun.
    :param iteration: how many trajectories there have been: the place in the Halton sequence.
    """

    log_length: Tensor
    log_average: Tensor
    curve: Tensor
    centre: Tensor
    last: Tensor
    updates: int = 0
    iteration: int = 0

    @classmethod
    def start(cls, length: float, z: Tensor) -> TrajectoryLength:
        """Start from this length, with chains at ``z``."""
        log_length = z.new_tensor(length, dtype=torch.double).log()
        return cls(log_length, log_length, log_length.new_zeros(3, BINS), z, z)

    def seen(self, time: Tensor, square: Tensor) -> TrajectoryLength:
        """Count an iteration: how long its trajectories lasted, and their estimate of the expected square, ``()``."""
        place = (BINS_OF_TWO * (time / SHORTEST).log2()).clamp(0, BINS - 1).long()
        here = torch.arange(BINS, device=place.device) == place
        return replace(self, curve=FADING * self.curve + here * torch.stack([square, time, square * 0 + 1])[:, None])

    def advised(self) -> Tensor:
        """The log of the best length among those that were tried twice, ``()``; the present one before any was.

        A time that was tried once belongs, as a rule, to a step size that the search has left. Times are rounded up to
        whole steps. So a bin that wasn't tried stands for times of the next one that was.
        """
        sums, counts = self.curve[:2], self.curve[2]
        tried, places = counts > 1, torch.arange(BINS, device=counts.device)
        edges = SHORTEST * 2 ** (torch.arange(BINS + 1, device=counts.device) / BINS_OF_TWO).double()
        following = torch.where(tried, places, BINS - 1).flip(0).cummin(0).values.flip(0)
        means = (sums / counts)[:, following]
        most = torch.where(tried, means[0], 0.0).max()
        square, time = (means * edges.diff()).cumsum(1) / edges[1:]
        worth = torch.where(tried & (most > 0), square / ((2 * most - square) * time), -torch.inf)
        return torch.where(tried.any(), edges[1:][worth.argmax()].log(), self.log_length)

    def update(self, highest: Tensor) -> TrajectoryLength:
        """Go towards what is advised, and a bin beyond it, below a limit of the log length.

        There need be none from below: a trajectory has one step at least, and nothing shorter is tried or advised.
        """
        updates, advice = self.updates + 1, self.advised()
        ahead = (advice + math.log(2) / BINS_OF_TWO - self.log_length).clamp(-RATE, RATE)
        average = torch.lerp(self.log_average, torch.minimum(advice, highest), updates**-0.5)
        log_length = torch.minimum(self.log_length + ahead, highest)
        return replace(self, log_length=log_length, log_average=average, updates=updates)
