r"""The part of warm-up that every iteration changes.

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

**Chains that are refused where others move** have a pace of their own while all are on their way, and a target for all
that rises. With a curvature that varies, a step that suits most places is too large for some: trajectories that begin
there diverge, and a chain that comes there stays. If trajectories are accepted with probability :math:`a(z)`, a chain
stays at :math:`z` for :math:`1 / a(z)` iterations on average, and so long stays, however rare, decide how many
effective draws there are. The mean acceptance, to which step sizes are adapted, doesn't tell: a thousandth of the
iterations hardly counts in it.

So warm-up counts the iterations in which a chain has long been refused. If they are more than a share :data:`SHARE` of
a window, the target becomes :data:`HIGHER`, and the steps shorter for all chains: on a Gaussian process with Poisson
counts, draws of the worst quantity for a gradient are three times as many as with a target of 0.8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.diagnostics import ACCEPTANCE

DECAY = 0.6  # of the search's gain; averaging asks for more than 1/2 and less than 1
LARGEST_GAIN = 8.0  # near a target of 1 the curve is flat and Newton's step knows no bounds
FURTHEST = 1.0  # that one iteration moves a log step size: near such a target a bad one would take it to nothing
STUCK = ACCEPTANCE[1]  # acceptance below which a chain hardly moves
WEIGHT = 0.2  # of the newest iteration in a chain's recent acceptance
SHARE = 0.002  # of a window's iterations, for all chains together
HIGHER = 0.95  # to which a lower target rises
FOLLOWING = 4  # the count at which a search stops that is to follow its root rather than to settle


@dataclass(frozen=True, eq=False)
class StepSearch:
    """Stochastic approximation of the log step size at which acceptance is the target; all ``()``, in double precision.

    :param log_step: :math:`x`, of the next iteration.
    :param log_average: :math:`\\bar x`, what to keep in the end.
    :param target: :math:`\\delta`.
    :param gain: :math:`c`.
    :param most: the count at which gains fall no more.
    :param count: :math:`t`, iterations so far.
    """

    log_step: Tensor
    log_average: Tensor
    target: Tensor
    gain: Tensor
    most: Tensor
    count: Tensor

    @classmethod
    def start(cls, step_size: Tensor, target: float, follow: bool = False, gain: float | None = None) -> StepSearch:
        """Start from a step size, ``()``.

        :param follow: whether the root may still move, as while chains are on their way: gains don't fall then.
        :param gain: what takes the place of Newton's gain, for other curves than that of the acceptance.
        """
        x = step_size.double().log()
        gain = newton_gain(target) if gain is None else gain
        most = FOLLOWING if follow else math.inf
        return cls(x, x, *(torch.full_like(x, value) for value in (target, gain, most, 0.0)))

    def update(self, acceptance: Tensor) -> StepSearch:
        """Learn from the mean acceptance ``()`` of one iteration."""
        count = torch.minimum(self.count + 1, self.most)
        change = self.gain * count.pow(-DECAY) * (acceptance.double() - self.target)
        log_step = self.log_step + change.clamp(-FURTHEST, FURTHEST)
        average = torch.lerp(self.log_average, log_step, 2 / (count + 1))
        return StepSearch(log_step, average, self.target, self.gain, self.most, count)


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

    def update(self, acceptance: Tensor, target: Tensor) -> Pace:
        """Learn from the acceptance ``(C,)`` of one iteration; shares rise with one over half the target, ``()``."""
        recent = torch.lerp(self.recent, acceptance, WEIGHT)
        most_move = (recent < STUCK).sum() <= len(recent) // 2
        behind = (self.share < 1.0) | ((recent < STUCK) & most_move)
        caught_up = (self.share * (acceptance - 0.5 * target.to(acceptance)).exp()).clamp(max=1.0)
        return Pace(torch.where(behind, caught_up, self.share), recent)

    def pooled(self, acceptance: Tensor) -> Tensor:
        """The mean acceptance ``()`` of the chains at full pace, which speaks of the step size; of all if none is."""
        full = (self.share == 1.0).to(acceptance)
        return torch.where(full.any(), (acceptance * full).sum() / full.sum().clamp(min=1), acceptance.mean())


@dataclass(frozen=True, eq=False)
class Stays:
    """The iterations in which chains had long been refused, which tell whether the target is to rise.

    :param recent: acceptance, averaged over about the last five iterations, ``(C,)``.
    :param stuck: of how many iterations since the window began this was below :data:`STUCK`, for all chains together,
        ``()``.
    :param count: how many iterations these were, for all chains together, ``()``.
    """

    recent: Tensor
    stuck: Tensor
    count: Tensor

    @classmethod
    def start(cls, like: Tensor) -> Stays:
        """Of chains ``(C,)`` that have yet to move."""
        none = torch.zeros((), dtype=torch.long, device=like.device)
        return cls(torch.ones_like(like), none, none)

    def update(self, acceptance: Tensor) -> Stays:
        """Learn from the acceptance ``(C,)`` of one iteration."""
        recent = torch.lerp(self.recent, acceptance, WEIGHT)
        return Stays(recent, self.stuck + (recent < STUCK).sum(), self.count + len(acceptance))

    def too_many(self) -> bool:
        """True if chains stayed so often that the target is to rise."""
        return int(self.stuck) > SHARE * int(self.count)


@dataclass(frozen=True, eq=False)
class Learnt:
    """The numbers that an iteration of warm-up changes, and one of sampling leaves as they are.

    :param step_size: of the integrator, ``()``.
    :param search: for it.
    :param pace: of each chain.
    :param stays: of chains that are refused.
    """

    step_size: Tensor
    search: StepSearch
    pace: Pace
    stays: Stays

    @classmethod
    def of(cls, tuning: Any) -> Learnt:
        """A tuning's part of this name."""
        return cls(*(getattr(tuning, field.name) for field in fields(cls)))

    @property
    def steps(self) -> Tensor:
        """Of each chain, ``(C, 1)``."""
        return (self.step_size * self.pace.share)[:, None]

    def update(self, acceptance: Tensor, blind: bool) -> Learnt:
        """Learn from the acceptance ``(C,)`` of one iteration.

        :param blind: whether the mass matrix is unknown, so that chains go at a pace of their own.
        """
        search = self.search.update(self.pace.pooled(acceptance))
        pace = self.pace.update(acceptance, search.target) if blind else self.pace
        return Learnt(search.log_step.exp().to(acceptance.dtype), search, pace, self.stays.update(acceptance))


def newton_gain(target: float) -> float:
    """:math:`c`, the fall of the log step size for which acceptance rises by one unit, around the target."""
    half = -NormalDist().inv_cdf(target / 2)  # half of s
    return min(1 / (4 * half * NormalDist().pdf(half)), LARGEST_GAIN)
