"""The ELBO with analytic divergence: the same number as Trace_ELBO's, less noise, the same gradients."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import nn
from torch.distributions import kl_divergence

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import AutoModes, AutoSymmetrized, Modes_ELBO
from pyro_symmetric.guides.objectives import SymmetrizedMeanField_ELBO
from pyro_symmetric.models import BayesianModel

GAUSSIAN = [AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


@functools.cache
def symmetry_of(make: Callable[[], nn.Module], *shape: int) -> Any:
    """Once for all tests: tracing takes longer than most of them."""
    with torch.random.fork_rng():
        return find_symmetry(make(), torch.zeros(shape))


def network() -> tuple[BayesianModel, Any, torch.Tensor, torch.Tensor]:
    """A tanh regression with learnt noise: one site with neither a normal prior nor a symmetry."""
    x = torch.linspace(-2, 2, 10)[:, None]
    return BayesianModel(perceptron(), 1.0, "gaussian"), symmetry_of(perceptron, 2, 1), x, torch.sin(2 * x[:, 0])


def mixture(data: torch.Tensor) -> None:
    """Simplex, log-normal scales and locations that hang on a latent spread."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    spread = pyro.sample("spread", dist.LogNormal(1.0, 0.3))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, spread))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scales)), obs=data)


def broadcast_mixture(data: torch.Tensor) -> None:
    """The same, written so that it also runs under a plate of particles."""
    spread = pyro.sample("spread", dist.LogNormal(1.0, 0.3))
    locs = pyro.sample("locs", dist.Normal(0.0, spread.unsqueeze(-1).expand(*spread.shape, 2)).to_event(1))
    scales = pyro.sample("scales", dist.LogNormal(torch.zeros(2), 0.5).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(locs, scales)), obs=data)


MIXTURE_SHAPES = {site: torch.Size([2]) for site in ("weights", "locs", "scales")}
DATA = torch.tensor([-2.0, -1.0, 1.5, 2.0, 2.2])


def many(kind: type, number: int, nesting: int = 1) -> Any:
    return kind(num_particles=number, vectorize_particles=True, max_plate_nesting=nesting)


def losses(kind: type, model: Any, guide: Any, *data: torch.Tensor, number: int = 20, particles: int = 500) -> Any:
    elbo = many(kind, particles)
    with torch.no_grad():
        return torch.tensor([elbo.loss(model, guide, *data) for _ in range(number)], dtype=torch.float64)


def gradients(elbo: Any, model: Any, guide: Any, *data: torch.Tensor, number: int = 60) -> torch.Tensor:
    """Of the loss in all parameters of the guide, ``(number, parameters)``."""
    rows = []
    for _ in range(number):
        guide.zero_grad()
        elbo.loss_and_grads(model, guide, *data)
        rows.append(torch.cat([p.grad.reshape(-1) for p in guide.parameters() if p.grad is not None]))
    return torch.stack(rows).double()


def assert_equal_means(first: torch.Tensor, second: torch.Tensor) -> None:
    """Two-sided at 5 standard errors, of 38 degrees of freedom or more: false alarm below 1 in 10^4."""
    error = math.sqrt(float(first.var() / len(first) + second.var() / len(second)))
    assert abs(float(first.mean() - second.mean())) < 5 * error + 1e-4


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("base", "estimator"), [(base, ExactOrbit()) for base in GAUSSIAN] + [(AutoDiagonalNormal, InfoNCE(2))]
)
def test_the_value_is_that_of_trace_elbo(base: type, estimator: Any) -> None:
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry.permutations, base=base, estimator=estimator, init_scale=0.5).setup(x, y)
    ours, stock = (losses(kind, model, guide, x, y) for kind in (SymmetrizedMeanField_ELBO, Trace_ELBO))
    assert_equal_means(ours, stock)


@pytest.mark.stochastic
@pytest.mark.parametrize("base", [AutoDiagonalNormal, AutoMultivariateNormal])
def test_the_value_is_right_for_hierarchical_and_log_normal_priors(base: type) -> None:
    """With a full-rank base the prior of the locations depends on another site and must not be taken from a formula:
    the two are made to depend on one another strongly."""
    group = Group.declare({"locs": ("k",), "scales": ("k",)}, MIXTURE_SHAPES)
    guide = AutoSymmetrized(broadcast_mixture, group, base=base, estimator=ExactOrbit(), init_scale=0.4).setup(DATA)
    if base is AutoMultivariateNormal:
        with torch.no_grad():
            # sites in order: spread, locs, scales
            tril = torch.eye(5)
            tril[1:3, 0] = 3.0
            guide.scale_tril = tril
    ours, stock = (losses(kind, broadcast_mixture, guide, DATA) for kind in (SymmetrizedMeanField_ELBO, Trace_ELBO))
    assert_equal_means(ours, stock)


