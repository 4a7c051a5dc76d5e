r"""Transport between Gaussian guides: distances, geodesics and barycentres of 2-Wasserstein.

Mean-field guides follow :mod:`pyro_symmetric.alignment.paths.geodesic`, those with correlations (low-rank and
full-rank) :mod:`pyro_symmetric.alignment.paths.bures`. Everything is measured in the guides' unconstrained coordinates.
Align the guides first: between unaligned posteriors of a network the midpoint is a mixture of unrelated units.

Reference: Rossi et al. 2023 (arXiv 2310.10171), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import Independent

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.paths.bures import barycentre_root, squared_distance
from pyro_symmetric.alignment.paths.geodesic import barycentre_gaussians, require_ends, wasserstein_gaussians
from pyro_symmetric.guides.gaussian import AutoGaussian, moments_of, plain_posterior, shares_of, triangular
from pyro_symmetric.guides.layout import GuideLayout, one_layout_of


@torch.no_grad()
def wasserstein(first: Any, second: Any, *, correlations: bool = True) -> float:
    """The 2-Wasserstein distance between two Gaussian posteriors, or two sets of plain weights.

    >>> ps.wasserstein({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])})
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
    ends, moments = (first, second), (to_gaussian(first, "first"), to_gaussian(second, "second"))
    marginal = wasserstein_gaussians(*moments)
    guides = [end for end in ends if isinstance(end, AutoGuide)]
    if not correlations or not _correlated(guides):
        return marginal
    layout = one_layout_of(guides)
    means = [layout.flatten(own.loc).double() for own in moments]
    roots = [
        _root(end) if isinstance(end, AutoGuide) else layout.flatten(own.scale).diag()
        for end, own in zip(ends, moments, strict=True)
    ]
    apart = (means[0] - means[1].to(means[0].device)).square().sum()
    return float(apart + squared_distance(roots[0], roots[1].to(roots[0].device))) ** 0.5


def interpolate(guide_0: Any, guide_1: Any, t: float, *, correlations: bool = True) -> Any:
    """The point ``t`` of the Wasserstein geodesic between two Gaussian guides: their barycentre with weights ``1 - t``
    and ``t``, as a guide of its own.

    >>> first, second = {"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 2.0])}
    >>> ps.interpolate(first, second, 0.25).loc
    {'w': tensor([1.0000, 0.5000])}

    :param guide_0: as :func:`barycentre` takes it; or a network.
    :param guide_1: likewise.
    :param t: from 0 to 1.
    :param correlations: see :func:`barycentre`.
    """
    arguments.flag("correlations", correlations)
    arguments.number("t", t, least=0, most=1)
    return _barycentre((guide_0, guide_1), ("guide_0", "guide_1"), (1.0 - t, t), correlations)


def barycentre(
    guides: Sequence[Any], weights: Sequence[float] | Tensor | None = None, *, correlations: bool = True
) -> Any:
    r"""The Wasserstein barycentre of Gaussian guides, as a guide of its own: the least
    :math:`\sum_i \lambda_i W_2^2(q, q_i)`.

    Of mean-field guides it is mean-field, with the mean of the means and the mean of the deviations. If a guide has
    correlations it is the barycentre of the full covariances, of full rank (a barycentre of low-rank covariances has no
    low rank), found as a fixed point.

    >>> members = [{"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 2.0])}]
    >>> ps.barycentre(members, weights=[0.5, 0.5]).loc
    {'w': tensor([2., 1.])}

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
    return _barycentre(guides, names, shares_of(weights, len(guides), zero=True).tolist(), correlations)


# small steps --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _barycentre(
    ends: Sequence[Any], names: Sequence[str], shares: Sequence[float], correlations: bool
) -> AutoGaussian | GaussianWeights:
    layout = _layout(ends, names)
    moments = [to_gaussian(end, name) for end, name in zip(ends, names, strict=True)]
    for other in moments:
        require_ends(moments[0], other)
    centre = barycentre_gaussians(moments, shares)
    if layout is None:
        return centre
    mean = layout.flatten(centre.loc)
    if not correlations or not _correlated(ends):
        return AutoGaussian(layout, mean, layout.flatten(centre.scale))
    roots = [_root(guide).to(mean.device) for guide in ends]
    return AutoGaussian(layout, mean, scale_tril=triangular(barycentre_root(roots, shares)).to(mean))


def _layout(ends: Sequence[Any], names: Sequence[str]) -> GuideLayout | None:
    """The layout of the ends if they are guides, of which guides are made; None if they are moments or weights.

    :raises TypeError: if some are and some aren't.
    """
    are = [isinstance(end, AutoGuide) for end in ends]
    if any(are) and not all(are):
        odd = are.index(False)
        raise TypeError(
            f"{names[odd]} is a {type(ends[odd]).__name__}, but {names[are.index(True)]} is a guide; give guides only, "
            "or moments only: to_gaussian(guide) are those of a guide"
        )
    return one_layout_of(ends) if all(are) else None


def _correlated(guides: Sequence[Any]) -> bool:
    return any(not isinstance(plain_posterior(guide), Independent) for guide in guides)


def _root(guide: AutoGuide) -> Tensor:
    """A root of a guide's covariance, ``(D, k)``."""
    moments = moments_of(guide)
    if "scale_tril" in moments:
        return moments["scale_tril"]
    diagonal = moments["scale"].diag()
    return torch.cat([diagonal, moments["cov_factor"]], -1) if "cov_factor" in moments else diagonal
