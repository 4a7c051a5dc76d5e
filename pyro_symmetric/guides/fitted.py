"""A Gaussian guide fitted to chains in many copies of a mode, and the draws that know nothing of the fit."""

from __future__ import annotations

import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

from pyro_symmetric.alignment.many import align_many
from pyro_symmetric.groups import Group
from pyro_symmetric.guides.gaussian import AutoGaussian
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.guides.own_parameters import distinct
from pyro_symmetric.posterior import Posterior

# Halves of fewer draws tell neither a Gaussian nor an autocorrelation.
FEWEST = 4


def halves(posterior: Posterior, group: Group, other: Posterior | None) -> tuple[AutoGaussian, Posterior]:
    """A Gaussian of full rank fitted to the first half of each chain, and the second half of each chain.

    :param other: a posterior to take in place of the second half; then all draws are fitted to.
    :raises ValueError: if the posterior doesn't remember its model, or is too short to be halved.
    """
    if not posterior.is_attached:
        raise ValueError("guide is a Posterior that doesn't know its model; say it by posterior.attach(model, *args)")
    half = posterior.num_samples // 2
    if half < FEWEST:
        raise ValueError(f"guide is a Posterior of {2 * half} draws of each chain; it needs at least {2 * FEWEST}")
    if other is not None:
        return fitted(posterior, group), other
    first, second = posterior.select(draws=slice(0, half)), posterior.select(draws=slice(half, None))
    return fitted(first, group), second


def fitted(posterior: Posterior, group: Group) -> AutoGaussian:
    r"""The Gaussian of the aligned draws' mean and covariance, over unconstrained vectors of dimension ``D``.

    Correlations are shrunk by the factor :math:`S / (S + D)` of ``S`` draws, so that the covariance has full rank.
    """
    first = {site: draws[0, 0] for site, draws in posterior.samples.items()}
    # At a draw of the posterior: priors may be improper.
    sketch = distinct(AutoDiagonalNormal(posterior.model, init_loc_fn=init_to_value(values=first)))
    sketch(*posterior._args, **posterior._kwargs)
    layout = layout_of(sketch)
    aligned = align_many(posterior, group, progress=False).posterior
    vectors = layout.unconstrain({site: aligned.samples[site].flatten(0, 1) for site in layout.site_shapes})
    deviations = (vectors - vectors.mean(0)).double()
    covariance = deviations.mT @ deviations / (len(vectors) - 1)
    return AutoGaussian(layout, vectors.mean(0), scale_tril=_cholesky(covariance, len(vectors)).to(vectors.dtype))


def _cholesky(covariance: Tensor, count: int) -> Tensor:
    diagonal = covariance.diagonal().diag_embed()
    share = count / (count + len(covariance))
    return torch.linalg.cholesky(share * covariance + (1 - share) * diagonal)
