r"""Gaussian guides with given moments, and the moments of Gaussian guides, stock or ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoContinuous, AutoDelta, AutoGuide, AutoNormal
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.alignment.gaussian import to_gaussian
from pyro_symmetric.distributions import UnitBlocks
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.layout import GuideLayout, LayoutModel, layout_of
from pyro_symmetric.weights import Weights

Moments = Mapping[str, Tensor]

# So many draws agree only if all do.
NO_COINCIDENCE = 8


class AutoGaussian(WeightsGuide):
    r"""A Gaussian guide with given moments over the concatenated unconstrained sites, of dimension ``D``:

    * of ``scale`` alone, the mean-field :math:`\mathcal N(m, \mathrm{diag}(s^2))`;
    * with ``cov_factor``, of low rank, :math:`\mathcal N(m, \mathrm{diag}(s^2) + F F^\top)`;
    * of ``scale_tril``, of full rank, :math:`\mathcal N(m, L L^\top)`.

    It is set up from the start, needs no model to draw from, and can be trained further with stock SVI. Its parameters
    are those of Pyro's ``AutoDiagonalNormal``, ``AutoLowRankMultivariateNormal`` and ``AutoMultivariateNormal``.
    Pushing forward, interpolating and loading make such guides.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> fitted = pyro.infer.autoguide.AutoDiagonalNormal(model)
    >>> draw = fitted()  # sets it up
    >>> guide = ps.interpolate(fitted, fitted, 0.5)
    >>> isinstance(guide, ps.AutoGaussian), guide.sample_posterior((20,))["w"].shape
    (True, torch.Size([20, 3]))

    :param layout: the sites, e.g. ``layout_of(other_guide)``.
    :param loc: means ``m``, ``(D,)``.
    :param scale: standard deviations ``s``, ``(D,)``.
    :param cov_factor: ``F``, ``(D, rank)``. (The parameter of that name is ``F / s``, row by row.)
    :param scale_tril: the Cholesky factor ``L``, lower triangular with a positive diagonal, ``(D, D)``. (The parameter
        of that name has ones on its diagonal.)
    """

    loc: Any
    scale: Any
    cov_factor: Any
    scale_tril: Any

    def __init__(
        self,
        layout: GuideLayout,
        loc: Tensor,
        scale: Tensor | None = None,
        cov_factor: Tensor | None = None,
        *,
        scale_tril: Tensor | None = None,
    ):
        given = {"loc": loc, "scale": scale, "cov_factor": cov_factor, "scale_tril": scale_tril}
        self.moment_names = tuple(name for name, value in given.items() if value is not None or name == "loc")
        for name in ("loc", "scale"):
            value = given[name]
            if value is not None and not (value.shape == (layout.dim,) and bool(value.isfinite().all())):
                raise ValueError(f"{name} has shape {tuple(value.shape)}; it must hold {layout.dim} finite numbers")
        model = LayoutModel(layout, loc)
        super().__init__(model, model.init_loc_fn)
        self.setup()
        with torch.no_grad():
            diagonal = (scale_tril.diagonal() if scale is None else scale).clone()  # type: ignore[union-attr]
            self.loc = nn.Parameter(loc.clone())
            self.scale = PyroParam(diagonal, constraints.softplus_positive)
            if cov_factor is not None:
                self.cov_factor = nn.Parameter(cov_factor / diagonal.unsqueeze(-1))
            if scale_tril is not None:
                self.scale_tril = PyroParam(scale_tril / diagonal.unsqueeze(-1), constraints.unit_lower_cholesky)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The Gaussian over flat unconstrained vectors."""
        loc, scale = self.loc, self.scale
        if "scale_tril" in self.moment_names:
            return dist.MultivariateNormal(loc, scale_tril=self.scale_tril * scale.unsqueeze(-1))
        if "cov_factor" in self.moment_names:
            return dist.LowRankMultivariateNormal(loc, self.cov_factor * scale.unsqueeze(-1), scale.square())
        return dist.Normal(loc, scale).to_event(1)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scale = self.scale
        if "scale_tril" in self.moment_names:
            scale = scale * self.scale_tril.square().sum(-1).sqrt()
        elif "cov_factor" in self.moment_names:
            scale = scale * (self.cov_factor.square().sum(-1) + 1).sqrt()
        return self.loc, scale


