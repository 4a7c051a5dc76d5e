r"""What it costs to lay one mean-field Gaussian over another, and the inner products by which a permutation lowers it.

With means :math:`m`, standard deviations :math:`s`, reference :math:`q_0` and moved source :math:`P_\# q_1`:

* ``"l2"``: :math:`\|m_0 - P m_1\|^2`, weight matching of plain networks (Ainsworth et al. 2023, arXiv 2209.04836);
* ``"wasserstein"``: :math:`W_2^2(P_\# q_1, q_0) = \|m_0 - P m_1\|^2 + \|s_0 - P s_1\|^2` (Rossi et al. 2023,
  arXiv 2310.10171);
* ``"kl"``: :math:`\mathrm{KL}(P_\# q_1 \,\|\, q_0) = \sum \log\frac{s_0}{P s_1} + \frac{(P s_1)^2 + (m_0 - P m_1)^2}
  {2 s_0^2} - \frac12`.

Each falls linearly, over all permutations, with the inner product of *features* of the reference and of the moved
source, so one assignment solver serves all. For ``"l2"`` and ``"wasserstein"`` the features are the moments themselves,
for ``"kl"`` they are :math:`(m_0 / s_0^2, -1 / 2 s_0^2)` and :math:`(m_1, s_1^2 + m_1^2)`. The divergence counts every
weight by the reference's precision, so that the few weights known best decide the match; it isn't symmetric, has no
geodesic along which one could interpolate, and is infinite for plain weights: prefer ``"wasserstein"``.

Moments and features hold their channels (mean, deviation) in the last axis: ``site_shape + (channels,)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Moments = dict[str, Tensor]


@dataclass(frozen=True)
class Cost:
    """A cost of matching that is linear in the features of the moved source.

    :param uses_scale: whether moments hold the deviations in a second channel.
    :param needs_scale: whether all deviations must be positive.
    :param reference_features: moments of the reference -> its features.
    :param source_features: moments of the source -> its features.
    :param distance: moments of the reference, moments of the moved source -> cost, elementwise or by channel.
    :param squared: whether the cost is a squared distance, half of which falls by the inner product of features; of a
        divergence all of it does. It matters to multipliers alone, by which features grow: the second channel of a
        squared distance grows with them, that of a divergence with their squares.
    """

    uses_scale: bool
    needs_scale: bool
    reference_features: Callable[[Tensor], Tensor]
    source_features: Callable[[Tensor], Tensor]
    distance: Callable[[Tensor, Tensor], Tensor]
    squared: bool = True


def _same(moments: Tensor) -> Tensor:
    return moments


def _squared(reference: Tensor, source: Tensor) -> Tensor:
    return (reference - source).square()


def _without_spread(moments: Tensor) -> Tensor:
    loc, scale = moments.unbind(-1)
    return torch.stack([loc, torch.zeros_like(scale)], -1)


def _expected(reference: Tensor, source: Tensor) -> Tensor:
    (loc_0, scale_0), (loc_1, scale_1) = reference.unbind(-1), source.unbind(-1)
    return (loc_0 - loc_1).square() + scale_0.square() + scale_1.square()


def _kl_reference_features(moments: Tensor) -> Tensor:
    loc, scale = moments.unbind(-1)
    return torch.stack([loc / scale**2, -0.5 / scale**2], -1)


def _kl_source_features(moments: Tensor) -> Tensor:
    loc, scale = moments.unbind(-1)
    return torch.stack([loc, scale**2 + loc**2], -1)


def _kl(reference: Tensor, source: Tensor) -> Tensor:
    (loc_0, scale_0), (loc_1, scale_1) = reference.unbind(-1), source.unbind(-1)
    ratio = scale_1 / scale_0
    return 0.5 * (ratio**2 + ((loc_0 - loc_1) / scale_0) ** 2 - 1) - ratio.log()


COSTS = {
    "l2": Cost(False, False, _same, _same, _squared),
    "wasserstein": Cost(True, False, _same, _same, _squared),
    "kl": Cost(True, True, _kl_reference_features, _kl_source_features, _kl, squared=False),
}
# The mean of the squared distance over independent draws of both, which their moments tell.
EXPECTED = Cost(True, False, _without_spread, _same, _expected)
