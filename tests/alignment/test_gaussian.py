"""Moments read from guides agree with the guides' own parameters, medians and draws."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch.distributions import biject_to

from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
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


def test_moments_of_auto_normal_are_its_parameters():
    guide = used(AutoNormal)
    gaussian = to_gaussian(guide)
    torch.testing.assert_close(gaussian.loc["weight"], guide.locs.weight.detach())
    torch.testing.assert_close(gaussian.scale["bias"], guide.scales.bias.detach())


def test_a_subclass_of_a_flat_guide_is_read_like_it():
    class Mine(AutoDiagonalNormal):
        pass

    guide = used(Mine)
    torch.testing.assert_close(to_gaussian(guide).scale["weight"], guide.scale[:6].detach().reshape(3, 2))


@pytest.mark.parametrize("guide_class", [AutoNormal, AutoDiagonalNormal])
def test_later_training_does_not_change_the_moments(guide_class):
    guide = used(guide_class)
    gaussian = to_gaussian(guide)
    before = {site: loc.clone() for site, loc in gaussian.loc.items()}
    for parameter in guide.parameters():
        parameter.data += 1
    assert all(torch.equal(before[site], loc) for site, loc in gaussian.loc.items())
    assert not any(loc.requires_grad for loc in gaussian.loc.values())


def test_plain_weights_have_deviations_of_zero():
    weights = {"w": torch.randn(2, 3, requires_grad=True)}
    gaussian = to_gaussian(weights)
    assert torch.equal(gaussian.loc["w"], weights["w"])
    assert torch.equal(gaussian.scale["w"], torch.zeros(2, 3))
    assert to_gaussian(gaussian) is gaussian


def test_networks_bring_their_statistics_and_draws_their_deviations():
    net = torch.nn.BatchNorm1d(3)
    assert to_gaussian(net).loc.keys() == {"weight", "bias", "running_mean", "running_var"}
    draws = torch.randn(2, 50, 3, dtype=torch.float64)
    gaussian = to_gaussian(Posterior({"w": draws}, kind="chains"))
    torch.testing.assert_close(gaussian.loc["w"], draws.flatten(0, 1).mean(0))
    torch.testing.assert_close(gaussian.scale["w"], draws.flatten(0, 1).var(0, correction=0).sqrt())


@pytest.mark.parametrize("guide_class", [AutoNormal, *FLAT_GUIDES])
def test_a_guide_without_parameters_says_what_to_do(guide_class):
    with pytest.raises(ValueError, match=r"no parameters yet; call guide.setup\(...\) or run one SVI step"):
        to_gaussian(guide_class(model))


def test_what_has_no_moments_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"AutoDelta guide pass guide.median\(\)"):
        to_gaussian(used(AutoDelta))
    with pytest.raises(TypeError, match="laplace_approximation"):
        to_gaussian(used(AutoLaplaceApproximation))
    with pytest.raises(TypeError, match=r"named_parameters"):
        to_gaussian(torch.zeros(3))
    with pytest.raises(TypeError, match="'w'"):
        to_gaussian({"w": [1.0]})


def test_moments_that_do_not_fit_are_refused():
    one = torch.ones(2)
    with pytest.raises(ValueError, match=r"same sites.*'b'"):
        GaussianWeights({"a": one}, {"a": one, "b": one})
    with pytest.raises(ValueError, match=r"scale\['a'\] has shape \(3,\)"):
        GaussianWeights({"a": one}, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="negative"):
        GaussianWeights({"a": one}, {"a": -one})
    with pytest.raises(ValueError, match=r"scale\['a'\] holds NaN"):
        GaussianWeights({"a": one}, {"a": torch.tensor([1.0, torch.nan])})
    with pytest.raises(ValueError, match=r"loc\['a'\] is of torch.complex64"):
        to_gaussian({"a": torch.ones(2, dtype=torch.cfloat)})
