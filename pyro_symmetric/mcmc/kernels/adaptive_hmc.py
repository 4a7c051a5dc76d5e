r"""HMC whose chains learn together how long a trajectory should be.

Trajectories last :math:`t = u T`, with :math:`u` from a Halton sequence on (0, 1) and one :math:`T` for all chains.
Their worth is the squared change of the squared distance from a centre,

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
by bin; :math:`T` stays a bin ahead of the best, to see what comes next.

The paper's sampler is another one, in four points:

* It climbs the slope of :math:`g` in :math:`T` by Adam. The slope's estimate from single trajectories, :math:`t (x' -
  m)^\top v'` times the change, is noisier the longer they are: on a Gaussian, whose best length is 1.8, :math:`T`
  became 4 to 5. By the curve it is 1.3 to 2.
* Its centre :math:`m` is the average of all chains, whose distance from a chain says where its mode lies and not how it
  moves. (On a network whose chains sit in different modes, :math:`T` fell to a single step.) Here it is each chain's
  own average.
* It counts squares instead of effective draws, and doesn't divide by the cost.
* Its step size follows the harmonic mean of the chains' acceptance, with a target of 0.651. A few bad chains pull that
  down (to three quarters of the step, on eight schools). Here it is the mean, with the target of the other Hamiltonian
  kernels.

Warmed up by itself, it gave for 1,000 gradients 104 and 111 effective draws of the worst position or square on eight
schools, the paper's sampler 119 and 117; on a rotated Gaussian of 50 dimensions and condition number 1,000, 6.9 and
11.6 beside 4.1 and 2.2. (``benchmarks/performance/trajectory_length.py``: 16 chains, two seeds each. The worst of so
many figures is known to about 20 %.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import HamiltonianKernel, HamiltonianTuning, tuned
from pyro_symmetric.mcmc.kernels.hmc import longest, trajectory, typical, whole_steps
from pyro_symmetric.mcmc.kernels.kernel import State

START = math.pi  # for which uniform times leave draws of a standard Gaussian uncorrelated
BINS, BINS_OF_TWO, SHORTEST = 64, 2, 2.0**-20  # of the curve: two for each doubling of the time, from 1e-6 to 4096
FADING = 0.98  # of the curve, with every iteration
RATE = 0.1  # the largest change of log T in one iteration
MIN_CHAINS = 2  # below, each square is a single trajectory's


@dataclass(frozen=True, eq=False)
class TrajectoryLength:
    """The expected square as a function of time, and the longest trajectory that it advises.

    :param log_length: :math:`\\log T`, of the next iteration, ``()``; times are in units of the whitened coordinates.
    :param log_average: the average of what was advised, weighted to the last iterations, ``()``.
    :param sums: of squares over the trajectories whose time lay in each bin, older ones fading as new ones come,
        ``(BINS,)``.
    :param times: sums of these trajectories' times, fading likewise, ``(BINS,)``.
    :param counts: of these trajectories, fading likewise, ``(BINS,)``.
    :param centre: each chain's average, weighted to the last iterations, ``(C, D)``.
    :param updates: how often the length was adapted since the curve was begun, ``()``; likewise
    :param draws: how many there have been of each chain.
    """

    log_length: Tensor
    log_average: Tensor
    sums: Tensor
    times: Tensor
    counts: Tensor
    centre: Tensor
    updates: Tensor
    draws: Tensor

    @classmethod
    def start(cls, length: Tensor, z: Tensor) -> TrajectoryLength:
        """Start from this length, ``()``, with chains at ``z``."""
        log_length = length.double().log()
        empty, none = log_length.new_zeros(BINS), torch.zeros_like(log_length)
        return cls(log_length, log_length, empty, empty, empty, z, none, none)

    def recentred(self, z: Tensor) -> TrajectoryLength:
        """Take this draw of all chains into their averages, with weight in proportion to its number."""
        weight = (2 / (self.draws + 2)).to(z.dtype)
        return replace(self, centre=torch.lerp(self.centre, z, weight), draws=self.draws + 1)

    def seen(self, time: Tensor, square: Tensor) -> TrajectoryLength:
        """Count an iteration: how long its trajectories lasted, and their estimate of the expected square, ``()``."""
        place = (BINS_OF_TWO * (time / SHORTEST).log2()).clamp(0, BINS - 1).long()
        here = (torch.arange(BINS, device=place.device) == place).to(self.counts)
        sums, times = FADING * self.sums + here * square, FADING * self.times + here * time
        return replace(self, sums=sums, times=times, counts=FADING * self.counts + here)

    def restarted(self, length: float) -> TrajectoryLength:
        """Start the curve anew in other units of time, from this length or the present one, whichever is shorter."""
        log_length, none = self.log_length.clamp(max=math.log(length)), torch.zeros_like(self.updates)
        empty = torch.zeros_like(self.counts)
        return replace(self, log_length=log_length, sums=empty, times=empty, counts=empty, updates=none)

    def advised(self) -> Tensor:
        """The log of the best length among those that were tried twice, ``()``; the present one before any was.

        A time that was tried once belongs, as a rule, to a step size that the search has left. Times are rounded up to
        whole steps. So a bin that wasn't tried stands for times of the next one that was.
        """
        tried = self.counts > 1
        places = torch.arange(BINS, device=tried.device)
        edges = SHORTEST * 2 ** (torch.arange(BINS + 1, device=tried.device) / BINS_OF_TWO).double()
        later = tried & (places >= places[:, None])
        following = torch.where(later, places, BINS - 1).amin(1)
        square, time = ((sums / self.counts)[following] for sums in (self.sums, self.times))
        most = torch.where(tried, square, 0.0).max()
        square, time = ((value * edges.diff()).cumsum(0) / edges[1:] for value in (square, time))
        worth = torch.where(tried & (most > 0), square / ((2 * most - square) * time), -torch.inf)
        return torch.where(
            tried.any(), edges[1:].index_select(0, worth.argmax().reshape(1)).squeeze(0).log(), self.log_length
        )

    def update(self, highest: Tensor) -> TrajectoryLength:
        """Go towards what is advised, and a bin beyond it, below a limit of the log length.

        There need be none from below: a trajectory has one step at least, and nothing shorter is tried or advised.
        """
        updates, advice = self.updates + 1, self.advised()
        ahead = (advice + math.log(2) / BINS_OF_TWO - self.log_length).clamp(-RATE, RATE)
        average = torch.lerp(self.log_average, torch.minimum(advice, highest), updates.rsqrt())
        log_length = torch.minimum(self.log_length + ahead, highest)
        return replace(self, log_length=log_length, log_average=average, updates=updates)


@dataclass(frozen=True, eq=False)
class AdaptiveTuning(HamiltonianTuning):
    """The tuning of every Hamiltonian kernel, the trajectories' length, and how many there have been: the place in the
    Halton sequence."""

    length: TrajectoryLength
    iteration: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class AdaptiveHMC(HamiltonianKernel):
    r"""HMC whose trajectory length is learnt from many chains, from about 8 on; nothing needs to be set.

    The criterion is that of ChEES (Hoffman, Radul & Sountsov 2021) for the cost of a trajectory; the module's
    description says what else differs from the paper.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), torch.tensor([1.0, 2.0, 10.0])).to_event(1))
    >>> kernel = ps.AdaptiveHMC(model)
    >>> posterior = ps.sample(kernel, num_samples=20, num_warmup=20, num_chains=8, seed=0, progress=False)
    >>> posterior.samples["w"].shape
    torch.Size([8, 20, 3])

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

    def step(self, density: Density, state: State) -> State:
        tuning: AdaptiveTuning = state.tuning
        unit, share = typical(tuning), radical_inverse(tuning.iteration + 1)
        found = trajectory(
            density, state, whole_steps(share * tuning.length.log_length.exp() / unit, self.max_steps, tuning)
        )
        if tuning.learns:
            length = tuning.length
            first, last = (tuning.mass.whiten(z - length.centre) for z in (state.z, found.end.z))
            length = length.seen(found.num_steps * unit, expected_square(first, last, found.acceptance))
            if self._learns_length(state.z) and not tuning.blind:
                # By the average: a single small step would cut off what took long to learn.
                average = tuning.search.log_average.median()
                length = length.update(average + math.log(longest(self.max_steps, tuning)))
            tuning = replace(tuning, length=length.recentred(found.after.z))
        tuning = replace(tuning, iteration=tuning.iteration + 1)
        return found.state(state, self._learnt(tuning, found.acceptance))

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        before: AdaptiveTuning = state.tuning
        if iteration + 1 == num_warmup and self._learns_length(state.z):
            state = tuned(state, length=replace(before.length, log_length=before.length.log_average))
        after = super().adapt(density, state, iteration, num_warmup)
        if after.tuning.mass is before.mass:
            return after
        # Squares and times in other units say nothing of those to come.
        length = after.tuning.length.restarted(self.trajectory_length)
        if before.blind:  # so do the places that chains come from
            length = replace(length, centre=after.z)
        return tuned(after, length=length)

    def _tuning(self, tuning: HamiltonianTuning, z: Tensor) -> AdaptiveTuning:
        length = TrajectoryLength.start(z.new_tensor(self.trajectory_length), z)
        return AdaptiveTuning(**vars(tuning), length=length)

    def _learns_length(self, z: Tensor) -> bool:
        return self.adapt_length and len(z) >= MIN_CHAINS


# small steps --------------------------------------------------------------------------------------------------------


def expected_square(before: Tensor, after: Tensor, acceptance: Tensor) -> Tensor:
    r"""The mean ``()`` of :math:`\tfrac14(\|x' - m\|^2 - \|x - m\|^2)^2`, each times the probability of going there.

    :param before: :math:`x - m`, whitened and from each chain's own centre, ``(C, D)``; likewise ``after``.
    :param acceptance: ``(C,)``.
    :return: in double precision; 0 if no trajectory arrived.
    """
    change = (after.square().sum(-1) - before.square().sum(-1)).double()
    square = torch.where(acceptance > 0, acceptance.double() * 0.25 * change.square(), 0.0).mean()
    return torch.where(torch.isfinite(square), square, 0.0)


def radical_inverse(index: int) -> float:
    """The Halton sequence in base 2: 1/2, 1/4, 3/4, 1/8, 5/8, ... for 1, 2, 3, 4, 5, ..."""
    value, unit = 0.0, 0.5
    while index:
        value += unit * (index & 1)
        index, unit = index >> 1, unit / 2
    return value
