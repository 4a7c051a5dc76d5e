r"""SWAG: a Gaussian from the path of a stochastic-gradient optimiser (Maddox et al. 2019, arXiv 1902.02476, section 3).

Of iterates :math:`w_1 \dots w_S` of SGD at a constant step size,

.. math:: \mathcal N\Big(\bar w,\ \tfrac12 \operatorname{diag}\big(\overline{w^2} - \bar w^2\big)
    + \frac{1}{2 (K - 1)} \hat D \hat D^\top\Big)

The columns of :math:`\hat D` are the last :math:`K` iterates' deviations. The paper takes them from the mean as
it stood at each iterate; here they are taken from the final mean, so that with :math:`K = S` the low-rank part is half
of the iterates' sample covariance.
"""

from __future__ import annotations

import torch

from pyro_symmetric import arguments
from pyro_symmetric.guides.gaussian import AutoGaussian
from pyro_symmetric.guides.layout import GuideLayout, LatentSite
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights, batch_shape, require_finite, require_sites

# Iterates that agree to the last bit would make a deviation of zero, which no density has.
LEAST_DEVIATION = 1e-8


@torch.no_grad()
def swag(model: BayesianModel, iterates: Weights, rank: int = 20) -> AutoGaussian:
    """Return the SWAG posterior of a Bayesian network; sites with constraints are averaged unconstrained.

    >>> model = ps.BayesianModel(nn.Linear(2, 1), likelihood=ps.GaussianLikelihood(scale=0.1))
    >>> guide = ps.guides.swag(model, {"weight": torch.randn(30, 1, 2), "bias": torch.randn(30, 1)})
    >>> guide.sample_posterior((100,))["weight"].shape
    torch.Size([100, 1, 2])

    :param iterates: weights of batch shape ``(S,)``, at least two, in the order in which SGD went through them.
    :param rank: ``K``, how many of the last iterates span the low-rank part; at most as many as there are.
    :raises ValueError: if they don't fit the model, or aren't finite.
    """
    arguments.whole("rank", rank, 2)
    sites = [
        LatentSite(name, tuple(model.site_shapes[name]), prior.support, len(prior.event_shape))  # type: ignore[arg-type]
        for name, prior in model.priors().items()
    ]
    layout = GuideLayout(sites)
    require_sites(iterates, layout.site_shapes, "iterates")
    batch = batch_shape(iterates, layout.site_shapes, "iterates")
    if len(batch) != 1 or batch[0] < 2:
        raise ValueError(f"iterates have batch shape {tuple(batch)}; it must be (S,), of at least 2 of them")
    require_finite(iterates, "iterates")
    path = layout.unconstrain({site: iterates[site] for site in layout.site_shapes})
    mean = path.double().mean(0)
    scale = (0.5 * path.double().var(0, correction=0)).sqrt().clamp(min=LEAST_DEVIATION)
    last = path[-rank:].double() - mean
    factor = last.mT / (2 * (len(last) - 1)) ** 0.5
    return AutoGaussian(layout, *(moment.to(path.dtype) for moment in (mean, scale, factor)))
