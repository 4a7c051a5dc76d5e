"""Moments read from guides agree with the guides' own parameters, medians and draws."""

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
from torch.distributions import biject_to

from pyro_symmetric.alignment.moments import to_gaussian
from pyro_symmetric.posterior.posterior import Posterior


def model() -> None:
    # Not in alphabetical order, so that a flat guide cut in the wrong order shows.
    pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    pyro.sample("shares", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("rows", 3):
        pyro.sample("bias", dist.Normal(0.0, 1.0))
    pyro.sample("noise_scale", dist.LogNormal(0.0, 1.0))


FLAT_GUIDES = [AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal]


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
    supports = {name: site["fn"].support for name, site in guide.prototype_trace.iter_stochastic_nodes()}
    for site, median in guide.median().items():
        torch.testing.assert_close(biject_to(supports[site])(gaussian.loc[site]), median)
    assert set(gaussian.supports) == {"shares", "noise_scale"}
    assert gaussian.loc["shares"].shape == (3,)
    assert gaussian.bijection("weight") is None
    torch.testing.assert_close(gaussian.bijection("noise_scale")(torch.tensor(0.0)), torch.tensor(1.0))


@pytest.mark.parametrize("guide_class", FLAT_GUIDES)
def test_deviations_of_a_flat_guide_are_those_of_the_marginals(guide_class):
    guide = used(guide_class)
    gaussian = to_gaussian(guide)
    flat = torch.cat([gaussian.scale[site].reshape(-1) for site in ("weight", "shares", "bias", "noise_scale")])
    torch.testing.assert_close(flat, guide.get_posterior().variance.sqrt().detach())


def test_networks_bring_their_statistics_and_draws_their_deviations():
    net = torch.nn.BatchNorm1d(3)
    assert to_gaussian(net).loc.keys() == {"weight", "bias", "running_mean", "running_var"}
    draws = torch.randn(2, 50, 3, dtype=torch.float64)
    gaussian = to_gaussian(Posterior({"w": draws}, kind="chains"))
    torch.testing.assert_close(gaussian.loc["w"], draws.flatten(0, 1).mean(0))
    torch.testing.assert_close(gaussian.scale["w"], draws.flatten(0, 1).var(0, correction=0).sqrt())
