r"""SWAG: a Gaussian from the path of a stochastic-gradient optimiser (Maddox et al. 2019, arXiv 1902.02476, section 3).

Of iterates :math:`w_1 \dots w_S` of SGD at a constant step size,

.. math:: \mathcal N\Big(\bar w,\ \tfrac12 \operatorname{diag}\big(\overline{w^2} - \bar w^2\big)
    + \frac{1}{2 (K - 1)} \hat D \hat D^\top\Big)

The columns of :math:`\hat D` are the last :math:`K` iterates' deviations. The paper takes them from the mean as
it stood at each iterate; here they are taken from the final mean, so that with :math:`K = S` the low-rank part is half
of the iterates' sample covariance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.guides.gaussian import AutoGaussian
from pyro_symmetric.guides.layout import Layout, SiteLayout
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import batch_shape, require_finite, require_sites

# Iterates that agree to the last bit would make a deviation of zero, which no density has.
LEAST_DEVIATION = 1e-8


@torch.no_grad()
def swag(model: BayesianModel, iterates: Mapping[str, Tensor], rank: int = 20) -> AutoGaussian:
    """The SWAG posterior of a Bayesian network, as a guide.

    >>> model = ps.BayesianModel(nn.Linear(2, 1), likelihood=ps.GaussianLikelihood(scale=0.1))
    >>> iterates = {"weight": torch.randn(30, 1, 2), "bias": torch.randn(30, 1)}  # of stochastic gradient descent
    >>> guide = ps.swag(model, iterates, rank=5)
    >>> guide.sample_posterior((100,))["weight"].shape
    torch.Size([100, 1, 2])

    :param iterates: weights of batch shape ``(S,)``: iterates of stochastic gradient descent in their order, after it
        has settled. Sites with constraints are averaged unconstrained.
    :param rank: ``K``, how many of the last iterates span the low-rank part; at most ``S`` are used.
    :raises ValueError: if there are fewer than two iterates or they don't fit the model.
    """
    shapes = arguments.instance("model", model, BayesianModel, "a BayesianModel").site_shapes
    require_sites(iterates, shapes, "iterates")
    batch = batch_shape(iterates, shapes, "iterates")
    if len(batch) != 1 or batch[0] < 2:
        raise ValueError(f"iterates have batch shape {tuple(batch)}; SWAG needs (S,) with at least 2 iterates")
    arguments.whole("rank", rank, 2)
    require_finite(iterates, "iterates")
    layout = Layout(
        tuple(
            SiteLayout(name, tuple(shapes[name]), prior.support, len(prior.event_shape))  # type: ignore[arg-type]
            for name, prior in model.priors().items()
        )
    )
    path = layout.pack({name: iterates[name] for name in layout.shapes})
    mean = path.mean(0)
    deviations = path[-rank:] - mean
    scale = (0.5 * path.var(0, correction=0)).sqrt().clamp(min=LEAST_DEVIATION)
    return AutoGaussian(layout, mean, scale, deviations.T / math.sqrt(2 * (len(deviations) - 1)))
