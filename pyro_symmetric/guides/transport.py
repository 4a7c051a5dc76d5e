r"""Between mean-field Gaussian guides: geodesics and barycentres of the 2-Wasserstein distance.

Of :math:`q_i = \mathcal N(m_i, \operatorname{diag}(s_i^2))` and weights :math:`\lambda_i` that sum to one, the least
:math:`\sum_i \lambda_i W_2^2(q, q_i)` is attained by the mean of the means and the mean of the deviations,

.. math:: m = \sum_i \lambda_i m_i, \qquad s = \sum_i \lambda_i s_i,

in the guides' unconstrained coordinates; the geodesic of two has :math:`\lambda = (1 - t, t)`. Align the guides first:
between unaligned posteriors of a network the midpoint is a mixture of unrelated units.

Reference: Rossi et al. 2023 (arXiv 2310.10171), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import Normal
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import Independent

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, barycentre_gaussians, require_ends, to_gaussian
from pyro_symmetric.arguments import as_tensor
from pyro_symmetric.guides.base import layout_of
from pyro_symmetric.guides.gaussian import AutoGaussian, plain_posterior


def interpolate(guide_0: Any, guide_1: Any, t: float) -> Any:
    """Return the point ``t`` of the Wasserstein geodesic between two mean-field guides, as a guide of its own.

    >>> first, second = {"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 2.0])}
    >>> ps.interpolate(first, second, 0.25).loc
    {'w': tensor([1.0000, 0.5000])}

    :param guide_0: as :func:`barycentre` takes it; or a network.
    :param guide_1: likewise.
    :param t: from 0 to 1.
    """
    arguments.number("t", t, least=0, most=1)
    return _barycentre((guide_0, guide_1), ("guide_0", "guide_1"), (1.0 - t, t))


def barycentre(guides: Sequence[Any], weights: Sequence[float] | Tensor | None = None) -> Any:
    r"""Return the Wasserstein barycentre of mean-field guides, as a guide of its own.

    >>> members = [{"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 2.0])}]
    >>> ps.barycentre(members, weights=[0.5, 0.5]).loc
    {'w': tensor([2., 1.])}

    :param guides: set-up mean-field guides of one model. Or ``GaussianWeights``, weights (site -> tensor) and
        ``Posterior`` (by their moments), no guide among them: the result is then ``GaussianWeights``.
    :param weights: :math:`\lambda`, not negative; equal by default. They are scaled to sum to one.
    :raises ValueError: for guides with correlations, whose barycentre has no such form.
    """
    guides = arguments.listed("guides", guides, object, "guides, or of weights")
    if not guides:
        raise ValueError("guides is empty; a barycentre needs at least one")
    shares = as_tensor([1.0] * len(guides) if weights is None else weights, dtype=torch.float64)
    if shares.shape != (len(guides),) or not bool((shares >= 0).all()) or not 0 < float(shares.sum()) < torch.inf:
        raise ValueError(f"weights are {weights}; there must be {len(guides)} numbers, none negative, one a guide")
    return _barycentre(guides, [f"guides[{k}]" for k in range(len(guides))], (shares / shares.sum()).tolist())


@torch.no_grad()
def _barycentre(ends: Sequence[Any], names: Sequence[str], shares: Sequence[float]) -> AutoGaussian | GaussianWeights:
    guides = [end for end in ends if isinstance(end, AutoGuide)]
    if 0 < len(guides) < len(ends):
        raise TypeError(f"there are guides among {list(names)}, and others: {[type(end).__name__ for end in ends]}")
    moments = [to_gaussian(end, name) for end, name in zip(ends, names, strict=True)]
    for other in moments:
        require_ends(moments[0], other)
    centre = barycentre_gaussians(moments, shares)
    if not guides:
        return centre
    for guide, name in zip(guides, names, strict=True):
        if not isinstance(plain_posterior(guide), Independent):
            raise ValueError(f"{name} has correlations; barycentres and geodesics are those of mean-field guides")
    layout = layout_of(guides[0])
    normal = Normal(layout.flatten(centre.loc), layout.flatten(centre.scale))
    return AutoGaussian(guides[0], normal.to_event(1))