@pytest.mark.stochastic
def test_the_value_is_right_for_simplexes_and_plates_one_particle_at_a_time() -> None:
    group = Group.declare({"weights": ("k",), "locs": ("k",), "scales": ("k",)}, MIXTURE_SHAPES)
    guide = AutoSymmetrized(mixture, group, estimator=ExactOrbit(), init_scale=0.3).setup(DATA)
    pair = []
    for kind in (SymmetrizedMeanField_ELBO, Trace_ELBO):
        elbo = kind(num_particles=1)
        pair.append(torch.tensor([elbo.loss(mixture, guide, DATA) for _ in range(150)], dtype=torch.float64))
    assert_equal_means(*pair)


@pytest.mark.parametrize("base", GAUSSIAN)
def test_without_data_the_plain_guide_has_the_divergence_exactly(base: type) -> None:
    scale = torch.tensor([0.5, 1.0, 2.0, 3.0])

    def prior() -> None:
        pyro.sample("a", dist.Normal(torch.ones(4), scale).to_event(1))
        pyro.sample("b", dist.LogNormal(torch.zeros(2), 0.7).to_event(1))

    guide = base(prior, init_scale=0.3)
    guide()
    q = guide.get_posterior()
    p = dist.MultivariateNormal(
        torch.tensor([1.0, 1, 1, 1, 0, 0]), torch.diag(torch.cat([scale, torch.full((2,), 0.7)]) ** 2)
    )
    covariance = torch.diag(q.variance) if base is AutoDiagonalNormal else q.covariance_matrix
    exact = kl_divergence(dist.MultivariateNormal(q.mean, covariance), p).item()
    values = [SymmetrizedMeanField_ELBO().loss(prior, guide) for _ in range(3)]
    assert values == pytest.approx([exact] * 3, rel=1e-4)
    with torch.no_grad():
        assert SymmetrizedMeanField_ELBO().loss(prior, guide) == pytest.approx(exact, rel=1e-4)


@pytest.mark.stochastic
def test_the_variance_is_far_smaller_where_the_prior_dominates() -> None:
    """A network of 200 hidden units and 10 rows: all that Trace_ELBO's noise is, is its sampled divergence, also in the
    gradients in the means of the 400 incoming weights, of 0.02 times the variance. False alarm below 1 in 10^4."""
    net = nn.Sequential(nn.Linear(1, 200), nn.Tanh(), nn.Linear(200, 1))
    x = torch.linspace(-1, 1, 10)[:, None]
    model = BayesianModel(net, 1.0, "gaussian")
    guide = AutoSymmetrized(model, find_symmetry(net, x), estimator=InfoNCE(3), init_scale=0.02).setup(x, x[:, 0])
    with torch.no_grad():
        guide.base.loc[-1] = 1.5  # noise_scale: the likelihood is flat
    ours, stock = (
        losses(kind, model, guide, x, x[:, 0], number=100, particles=2)
        for kind in (SymmetrizedMeanField_ELBO, Trace_ELBO)
    )
    assert_equal_means(ours, stock)
    assert float(ours.var()) < 0.05 * float(stock.var())
    noise = [
        float(gradients(many(kind, 2), model, guide, x, x[:, 0], number=20)[:, :400].var(0).sum())
        for kind in (SymmetrizedMeanField_ELBO, Trace_ELBO)
    ]
    assert noise[0] < 0.1 * noise[1]


@pytest.mark.stochastic
@pytest.mark.parametrize("base", [AutoDiagonalNormal, pytest.param(AutoMultivariateNormal, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_trace_elbo(base: type) -> None:
    """Means of 60 gradients each, at 6 standard errors over at most 150 parameters: false alarm below 1 in 10^5."""
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry, base=base, estimator=InfoNCE(3), init_scale=0.3).setup(x, y)

    ours, stock = (gradients(many(kind, 100), model, guide, x, y) for kind in (SymmetrizedMeanField_ELBO, Trace_ELBO))
    assert ours.shape == stock.shape
    error = ((ours.var(0) + stock.var(0)) / len(ours)).sqrt()
    assert bool(((ours.mean(0) - stock.mean(0)).abs() < 6 * error + 1e-4).all())


def test_a_flow_has_no_formula_and_gives_the_value_of_trace_elbo_draw_by_draw() -> None:
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(
        model, symmetry.permutations, base=AutoIAFNormal, estimator=ExactOrbit(), hidden_dim=[16]
    ).setup(x, y)
    values = []
    for kind in (SymmetrizedMeanField_ELBO, Trace_ELBO):
        pyro.set_rng_seed(3)
        values.append(kind().loss(model, guide, x, y))
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_guides_without_one_flat_vector_are_refused_with_advice() -> None:
    model, _, x, y = network()
    guide = AutoNormal(model)
    guide(x, y)
    with pytest.raises(TypeError, match=r"one flat(.|\n)*Trace_ELBO"):
        SymmetrizedMeanField_ELBO().loss(model, guide, x, y)


def test_it_trains_with_stock_svi() -> None:
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry, estimator=InfoNCE(3), init_scale=0.05)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), SymmetrizedMeanField_ELBO())
    history = [svi.step(x, y) for _ in range(150)]
    assert sum(history[-20:]) < sum(history[:20])
    assert math.isfinite(svi.evaluate_loss(x, y))


