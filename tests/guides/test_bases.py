"""Every base: set-up, training, draws, medians, quantiles, where it starts; gradients that stick the landing."""

import functools
from typing import Any

import pyro
import pyro.distributions as dist
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
from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance, Symmetrized
from pyro_symmetric.groups import Action, Group
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


def test_draws_over_the_orbit_are_alike_for_all_units_and_symmetric_around_zero() -> None:
    """Two units at 1 and -3 with signs: marginals on ±1 and ±3, a quarter each."""
    model, symmetry, x, y = network(2)
    guide = AutoSymmetrized(model, symmetry, init_scale=1e-3).setup(x, y)
    with torch.no_grad():
        guide.base.loc[:2] = torch.tensor([1.0, -3.0])  # 0.weight
    draws = guide.sample_posterior((4000,), orbit=True)["0.weight"]
    found = torch.quantile(draws, torch.tensor([0.125, 0.375, 0.625, 0.875]), dim=0)
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]).reshape(4, 1, 1).expand(4, 2, 1)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    plain = guide.median()["0.weight"].flatten()
    torch.testing.assert_close(plain, torch.tensor([1.0, -3.0]))


def test_a_flow_s_quantiles_are_those_of_its_draws() -> None:
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry, base=AutoIAFNormal, hidden_dim=[16]).setup(x, y)
    for call in (guide.median, lambda: guide.quantiles([0.5])):
        with pytest.raises(NotImplementedError):
            call()


# sticking the landing -----------------------------------------------------------------------------------------------

THREE = Group.declare({"w": ("u",)}, {"w": torch.Size([3])})
TARGET = torch.tensor([-1.0, 0.2, 1.5])


def exchangeable() -> None:
    """A posterior with all permutations, and no data: its ELBO is known up to a constant by many draws."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Normal((w**2).sum(-1), 1.0), obs=torch.tensor(3.0))


def gradient_rows(estimator: Any, sticking: bool, number: int = 3000) -> torch.Tensor:
    """Gradients of log q̄ terms with respect to means and log-deviations, draw by draw: ``(number, 6)``."""
    loc = TARGET.double().expand(number, 3).clone().requires_grad_()
    log_scale = torch.tensor([-0.5, 0.0, 0.3], dtype=torch.float64).expand(number, 3).clone().requires_grad_()
    q = dist.Normal(loc, log_scale.exp()).to_event(1)
    symmetrized = Symmetrized(q, Action(THREE, ["w"]), estimator, sticking)
    w = symmetrized.rsample()
    return torch.cat(torch.autograd.grad(symmetrized.log_prob(w).sum(), (loc, log_scale)), -1)


@pytest.mark.stochastic
@pytest.mark.parametrize("estimator", [ExactOrbit(), InfoNCE(1), InfoNCE(3), SinkhornImportance(1)])
def test_sticking_the_landing_is_unbiased(estimator: Any) -> None:
    """For the exact density, and for estimates whose terms are exchangeable given their shares: 6 standard errors over
    6 numbers."""
    stuck, full = (gradient_rows(estimator, sticking, 40_000) for sticking in (True, False))
    error = ((stuck.var(0) + full.var(0)) / len(full)).sqrt()
    assert bool(((stuck.mean(0) - full.mean(0)).abs() < 6 * error).all())
    assert float((stuck - full).abs().max()) > 0.1  # draw by draw they differ


def test_the_score_that_is_left_out_has_mean_zero_by_enumeration() -> None:
    r"""On a grid: :math:`\sum_w q(w)\, \partial \log \bar q(w) \Delta w = 0` for two exchangeable coordinates."""
    two = Group.declare({"w": ("u",)}, {"w": torch.Size([2])})
    axis = torch.linspace(-8, 8, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    parameters = torch.tensor([-1.0, 0.7, 0.6, 1.1], dtype=torch.float64, requires_grad=True)
    q = dist.Normal(parameters[:2], parameters[2:]).to_event(1)
    log_prob = Symmetrized(q, Action(two, ["w"]), ExactOrbit()).log_prob(grid)
    weights = q.log_prob(grid).exp().detach() * (axis[1] - axis[0]) ** 2
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)
    (score,) = torch.autograd.grad((weights * log_prob).sum(), parameters)
    torch.testing.assert_close(score, torch.zeros(4, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.stochastic
@pytest.mark.parametrize("base", GAUSSIAN)
def test_gradients_vanish_where_the_guide_is_the_posterior(base: type) -> None:
    """The namesake: a Gaussian posterior with distinct modes far apart, so that q̄ is locally q; no noise is left."""

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    norms = {}
    for sticking in (True, False):
        guide = AutoSymmetrized(
            model, THREE, base=base, estimator=ExactOrbit(), sticking_the_landing=sticking, init_scale=1.0
        ).setup()
        with torch.no_grad():
            guide.base.loc.zero_()
            if base is AutoLowRankMultivariateNormal:
                guide.base.cov_factor.zero_()
                guide.base.scale = torch.ones(3)
        guide.zero_grad()
        Trace_ELBO(num_particles=3).loss_and_grads(model, guide)
        norms[sticking] = sum(float(p.grad.norm()) for p in guide.parameters() if p.grad is not None)
    assert norms[True] < 1e-4
    assert norms[False] > 1e-2


def test_a_flow_cannot_stick_the_landing() -> None:
    guide = AutoSymmetrized(exchangeable, THREE, base=AutoIAFNormal, hidden_dim=[8], sticking_the_landing=True)
    with pytest.raises(TypeError, match="Gaussian base"):
        guide()
    cauchy = dist.Cauchy(torch.zeros(3), 1.0).to_event(1)
    with pytest.raises(TypeError, match="Gaussian base"):
        Symmetrized(cauchy, Action(THREE, ["w"]), ExactOrbit(), sticking_the_landing=True)


def test_a_flow_without_an_inverse_is_refused_at_set_up() -> None:
    model, symmetry, x, y = network()
    flow = functools.partial(iterated, 1, block_autoregressive)
    guide = AutoSymmetrized(model, symmetry, base=AutoNormalizingFlow, init_transform_fn=flow)
    with pytest.raises(TypeError, match="spline_coupling"):
        guide.setup(x, y)
