"""Every base: set-up, training, draws, medians, quantiles, where it starts."""

import functools
from typing import Any

import pyro
import pytest
import torch
from pyro.distributions.transforms import block_autoregressive, iterated, spline_coupling
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
)
from torch import nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import InfoNCE
from pyro_symmetric.guides import AutoSymmetrized
from pyro_symmetric.models import BayesianModel

GAUSSIAN = [AutoDiagonalNormal, AutoNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal]
FLOWS: list[tuple[type, dict[str, Any]]] = [
    (AutoIAFNormal, {"hidden_dim": [16]}),
    (AutoNormalizingFlow, {"init_transform_fn": functools.partial(iterated, 2, spline_coupling)}),
]
EVERY: list[tuple[type, dict[str, Any]]] = [(base, {}) for base in GAUSSIAN] + FLOWS


def perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))


@functools.cache
def symmetry_of(width: int) -> Symmetry:
    """Once for all tests: tracing takes longer than most of them."""
    with torch.random.fork_rng():
        return find_symmetry(perceptron(width), torch.zeros(2, 1))


def network(width: int = 3) -> tuple[BayesianModel, Symmetry, torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 20)[:, None]
    return BayesianModel(perceptron(width), 1.0, "gaussian"), symmetry_of(width), x, torch.sin(2 * x[:, 0])


@pytest.mark.parametrize(("base", "options"), EVERY)
def test_every_base_is_set_up_trained_and_drawn_from(base: type, options: dict[str, Any]) -> None:
    model, symmetry, x, y = network()
    estimator = InfoNCE(3) if base in GAUSSIAN else InfoNCE(1)
    guide = AutoSymmetrized(model, symmetry.permutations, base=base, estimator=estimator, **options).setup(x, y)
    parameters = {name for name, _ in guide.named_parameters()}
    assert parameters
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02 if base in GAUSSIAN else 0.01}), Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(80)]
    assert {name for name, _ in guide.named_parameters()} == parameters  # set-up created them all
    assert sum(losses[-20:]) < sum(losses[:20])
    shapes = {site: tuple(value.shape) for site, value in guide.sample_posterior((2, 5)).items()}
    assert shapes == {site: (2, 5, *shape) for site, shape in model.site_shapes.items()}


@pytest.mark.parametrize("base", GAUSSIAN)
def test_every_base_starts_at_the_networks_own_values_and_off_the_fixed_point(base: type) -> None:
    """Means of 400 draws of scale 0.02: far within 0.1 of the values, which are further apart."""
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry, base=base, estimator=InfoNCE(1), init_scale=0.02).setup(x, y)
    start = guide.unpack(guide.base.loc.detach())["0.weight"]
    torch.testing.assert_close(start, model.initial_weights()["0.weight"])
    draws = guide.sample_posterior((400,))["0.weight"]
    assert float(draws.std(0).max()) < 0.1
    torch.testing.assert_close(draws.mean(0), start, atol=0.1, rtol=0)


@pytest.mark.parametrize("base", GAUSSIAN)
def test_medians_and_quantiles_are_those_of_the_base(base: type) -> None:
    """Against 20,000 draws: quantiles at 10 % to 90 % of a scale of 0.3 err by 0.005."""
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry, base=base, init_scale=0.3).setup(x, y)
    levels = [0.1, 0.5, 0.9]
    found = guide.quantiles(levels)
    draws = guide.sample_posterior((20_000,))
    for site, value in found.items():
        assert value.shape == (3, *model.site_shapes[site])
        expected = torch.quantile(draws[site], torch.tensor(levels), dim=0)
        torch.testing.assert_close(value, expected, atol=0.08, rtol=0.08)
    for site, value in guide.median().items():
        torch.testing.assert_close(value, found[site][1])


def test_a_flow_without_an_inverse_is_refused_at_set_up() -> None:
    model, symmetry, x, y = network()
    flow = functools.partial(iterated, 1, block_autoregressive)
    guide = AutoSymmetrized(model, symmetry, base=AutoNormalizingFlow, init_transform_fn=flow)
    with pytest.raises(TypeError, match="spline_coupling"):
        guide.setup(x, y)