# many particles in one pass -----------------------------------------------------------------------------------------


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def classifier() -> tuple[BayesianModel, Any, torch.Tensor, torch.Tensor]:
    model = BayesianModel(convolutional(), 1.0, num_data=200)
    return model, symmetry_of(convolutional, 2, 16), torch.randn(20, 16), torch.randint(3, (20,))


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", [SymmetrizedMeanField_ELBO, Trace_ELBO])
def test_particles_of_a_network_run_in_one_batched_pass(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the network for all particles; and the mean is that of particles one by one, mini-batch scaled."""
    model, symmetry, x, y = classifier()
    guide = AutoSymmetrized(model, symmetry, estimator=InfoNCE(2), init_scale=0.1).setup(x, y)
    calls: list[int] = []
    outputs = model.outputs

    def counted(weights: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(weights["1.weight"].shape[:-4].numel())
        return outputs(weights, *args, **kwargs)

    monkeypatch.setattr(model, "outputs", counted)
    elbo = kind(num_particles=64, vectorize_particles=True)  # finds out the plates' nesting by itself
    elbo.loss(model, guide, x, y)
    assert calls[-1] == 64
    calls.clear()
    batched = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(10)], dtype=torch.float64)
    assert calls == [64] * 10
    one = kind()
    single = torch.tensor([one.loss(model, guide, x, y) for _ in range(80)], dtype=torch.float64)
    assert_equal_means(batched, single)


def test_mini_batches_estimate_the_objective_of_all_data() -> None:
    """Mean over all batches of an epoch, for one and the same draw of the guide, is the objective of all data."""
    model, symmetry, x, y = classifier()
    whole = BayesianModel(model.net, 1.0)
    guide = AutoSymmetrized(model, symmetry, estimator=ExactOrbit(), init_scale=0.1).setup(x, y)
    part = BayesianModel(model.net, 1.0, num_data=20)
    elbo = many(SymmetrizedMeanField_ELBO, 4)

    def value(given: BayesianModel, *data: torch.Tensor) -> float:
        pyro.set_rng_seed(7)
        return elbo.loss(given, guide, *data)

    batches = [value(part, x[rows], y[rows]) for rows in torch.arange(20).split(5)]
    assert sum(batches) / 4 == pytest.approx(value(whole, x, y), rel=1e-5)


@pytest.mark.stochastic
@pytest.mark.slow
def test_gradients_of_batched_particles_agree_with_those_one_by_one() -> None:
    """60 against 400 gradients, at 6 standard errors over some 300 parameters: false alarm below 1 in 10^6."""
    model, symmetry, x, y = classifier()
    guide = AutoSymmetrized(model, symmetry.permutations, estimator=InfoNCE(1), init_scale=0.1).setup(x, y)

    batched = gradients(many(SymmetrizedMeanField_ELBO, 16), model, guide, x, y)
    single = gradients(SymmetrizedMeanField_ELBO(), model, guide, x, y, number=400)
    error = (batched.var(0) / len(batched) + single.var(0) / len(single)).sqrt()
    assert bool(((batched.mean(0) - single.mean(0)).abs() < 6 * error + 1e-4).all())


def exchangeable() -> None:
    pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))


def mean_gradients(kind: type, base: type, estimator: Any) -> torch.Tensor:
    """Of the means of a guide whose units overlap, ``(20, ...)``; the same draws for each estimator."""
    guide = AutoSymmetrized(
        exchangeable,
        Group.declare({"w": ("unit",)}, {"w": torch.Size([3])}),
        base=base,
        estimator=estimator,
        init_scale=0.8,
    ).setup()
    parts = guide.base.modes if base is AutoModes else [guide.base]
    with torch.no_grad():
        for part, values in zip(parts, torch.linspace(-1.0, 1.0, 3 * len(parts)).sin().split(3), strict=True):
            part.loc.copy_(values)
    rows = []
    for seed in range(20):
        pyro.set_rng_seed(100 * seed)  # so that no two values of --seed share draws
        guide.zero_grad()
        many(kind, 200, 0).loss_and_grads(exchangeable, guide)
        rows.append(torch.cat([part.loc.grad for part in parts]))
    return torch.stack(rows)


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("kind", "base"),
    [(kind, AutoDiagonalNormal) for kind in (Trace_ELBO, TraceMeanField_ELBO, SymmetrizedMeanField_ELBO)]
    + [(Modes_ELBO, AutoModes)],
)
def test_every_objective_has_all_of_the_gain_s_gradient(kind: type, base: type) -> None:
    """At ``K = 1``, the plain gradient of the estimate has half of it. 5 standard errors: false alarms below 1e-4."""
    exact, found, plain = (mean_gradients(kind, base, e) for e in (ExactOrbit(), SinkhornImportance(1), InfoNCE(0)))
    gain = (plain - exact).mean(0)
    shares = (plain - found) @ gain / gain.square().sum()
    error = float(shares.std()) / math.sqrt(len(shares))
    assert error < 0.05
    assert abs(float(shares.mean()) - 1) < 0.05 + 5 * error
