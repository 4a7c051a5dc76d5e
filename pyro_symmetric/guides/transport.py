r"""What lies between Gaussian guides: distances, geodesics and barycentres of 2-Wasserstein transport.

Of mean-field guides with means :math:`m_i` and deviations :math:`s_i`,

.. math:: W_2^2(q_0, q_1) = \|m_0 - m_1\|^2 + \|s_0 - s_1\|^2, \qquad
          \bar m = \sum_i \lambda_i m_i, \quad \bar s = \sum_i \lambda_i s_i ,

and the geodesic is the barycentre of two with weights :math:`(1 - t, t)`. With correlations (low-rank and full-rank
guides) the covariances follow :mod:`pyro_symmetric.alignment.bures`. Everything is measured in the guides'
unconstrained coordinates. Align the guides first: between unaligned posteriors of a network the midpoint is a mixture
of unrelated units.

Reference: Rossi et al. 2023 (arXiv 2310.10171), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric.alignment.bures import barycentre_root, between, squared_distance
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.geodesic import interpolate_gaussians, wasserstein_gaussians
from pyro_symmetric.guides.affine import triangular
from pyro_symmetric.guides.gaussian import (
    AutoFullRank,
    AutoMeanField,
    GaussianGuide,
    family_and_moments,
    flat_moments,
)
from pyro_symmetric.guides.layout import one_layout_of


@torch.no_grad()
def wasserstein(first: Any, second: Any, *, correlations: bool = True) -> float:
    """The 2-Wasserstein distance between two Gaussian posteriors, or two sets of plain weights.

    >>> wasserstein({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])})
    5.0

    :param first: a set-up Gaussian guide, ``GaussianWeights``, or weights (site -> tensor), which have no deviations.
    :param second: likewise.
    :param correlations: whether those of low-rank and full-rank guides count; up to 2000 weights. Else the marginals
        are compared, at any size: a lower bound of the distance.
    :raises ValueError: if the sites or shapes differ, or there are too many weights for correlations.
    """
    one, other = to_gaussian(first), to_gaussian(second)
    squared = wasserstein_gaussians(one, other) ** 2
    roots = [_root_or_none(guide) for guide in (first, second)] if correlations else [None]
    if all(root is None for root in roots):
        return squared**0.5
    order = _order(first, second)
    means = sum(
        float((one.loc[site].double() - other.loc[site].to(one.loc[site].device).double()).square().sum())
        for site in order
    )
    pair = [
        root if root is not None else _diagonal(moments, order)
        for root, moments in zip(roots, (one, other), strict=True)
    ]
    return (means + float(squared_distance(pair[0], pair[1].to(pair[0].device)))) ** 0.5


def interpolate(guide_0: AutoGuide, guide_1: AutoGuide, t: float, *, correlations: bool = True) -> GaussianGuide:
    """The point ``t`` of the Wasserstein geodesic between two Gaussian guides, as a guide of its own.

    Of mean-field guides it is an :class:`~pyro_symmetric.guides.AutoMeanField` whose means and deviations are
    interpolated; if a guide has correlations, an :class:`~pyro_symmetric.guides.AutoFullRank`.

    :param t: from 0 to 1.
    :param correlations: whether to keep those of low-rank and full-rank guides; up to 2000 weights. Else the marginals
        are interpolated, at any size.
    """
    sites = one_layout_of((guide_0, guide_1))
    moments = interpolate_gaussians(to_gaussian(guide_0), to_gaussian(guide_1), t)
    loc, scale = flat_moments(moments, sites)
    if not correlations or not _correlated((guide_0, guide_1)):
        return AutoMeanField(sites, loc, scale)
    first, second = (_root(guide) for guide in (guide_0, guide_1))
    return AutoFullRank(sites, loc, triangular(between(first, second.to(first.device), t)).to(loc))


def barycentre(
    guides: Sequence[AutoGuide], weights: Sequence[float] | Tensor | None = None, *, correlations: bool = True
) -> GaussianGuide:
    r"""The Wasserstein barycentre of Gaussian guides, as a guide of its own: the least
    :math:`\sum_i \lambda_i W_2^2(q, q_i)`.

    Of mean-field guides it is an :class:`~pyro_symmetric.guides.AutoMeanField` with the mean of the means and the mean
    of the deviations. If a guide has correlations it is the barycentre of the full covariances, an
    :class:`~pyro_symmetric.guides.AutoFullRank` (a barycentre of low-rank covariances isn't one), found as a fixed
    point.

    :param guides: set-up Gaussian guides of one model.
    :param weights: :math:`\lambda`, not negative; equal by default. They are scaled to sum to one.
    :param correlations: whether to keep those of low-rank and full-rank guides; up to 2000 weights. Else the marginals'
        barycentre is taken, at any size.
    """
    guides = list(guides)
    if not guides:
        raise ValueError("guides is empty; a barycentre needs at least one")
    sites = one_layout_of(guides)
    shares = _shares(weights, len(guides))
    flat = [flat_moments(to_gaussian(guide), sites) for guide in guides]
    device = flat[0][0].device

    def mean(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([share * value.to(device) for share, value in zip(shares, values, strict=True)]).sum(0)

    loc, scale = (mean(column) for column in zip(*flat, strict=True))
    if not correlations or not _correlated(guides):
        return AutoMeanField(sites, loc, scale)
    root = barycentre_root([_root(guide).to(device) for guide in guides], shares)
    return AutoFullRank(sites, loc, triangular(root).to(loc))


# small steps --------------------------------------------------------------------------------------------------------


def _shares(weights: Sequence[float] | Tensor | None, count: int) -> list[float]:
    shares = torch.ones(count) if weights is None else torch.as_tensor(weights)
    shares = shares.double()
    if shares.shape != (count,) or not bool((shares >= 0).all()) or not bool(shares.sum() > 0):
        raise ValueError(f"weights are {weights}; there must be {count} numbers, one for each guide, none negative")
    return (shares / shares.sum()).tolist()


def _correlated(guides: Sequence[Any]) -> bool:
    return any(family_and_moments(guide)[0] is not AutoMeanField for guide in guides)


def _root(guide: AutoGuide) -> Tensor:
    """A root of a guide's covariance, ``(D, k)``."""
    moments: Mapping[str, Tensor] = family_and_moments(guide)[1]
    if "scale_tril" in moments:
        return moments["scale_tril"]
    diagonal = moments["scale"].diag()
    return torch.cat([diagonal, moments["cov_factor"]], -1) if "cov_factor" in moments else diagonal


def _root_or_none(guide: Any) -> Tensor | None:
    """Of a guide with correlations, a root of its covariance."""
    return _root(guide) if isinstance(guide, AutoGuide) and _correlated([guide]) else None


def _order(*ends: Any) -> list[str]:
    """The sites in the order in which the guides among the ends concatenate them."""
    return [site.name for site in one_layout_of([end for end in ends if isinstance(end, AutoGuide)])]


def _diagonal(moments: GaussianWeights, order: Sequence[str]) -> Tensor:
    return torch.cat([moments.scale[site].reshape(-1) for site in order]).diag()
