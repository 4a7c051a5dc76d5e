r"""HMC whose chains learn together how long a trajectory should be, after ChEES (Hoffman, Radul & Sountsov 2021, "An
adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte Carlo", AISTATS).

Trajectories last :math:`t = u T`, with :math:`u` from a Halton sequence on (0, 1) and one :math:`T` for all chains.
ChEES judges them by the change in the estimator of the expected square,

.. math:: g(t) = \mathbb E\left[\tfrac14\left(\|x' - m\|^2 - \|x - m\|^2\right)^2\right],

in coordinates :math:`x = W z` that the mass matrix has whitened (there the paper, whose mass is 1, applies as it
stands). In warm-up :math:`T` goes to where

.. math:: \frac{1}{T^2} \int_0^T g(t)\, dt,

the mean square for its cost, is greatest. Trajectories of all times up to :math:`T` are made anyway, so that the whole
curve :math:`g` is known up to there, bin by bin; :math:`T` stays a bin ahead of the best, to see what comes next.

Where this differs from the paper:

* The paper climbs the slope in :math:`T` by Adam. Its estimate from single trajectories, :math:`t (x' - m)^\top v'`
  times the change, is noisier the longer they are; on a Gaussian, whose best length is 1.57, :math:`T` was 4 to 5. By
  the curve it is 1.4.
* The centre :math:`m` is each chain's own average, not that of all chains, whose distance from a chain says where its
  mode lies and not how it moves (on a network whose chains sit in different modes, :math:`T` fell to a single step).
* The mean square is divided by the cost. Undivided it leaves open how far beyond half a turn to go.
* The step size follows the chains' mean acceptance like that of the other kernels, not the harmonic mean, which a few
  bad chains pull down (half the step, on eight schools).

Why this and not MEADS (Hoffman & Sountsov 2022, "Tuning-free generalized Hamiltonian Monte Carlo", AISTATS): from one
warmed-up state, HMC with a mean time of 0.7 to 1.4, which is what :math:`T` of 1.4 to 2.8 amounts to, gave the worst
prediction 2.1 to 2.7 effective draws for 1,000 gradients on UCI energy (8-50-1 tanh) and 12.6 to 15.2 on digits
(64-32-10 ReLU); NUTS gave 1.2 and 11.7, MEADS as published 1.3 and 7.5, with steps twice as large 1.6 and 19. MEADS has
no acceptance that its step could be adapted to. (16 chains, 2,000 and 1,000 gradients each: good to about a third.)

Warmed up by itself (:math:`T` of 1.5 and 2), it gave the worst prediction 0.66 effective draws for 1,000 gradients on
energy and 4.9 on digits, HMC 0.69 and 3.3, NUTS 0.76 and 1.7; the median prediction 4.4 and 6.4, HMC 3.4 and 4.6, NUTS
1.1 and 3.9. On energy a chain seldom leaves its mode, and a worst prediction there varies threefold from one run to the
next. (``benchmarks/effective_samples.py``, 16 chains, one seed.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.hmc import Trajectory, transition, whole_steps
from pyro_symmetric.mcmc.kernel import State
from pyro_symmetric.mcmc.mass import Mass
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.warmup import HamiltonianKernel, Tuning

START = math.pi  # for which uniform times leave draws of a standard Gaussian uncorrelated
BINS, BINS_OF_TWO, SHORTEST = 64, 2, 2.0**-20  # of the curve: two for each doubling of the time, from 1e-6 to 4096
FADING = 0.98  # of the curve, with every iteration
RATE = 0.1  # the largest change of log T in one iteration
MIN_CHAINS = 2  # below, each square is a single trajectory's


@dataclass(frozen=True, eq=False)
class LengthTuning:
    """The expected square as a function of time, the longest trajectory that it advises, and the Halton sequence.

    :param log_length: :math:`\\log T`, of the next iteration, ``()``; times are in units of the whitened coordinates.
    :param log_average: the average of what was advised, weighted to the last iterations, ``()``.
    :param sums: of squares over the trajectories whose time lay in each bin, older ones fading as new ones come,
        ``(BINS,)``.
    :param counts: of these trajectories, fading likewise, ``(BINS,)``.
    :param centre: each chain's average, weighted to the last iterations, ``(C, D)``.
    :param updates: how often it was adapted since the curve was begun.
    :param iteration: how many trajectories there have been.
    """

    log_length: Tensor
    log_average: Tensor
    sums: Tensor
    counts: Tensor
    centre: Tensor
    updates: int = 0
    iteration: int = 0

    @classmethod
    def start(cls, length: Tensor, z: Tensor) -> LengthTuning:
        """Start from this length, ``()``, with chains at ``z``."""
        log_length = length.double().log()
        empty = log_length.new_zeros(BINS)
        return cls(log_length, log_length, empty, empty, z)

    def recentred(self, z: Tensor) -> LengthTuning:
        """Take this draw of all chains into their averages, with weight in proportion to its number."""
        return replace(self, centre=torch.lerp(self.centre, z, 2 / (self.iteration + 1)))

    def seen(self, time: float, square: Tensor) -> LengthTuning:
        """Count an iteration: how long its trajectories lasted, and their estimate of the expected square, ``()``."""
        place = int(min(max(BINS_OF_TWO * math.log2(time / SHORTEST), 0), BINS - 1))
        here = torch.zeros_like(self.counts)
        here[place] = 1.0
        sums, counts = FADING * self.sums + here * square, FADING * self.counts + here
        return replace(self, sums=sums, counts=counts, iteration=self.iteration + 1)

    def restarted(self, length: float) -> LengthTuning:
        """Start the curve anew in other units of time, from this length or the present one, whichever is shorter."""
        log_length = self.log_length.clamp(max=math.log(length))
        return replace(self, log_length=log_length, sums=0 * self.sums, counts=0 * self.counts, updates=0)

    def advised(self) -> Tensor:
        """The log of the best length among those that were tried, ``()``; NaN before any was.

        Bins that no time fell into count for nothing; but for the shortest they are few, as times fill (0, T) evenly.
        """
        edges = SHORTEST * 2 ** (torch.arange(BINS + 1, device=self.sums.device) / BINS_OF_TWO).double()
        tried = self.counts > 0
        curve = torch.where(tried, self.sums / self.counts, 0.0)
        area = (curve * edges.diff()).cumsum(0)
        worth = torch.where(tried, area / edges[1:].square(), -torch.inf)
        return torch.where(tried.any(), edges[1:].take(worth.argmax()).log(), torch.nan)

    def update(self, highest: Tensor) -> LengthTuning:
        """Go towards what is advised, and a bin beyond it, below a limit of the log length.

        There need be none from below: a trajectory has one step at least, and nothing shorter is tried or advised.
        """
        updates, advice = self.updates + 1, self.advised()
        advice = torch.where(advice.isnan(), self.log_length, advice)
        ahead = (advice + math.log(2) / BINS_OF_TWO - self.log_length).clamp(-RATE, RATE)
        share = updates**-0.5
        average = share * advice.clamp(max=highest) + (1 - share) * self.log_average
        log_length = (self.log_length + ahead).clamp(max=highest)
        return replace(self, log_length=log_length, log_average=average, updates=updates)


@dataclass(frozen=True, eq=False)
class ChEESTuning(Tuning):
    """What ChEES learns in warm-up: what every Hamiltonian kernel does, and the trajectories' length."""

    length: LengthTuning


