r"""Scores by who belongs to which component: the divergence of Stephens 2000 (JRSS B 62(4), Algorithm 2).

With :math:`p_{ik}` the probability that observation ``i`` belongs to component ``k``, and :math:`\bar p` the mean over
all draws, the cost is :math:`-\sum_{ik} g \cdot p_{ik} \log \bar p_{ik}`: the divergence but for the entropy of ``p``,
which no label changes. Features are :math:`\log \bar p` and :math:`p`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_symmetric.alignment.scores.weights import WeightScores


class AllocationScores(WeightScores):
    """The cross-entropy of one draw's allocation from the mean of all."""

    deviations = squared = False

    @classmethod
    def reference_features(cls, moments: Tensor) -> Tensor:
        return moments.clamp_min(torch.finfo(moments.dtype).tiny).log()

    @classmethod
    def distance(cls, reference: Tensor, moved: Tensor) -> Tensor:
        return -moved * cls.reference_features(reference)

    @classmethod
    def alone(cls, member: Tensor, every: Tensor, exchanged: Sequence[int]) -> Tensor:
        return 0.5 * (member + member.mean([2 + dim for dim in exchanged], keepdim=True))