@torch.no_grad()
def moments_of(guide: AutoGuide) -> dict[str, Tensor]:
    """Moments of an :class:`AutoGaussian` that equals a set-up Gaussian guide; of a symmetrised one, its base.

    :raises TypeError: for a guide that isn't Gaussian.
    """
    found = plain_posterior(guide)
    if isinstance(found, UnitBlocks):
        return {"loc": found.loc, "scale_tril": triangular(found.square_root)}
    if isinstance(found, dist.LowRankMultivariateNormal):
        return {"loc": found.loc, "scale": found.cov_diag.sqrt(), "cov_factor": found.cov_factor}
    if isinstance(found, dist.MultivariateNormal):
        return {"loc": found.loc, "scale_tril": found.scale_tril}
    if isinstance(found, dist.Independent) and isinstance(found.base_dist, dist.Normal):
        return {"loc": found.base_dist.loc, "scale": found.base_dist.scale}
    raise TypeError(f"{type(guide).__name__} isn't a Gaussian guide; take AutoNormal, AutoGaussian or alike")


def plain(guide: AutoGuide) -> AutoGuide:
    """The guide before any symmetrisation."""
    return guide.plain if isinstance(guide, WeightsGuide) else guide


def plain_posterior(guide: AutoGuide) -> Any:
    """The distribution of a set-up guide over flat unconstrained vectors, before any symmetrisation.

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal``.
    """
    layout, guide = layout_of(guide), plain(guide)
    if isinstance(guide, AutoNormal):
        moments = to_gaussian(guide)
        return dist.Normal(layout.flatten(moments.loc), layout.flatten(moments.scale)).to_event(1)
    if isinstance(guide, AutoContinuous):
        return guide.get_posterior()
    raise TypeError(f"the density of {type(guide).__name__} isn't known; pass an AutoContinuous or AutoNormal")


def require_spread(distribution: Any, guide: Any) -> None:
    """:raises TypeError: if all draws are alike in some direction: a point mass has no density."""
    with torch.no_grad(), forked():
        draws = distribution.sample((NO_COINCIDENCE,))
    if still := int((draws == draws[0]).all(0).sum()):
        raise TypeError(
            f"{type(guide).__name__} is a point mass in {still} of {draws.shape[-1]} directions, and has no density. "
            "Take a guide that spreads; of an AutoLaplaceApproximation that is guide.laplace_approximation(*args)"
        )


def sample_posterior(guide: AutoGuide, sample_shape: Sequence[int] = ()) -> Weights:
    """Draws of the weights of any automatic guide, stock ones included, without data: ``sample_shape + site_shape``.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoNormal(model)
    >>> draw = guide()  # sets it up
    >>> ps.guides.sample_posterior(guide, (20,))["w"].shape
    torch.Size([20, 3])

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal`` nor ``AutoDelta``.
    """
    shape, layout = arguments.shape("sample_shape", sample_shape), layout_of(guide)
    with torch.no_grad():
        if isinstance(guide, AutoDelta):
            return {name: value.expand(*shape, *value.shape) for name, value in guide.median().items()}
        return layout.constrain(plain_posterior(guide).sample(shape))


def triangular(rows: Tensor) -> Tensor:
    """The Cholesky factors of ``rows @ rows.mT``, ``batch_shape + (n, k)`` -> ``batch_shape + (n, n)``, by a QR
    decomposition in float64: no squares, no lost digits."""
    upper = torch.linalg.qr(rows.double().mT, mode="r").R
    signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(upper)
    return (upper * signs.unsqueeze(-1)).mT.to(rows.dtype)
