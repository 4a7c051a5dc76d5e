r"""What lies between Gaussian guides: distances, geodesics and barycentres of 2-Wasserstein transport.

Of mean-field guides with means :math:`m_i` and deviations :math:`s_i`,

.. math:: W_2^2(q_0, q_1) = \|m_0 - m_1\|^2 + \|s_0 - s_1\|^2, \qquad
          \bar m = \sum_i \lambda_i m_i, \quad \bar s = \sum_i \lambda_i s_i ,

and the geodesic is the barycentre of two with weights :math:`(1 - t, t)`. With correlations (low-rank and full-rank
guides) the covariances follow :mod:`pyro_symmetric.alignment.paths.bures`. Everything is measured in the guides'
unconstrained coordinates. Align the guides first: between unaligned posteriors of a network the midpoint is a mixture
of unrelated units.

Reference: Rossi et al. 2023 (arXiv 2310.10171), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, gaussian_of
from pyro_symmetric.alignment.paths.bures import barycentre_root, between, squared_distance
from pyro_symmetric.alignment.paths.geodesic import interpolate_gaussians, require_ends, wasserstein_gaussians
from pyro_symmetric.guides.affine import triangular
from pyro_symmetric.guides.gaussian import (
    AutoFullRank,
    AutoMeanField,
    GaussianGuide,
    family_and_moments,
    flat_moments,
)
from pyro_symmetric.guides.layout import one_layout_of
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.weights import Weights

AnyMoments = GaussianWeights | Posterior | Mapping[str, Tensor]


@torch.no_grad()
def wasserstein(first: Any, second: Any, *, correlations: bool = True) -> float:
    """The 2-Wasserstein distance between two Gaussian posteriors, or two sets of plain weights.

    >>> wasserstein({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])})
    5.0

    :param first: a set-up Gaussian guide, ``GaussianWeights``, a ``Posterior`` (by the means and deviations of its
        draws), or weights (site -> tensor), which have no deviations.
    :param second: likewise.
    :param correlations: whether those of low-rank and full-rank guides count; up to 2000 weights. Else the marginals
        are compared, at any size: a lower bound of the distance.
    :raises ValueError: if the sites or shapes differ, values aren't finite, or there are too many weights for
        correlations.
    """
    arguments.flag("correlations", correlations)
    one, other = gaussian_of(first, "first"), gaussian_of(second, "second")
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


@overload
def interpolate(guide_0: AutoGuide, guide_1: AutoGuide, t: float, *, correlations: bool = ...) -> GaussianGuide: ...


@overload
def interpolate(guide_0: AnyMoments, guide_1: AnyMoments, t: float, *, correlations: bool = ...) -> GaussianWeights: ...


def interpolate(guide_0: Any, guide_1: Any, t: float, *, correlations: bool = True) -> GaussianGuide | GaussianWeights:
    """The point ``t`` of the Wasserstein geodesic between two Gaussian guides, as a guide of its own.

    Of mean-field guides it is an :class:`~pyro_symmetric.guides.AutoMeanField` whose means and deviations are
    interpolated; if a guide has correlations, an :class:`~pyro_symmetric.guides.AutoFullRank`.

    :param guide_0: a set-up Gaussian guide. Or ``GaussianWeights``, weights (site -> tensor), a network or a
        ``Posterior`` (by its moments), at both ends: the result is then ``GaussianWeights``, whose ``loc`` are the
        weights between.
    :param guide_1: likewise.
    :param t: from 0 to 1.
    :param correlations: whether to keep those of low-rank and full-rank guides; up to 2000 weights. Else the marginals
        are interpolated, at any size.
    """
    arguments.flag("correlations", correlations)
    both = (guide_0, guide_1)
    names = ("guide_0", "guide_1")
    guides = _are_guides(both, names)
    first, second = (gaussian_of(end, name) for end, name in zip(both, names, strict=True))
    if not guides:
        return interpolate_gaussians(first, second, t)
    sites = one_layout_of(both)
    loc, scale = flat_moments(interpolate_gaussians(first, second, t), sites)
    if not correlations or not _correlated(both):
        return AutoMeanField(sites, loc, scale)
    root, other = (_root(guide) for guide in both)
    return AutoFullRank(sites, loc, triangular(between(root, other.to(root.device), t)).to(loc))


@overload
def barycentre(
    guides: Sequence[AutoGuide], weights: Sequence[float] | Tensor | None = ..., *, correlations: bool = ...
) -> GaussianGuide: ...


@overload
def barycentre(
    guides: Sequence[AnyMoments], weights: Sequence[float] | Tensor | None = ..., *, correlations: bool = ...
) -> GaussianWeights: ...


def barycentre(
    guides: Sequence[Any], weights: Sequence[float] | Tensor | None = None, *, correlations: bool = True
) -> GaussianGuide | GaussianWeights:
    r"""The Wasserstein barycentre of Gaussian guides, as a guide of its own: the least
    :math:`\sum_i \lambda_i W_2^2(q, q_i)`.

    Of mean-field guides it is an :class:`~pyro_symmetric.guides.AutoMeanField` with the mean of the means and the mean
    of the deviations. If a guide has correlations it is the barycentre of the full covariances, an
    :class:`~pyro_symmetric.guides.AutoFullRank` (a barycentre of low-rank covariances isn't one), found as a fixed
    point.

    :param guides: set-up Gaussian guides of one model. Or ``GaussianWeights``, weights (site -> tensor) and
        ``Posterior`` (by their moments), no guide among them: the result is then ``GaussianWeights``.
    :param weights: :math:`\lambda`, not negative; equal by default. They are scaled to sum to one.
    :param correlations: whether to keep those of low-rank and full-rank guides; up to 2000 weights. Else the marginals'
        barycentre is taken, at any size.
    """
    arguments.flag("correlations", correlations)
    guides = arguments.listed("guides", guides, object, "guides, or of weights")
    if not guides:
        raise ValueError("guides is empty; a barycentre needs at least one")
    names = [f"guides[{k}]" for k in range(len(guides))]
    are_guides = _are_guides(guides, names)
    moments = [gaussian_of(guide, name) for guide, name in zip(guides, names, strict=True)]
    sites = one_layout_of(guides) if are_guides else ()
    shares = _shares(weights, len(guides))
    for other in moments:
        require_ends(moments[0], other)
    mean = _mean(moments, shares)
    if not are_guides:
        return mean
    loc, scale = flat_moments(mean, sites)
    if not correlations or not _correlated(guides):
        return AutoMeanField(sites, loc, scale)
    root = barycentre_root([_root(guide).to(loc.device) for guide in guides], shares)
    return AutoFullRank(sites, loc, triangular(root).to(loc))


# small steps --------------------------------------------------------------------------------------------------------


def _are_guides(ends: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether the ends are guides, of which guides are made, or come without a layout.

    :raises TypeError: if some are and some aren't.
    """
    are = [isinstance(end, AutoGuide) for end in ends]
    if any(are) and not all(are):
        odd = are.index(False)
        raise TypeError(
            f"{names[odd]} is a {type(ends[odd]).__name__}, but {names[are.index(True)]} is a guide; give guides only, "
            "or moments only: to_gaussian(guide) are those of a guide"
        )
    return all(are)


def _mean(moments: Sequence[GaussianWeights], shares: Sequence[float]) -> GaussianWeights:
    """Means of means and of deviations, site by site."""

    def mean(values: Sequence[Weights]) -> Weights:
        return {
            site: torch.stack([s * own[site].to(like.device) for s, own in zip(shares, values, strict=True)]).sum(0)
            for site, like in values[0].items()
        }

    return GaussianWeights(mean([m.loc for m in moments]), mean([m.scale for m in moments]), moments[0].supports)


def _shares(weights: Sequence[float] | Tensor | None, count: int) -> list[float]:
    shares = torch.ones(count) if weights is None else arguments.numbers("weights", weights)
    shares = shares.double()
    if shares.shape != (count,) or not bool(((shares >= 0) & shares.isfinite()).all()) or not bool(shares.sum() > 0):
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
