r"""Costs by densities: how likely a source is under the reference's Gaussian.

.. math:: -\mathbb E_{w \sim q_1} \log \mathcal N(g \cdot w;\ m_0, s_0^2)
    = \sum \frac{(m_0 - g \cdot m_1)^2 + (|g| \cdot s_1)^2}{2 s_0^2} + \log s_0 + \tfrac12 \log 2\pi,

of a Gaussian source up to its entropy, which no permutation or sign changes, the divergence
:math:`\mathrm{KL}(g_\# q_1 \| q_0)`. Features are :math:`(m_0 / s_0^2, -1 / 2 s_0^2)` and :math:`(m_1, s_1^2 +
m_1^2)`. Every weight counts by the reference's precision: a unit is known by its own spread, and no site counts for
more because of its units of measurement; but the few weights known best decide the match. It isn't symmetric, has no
geodesic along which one could interpolate, and is infinite for a reference without spread: prefer ``"wasserstein"``
between two, and this among many draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.weights import WeightCost

# A weight that varies by less than this part of its size, such as the zeros of a triangle, says nothing of any label.
LEAST_SPREAD = 1e-7


class GaussianCost(WeightCost):
    """Minus the log-density under the reference's Gaussian."""

    squared = False

    @classmethod
    def features(cls, moments: Tensor) -> Tensor:
        loc, variance = moments[0], moments[1:].square().sum(0)  # of plain draws there is no second channel
        return torch.stack([loc, loc**2 + variance])

    @classmethod
    def reference_features(cls, moments: Tensor) -> Tensor:
        loc, scale = moments
        return torch.stack([loc / scale**2, -0.5 / scale**2])

    @classmethod
    def distance(cls, reference: Tensor, moved: Tensor) -> Tensor:
        loc, scale = reference
        variance = moved[0].square().neg_().add_(moved[1])  # in place: this is most of what many draws cost
        variance.add_((moved[0] - loc).square_()).mul_(0.5 / scale.square())
        return variance.add_(scale.log() + 0.5 * math.log(2 * math.pi))

    @classmethod
    def centre(cls, features: Tensor) -> Tensor:
        loc, square = features
        variance = square - loc**2
        return torch.stack([loc, torch.where(variance > LEAST_SPREAD**2 * square, variance, 1.0).sqrt()])

    @classmethod
    def alone(cls, member: Tensor, every: Tensor, exchanged: Sequence[int]) -> Tensor:
        scale = cls.centre(cls.features(every).mean(1, keepdim=True))[1]
        if exchanged:
            scale = scale.square().mean([1 + dim for dim in exchanged], keepdim=True).sqrt()
        return torch.stack([member[0], scale.expand_as(member[0])])
