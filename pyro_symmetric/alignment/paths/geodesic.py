r"""The Wasserstein geodesic between mean-field Gaussians, and draws along it.

.. math:: W_2^2(q_0, q_1) = \|m_0 - m_1\|^2 + \|s_0 - s_1\|^2, \qquad m_t = (1-t) m_0 + t m_1, \quad s_t = (1-t) s_0 + t
s_1

Reference: Rossi et al. 2023 (arXiv 2310.10171), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights
from pyro_symmetric.symmetry.weights import Weights, require_finite


def interpolate_gaussians(first: GaussianWeights, second: GaussianWeights, t: float) -> GaussianWeights:
    """The point ``t`` in [0, 1] of the geodesic from ``first`` (0) to ``second`` (1)."""
    arguments.number("t", t, least=0, most=1)
    require_ends(first, second)
    return GaussianWeights(
        {site: torch.lerp(value, second.loc[site].to(value.device), t) for site, value in first.loc.items()},
        {site: torch.lerp(value, second.scale[site].to(value.device), t) for site, value in first.scale.items()},
        first.supports,
    )


def wasserstein_gaussians(first: GaussianWeights, second: GaussianWeights) -> float:
    """The 2-Wasserstein distance of mean-field Gaussians, summed in float64."""
    require_ends(first, second)
    total = 0.0
    for one, other in ((first.loc, second.loc), (first.scale, second.scale)):
        for site, value in one.items():
            total += float((value.double() - other[site].to(value.device).double()).square().sum())
    return total**0.5


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
    if differing := {site for site in first.loc if (site in first.supports) != (site in second.supports)}:
        raise ValueError(
            f"the sites {sorted(differing)} are unconstrained, as a guide has them, at one end only; map them by "
            "biject_to(support).inv and pass GaussianWeights(loc, scale, supports)"
        )
    for gaussian, end in ((first, "the first end"), (second, "the second end")):
        require_finite_moments(gaussian, end)


def require_finite_moments(gaussian: GaussianWeights, name: str) -> None:
    """:raises ValueError: naming the site whose means or deviations are NaN or infinite."""
    require_finite(gaussian.loc, name)
    require_finite(gaussian.scale, f"scale of {name}")


def standard_normals(
    like: GaussianWeights, sample_shape: Sequence[int], generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """The noise of draws, to be shared by several Gaussians: site -> ``sample_shape + site_shape``."""
    shape = torch.Size(sample_shape)
    return {
        site: torch.randn(shape + v.shape, dtype=v.dtype, device=v.device, generator=generator)
        for site, v in like.loc.items()
    }


def draw(gaussian: GaussianWeights, noise: Mapping[str, Tensor]) -> Weights:
    """Draws ``m + s·noise`` as constrained weights."""
    weights = {}
    for site, loc in gaussian.loc.items():
        value = loc + gaussian.scale[site] * noise[site]
        bijection = gaussian.bijection(site)
        weights[site] = value if bijection is None else bijection(value)
    return weights
