"""BayesianModel: the Pyro model, its batched evaluation, and that both agree."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn

from pyro_symmetric.alignment import loss_barrier
from pyro_symmetric.models import (
    BayesianModel,
    CategoricalLikelihood,
    GaussianLikelihood,
    GaussianPrior,
)
from pyro_symmetric.posterior.predict import predict

LIKELIHOODS = {
    "categorical": ("categorical", 3, lambda n: torch.randint(3, (n,))),
    "learnt noise": ("gaussian", 1, lambda n: torch.randn(n)),
    "learnt noise, column": ("gaussian", 1, lambda n: torch.randn(n, 1)),
    "fixed noise": (GaussianLikelihood(0.3), 1, lambda n: torch.randn(n)),
    "two targets": ("gaussian", 2, lambda n: torch.randn(n, 2)),
    "cold": (
        CategoricalLikelihood(temperature=0.1),
        3,
        lambda n: torch.randint(3, (n,)),
    ),
}


def problem(
    name: str, num_data: int | None = None
) -> tuple[BayesianModel, torch.Tensor, torch.Tensor]:
    likelihood, outputs, targets = LIKELIHOODS[name]
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))
    model = BayesianModel(net, GaussianPrior(0.7, fan_in=True), likelihood, num_data)
    return model, torch.randn(20, 2), targets(20)


def draw(model: BayesianModel, *shape: int) -> dict[str, torch.Tensor]:
    return {name: prior.sample(shape) for name, prior in model.priors().items()}


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("num_data", [None, 100])
def test_log_joint_equals_the_traced_pyro_model(
    name: str, num_data: int | None
) -> None:
    model, x, y = problem(name, num_data)
    weights = draw(model, 4)
    one_by_one = [
        poutine.trace(
            poutine.condition(model, {site: v[i] for site, v in weights.items()})
        )
        .get_trace(x, y)
        .log_prob_sum()
        for i in range(4)
    ]
    torch.testing.assert_close(
        model.log_joint(weights, x, y), torch.stack(one_by_one), rtol=1e-4, atol=1e-3
    )


def test_a_mini_batch_counts_as_often_as_it_is_smaller_than_the_data() -> None:
    model, x, y = problem("categorical", num_data=20)
    weights = draw(model)
    parts = [
        model.log_joint(weights, x[rows], y[rows])
        for rows in (slice(0, 10), slice(10, 20))
    ]
    torch.testing.assert_close(sum(parts) / 2, model.log_joint(weights, x, y))


@pytest.mark.parametrize(
    "likelihood", ["categorical", "gaussian", GaussianLikelihood(0.5, temperature=2.0)]
)
def test_a_cold_posterior_is_a_power_of_prior_and_likelihood(
    likelihood: object,
) -> None:
    net = nn.Linear(3, 2 if likelihood == "categorical" else 1)
    x = torch.randn(9, 3)
    y = torch.randint(2, (9,)) if likelihood == "categorical" else torch.randn(9)
    warm, cold = (
        BayesianModel(
            net,
            GaussianPrior(0.7, scales={"bias": 2.0}),
            likelihood,
            num_data=30,
            temperature=temperature,
        )
        for temperature in (1.0, 0.1)
    )
    points = [
        {name: prior.sample() for name, prior in warm.priors().items()}
        for _ in range(2)
    ]
    differences = [
        model.log_joint(points[0], x, y) - model.log_joint(points[1], x, y)
        for model in (warm, cold)
    ]
    # but for a constant
    torch.testing.assert_close(
        differences[1], 10 * differences[0], rtol=1e-4, atol=1e-3
    )
    with pytest.raises(ValueError, match="temper these yourself"):
        BayesianModel(net, lambda name, value: dist.Laplace(0.0, 1.0), temperature=0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("categorical", 0.7),
        ("categorical", -1.0),
        ("categorical", 3.0),
        ("fixed noise", math.nan),
    ],
)
def test_targets_that_no_likelihood_can_have_are_refused(
    name: str, value: float
) -> None:
    model, x, y = problem(name)
    weights, y = draw(model), y.float().index_fill(0, torch.tensor([4]), value)
    guide = AutoDiagonalNormal(model)
    for call in (
        lambda: model.log_likelihood(weights, x, y),
        lambda: model(x, y),
        lambda: predict(weights, model, x, y, kind="log_likelihood"),
        lambda: Trace_ELBO().loss(model, guide, x, y),
        lambda: loss_barrier(weights, weights, model, (x, y)),
    ):
        with pytest.raises(
            ValueError, match=f"holds ({value:g}, which isn't within the support|1 NaN)"
        ):
            call()
    assert torch.isfinite(model.log_likelihood(weights, x[:4], y[:4])).all()


def test_outputs_of_a_batch_equal_a_loop_over_networks() -> None:
    model, x, _ = problem("categorical")
    weights = draw(model, 2, 3)
    outputs = model.outputs(weights, x, chunk_size=4)
    assert outputs.shape == (2, 3, 20, 3)
    for i in range(2):
        for j in range(3):
            one = torch.func.functional_call(
                model.net, {site: value[i, j] for site, value in weights.items()}, (x,)
            )
            torch.testing.assert_close(outputs[i, j], one)


def test_log_prior_is_that_of_independent_gaussians_with_fan_in() -> None:
    model, _, _ = problem("categorical")
    weights = draw(model)
    scales = {
        "0.weight": 0.7 / math.sqrt(2),
        "0.bias": 0.7,
        "2.weight": 0.7 / math.sqrt(5),
        "2.bias": 0.7,
    }
    expected = sum(
        torch.distributions.Normal(0, scales[site]).log_prob(value).sum()
        for site, value in weights.items()
    )
    torch.testing.assert_close(model.log_prior(weights), expected)


@pytest.mark.stochastic
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_vectorised_particles_give_the_same_expected_loss_as_a_loop(name: str) -> None:
    model, x, y = problem(name)
    guide = AutoDiagonalNormal(model, init_scale=1e-4)
    losses = []
    for options in (
        {"num_particles": 3},
        {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1},
    ):
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-9}), Trace_ELBO(**options))
        losses.append(svi.evaluate_loss(x, y))
    # The guide is almost a point, so the two differ by its entropy's Monte Carlo error
    # alone: about sqrt(D/6), 5 sigma.
    assert losses[0] == pytest.approx(
        losses[1], abs=5 * math.sqrt(guide.latent_dim / 6) + 0.01 * abs(losses[0])
    )


@pytest.mark.stochastic
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_predictive_draws_targets_for_any_number_of_rows(
    name: str, parallel: bool
) -> None:
    model, x, y = problem(name, num_data=20)
    guide = AutoDiagonalNormal(model)
    guide(x, y)
    draws = Predictive(model, guide=guide, num_samples=6, parallel=parallel)(
        torch.randn(33, 2)
    )
    assert draws["y"].shape == (
        6,
        33,
        *y.shape[1:][: y.dim() - 1 if y.shape[-1] > 1 else 0],
    )


def test_the_net_is_copied_and_put_in_eval_mode() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    model = BayesianModel(net)
    before = net[0].weight.clone()
    model.net[0].weight.zero_()
    assert torch.equal(net[0].weight, before)
    assert net.training
    assert net[0].weight.requires_grad
    x, weights = torch.randn(5, 2), draw(model, 3)
    assert torch.equal(model.outputs(weights, x), model.outputs(weights, x))


def test_one_row_and_outputs_without_a_second_axis() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0))
    model = BayesianModel(net, 1.0, "gaussian")
    weights = draw(model, 5)
    for rows in (1, 4):
        x, y = torch.randn(rows, 2), torch.randn(rows)
        assert model.log_likelihood(weights, x, y).shape == (5, rows)
        assert Predictive(model, num_samples=3)(x)["y"].shape == (3, rows)


def test_weights_that_lie_elsewhere_are_moved(device: torch.device) -> None:
    """As draws of a run on a GPU do, which lie on the CPU."""
    model = BayesianModel(
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
        likelihood="gaussian",
    )
    x, y = torch.randn(5, 2, device="cpu"), torch.randn(5, device="cpu")
    weights = {
        name: torch.rand(4, *shape, device="cpu")
        for name, shape in model.site_shapes.items()
    }
    expected = model.to("cpu").log_joint(weights, x, y)
    found = model.to(device).log_joint(weights, x.to(device), y.to(device))
    assert found.device.type == device.type
    torch.testing.assert_close(found.to("cpu"), expected)
