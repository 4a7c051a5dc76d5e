r"""HMC whose chains learn together how long a trajectory should be: ChEES (Hoffman, Radul & Sountsov 2021, "An
adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte Carlo", AISTATS).

Trajectories last :math:`t = u T`, with :math:`u` from a Halton sequence on (0, 1) and one :math:`T` for all chains. In
warm-up Adam climbs the change in the estimator of the expected square, for its cost,

.. math:: \frac{1}{T}\, \mathbb E\left[\tfrac14\left(\|x' - m\|^2 - \|x - m\|^2\right)^2\right],

in coordinates :math:`x = W z` that the mass matrix has whitened (there the paper, whose mass is 1, applies as it
stands). The derivative of :math:`\|x'\|^2` in :math:`t` is :math:`2 z'^\top p'`, so every iteration's trajectories give
an estimate of the slope without a further gradient (its eq. 7).

Where this differs from the paper: the centre :math:`m` is each chain's own average, not that of all chains, whose
distance from a chain says where its mode lies and not how it moves (on a network whose chains sit in different modes,
:math:`T` fell to a single step); the criterion is divided by :math:`T`, the cost (without it :math:`T` was 12 on eight
schools, and a gradient worth a fifth); and the step size follows the chains' mean acceptance like that of the other
kernels, not the harmonic mean, which a few bad chains pull down (half the step, on eight schools).

Why this and not MEADS (Hoffman & Sountsov 2022, "Tuning-free generalized Hamiltonian Monte Carlo", AISTATS): from one
warmed-up state, HMC with a mean time of 0.7 to 1.4, which is what :math:`T` of 1.4 to 2.8 amounts to, gave the worst
prediction 2.1 to 2.7 effective draws for 1,000 gradients on UCI energy (8-50-1 tanh) and 12.6 to 15.2 on digits
(64-32-10 ReLU); NUTS gave 1.2 and 11.7, MEADS as published 1.3 and 7.5, with steps twice as large 1.6 and 19. MEADS has
no acceptance that its step could be adapted to. (16 chains, 2,000 and 1,000 gradients each: good to about a third.)

Where it falls short: warmed up by itself, it gave the worst prediction 4.4 effective draws for 1,000 gradients on
digits, NUTS 3.1 and HMC 2.9; but on energy, where a chain seldom leaves its mode, 0.2, HMC 0.2 and NUTS, whose
trajectories are longer, 0.7; the median prediction there 3.5, 3.8 and 1.9. (``benchmarks/effective_samples.py``, 16
chains, one seed.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric.mcmc.hmc import Trajectory, transition, whole_steps
from pyro_symmetric.mcmc.kernel import State, require_count, require_positive
from pyro_symmetric.mcmc.mass import Mass
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.warmup import HamiltonianKernel, Tuning

START = math.pi  # for which uniform times leave draws of a standard Gaussian uncorrelated
RATE = 0.025  # of Adam: the largest change of log T in one iteration
DECAY = 0.95  # of Adam's second moment; the first isn't averaged
MIN_CHAINS = 2  # below, each slope is a single trajectory's


@dataclass(frozen=True, eq=False)
class LengthTuning:
    """Adam's ascent in the log of the longest trajectory, and the Halton sequence.

    :param log_length: :math:`\\log T`, of the next iteration, ``()``; times are in units of the whitened coordinates.
    :param log_average: its average over the iterations, weighted to the last ones, ``()``.
    :param second_moment: running mean square of the slopes, ``()``.
    :param slope: the criterion's, in :math:`\\log T`, at the last iteration, ``()``.
    :param centre: each chain's average, weighted to the last iterations, ``(C, D)``.
    :param updates: how often it was adapted.
    :param iteration: how many trajectories there have been.
    """

    log_length: Tensor
    log_average: Tensor
    second_moment: Tensor
    slope: Tensor
    centre: Tensor
    updates: int = 0
    iteration: int = 0

    @classmethod
    def start(cls, length: Tensor, z: Tensor) -> LengthTuning:
        """Start from this length, ``()``, with chains at ``z``."""
        log_length = length.double().log()
        zero = torch.zeros_like(log_length)
        return cls(log_length, log_length, zero, zero, z)

    def recentred(self, z: Tensor) -> LengthTuning:
        """Take this draw of all chains into their averages, with weight in proportion to its number."""
        return replace(self, centre=torch.lerp(self.centre, z, 2 / (self.iteration + 1)))

    def update(self, lowest: Tensor, highest: Tensor) -> LengthTuning:
        """Climb by one step, within limits of the log length."""
        updates = self.updates + 1
        second_moment = DECAY * self.second_moment + (1 - DECAY) * self.slope.square()
        size = (second_moment / (1 - DECAY**updates)).sqrt().clamp(min=1e-30)
        log_length = (self.log_length + RATE * (self.slope / size).clamp(-1, 1)).clamp(lowest, highest)
        share = updates**-0.5
        average = share * log_length + (1 - share) * self.log_average
        return replace(self, log_length=log_length, log_average=average, second_moment=second_moment, updates=updates)


@dataclass(frozen=True, eq=False)
class ChEESTuning(Tuning):
    """What ChEES learns in warm-up: what every Hamiltonian kernel does, and the trajectories' length."""

    length: LengthTuning


