"""Moments agree with the parameters, medians and draws of what they are read from; each
cost is the distance that it names, and falls linearly with the inner product of its
features."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch.distributions import Normal, biject_to, kl_divergence

from pyro_symmetric.alignment.moments import COSTS, to_gaussian
from pyro_symmetric.posterior.posterior import Posterior


def model() -> None:
    # Not in alphabetical order, so that a flat guide cut in the wrong order shows.
    pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    pyro.sample("shares", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("rows", 3):
        pyro.sample("bias", dist.Normal(0.0, 1.0))
    pyro.sample("noise_scale", dist.LogNormal(0.0, 1.0))


FLAT_GUIDES = [
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
]


def used(guide_class):
    """A guide with every parameter at a random value."""
    guide = guide_class(model)
    guide()
    for parameter in guide.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return guide


@pytest.mark.parametrize("guide_class", [AutoNormal, *FLAT_GUIDES])
def test_means_mapped_to_the_supports_are_the_guides_medians(guide_class):
    guide = used(guide_class)
    gaussian = to_gaussian(guide)
    supports = {
        name: site["fn"].support
        for name, site in guide.prototype_trace.iter_stochastic_nodes()
    }
    for site, median in guide.median().items():
        torch.testing.assert_close(
            biject_to(supports[site])(gaussian.loc[site]), median
        )
    assert set(gaussian.supports) == {"shares", "noise_scale"}
    assert gaussian.loc["shares"].shape == (3,)
    assert gaussian.bijection("weight") is None
    torch.testing.assert_close(
        gaussian.bijection("noise_scale")(torch.tensor(0.0)), torch.tensor(1.0)
    )


@pytest.mark.parametrize("guide_class", FLAT_GUIDES)
def test_deviations_of_a_flat_guide_are_those_of_the_marginals(guide_class):
    guide = used(guide_class)
    gaussian = to_gaussian(guide)
    flat = torch.cat(
        [
            gaussian.scale[site].reshape(-1)
            for site in ("weight", "shares", "bias", "noise_scale")
        ]
    )
    torch.testing.assert_close(flat, guide.get_posterior().variance.sqrt().detach())


def test_networks_bring_their_statistics_and_draws_their_deviations():
    net = torch.nn.BatchNorm1d(3)
    assert to_gaussian(net).loc.keys() == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
    }
    draws = torch.randn(2, 50, 3, dtype=torch.float64)
    gaussian = to_gaussian(Posterior({"w": draws}, kind="chains"))
    torch.testing.assert_close(gaussian.loc["w"], draws.flatten(0, 1).mean(0))
    torch.testing.assert_close(
        gaussian.scale["w"], draws.flatten(0, 1).var(0, correction=0).sqrt()
    )


# costs --------------------------------------------------------------------------------

N = 7


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Means and deviations of a reference and a source, ``(channels, N)``."""
    return tuple(
        torch.stack([torch.randn(N), torch.rand(N) + 0.1]).double() for _ in range(2)
    )


@pytest.mark.parametrize("name", COSTS)
def test_cost_falls_linearly_with_the_inner_product_of_features(name):
    cost = COSTS[name]
    reference, source = pair()
    if not cost.deviations:
        reference, source = reference[:1], source[:1]
    moved = [cost.of_source(source[:, torch.randperm(N)]) for _ in range(50)]
    distances = torch.stack([cost.distance(reference, m).sum() for m in moved])
    products = torch.stack([(cost.of_reference(reference) * m).sum() for m in moved])
    slope = -2.0 if cost.squared else -1.0
    constant = distances - slope * products
    torch.testing.assert_close(constant, constant[:1].expand_as(constant))


def test_the_gaussian_cost_is_the_divergence_up_to_the_entropy_of_the_source():
    reference, source = pair()
    first, second = Normal(*source), Normal(*reference)
    expected = kl_divergence(first, second) + first.entropy()
    torch.testing.assert_close(
        COSTS["gaussian"].distance(reference, COSTS["gaussian"].of_source(source)),
        expected,
    )


def test_wasserstein_is_the_squared_transport_distance_of_sorted_draws():
    # In one dimension the optimal transport pairs quantiles; 200,000 quantiles err by
    # less than 0.2 %.
    reference, source = (
        torch.tensor([[0.3], [0.5]]).double(),
        torch.tensor([[-1.0], [1.7]]).double(),
    )
    levels = (torch.arange(200_000).double() + 0.5) / 200_000
    quantiles = [Normal(*m[:, 0]).icdf(levels) for m in (reference, source)]
    expected = (quantiles[0] - quantiles[1]).square().mean()
    torch.testing.assert_close(
        COSTS["wasserstein"].distance(reference, source).sum(),
        expected,
        rtol=2e-3,
        atol=0,
    )
