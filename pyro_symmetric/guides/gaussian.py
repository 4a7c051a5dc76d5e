r"""Gaussian guides with given moments, and the moments of guides that others have made.

Three families over the concatenated unconstrained sites, of dimension ``D``:

* :class:`AutoMeanField`, :math:`\mathcal N(m, \mathrm{diag}(s^2))`;
* :class:`AutoLowRank`, :math:`\mathcal N(m, \mathrm{diag}(s^2) + F F^\top)`;
* :class:`AutoFullRank`, :math:`\mathcal N(m, L L^\top)`.

They have parameters of their own from the start, need no model to draw from, and can be trained further with stock SVI:
pushing forward, interpolating and loading make them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.guides.affine import triangular
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.layout import LayoutModel, SiteLayout, layout_of

Moments = Mapping[str, Tensor]


class GaussianGuide(WeightsGuide):
    """What the three families share: a guide over a layout instead of a model, set up at once."""

    def __init__(self, sites: tuple[SiteLayout, ...], loc: Tensor, **options: Any):
        model = LayoutModel(sites, loc)
        super().__init__(model, init_loc_fn=model.init_loc_fn, **options)
        self.setup()
        with torch.no_grad():
            self.loc.copy_(loc)


class AutoMeanField(GaussianGuide, AutoDiagonalNormal):
    """A mean-field Gaussian guide with given moments.

    :param sites: the layout, e.g. ``layout_of(other_guide)``.
    :param loc: means of the concatenated unconstrained sites, ``(D,)``.
    :param scale: standard deviations, ``(D,)``.
    """

    def __init__(self, sites: tuple[SiteLayout, ...], loc: Tensor, scale: Tensor):
        require_moments(sites, {"loc": loc, "scale": scale})
        super().__init__(sites, loc)
        self.scale = scale.detach().clone()  # type: ignore[assignment]  # a PyroParam by its class


class AutoLowRank(GaussianGuide, AutoLowRankMultivariateNormal):
    """A Gaussian guide whose covariance is a diagonal plus a matrix of low rank.

    :param sites: the layout, e.g. ``layout_of(other_guide)``.
    :param loc: means of the concatenated unconstrained sites, ``(D,)``.
    :param scale: standard deviations of the diagonal part, ``(D,)``.
    :param cov_factor: ``F`` of the low-rank part ``F F^T``, ``(D, rank)``. (Pyro's parameter of that name is ``F /
        scale``, row by row.)
    """

    def __init__(self, sites: tuple[SiteLayout, ...], loc: Tensor, scale: Tensor, cov_factor: Tensor):
        require_moments(sites, {"loc": loc, "scale": scale, "cov_factor": cov_factor})
        super().__init__(sites, loc, rank=cov_factor.shape[-1])
        self.scale = scale.detach().clone()  # type: ignore[assignment]
        with torch.no_grad():
            self.cov_factor.copy_(cov_factor / scale.unsqueeze(-1))


class AutoFullRank(GaussianGuide, AutoMultivariateNormal):
    """A Gaussian guide with any covariance.

    :param sites: the layout, e.g. ``layout_of(other_guide)``.
    :param loc: means of the concatenated unconstrained sites, ``(D,)``.
    :param scale_tril: Cholesky factor of the covariance, lower triangular with a positive diagonal, ``(D, D)``.
    """

    def __init__(self, sites: tuple[SiteLayout, ...], loc: Tensor, scale_tril: Tensor):
        require_moments(sites, {"loc": loc, "scale_tril": scale_tril})
        super().__init__(sites, loc)
        diagonal = scale_tril.detach().diagonal().clone()
        self.scale = diagonal  # type: ignore[assignment]
        self.scale_tril = scale_tril.detach() / diagonal.unsqueeze(-1)  # type: ignore[assignment]


# Each holds those before it.
FAMILIES: dict[str, type[GaussianGuide]] = {
    "AutoMeanField": AutoMeanField,
    "AutoLowRank": AutoLowRank,
    "AutoFullRank": AutoFullRank,
}


@torch.no_grad()
def family_and_moments(guide: AutoGuide) -> tuple[type[GaussianGuide], dict[str, Tensor]]:
    """Our family of a set-up Gaussian guide, stock or ours, and the arguments that make its equal; of a symmetrised
    guide, those of its base.

    :raises TypeError: for a guide that isn't Gaussian.
    """
    if isinstance(guide, AutoLowRankMultivariateNormal):
        posterior = base_posterior(guide)
        scale, factor = posterior.cov_diag.sqrt(), posterior.cov_factor
        return AutoLowRank, {"loc": posterior.loc.detach(), "scale": scale, "cov_factor": factor}
    if isinstance(guide, AutoMultivariateNormal):
        posterior = base_posterior(guide)
        return AutoFullRank, {"loc": posterior.loc.detach(), "scale_tril": posterior.scale_tril}
    if isinstance(guide, AutoDiagonalNormal | AutoNormal):
        loc, scale = flat_moments(to_gaussian(guide), layout_of(guide))
        return AutoMeanField, {"loc": loc, "scale": scale}
    raise TypeError(
        f"{type(guide).__name__} isn't a Gaussian guide; known are AutoNormal, AutoDiagonalNormal, "
        f"AutoLowRankMultivariateNormal, AutoMultivariateNormal and {', '.join(FAMILIES)}"
    )


def require_moments(sites: Sequence[SiteLayout], moments: Moments) -> None:
    """Check what a Gaussian guide over these sites is made of.

    :raises ValueError: naming the moment whose shape or values don't fit.
    """
    given = arguments.listed("sites", sites, SiteLayout, "layouts, as layout_of(guide) gives them")
    dim = sum(site.unconstrained_shape.numel() for site in given)
    if not dim:
        raise ValueError("sites holds no weights; a guide needs at least one")
    for name, value in moments.items():
        columns = {"scale_tril": (dim,), "cov_factor": value.shape[1:2] if isinstance(value, Tensor) else ()}
        if arguments.tensor(name, value).shape != (dim, *columns.get(name, ())) or (
            name in columns and value.dim() != 2
        ):
            wanted = f"({dim}, rank)" if name == "cov_factor" else str((dim, *columns.get(name, ())))
            raise ValueError(f"{name} has shape {tuple(value.shape)}; the sites' {dim} weights need {wanted}")
        positive = {"scale": value, "scale_tril": value.diagonal() if value.dim() == 2 else value}.get(name)
        if not bool(value.isfinite().all()) or (positive is not None and not bool((positive > 0).all())):
            raise ValueError(f"{name} must hold finite numbers{'' if positive is None else ', deviations above 0'}")
        if name == "scale_tril" and bool(value.triu(1).any()):
            raise ValueError("scale_tril holds numbers above its diagonal; it must be lower triangular")


def one_family(names: Sequence[str], moments: Sequence[Moments]) -> tuple[str, list[Moments]]:
    """The smallest family that holds Gaussians of all these families, and the moments of each as of one of it."""
    family = max(names, key=list(FAMILIES).index)
    if family == "AutoFullRank":
        return family, [m if "scale_tril" in m else {"loc": m["loc"], "scale_tril": _root(m)} for m in moments]
    if family == "AutoLowRank":
        rank = max(m["cov_factor"].shape[-1] for m in moments if "cov_factor" in m)
        none = moments[0]["loc"].new_zeros(len(moments[0]["loc"]), 0)
        factors = [m.get("cov_factor", none) for m in moments]
        padded = [nn.functional.pad(factor, (0, rank - factor.shape[-1])) for factor in factors]
        return family, [{**m, "cov_factor": factor} for m, factor in zip(moments, padded, strict=True)]
    return family, list(moments)


def base_posterior(guide: AutoGuide) -> Any:
    """The distribution of a set-up guide over flat unconstrained vectors; of a symmetrised guide, that of its base.

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal``.
    """
    if isinstance(guide, WeightsGuide):
        return guide.get_base_posterior()
    if isinstance(guide, AutoContinuous):
        return guide.get_posterior()
    if isinstance(guide, AutoNormal):
        sites = layout_of(guide)
        return AutoMeanField(sites, *flat_moments(to_gaussian(guide), sites)).get_posterior()
    raise TypeError(f"the density of {type(guide).__name__} isn't known; pass an AutoContinuous or AutoNormal")


def flat_moments(moments: GaussianWeights, sites: tuple[SiteLayout, ...]) -> tuple[Tensor, Tensor]:
    """Means and marginal deviations concatenated in the layout's order."""

    def flat(values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[site.name].reshape(-1) for site in sites])

    return flat(moments.loc), flat(moments.scale)


# small steps --------------------------------------------------------------------------------------------------------


def _root(moments: Moments) -> Tensor:
    diagonal = moments["scale"].diag()
    return triangular(torch.cat([diagonal, moments["cov_factor"]], -1)) if "cov_factor" in moments else diagonal
