"""Geodesics and barycentres of mean-field guides against their closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal

from pyro_symmetric.alignment import GaussianWeights
from pyro_symmetric.guides import AutoGaussian, barycentre, fit_gaussian, interpolate
from pyro_symmetric.posterior.posterior import Posterior


def two_sites() -> None:
    pyro.sample("a", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    pyro.sample("b", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))


DIM = 6


def normal_guide(normal: Any) -> AutoGaussian:
    sketch = AutoDiagonalNormal(two_sites)
    sketch._setup_prototype()
    return AutoGaussian(sketch, normal)


def mean_field() -> AutoGaussian:
    return normal_guide(
        dist.Normal(torch.randn(DIM).double(), torch.rand(DIM).double() + 0.1).to_event(
            1
        )
    )


def test_mean_field_guides_meet_at_means_of_means_and_deviations() -> None:
    guides = [mean_field() for _ in range(3)]
    centre = barycentre(guides, weights=[1.0, 2.0, 5.0])
    assert isinstance(centre.get_posterior(), dist.Independent)
    shares = torch.tensor([1.0, 2.0, 5.0]).double() / 8
    for name in ("loc", "scale"):
        expected = sum(
            w * getattr(g, name) for w, g in zip(shares, guides, strict=True)
        )
        torch.testing.assert_close(getattr(centre, name), expected)
    middle, two = (
        interpolate(guides[0], guides[1], 0.25),
        barycentre(guides[:2], [0.75, 0.25]),
    )
    torch.testing.assert_close(middle.loc, two.loc)
    torch.testing.assert_close(middle.scale, two.scale)


def test_weights_moments_and_posteriors_are_taken_as_align_takes_them() -> None:
    draws = torch.randn(2, 6, 3).double()
    posterior = Posterior({"w": draws}, {}, {}, kind="chains")
    mean, scale = draws.flatten(0, 1).mean(0), draws.flatten(0, 1).std(0, correction=0)
    plain = {"w": torch.ones(3).double()}
    between = interpolate(posterior, plain, 0.25)
    assert isinstance(between, GaussianWeights)
    torch.testing.assert_close(between.loc["w"], 0.75 * mean + 0.25)
    torch.testing.assert_close(between.scale["w"], 0.75 * scale)
    middle = barycentre(
        [plain, posterior, {"w": torch.zeros(3).double()}], [1.0, 2.0, 1.0]
    )
    torch.testing.assert_close(middle.loc["w"], 0.5 * mean + 0.25)
    torch.testing.assert_close(middle.scale["w"], 0.5 * scale)


def test_guides_with_correlations_are_refused() -> None:
    full = normal_guide(
        dist.MultivariateNormal(torch.zeros(DIM).double(), torch.eye(DIM).double())
    )
    with pytest.raises(ValueError, match=r"guides\[1\] has correlations"):
        barycentre([mean_field(), full])
    with pytest.raises(ValueError, match="guide_1 has correlations"):
        interpolate(mean_field(), full, 0.5)


def test_errors_of_interpolate_name_its_own_arguments() -> None:
    plain = {"w": torch.ones(3)}
    with pytest.raises(TypeError, match="guide_1 is 3"):
        interpolate(plain, 3, 0.5)
    with pytest.raises(TypeError, match="guide_0, guide_1 are"):
        interpolate(mean_field(), plain, 0.5)


def test_a_fitted_gaussian_has_the_draws_moments_with_shrunk_correlations() -> None:
    """By 6 / (6 + 4) for 6 draws in 4 dimensions; deviations stay."""

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(4).double(), 1.0).to_event(1))

    draws = torch.randn(2, 3, 4).double()
    posterior = Posterior({"w": draws}, kind="chains").attach(model)
    normal = fit_gaussian(posterior, None).base.get_posterior()
    covariance = np.cov(draws.flatten(0, 1).cpu().numpy().T)
    expected = 0.6 * covariance + 0.4 * np.diag(covariance.diagonal())
    tril = normal.scale_trils[0][0].detach()
    found = (tril @ tril.mT).cpu().numpy()
    assert found == pytest.approx(expected)
    torch.testing.assert_close(normal.loc.detach(), draws.mean((0, 1)))