@dataclass(frozen=True, eq=False, repr=False)
class ChEES(HamiltonianKernel):
    r"""HMC whose trajectory length is learnt from many chains, from about 8 on; nothing needs to be set.

    What is learnt is the length for moves within a mode. On networks, where each chain has a mode of its own, try
    :class:`~pyro_symmetric.mcmc.hmc.HMC` beside it.

    :param trajectory_length: :math:`T`, the longest trajectory, where adaptation starts or, with
        ``adapt_length=False``, stays; the mean is half of it. In units where the mass matrix has made each coordinate's
        standard deviation 1.
    :param adapt_length: whether to learn it; with a single chain there is nothing to learn from.
    :param max_steps: upper limit of the leapfrog steps of one iteration.
    """

    trajectory_length: float = START
    adapt_length: bool = True
    max_steps: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("trajectory_length", self.trajectory_length)
        require_count("max_steps", self.max_steps)

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
        slope = criterion_slope(tuning.mass, centre, state.z, ends, num_steps * step_size, length).double()
        counted = replace(tuning.length, slope=slope, iteration=tuning.length.iteration + 1)
        return replace(after, tuning=replace(tuning, length=counted))

    def adapt(self, potential: Potential, state: State, iteration: int, num_warmup: int) -> State:
        tuning: ChEESTuning = state.tuning
        if self.adapt_length and len(state.z) >= MIN_CHAINS:
            length = tuning.length
            if not tuning.blind:
                step = tuning.step_size.double().log()
                length = length.update(step, step + math.log(self.max_steps))
            if iteration + 1 == num_warmup:
                length = replace(length, log_length=length.log_average)
            state = replace(state, tuning=replace(tuning, length=length.recentred(state.z)))
        return super().adapt(potential, state, iteration, num_warmup)


# small steps --------------------------------------------------------------------------------------------------------


def criterion_slope(
    mass: Mass, centre: Tensor, before: Tensor, ends: Trajectory, time: float, longest: float
) -> Tensor:
    r"""The slope ``()`` of the criterion in :math:`\log T`, as these trajectories estimate it.

    With :math:`\Delta = \|x' - m\|^2 - \|x - m\|^2` it is the mean of

    .. math:: \frac{1}{T} \left(t \Delta\, (z' - m)^\top p' - \tfrac14 \Delta^2\right),

    in which trajectories count by their acceptance.

    :param centre: :math:`m`, of each chain, ``(C, D)``, in the sampler's coordinates.
    :param before: where the trajectories began, ``(C, D)``.
    :param time: how long they lasted, :math:`t`.
    :param longest: :math:`T`, in proportion to which :math:`t` grows.
    """
    weight = ends.acceptance / ends.acceptance.sum().clamp(min=1e-30)
    arrived = (weight > 0)[:, None]
    z = torch.where(arrived, ends.z, before)
    momentum = torch.where(arrived, ends.momentum, 0.0)
    first, last = before - centre, z - centre
    change = mass.whiten(last).square().sum(-1) - mass.whiten(first).square().sum(-1)
    drift = (last * momentum).sum(-1)
    slope = weight @ (time * change * drift - 0.25 * change.square()) / longest
    return torch.where(torch.isfinite(slope), slope, 0.0)


def radical_inverse(index: int) -> float:
    """The Halton sequence in base 2: 1/2, 1/4, 3/4, 1/8, 5/8, ... for 1, 2, 3, 4, 5, ..."""
    value, unit = 0.0, 0.5
    while index:
        value += unit * (index & 1)
        index, unit = index >> 1, unit / 2
    return value
