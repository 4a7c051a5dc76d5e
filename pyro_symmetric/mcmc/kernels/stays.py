r"""Chains that are refused where others move: a pace of their own, and a target for all that rises.

Where curvature varies, a step that suits most places is too large for some: trajectories that begin there diverge, and
a chain that comes there stays. If trajectories are accepted with probability :math:`a(z)`, a chain stays at :math:`z`
for :math:`1 / a(z)` iterations on average, and so long stays, however rare, decide how many effective draws there are.
The mean acceptance, to which step sizes are adapted, doesn't tell: a thousandth of the iterations hardly counts in it.

So warm-up counts the iterations in which a chain has long been refused. If they are more than a share :data:`SHARE` of
a window, the target becomes :data:`HIGHER`, and the steps shorter for all chains: on a Gaussian process with Poisson
counts, draws of the worst quantity for a gradient are three times as many as with a target of 0.8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric.chain_findings import ACCEPTANCE

STUCK = ACCEPTANCE[1]  # acceptance below which a chain hardly moves
WEIGHT = 0.2  # of the newest iteration in a chain's recent acceptance
SHARE = 0.002  # of a window's iterations, for all chains together
HIGHER = 0.95  # to which a lower target rises


@dataclass(frozen=True, eq=False)
class Pace:
    """Each chain's share of the step size, while chains are on their way.

    A chain that hardly moves at a step with which most get along falls back to a share of it, which it adapts to its
    own acceptance until it has caught up. So a step that suits most isn't drawn down by a few, however many chains
    there are, and none is left behind.

    :param share: of the step size, in (0, 1], ``(C,)``.
    :param recent: acceptance, averaged over about the last five iterations, ``(C,)``.
    :param arriving: whether the chains have yet to arrive; what is left after warm-up stays.
    """

    share: Tensor
    recent: Tensor
    arriving: bool = True

    @classmethod
    def start(cls, like: Tensor) -> Pace:
        """All at full pace, for chains ``(C,)``."""
        return cls(torch.ones_like(like), torch.ones_like(like))

    def update(self, acceptance: Tensor, target: float) -> Pace:
        """Learn from the acceptance ``(C,)`` of one iteration; shares rise with one over half the target."""
        recent = torch.lerp(self.recent, acceptance, WEIGHT)
        most_move = recent.quantile(0.5, interpolation="higher") >= STUCK
        behind = (self.share < 1.0) | ((recent < STUCK) & most_move)
        caught_up = (self.share * (acceptance - 0.5 * target).exp()).clamp(max=1.0)
        return Pace(torch.where(behind, caught_up, self.share), recent)

    def pooled(self, acceptance: Tensor) -> Tensor:
        """The mean acceptance ``()`` of the chains at full pace, which speaks of the step size; of all if none is."""
        full = (self.share == 1.0).to(acceptance)
        return torch.where(full.any(), (acceptance * full).sum() / full.sum().clamp(min=1), acceptance.mean())


@dataclass(frozen=True, eq=False)
class Stays:
    """The iterations in which chains had long been refused, and the target that follows from their number.

    :param target: mean acceptance that the step size is adapted to.
    :param recent: acceptance, averaged over about the last five iterations, ``(C,)``.
    :param stuck: of how many iterations since the window began this was below :data:`STUCK`, for all chains together,
        ``()``.
    :param count: how many iterations these were, for all chains together.
    """

    target: float
    recent: Tensor
    stuck: Tensor
    count: int = 0

    @classmethod
    def start(cls, target: float, like: Tensor) -> Stays:
        """Of chains ``(C,)`` that have yet to move."""
        return cls(target, torch.ones_like(like), torch.zeros((), dtype=torch.long, device=like.device))

    def update(self, acceptance: Tensor) -> Stays:
        """Learn from the acceptance ``(C,)`` of one iteration."""
        recent = torch.lerp(self.recent, acceptance, WEIGHT)
        return replace(
            self, recent=recent, stuck=self.stuck + (recent < STUCK).sum(), count=self.count + len(acceptance)
        )

    def renewed(self, judge: bool) -> Stays:
        """For the next window.

        :param judge: whether the target may rise by what was seen in this one.
        """
        target = self.target
        if judge and target < HIGHER and int(self.stuck) > SHARE * self.count:
            target = HIGHER
        return Stays.start(target, self.recent)
