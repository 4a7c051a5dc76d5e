r"""Hamiltonian Monte Carlo of many chains at once (Duane et al. 1987; Neal 2011, arXiv
1206.1901).

Each iteration draws momenta :math:`p \sim \mathcal N(0, M)`, integrates the Hamiltonian

.. math:: H(z, p) = U(z) + \tfrac12 p^\top M^{-1} p

by the leapfrog method and accepts each chain's end point with probability
:math:`\min(1, e^{-\Delta H})`. The number of leapfrog steps is drawn in each iteration,
independently of the state and shared by all chains, so that every chain's transition is
exact and one batched gradient serves all chains.

:class:`AdaptiveHMC` learns the trajectory length by a form of ChEES (Hoffman, Radul &
Sountsov 2021, "An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian
Monte Carlo", AISTATS), see :class:`TrajectoryLength`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.density.density import Density, iterated
from pyro_symmetric.mcmc.kernels.adaptation import (
    BLIND_STEPS,
    HamiltonianKernel,
    HamiltonianTuning,
    tuned,
)
from pyro_symmetric.mcmc.kernels.kernel import (
    MAX_ENERGY_ERROR,
    Mass,
    PhasePoint,
    State,
    choose,
    energy_error,
    leapfrog,
    resample_momenta,
    runs_in_loops,
    uniform,
)

# initial T: uniform times up to pi leave successive draws of a standard Gaussian
# uncorrelated
START = math.pi
# of trajectory times, from 1e-6 to 4096
BINS = 64
BINS_PER_OCTAVE = 2
SHORTEST = 2.0**-20
FADING = 0.98  # decay of the binned sums in each iteration
RATE = 0.1  # largest change of log T in one iteration
MIN_CHAINS = 2  # one chain's squared changes are too noisy to learn from


@dataclass(frozen=True, eq=False, repr=False)
class HMC(HamiltonianKernel):
    r"""Hamiltonian Monte Carlo with a given trajectory length and adapted step size and
    mass matrix.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> kernel = ps.HMC(model, num_steps=5)
    >>> posterior = ps.sample(
    ...     kernel, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False
    ... )
    >>> posterior.samples["w"].shape
    torch.Size([4, 20, 3])

    Other settings are those of :class:`~pyro_symmetric.mcmc.NUTS`.

    :param trajectory_length: mean integration time of a trajectory, in units in which
        the mass matrix gives each coordinate a standard deviation of 1. The time of
        each trajectory is uniform between 0 and twice the mean, which avoids resonance
        with periods of the target. :math:`\pi / 2` is the shortest for which successive
        draws of a Gaussian are uncorrelated on average. Correlations that the mass
        matrix leaves need more;
        :class:`AdaptiveHMC` learns how much.
    :param num_steps: mean number of leapfrog steps, instead of a length.
    :param max_steps: upper limit of the leapfrog steps of one iteration.
    """

    compiles_leapfrog = True

    trajectory_length: float = math.pi / 2
    num_steps: int | None = None
    max_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("trajectory_length", self.trajectory_length)
        arguments.whole(
            "num_steps", self.num_steps, 1, none="trajectory_length over the step size"
        )
        arguments.whole("max_steps", self.max_steps, 1)

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        fraction = uniform(tuning.step_size[0], state.generator).double()
        steps = 2 * fraction * (self.num_steps or self.trajectory_length)
        if self.num_steps is None:
            steps = steps / median_step_size(tuning.step_size)
        return hmc_step(density, state, round_up_steps(steps, self.max_steps, tuning))


def hmc_step(density: Density, state: State, num_steps: int) -> State:
    """Resample momenta, take ``num_steps`` leapfrog steps, and accept or reject the end
    points.
    """
    tuning: HamiltonianTuning = state.tuning
    mass = tuning.mass
    start = resample_momenta(state, mass)
    end = _trajectory(density, start, tuning.step_size, mass, num_steps)
    before = start.total_energy(mass)
    after = end.total_energy(mass)
    error = energy_error(after, before)
    acceptance = (-error).clamp(max=0).exp()
    accept = uniform(error, state.generator) < acceptance
    point = choose(accept, end, start)
    diverging = error > MAX_ENERGY_ERROR
    statistics = {
        "lp": -point.energy,
        "acceptance_rate": acceptance,
        "energy": after.where(accept, before),
        "diverging": diverging,
        "step_size": tuning.step_size,
        "n_steps": diverging.long().fill_(num_steps),
    }
    return State(*point, tuning, state.generator, statistics)


def _trajectory(
    density: Density, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int
) -> PhasePoint:
    """Take leapfrog steps of sizes ``(C,)``, by loops or programs; return the ends."""
    if runs_in_loops(density, start.z, mass):
        from pyro_symmetric.mcmc.kernels import loops  # slow to import

        return loops.leapfrog_trajectory(density, start, step_size, mass, num_steps)
    return iterated(density, leapfrog, num_steps, start, step_size[:, None], mass)


def median_step_size(step_size: Tensor) -> Tensor:
    """Return the median over chains, ``()`` in double precision; it converts trajectory
    times to numbers of steps.
    """
    return step_size.median().double()


def round_up_steps(steps: Tensor, max_steps: int, tuning: HamiltonianTuning) -> int:
    """Round a number of steps ``()`` up to an integer between 1 and ``max_steps``, or
    fewer before the mass matrix is known. This is the only host sync of an iteration: a
    loop needs its length."""
    most = min(max_steps, BLIND_STEPS) if tuning.blind else max_steps
    # ``steps`` is infinite for a step size of 0
    return max(1, math.ceil(min(float(steps), most) - 1e-9))


# adapted trajectory length ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrajectoryLength:
    r"""Running estimate of ChEES as a function of trajectory time, and the longest time
    :math:`T`.

    Trajectories last :math:`t = u T`, with :math:`u` from a Halton sequence on (0, 1)
    and one :math:`T` for all chains. In whitened coordinates :math:`x = W z`, with
    :math:`m` each chain's own running mean, ChEES is

    .. math:: g(t) = \mathbb E\left[
        \tfrac14\left(\|x' - m\|^2 - \|x - m\|^2\right)^2\right].

    All times up to :math:`T` occur, so :math:`g` is known up to there, bin by bin. The
    paper ascends its gradient in
    :math:`T` by Adam, ignores the cost, and centres at the mean over chains, which
        measures where a chain's mode lies.

    :param log_length: :math:`\log T` of the next iteration, ``()``, in units of the
        whitened coordinates.
    :param log_average: running average of :math:`\log T`, weighted towards recent
        iterations, ``()``.
    :param curve: exponentially fading sums of squared changes, times and counts by time
        bin, ``(3, BINS)``.
    :param centre: each chain's mean :math:`m`, weighted towards recent iterations,
        ``(C, D)``.
    :param last: positions of the previous iteration, ``(C, D)``.
    :param updates: number of updates of :math:`T` since the curve was reset.
    :param iteration: number of trajectories so far, the index into the Halton sequence.
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
        """Return the initial estimate, for a length and chains at ``z``."""
        log_length = z.new_tensor(length, dtype=torch.double).log()
        return cls(log_length, log_length, log_length.new_zeros(3, BINS), z, z)

    def of_chains(self, chains: Tensor) -> TrajectoryLength:
        """Select the positions of some chains, by their indices."""
        return replace(self, centre=self.centre[chains], last=self.last[chains])

    def record(self, time: Tensor, square: Tensor) -> TrajectoryLength:
        """Add the time of an iteration and its mean squared change, ``()`` each, to the
        curve.
        """
        number = (BINS_PER_OCTAVE * (time / SHORTEST).log2()).clamp(0, BINS - 1).long()
        in_bin = torch.arange(BINS, device=number.device) == number
        return replace(
            self,
            curve=FADING * self.curve
            + in_bin * torch.stack([square, time, square * 0 + 1])[:, None],
        )

    def best_log_length(self) -> Tensor:
        r"""Return :math:`\log T` for the most effective draws per leapfrog step,
        ``()``; the current one without data.

        .. math:: T^* = \arg\max_T \frac{1}{\bar t} \cdot
            \frac{\bar g}{2 \max g - \bar g}, \qquad
            \bar g = \frac1T \int_0^T g(\lceil t \rceil)\, dt, \quad
            \bar t = \frac1T \int_0^T \lceil t \rceil\, dt,

        where :math:`\lceil t \rceil` is a time rounded up to whole steps. Trajectories
        of the largest :math:`g` are taken to give independent draws. Squared distances
        of successive draws then have the correlation
        :math:`\rho = 1 - \bar g / \max g`, and the effective share of the draws is
            :math:`(1 - \rho) / (1 + \rho)`.

        A bin with one trajectory is ignored: its step size is, as a rule, a transient
        of warm-up. An empty bin takes the values of the next one, since times are
        rounded up.
        """
        sums = self.curve[:2]
        counts = self.curve[2]
        is_known = counts > 1
        bins = torch.arange(BINS, device=counts.device)
        edges = (
            SHORTEST
            * 2
            ** (torch.arange(BINS + 1, device=counts.device) / BINS_PER_OCTAVE).double()
        )
        next_tried = (
            torch.where(is_known, bins, BINS - 1).flip(0).cummin(0).values.flip(0)
        )
        means = (sums / counts)[:, next_tried]
        largest = torch.where(is_known, means[0], 0.0).max()
        square, time = (means * edges.diff()).cumsum(1) / edges[1:]
        efficiency = torch.where(
            is_known & (largest > 0),
            square / ((2 * largest - square) * time),
            -torch.inf,
        )
        return torch.where(
            is_known.any(), edges[1:][efficiency.argmax()].log(), self.log_length
        )

    def update(self, highest: Tensor) -> TrajectoryLength:
        """Move :math:`\\log T` towards one bin beyond the best, to explore longer
        times, but not above ``highest``.

        A lower limit isn't needed: trajectories have at least one step.
        """
        updates = self.updates + 1
        best = self.best_log_length()
        change = (best + math.log(2) / BINS_PER_OCTAVE - self.log_length).clamp(
            -RATE, RATE
        )
        average = torch.lerp(
            self.log_average, torch.minimum(best, highest), updates**-0.5
        )
        log_length = torch.minimum(self.log_length + change, highest)
        return replace(
            self, log_length=log_length, log_average=average, updates=updates
        )


@dataclass(frozen=True, eq=False)
class AdaptiveTuning(HamiltonianTuning):
    """Results of warm-up, with the trajectory length."""

    length: TrajectoryLength

    def of_chains(self, chains: Tensor) -> AdaptiveTuning:
        length = self.length.of_chains(chains)
        return replace(super().of_chains(chains), length=length)


@dataclass(frozen=True, eq=False, repr=False)
class AdaptiveHMC(HamiltonianKernel):
    r"""HMC that learns its trajectory length from many chains, 4 or more.

    The criterion is ChEES (Hoffman, Radul & Sountsov 2021) relative to the cost of a
    trajectory.

    >>> def model():
    ...     pyro.sample(
    ...         "w",
    ...         dist.Normal(torch.zeros(3), torch.tensor([1.0, 2.0, 10.0])).to_event(1),
    ...     )
    >>> kernel = ps.AdaptiveHMC(model)
    >>> posterior = ps.sample(
    ...     kernel, num_samples=20, num_warmup=20, num_chains=8, seed=0, progress=False
    ... )
    >>> posterior.samples["w"].shape
    torch.Size([8, 20, 3])

    Other settings are those of :class:`~pyro_symmetric.mcmc.NUTS`.

    :param max_steps: upper limit of the leapfrog steps of one iteration.
    """

    compiles_leapfrog = True

    max_steps: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("max_steps", self.max_steps, 1)

    def init(
        self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator
    ) -> State:
        state = super().init(density, z, num_warmup, generator)
        length = TrajectoryLength.start(START, z)
        return replace(
            state, tuning=AdaptiveTuning(**vars(state.tuning), length=length)
        )

    def step(self, density: Density, state: State) -> State:
        tuning: AdaptiveTuning = state.tuning
        length = tuning.length
        time = radical_inverse(length.iteration + 1) * length.log_length.exp()
        num_steps = round_up_steps(
            time / median_step_size(tuning.step_size), self.max_steps, tuning
        )
        return tuned(
            hmc_step(density, state, num_steps),
            length=replace(length, iteration=length.iteration + 1),
        )

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        before: AdaptiveTuning = state.tuning
        length = before.length
        first, last = (
            before.mass.whiten(z - length.centre).square().sum(-1)
            for z in (length.last, state.z)
        )
        # a rejected proposal contributes 0
        square = (0.25 * (last - first).double().square()).mean()
        time = state.statistics["n_steps"][0] * median_step_size(
            state.statistics["step_size"]
        )
        length = length.record(time, square)
        learns = len(state.z) >= MIN_CHAINS
        if learns and not before.blind:
            # The average step size, since one small step size would cut T, which grows
            # slowly.
            length = length.update(
                before.search.log_average.median() + math.log(self.max_steps)
            )
        if learns and iteration + 1 == num_warmup:
            length = replace(length, log_length=length.log_average)
        length = replace(
            length,
            centre=length.centre.lerp(state.z, 2 / (iteration + 2)),
            last=state.z,
        )
        state = super().adapt(density, state, iteration, num_warmup)
        # the curve is in units of the old mass matrix
        if state.tuning.mass is not before.mass:
            log_length = length.log_length.clamp(max=math.log(START))
            length = replace(
                length,
                log_length=log_length,
                curve=torch.zeros_like(length.curve),
                updates=0,
            )
            if before.blind:  # the running mean still contains the transient
                length = replace(length, centre=state.z)
        return tuned(state, length=length)


def radical_inverse(index: int) -> float:
    """Return an entry of the Halton sequence in base 2: 1/2, 1/4, 3/4, 1/8, 5/8, ...
    for 1, 2, 3, 4, 5, ...
    """
    return int(f"{index:b}"[::-1], 2) / 2 ** index.bit_length()
