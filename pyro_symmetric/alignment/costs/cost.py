r"""What it costs to lay one mean-field Gaussian over another, and the inner products by which a permutation lowers it.

With means :math:`m`, standard deviations :math:`s`, reference :math:`q_0` and moved source :math:`P_\# q_1`:

* ``"l2"``: :math:`\|m_0 - P m_1\|^2`, weight matching of plain networks (Ainsworth et al. 2023, arXiv 2209.04836);
* ``"wasserstein"``: :math:`W_2^2(P_\# q_1, q_0) = \|m_0 - P m_1\|^2 + \|s_0 - P s_1\|^2` (Rossi et al. 2023,
  arXiv 2310.10171);
* ``"kl"``: :math:`\mathrm{KL}(P_\# q_1 \,\|\, q_0) = \sum \log\frac{s_0}{P s_1} + \frac{(P s_1)^2 + (m_0 - P m_1)^2}
  {2 s_0^2} - \frac12`.

Two more measure draws by how all of them lie, and say how draws are brought into one frame:

* ``"gaussian"``: :math:`-\log \mathcal N(P w; m_0, s_0^2)` (of a Gaussian source its mean over it), with
  :math:`m_0, s_0` the mean and deviation of every weight over all draws. A unit is known by its own spread, and no site
  counts for more because of its units of measurement;
* allocation: :math:`-\sum_{ik} P p_{ik} \log \bar p_{ik}`, of the probabilities that observation ``i`` belongs to
  component ``k``, and their mean over all draws: the divergence of Stephens 2000 (JRSS B 62(4), Algorithm 2) but for
  the entropy of ``p``, which no label changes.

Each falls linearly, over all permutations, with the inner product of *features* of the reference and of the moved
source, so one assignment solver serves all. For ``"l2"`` and ``"wasserstein"`` the features are the moments themselves,
for ``"kl"`` and ``"gaussian"`` :math:`(m_0 / s_0^2, -1 / 2 s_0^2)` and :math:`(m_1, s_1^2 + m_1^2)`, for allocations
:math:`\log \bar p` and :math:`p`. The best reference of many members follows from the mean of their features. The
divergence counts every weight by the reference's precision, so that the few weights known best decide the match; it
isn't symmetric, has no geodesic along which one could interpolate, and is infinite for plain weights: prefer
``"wasserstein"`` between two.

Moments and features hold their channels (mean, deviation) in the last axis: ``site_shape + (channels,)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Moments = dict[str, Tensor]

# A weight that varies by less than this part of its size, such as the zeros of a triangle, says nothing of any label.
LEAST_SPREAD = 1e-7


def _same(moments: Tensor) -> Tensor:
    return moments


def _itself(member: Tensor, every: Tensor, exchanged: Sequence[int]) -> Tensor:
    return member


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
    :param centre: mean of the features of many members -> moments of the reference that is best for all of them.
    :param alone: moments of one member, those of all, the dimensions along which the site's entries can be exchanged ->
        moments of the reference that this member is by itself.
    """

    uses_scale: bool
    needs_scale: bool
    reference_features: Callable[[Tensor], Tensor]
    source_features: Callable[[Tensor], Tensor]
    distance: Callable[[Tensor, Tensor], Tensor]
    squared: bool = True
    centre: Callable[[Tensor], Tensor] = _same
    alone: Callable[[Tensor, Tensor, Sequence[int]], Tensor] = _itself


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


def _draw_features(moments: Tensor) -> Tensor:
    loc, scale = moments[..., 0], moments[..., 1:].sum(-1)  # of plain draws there is no second channel
    return torch.stack([loc, loc**2 + scale**2], -1)


def _fitted(features: Tensor) -> Tensor:
    loc, square = features.unbind(-1)
    variance = square - loc**2
    return torch.stack([loc, torch.where(variance > LEAST_SPREAD**2 * square, variance, 1.0).sqrt()], -1)


def _pooled(member: Tensor, every: Tensor, exchanged: Sequence[int]) -> Tensor:
    scale = _fitted(_draw_features(every).mean(0, keepdim=True))[..., 1]
    if exchanged:
        scale = scale.square().mean([1 + dim for dim in exchanged], keepdim=True).sqrt()
    loc = member[..., 0]
    return torch.stack([loc, scale.expand_as(loc)], -1)


def _surprise(reference: Tensor, source: Tensor) -> Tensor:
    loc, scale = reference.unbind(-1)
    variance = (source[..., 0] - loc).square() + source[..., 1:].sum(-1).square()
    return 0.5 * variance / scale.square() + scale.log() + 0.5 * math.log(2 * math.pi)


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _smoothed(member: Tensor, every: Tensor, exchanged: Sequence[int]) -> Tensor:
    return 0.5 * (member + member.mean([1 + dim for dim in exchanged], keepdim=True))


def _cross_entropy(reference: Tensor, source: Tensor) -> Tensor:
    return -source * _log(reference)


COSTS = {
    "l2": Cost(False, False, _same, _same, _squared),
    "wasserstein": Cost(True, False, _same, _same, _squared),
    "kl": Cost(True, True, _kl_reference_features, _kl_source_features, _kl, squared=False),
}
# Of draws that are brought into one frame, and of the probabilities of components by which they can be.
GAUSSIAN = Cost(True, False, _kl_reference_features, _draw_features, _surprise, False, _fitted, _pooled)
ALLOCATION = Cost(False, False, _log, _same, _cross_entropy, squared=False, alone=_smoothed)
# The mean of the squared distance over independent draws of both, which their moments tell.
EXPECTED = Cost(True, False, _without_spread, _same, _expected)
