"""Distances, geodesics and barycentres of Gaussian guides against SciPy's matrix square roots and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import scipy.linalg
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
from torch import Tensor

from pyro_symmetric.alignment import GaussianWeights
from pyro_symmetric.alignment.paths import bures
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import (
    AutoGaussian,
    barycentre,
    distinct,
    interpolate,
    load_guide,
    push_forward,
    save_guide,
    wasserstein,
)
from pyro_symmetric.guides.layout import GuideLayout, LatentSite
from pyro_symmetric.posterior import Posterior

SITES = GuideLayout(
    (
        LatentSite("a", (2, 2), dist.constraints.independent(dist.constraints.real, 2), 2),
        LatentSite("b", (2,), dist.constraints.independent(dist.constraints.positive, 1), 1),
    )
)
DIM = 6


def mean_field() -> AutoGaussian:
    return AutoGaussian(SITES, torch.randn(DIM).double(), torch.rand(DIM).double() + 0.1)


def low_rank() -> AutoGaussian:
    scale = torch.rand(DIM).double() + 0.1
    return AutoGaussian(SITES, torch.randn(DIM).double(), scale, torch.randn(DIM, 2).double())


def full_rank() -> AutoGaussian:
    root = torch.randn(DIM, DIM).double().tril()
    root.diagonal().abs_().add_(0.2)
    return AutoGaussian(SITES, torch.randn(DIM).double(), scale_tril=root)


MAKERS = {"mean-field": mean_field, "low-rank": low_rank, "full-rank": full_rank}


def moments(guide: Any) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        posterior = guide.get_posterior()
        if isinstance(posterior, dist.Independent):
            return posterior.mean.numpy(), posterior.variance.diag().numpy()
        return posterior.mean.numpy(), posterior.covariance_matrix.numpy()


def root(matrix: np.ndarray) -> np.ndarray:
    return scipy.linalg.sqrtm(matrix).real


def by_scipy(first: Any, second: Any) -> float:
    (m0, s0), (m1, s1) = moments(first), moments(second)
    cross = root(root(s0) @ s1 @ root(s0))
    return float(np.sqrt(((m0 - m1) ** 2).sum() + np.trace(s0 + s1 - 2 * cross)))


@pytest.mark.parametrize("first", MAKERS)
@pytest.mark.parametrize("second", MAKERS)
def test_the_distance_is_that_of_bures(first: str, second: str) -> None:
    one, other = MAKERS[first](), MAKERS[second]()
    assert wasserstein(one, other) == pytest.approx(by_scipy(one, other), rel=1e-6)
    assert wasserstein(other, one) == pytest.approx(wasserstein(one, other), rel=1e-6)
    assert wasserstein(one, one) == pytest.approx(0.0, abs=1e-6)
    assert wasserstein(one, other, correlations=False) <= wasserstein(one, other) + 1e-9


def test_of_plain_weights_it_is_the_euclidean_distance() -> None:
    one, other = {"w": torch.randn(3, 2), "v": torch.randn(4)}, {"w": torch.randn(3, 2), "v": torch.randn(4)}
    expected = torch.cat([(one[k] - other[k]).flatten() for k in one]).norm()
    assert wasserstein(one, other) == pytest.approx(float(expected), rel=1e-6)
    noisy = GaussianWeights(other, {k: torch.full_like(v, 0.5) for k, v in other.items()})
    assert wasserstein(one, noisy) ** 2 == pytest.approx(float(expected) ** 2 + 10 * 0.25, rel=1e-6)


def test_close_covariances_keep_their_digits() -> None:
    """By traces the distance of two that differ by 1e-9 would be lost in rounding errors of 1e-8."""
    eye = torch.eye(3, dtype=torch.float64)
    squared = bures.squared_distance(eye, eye + 1e-9 * torch.diag(torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)))
    assert float(squared) ** 0.5 == pytest.approx(3e-9, rel=1e-5)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("first", "second"), [("full-rank", "low-rank"), ("mean-field", "full-rank")])
def test_the_geodesic_is_that_of_the_optimal_map(first: str, second: str, t: float) -> None:
    one, other = MAKERS[first](), MAKERS[second]()
    (m0, s0), (m1, s1) = moments(one), moments(other)
    half = root(s0)
    transport = np.linalg.inv(half) @ root(half @ s1 @ half) @ np.linalg.inv(half)
    along = (1 - t) * np.eye(DIM) + t * transport
    between = interpolate(one, other, t)
    assert between.moment_names == ("loc", "scale_tril")
    loc, covariance = moments(between)
    np.testing.assert_allclose(loc, (1 - t) * m0 + t * m1, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(covariance, along @ s0 @ along.T, rtol=1e-5, atol=1e-7)
    whole = wasserstein(one, other)
    assert wasserstein(one, between) == pytest.approx(t * whole, abs=1e-5)
    assert wasserstein(between, other) == pytest.approx((1 - t) * whole, abs=1e-5)


def test_mean_field_guides_meet_at_means_of_means_and_deviations() -> None:
    guides = [mean_field() for _ in range(3)]
    centre = barycentre(guides, weights=[1.0, 2.0, 5.0])
    assert centre.is_mean_field
    shares = torch.tensor([1.0, 2.0, 5.0]).double() / 8
    for name in ("loc", "scale"):
        expected = sum(w * getattr(g, name) for w, g in zip(shares, guides, strict=True))
        torch.testing.assert_close(getattr(centre, name), expected)
    middle, two = interpolate(guides[0], guides[1], 0.25), barycentre(guides[:2], [0.75, 0.25])
    torch.testing.assert_close(middle.loc, two.loc)
    torch.testing.assert_close(middle.scale, two.scale)


def test_the_barycentre_solves_its_fixed_point_equation_and_no_neighbour_is_better() -> None:
    guides, shares = [full_rank(), low_rank(), mean_field()], [0.2, 0.5, 0.3]
    centre = barycentre(guides, shares)
    assert centre.moment_names == ("loc", "scale_tril")
    loc, covariance = moments(centre)
    half = root(covariance)
    fixed = sum(w * root(half @ moments(g)[1] @ half) for w, g in zip(shares, guides, strict=True))
    np.testing.assert_allclose(fixed, covariance, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(loc, sum(w * moments(g)[0] for w, g in zip(shares, guides, strict=True)), rtol=1e-6)

    def objective(guide: Any) -> float:
        return sum(w * wasserstein(guide, g) ** 2 for w, g in zip(shares, guides, strict=True))

    least = objective(centre)
    for _ in range(10):
        scale_tril = torch.tensor(np.linalg.cholesky(covariance)) + 0.05 * torch.randn(DIM, DIM).double().tril()
        scale_tril.diagonal().abs_()
        assert objective(AutoGaussian(SITES, centre.loc + 0.01, scale_tril=scale_tril)) > least


def test_of_two_the_barycentre_lies_on_the_geodesic() -> None:
    one, other = full_rank(), low_rank()
    centre, between = barycentre([one, other], [0.7, 0.3]), interpolate(one, other, 0.3)
    for found, expected in zip(moments(centre), moments(between), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_without_correlations_marginals_meet_at_any_size() -> None:
    guides = [low_rank(), full_rank()]
    deviations = [torch.tensor(moments(g)[1]).diagonal().sqrt() for g in guides]
    centre = barycentre(guides, correlations=False)
    assert centre.is_mean_field
    torch.testing.assert_close(centre.scale.detach(), sum(deviations) / 2)
    assert interpolate(*guides, 0.5, correlations=False).is_mean_field
    many = GuideLayout((LatentSite("a", (2001,), dist.constraints.independent(dist.constraints.real, 1), 1),))
    large = [AutoGaussian(many, torch.randn(2001), torch.ones(2001), torch.randn(2001, 1)) for _ in range(2)]
    for call in (wasserstein, lambda a, b: interpolate(a, b, 0.5), lambda a, b: barycentre([a, b])):
        with pytest.raises(ValueError, match=r"2001 weights.*correlations=False"):
            call(*large)
    assert wasserstein(*large, correlations=False) > 0


def test_what_comes_out_is_a_guide_that_trains_and_is_saved(tmp_path: Any) -> None:
    def model(data: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(w, 0.5).to_event(1), obs=data)

    data, guides = torch.tensor([0.5, -1.0, 2.0]), [distinct(AutoNormal(model)), distinct(AutoDiagonalNormal(model))]
    for guide in guides:
        SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(data)
    group = Group.declare({"w": ("k",)}, {"w": torch.Size([3])})
    centre = barycentre([guides[0], push_forward(guides[1], group.sample())])
    save_guide(centre, tmp_path / "centre.safetensors")
    loaded = load_guide(tmp_path / "centre.safetensors")
    svi = SVI(model, loaded, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(data) for _ in range(200)]
    assert sum(losses[-50:]) < sum(losses[:50])


def test_weights_moments_and_posteriors_are_taken_as_align_takes_them() -> None:
    draws = torch.randn(2, 6, 3).double()
    posterior = Posterior({"w": draws}, {}, {}, rows="chains")
    mean, scale = draws.flatten(0, 1).mean(0), draws.flatten(0, 1).std(0, correction=0)
    plain = {"w": torch.ones(3).double()}
    apart = float(((mean - 1).square().sum() + scale.square().sum()).sqrt())
    assert wasserstein(posterior, plain) == pytest.approx(apart)
    between = interpolate(posterior, plain, 0.25)
    assert isinstance(between, GaussianWeights)
    torch.testing.assert_close(between.loc["w"], 0.75 * mean + 0.25)
    torch.testing.assert_close(between.scale["w"], 0.75 * scale)
    middle = barycentre([plain, posterior, {"w": torch.zeros(3).double()}], [1.0, 2.0, 1.0])
    torch.testing.assert_close(middle.loc["w"], 0.5 * mean + 0.25)
    torch.testing.assert_close(middle.scale["w"], 0.5 * scale)


def test_guides_that_do_not_fit_are_named() -> None:
    other = AutoGaussian(GuideLayout(SITES.sites[:1]), torch.zeros(4).double(), torch.ones(4).double())
    reordered = AutoGaussian(GuideLayout(SITES.sites[::-1]), torch.zeros(DIM).double(), torch.ones(DIM).double())
    for stranger in (other, reordered):
        with pytest.raises(ValueError, match=r"guides\[1\] has the sites"):
            barycentre([mean_field(), stranger])
        with pytest.raises(ValueError, match="sites"):
            interpolate(mean_field(), stranger, 0.5)
    with pytest.raises(ValueError, match="same sites"):
        wasserstein(mean_field(), other)
    with pytest.raises(ValueError, match=r"\['b'\] are unconstrained"):
        wasserstein(mean_field(), {"a": torch.zeros(2, 2), "b": torch.ones(2)})
    with pytest.raises(ValueError, match="guides is empty"):
        barycentre([])
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0]):
        with pytest.raises(ValueError, match="2 numbers"):
            barycentre([mean_field(), mean_field()], weights)
    bad = mean_field()
    with torch.no_grad():
        bad.loc[1] = torch.nan
    for call in (
        lambda: wasserstein(mean_field(), bad),
        lambda: interpolate(bad, mean_field(), 0.5),
        lambda: barycentre([mean_field(), bad]),
    ):
        with pytest.raises(ValueError, match=r"end\['a'\] holds 1 NaN"):
            call()
    with pytest.raises(ValueError, match=r"first end\['w'\] holds 1 NaN or infinite"):
        wasserstein({"w": torch.tensor([torch.inf])}, {"w": torch.zeros(1)})
    with pytest.raises(TypeError, match=r"guides\[1\] is a dict, but guides\[0\] is a guide"):
        barycentre([mean_field(), {"a": torch.zeros(2, 2)}])  # type: ignore[list-item]
    delta = AutoDelta(lambda: pyro.sample("w", dist.Normal(0.0, 1.0)))
    delta()
    with pytest.raises(TypeError, match="AutoDelta"):
        wasserstein(delta, delta)


def test_networks_are_points() -> None:
    nets = [torch.nn.Linear(2, 1) for _ in range(2)]
    half = interpolate(*nets, 0.5)
    centre = barycentre(nets)
    for name, value in nets[0].named_parameters():
        expected = (value + dict(nets[1].named_parameters())[name]).detach() / 2
        torch.testing.assert_close(half.loc[name], expected)
        torch.testing.assert_close(centre.loc[name], expected)
        assert not bool(half.scale[name].any())
