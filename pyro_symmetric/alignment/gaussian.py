r"""Mean-field Gaussian moments of a guide, whatever its class, or of other weights, by site; barycentres and draws.

Guides keep means and standard deviations in different places (one parameter per site, one flat vector in the model's
execution order, a Cholesky factor); :func:`to_gaussian` brings all of them, plain weights, networks and draws to one
form. Correlations are dropped: the deviations are those of the marginals. Of independent Gaussians

.. math:: W_2^2(q_0, q_1) = \|m_0 - m_1\|^2 + \|s_0 - s_1\|^2, \qquad
          \bar m = \sum_i \lambda_i m_i, \quad \bar s = \sum_i \lambda_i s_i ,

and the geodesic is the barycentre of two with weights :math:`(1 - t, t)`.

Reference: Rossi et al. 2023 (arXiv 2310.10171), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import nn
from torch.distributions import biject_to
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

from pyro_symmetric import arguments
from pyro_symmetric.arguments import described
from pyro_symmetric.groups.action import is_real, of_entries
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Weights, require_finite


@dataclass(frozen=True, repr=False)
class GaussianWeights:
    """Independent Gaussians over weights: one mean and one standard deviation for each.

    >>> first = ps.alignment.GaussianWeights({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    >>> second = ps.alignment.GaussianWeights({"w": torch.tensor([3.0, 4.0])}, {"w": torch.ones(2)})
    >>> ps.interpolate(first, second, 0.5).loc
    {'w': tensor([1.5000, 2.0000])}

    :param loc: site -> means, of the site's shape.
    :param scale: site -> standard deviations of the same shape; zero where a weight is known exactly.
    :param supports: site -> support of the model's site, for those sites whose moments are not of the weight itself but
        of its unconstrained value ``biject_to(support).inv(weight)``. Sites left out are taken as they are.
    """

    loc: Weights
    scale: Weights
    supports: Mapping[str, Constraint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arguments.weights("loc", self.loc)
        arguments.weights("scale", self.scale)
        if odd := set(self.loc) ^ set(self.scale) | set(self.supports) - set(self.loc):
            raise ValueError(f"loc and scale must hold the same sites, supports none but theirs: {sorted(odd)}")
        for site, loc in self.loc.items():
            scale = self.scale[site]
            if scale.shape != loc.shape or not (loc.is_floating_point() and scale.is_floating_point()):
                raise ValueError(
                    f"loc[{site!r}] is {described(loc)}, scale[{site!r}] {described(scale)}; both must "
                    "be real numbers of one shape (of complex ones pass torch.view_as_real, counters leave out)"
                )
            if not bool((scale >= 0).all()):
                raise ValueError(f"scale[{site!r}] holds negative values or NaN; standard deviations are at least 0")

    def __repr__(self) -> str:
        shapes = ", ".join(f"{site} {tuple(loc.shape)}" for site, loc in self.loc.items())
        widest = max((float(scale.max()) for scale in self.scale.values() if scale.numel()), default=0.0)
        return f"GaussianWeights({shapes}; deviations up to {widest:.3g})"

    def bijection(self, site: str) -> Transform | None:
        """The map from the unconstrained to the constrained value of a site; ``None`` if that is the identity."""
        return biject_to(of_entries(self.supports[site])) if site in self.supports else None

    def shape_of(self, site: str, shape: torch.Size) -> torch.Size:
        """The shape of the moments of a site whose values have this shape."""
        bijection = self.bijection(site)
        return shape if bijection is None else bijection.inverse_shape(shape)


@torch.no_grad()
def to_gaussian(weights: Any, name: str = "weights") -> GaussianWeights:
    """The mean-field Gaussian moments of ``weights``, detached.

    >>> draws = ps.Posterior({"w": torch.tensor([[[0.0, 1.0], [2.0, 3.0]]])}, kind="independent")
    >>> moments = ps.alignment.to_gaussian(draws)
    >>> moments.loc["w"], moments.scale["w"]
    (tensor([1., 2.]), tensor([1., 1.]))

    :param weights: one of

        * :class:`GaussianWeights`, returned as it is;
        * plain weights (site -> tensor), or a network (its parameters and running statistics): their own means, with
          deviations of zero;
        * a ``Posterior``: means and deviations over all of its draws;
        * a Pyro guide that keeps Gaussian moments per site (``AutoNormal``) or in one flat vector (any
          ``AutoContinuous`` whose ``_loc_scale`` gives the marginal means and deviations). Moments are those of the
          unconstrained values, as the guide has them; ``supports`` names the sites where that makes a difference.

    :param name: what messages call them.
    :raises ValueError: if there are no weights or draws, or the guide has no parameters yet.
    :raises TypeError: if ``weights`` is none of these.
    """
    if isinstance(weights, GaussianWeights):
        return weights
    loc, scale, supports = _read(plain(weights), name)
    return GaussianWeights(loc, scale or {site: torch.zeros_like(value) for site, value in loc.items()}, supports)


def on_host(weights: Any, name: str = "weights") -> tuple[GaussianWeights, torch.device]:
    """The moments on the CPU, and the device that they came from: what decides step by step has a GPU wait at each."""
    gaussian = to_gaussian(weights, name)
    device = next((value.device for value in gaussian.loc.values()), torch.device("cpu"))
    loc, scale = ({site: value.cpu() for site, value in part.items()} for part in (gaussian.loc, gaussian.scale))
    return GaussianWeights(loc, scale, gaussian.supports), device


def plain(weights: Any) -> Any:
    """Parameters and running statistics of a network; all else (a guide, say) as it is."""
    if not isinstance(weights, nn.Module) or isinstance(weights, AutoGuide) or hasattr(weights, "prototype_trace"):
        return weights
    buffers = {name: value for name, value in weights.named_buffers() if value.is_floating_point()}
    return {**dict(weights.named_parameters()), **buffers}


# barycentres, and draws ----------------------------------------------------------------------------------------------


def barycentre_gaussians(gaussians: Sequence[GaussianWeights], shares: Sequence[float]) -> GaussianWeights:
    """The barycentre of mean-field Gaussians of the same sites, with weights ``shares`` of sum one."""

    def mean(values: Sequence[Weights]) -> Weights:
        return {
            site: torch.stack([s * own[site].to(like.device) for s, own in zip(shares, values, strict=True)]).sum(0)
            for site, like in values[0].items()
        }

    return GaussianWeights(mean([g.loc for g in gaussians]), mean([g.scale for g in gaussians]), gaussians[0].supports)


def require_ends(first: GaussianWeights, second: GaussianWeights) -> None:
    """:raises ValueError: naming the sites, unless both ends of a path are finite and have the same sites, of the same
    shapes, on which they know the same supports."""
    shapes = [{site: tuple(value.shape) for site, value in end.loc.items()} for end in (first, second)]
    if shapes[0] != shapes[1]:
        odd = sorted(s for s in shapes[0].keys() | shapes[1] if shapes[0].get(s) != shapes[1].get(s))
        raise ValueError(f"both ends must have the same sites, of the same shapes; they differ in {odd}")
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


# reading --------------------------------------------------------------------------------------------------------------


def _read(weights: Any, name: str) -> tuple[Weights, Weights, Mapping[str, Constraint]]:
    """Means, deviations (of plain weights none) and supports, where they are."""
    if isinstance(weights, Posterior):
        flat = weights.get_samples()
        require_finite(flat, name)
        spread = {site: value.std(0, correction=0) for site, value in flat.items()}
        return {site: value.mean(0) for site, value in flat.items()}, spread, {}
    if isinstance(weights, Mapping):
        arguments.weights(name, weights)
        return {site: value.detach() for site, value in weights.items()}, {}, {}
    by_site = hasattr(weights, "_get_loc_and_scale")
    if not by_site and not (hasattr(weights, "_unpack_latent") and hasattr(weights, "_loc_scale")):
        raise TypeError(
            f"{name} is {described(weights)}, which has no Gaussian moments that can be read. Pass GaussianWeights, "
            "a dict of site -> tensor (for a network, dict(net.named_parameters())), AutoNormal, or a Gaussian "
            "AutoContinuous guide; of an AutoDelta guide pass guide.median()"
        )
    if weights.prototype_trace is None:
        raise ValueError(
            f"this {type(weights).__name__} has no parameters yet; call guide.setup(...) or run one SVI step first"
        )
    sites = {site: node["fn"].support for site, node in weights.prototype_trace.iter_stochastic_nodes()}
    if by_site:
        moments = {site: weights._get_loc_and_scale(site) for site in sites}
    else:  # a flat vector, in the order of the guide's own layout
        both = [{s["name"]: value for s, value in weights._unpack_latent(flat)} for flat in weights._loc_scale()]
        moments = {site: (both[0][site], both[1][site]) for site in sites}
    # Cloned, so that later training steps of the guide don't change the moments.
    loc, scale = ({site: pair[k].detach().clone() for site, pair in moments.items()} for k in (0, 1))
    return loc, scale, {site: support for site, support in sites.items() if not is_real(support)}
