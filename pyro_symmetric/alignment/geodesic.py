r"""Wasserstein barycentres of mean-field Gaussians, and draws.

.. math:: W_2^2(q_0, q_1) = \|m_0 - m_1\|^2 + \|s_0 - s_1\|^2, \qquad
          \bar m = \sum_i \lambda_i m_i, \quad \bar s = \sum_i \lambda_i s_i ,

and the geodesic is the barycentre of two with weights :math:`(1 - t, t)`.

Reference: Rossi et al. 2023 (arXiv 2310.10171), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyro_symmetric.alignment.gaussian import GaussianWeights
from pyro_symmetric.weights import Weights, require_finite


def barycentre_gaussians(gaussians: Sequence[GaussianWeights], shares: Sequence[float]) -> GaussianWeights:
    """The barycentre of mean-field Gaussians of the same sites, with weights ``shares`` of sum one."""

    def mean(values: Sequence[Weights]) -> Weights:
        return {
            site: torch.stack([s * own[site].to(like.device) for s, own in zip(shares, values, strict=True)]).sum(0)
            for site, like in values[0].items()
        }

    return GaussianWeights(mean([g.loc for g in gaussians]), mean([g.scale for g in gaussians]), gaussians[0].supports)


def require_ends(first: GaussianWeights, second: GaussianWeights) -> None:
    """:raises ValueError: naming the site, unless both ends of a path are finite and have the same sites, of the same
    shapes."""
    if set(first.loc) != set(second.loc):
        raise ValueError(f"both ends must have the same sites; only one has {sorted(set(first.loc) ^ set(second.loc))}")
    for site, value in first.loc.items():
        if value.shape != second.loc[site].shape:
            raise ValueError(
                f"site {site!r} has shape {tuple(value.shape)} at one end and "
                f"{tuple(second.loc[site].shape)} at the other"
            )
    if differing := set(first.supports) ^ set(second.supports):
        raise ValueError(
            f"the sites {sorted(differing)} are unconstrained, as a guide has them, at one end only; map them by "
            "biject_to(support).inv and pass GaussianWeights(loc, scale, supports)"
        )
    for gaussian, end in ((first, "the first end"), (second, "the second end")):
        require_finite(gaussian.loc, end)
        require_finite(gaussian.scale, f"scale of {end}")


def draw(gaussian: GaussianWeights, count: int, generator: torch.Generator) -> Weights:
    """Constrained weights of batch shape ``(count,)``; generators in one state give the same standard normals."""
    weights = {}
    for site, loc in gaussian.loc.items():
        noise = torch.randn(count, *loc.shape, dtype=loc.dtype, device=loc.device, generator=generator)
        value = loc + gaussian.scale[site] * noise
        bijection = gaussian.bijection(site)
        weights[site] = value if bijection is None else bijection(value)
    return weights