@dataclass(frozen=True, eq=False, repr=False)
class ChEES(HamiltonianKernel):
    r"""HMC whose trajectory length is learnt from many chains, from about 8 on; nothing needs to be set.

    :param trajectory_length: :math:`T`, the longest trajectory, where adaptation starts (again after each renewal of
        the mass matrix, unless a shorter one was learnt) or, with ``adapt_length=False``, stays; the mean is half of
        it. In units where the mass matrix has made each coordinate's standard deviation 1.
    :param adapt_length: whether to learn it; with a single chain there is nothing to learn from.
    :param max_steps: upper limit of the leapfrog steps of one iteration.
    """

    trajectory_length: float = START
    adapt_length: bool = True
    max_steps: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("trajectory_length", self.trajectory_length)
        arguments.whole("max_steps", self.max_steps, 1)

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, potential: Potential, z: Tensor, num_warmup: int) -> State:
        state = super().init(potential, z, num_warmup)
        length = LengthTuning.start(z.new_tensor(self.trajectory_length), z)
        return replace(state, tuning=ChEESTuning(**vars(state.tuning), length=length))

    def step(self, potential: Potential, state: State) -> State:
        tuning: ChEESTuning = state.tuning
        share = radical_inverse(tuning.length.iteration + 1)
        # The one place where an iteration waits for the device: a loop needs its length.
        length, step_size = torch.stack([tuning.length.log_length.exp(), tuning.step_size.double()]).tolist()
        num_steps = whole_steps(share * length / step_size, self.max_steps, tuning.blind)
        after, ends = transition(potential, state, num_steps)
        centre = tuning.length.centre
        square = expected_square(tuning.mass, centre, state.z, ends)
        return replace(after, tuning=replace(tuning, length=tuning.length.seen(num_steps * step_size, square)))

    def adapt(self, potential: Potential, state: State, iteration: int, num_warmup: int) -> State:
        tuning: ChEESTuning = state.tuning
        if self.adapt_length and len(state.z) >= MIN_CHAINS:
            length = tuning.length
            if not tuning.blind:
                # By the average: a single small step would cut off what took long to learn.
                step = tuning.averaging.log_average
                length = length.update(step + math.log(self.max_steps))
            if iteration + 1 == num_warmup:
                length = replace(length, log_length=length.log_average)
            state = replace(state, tuning=replace(tuning, length=length.recentred(state.z)))
        after = super().adapt(potential, state, iteration, num_warmup)
        if after.tuning.mass is tuning.mass:
            return after
        # Squares and times in other units say nothing of those to come.
        restarted = after.tuning.length.restarted(self.trajectory_length)
        return replace(after, tuning=replace(after.tuning, length=restarted))


# small steps --------------------------------------------------------------------------------------------------------


def expected_square(mass: Mass, centre: Tensor, before: Tensor, ends: Trajectory) -> Tensor:
    r"""The mean ``()`` of :math:`\tfrac14(\|x' - m\|^2 - \|x - m\|^2)^2`, each times the probability of going there.

    :param centre: :math:`m`, of each chain, ``(C, D)``, in the sampler's coordinates.
    :param before: where the trajectories began, ``(C, D)``.
    :return: in double precision; 0 where no trajectory arrived.
    """
    arrived = (ends.acceptance > 0)[:, None]
    first, last = before - centre, torch.where(arrived, ends.z, before) - centre
    change = mass.whiten(last).square().sum(-1) - mass.whiten(first).square().sum(-1)
    square = (ends.acceptance.double() * 0.25 * change.double().square()).mean()
    return torch.where(torch.isfinite(square), square, 0.0)


def radical_inverse(index: int) -> float:
    """The Halton sequence in base 2: 1/2, 1/4, 3/4, 1/8, 5/8, ... for 1, 2, 3, 4, 5, ..."""
    value, unit = 0.0, 0.5
    while index:
        value += unit * (index & 1)
        index, unit = index >> 1, unit / 2
    return value
