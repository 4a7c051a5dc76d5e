"""Predictions: chunked and mapped over draws, against one draw at a time."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior import predict as module
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.predict import predict


@pytest.fixture
def model() -> BayesianModel:
    return BayesianModel(
        nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)), num_data=9
    )


@pytest.fixture
def posterior(model) -> Posterior:
    return Posterior(
        {name: prior.sample((2, 6)) for name, prior in model.priors().items()},
        kind="chains",
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(9, 2)


def one_by_one(model, weights, x):
    count = len(next(iter(weights.values())))
    pieces = [
        torch.func.functional_call(
            model.net, {k: v[s] for k, v in weights.items()}, (x,)
        )
        for s in range(count)
    ]
    return torch.stack(pieces)


def regression(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    mean = x @ w
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)
    return mean


@pytest.fixture
def draws() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(40, 2), "scale": 0.1 + torch.rand(40)}


@pytest.mark.parametrize("most", [5, 1024])
def test_what_is_taken_at_once_changes_nothing_and_weights_keep_their_batch_shape(
    model, posterior, x, draws, most, monkeypatch
):
    monkeypatch.setattr(module, "MAX_DRAWS", most)
    expected = one_by_one(model, posterior.get_samples(), x)
    assert torch.allclose(predict(posterior, model, x), expected, atol=1e-6)
    assert torch.allclose(predict(posterior, model.net, x), expected, atol=1e-6)
    assert torch.allclose(
        predict(posterior, model, x, kind="mean"), expected.softmax(-1), atol=1e-6
    )
    average = predict(posterior, model, x, kind="mean", average=True)
    assert torch.allclose(average, expected.softmax(-1).double().mean(0), atol=1e-6)
    labels = torch.randint(3, (9,))
    chunked = predict(posterior.samples, model, x, labels, kind="log_likelihood")["y"]
    assert torch.allclose(
        chunked, model.log_likelihood(posterior.samples, x, labels), atol=1e-5
    )
    by_chain = predict(posterior.samples, model, x)
    assert by_chain.shape == (2, 6, 9, 3)
    assert torch.equal(by_chain.flatten(0, 1), predict(posterior, model, x))
    assert torch.allclose(
        predict(posterior, model, x, num_samples=4), expected[2::3], atol=1e-6
    )
    single = {site: value[1, 2] for site, value in posterior.samples.items()}
    assert torch.allclose(predict(single, model, x), by_chain[1, 2], atol=1e-6)
    lines = draws["w"] @ x.T
    assert torch.allclose(predict(draws, regression, x), lines, atol=1e-6)
    assert torch.allclose(
        predict(draws, regression, x, kind="mean")["y"], lines, atol=1e-6
    )
    average = predict(draws, regression, x, kind="mean", average=True)["y"]
    assert torch.allclose(average, lines.double().mean(0), atol=1e-6)


@pytest.mark.parametrize("wrapped", [False, True])
def test_draws_are_predicted_with_their_own_running_statistics(x, wrapped):
    net = nn.Sequential(
        nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
    ).eval()
    sites = {
        name: value
        for name, value in net.state_dict().items()
        if value.is_floating_point()
    }
    draws = {name: torch.rand(4, *value.shape) + 0.5 for name, value in sites.items()}
    expected = torch.stack(
        [
            torch.func.functional_call(
                net, {name: value[s] for name, value in draws.items()}, (x,)
            )
            for s in range(4)
        ]
    )
    model = BayesianModel(net) if wrapped else net
    assert torch.allclose(predict(draws, model, x), expected, atol=1e-5)
    parameters = {name: value for name, value in draws.items() if "running" not in name}
    own = {
        name: value.expand(4, *value.shape)
        for name, value in net.named_buffers()
        if value.is_floating_point()
    }
    assert torch.equal(
        predict(parameters, model, x), predict(parameters | own, model, x)
    )
    assert not torch.allclose(predict(parameters, model, x), expected, atol=1e-2)


@pytest.mark.stochastic
def test_samples_follow_the_likelihood_of_their_draw():
    model = BayesianModel(nn.Linear(1, 1), likelihood="gaussian")
    scales = torch.tensor([0.1, 10.0])
    weights = {
        "weight": torch.zeros(2, 1, 1),
        "bias": torch.tensor([[1.0], [-2.0]]),
        "noise_scale": scales,
    }
    y = predict(weights, model, torch.zeros(4000, 1), kind="samples")
    assert y.shape == (2, 4000, 1)
    y = y.squeeze(-1)
    # Five standard errors of means and deviations of 4,000 normal draws: false alarm
    # below 1e-5.
    assert torch.allclose(y.mean(1), torch.tensor([1.0, -2.0]), atol=5 * 10 / 4000**0.5)
    assert torch.allclose(y.std(1) / scales, torch.ones(2), atol=5 / 8000**0.5)


def test_a_guide_is_asked_for_draws(model, x):
    guide = ps.AutoSymmetrized(model, ps.find_symmetry(model.net, x).permutations)
    guide.setup(x, torch.zeros(9, dtype=torch.long))
    assert predict(guide, model, x, num_samples=7).shape == (7, 9, 3)
    assert predict(guide, model, x).shape == (100, 9, 3)


@pytest.mark.parametrize("kind", [AutoNormal, AutoDelta, AutoMultivariateNormal])
def test_guides_of_pyro_are_asked_for_draws_too(kind, model, x):
    guide = kind(model)
    guide(x, torch.zeros(9, dtype=torch.long))
    torch.manual_seed(1)
    found = predict(guide, model, x, kind="mean", num_samples=3)
    torch.manual_seed(1)
    draws = ps.guides.sample_posterior(guide, (3,))
    torch.testing.assert_close(found, model.outputs(draws, x).softmax(-1))


def test_a_network_is_evaluated_in_eval_mode_and_left_alone(x):
    net = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)
    )
    weights = {name: torch.randn(4, *p.shape) for name, p in net.named_parameters()}
    first, again = predict(weights, net, x), predict(weights, net, x)
    assert torch.allclose(first, again, atol=1e-6)
    assert net.training
    assert net[1].num_batches_tracked == 0


def test_convolutions_and_several_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, image, shift):
            return self.conv(image).mean((2, 3)) + shift

    net = Pair()
    weights = {name: torch.randn(5, *p.shape) for name, p in net.named_parameters()}
    image, shift = torch.randn(4, 2, 6, 6), torch.randn(4, 1)
    expected = [
        torch.func.functional_call(
            net, {k: v[s] for k, v in weights.items()}, (image, shift)
        )
        for s in range(5)
    ]
    assert torch.allclose(
        predict(weights, net, image, shift), torch.stack(expected), atol=1e-5
    )


# any Pyro model -----------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("given", [False, True])
def test_targets_of_a_pyro_model_are_drawn_anew_for_each_draw_and_row(draws, given):
    x = torch.randn(2000, 2)
    data = (x, torch.zeros(2000)) if given else (x,)
    y = predict(draws, regression, *data, kind="samples")
    assert list(y) == ["y"]
    standard = (y["y"] - draws["w"] @ x.T) / draws["scale"][:, None]
    # 80,000 standard normal numbers: five standard errors, false alarm below 1e-5.
    assert abs(float(standard.mean())) < 5 / 80_000**0.5
    assert abs(float(standard.std()) - 1) < 5 / 160_000**0.5
    assert abs(float((standard[0] * standard[1]).mean())) < 5 / 2000**0.5


@pytest.mark.stochastic
def test_sites_that_the_posterior_lacks_are_drawn_from_the_model():
    def hierarchical(n):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", n):
            own = pyro.sample("own", dist.Normal(mean, 0.01))
            return pyro.sample("y", dist.Normal(own, 0.01))

    means = torch.linspace(-3, 3, 30)
    drawn = predict({"mean": means}, hierarchical, 5, kind="samples")
    assert set(drawn) == {"own", "y"}
    assert torch.allclose(drawn["own"], means[:, None], atol=0.06)
    assert ((drawn["y"] - drawn["own"]).abs() < 0.06).all()  # six deviations
    assert not torch.equal(drawn["y"], drawn["own"])


def test_a_model_that_cannot_be_mapped_is_run_draw_by_draw_with_a_warning(x):
    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        return x.sum(1) * (w if w > 0 else 0 * w)

    w = torch.tensor([-1.0, 2.0, 0.5])
    with pytest.warns(RuntimeWarning, match="one after another") as warned:
        found = predict({"w": w}, model, x)
    assert warned[0].filename == __file__
    assert torch.allclose(found, w.clamp(min=0)[:, None] * x.sum(1), atol=1e-6)


def test_log_likelihood_of_every_row(draws, x):
    y = torch.randn(9)
    found = predict(draws, regression, x, y, kind="log_likelihood")
    assert torch.allclose(
        found["y"],
        dist.Normal(draws["w"] @ x.T, draws["scale"][:, None]).log_prob(y),
        atol=1e-4,
    )


def test_what_nothing_can_be_predicted_of_is_named(posterior, model, x):
    for call, message in (
        (
            lambda: predict(posterior, model.net, x, kind="mean"),
            "a bare network has no likelihood",
        ),
        (lambda: predict({"u": torch.zeros(3)}, regression, x), "none of the sites"),
        (lambda: predict(posterior.select(draws=slice(0)), model, x), "no draws"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.cuda
def test_draws_on_the_cpu_meet_a_network_on_the_device(model, posterior, x):
    expected = predict(posterior, model, x)
    assert torch.allclose(predict(posterior, model.to("cuda"), x), expected, atol=1e-5)


def test_draws_on_the_cpu_meet_data_on_the_device(device):
    def line(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), device=x.device), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    x, y, w = (
        torch.randn(5, device=device),
        torch.randn(5, device=device),
        torch.randn(3, device="cpu"),
    )
    found = predict({"w": w}, line, x, y, kind="log_likelihood")["y"]
    expected = dist.Normal(w[:, None] * x.cpu(), 1.0).log_prob(y.cpu())
    torch.testing.assert_close(found.cpu(), expected)


def test_the_mean_of_a_categorical_site_are_its_probabilities():
    def classes(x, y=None):
        p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(p), obs=y)

    p = torch.distributions.Dirichlet(torch.ones(3)).sample((5,))
    found = predict({"p": p}, classes, torch.zeros(4), kind="mean")["y"]
    assert torch.allclose(found, p[:, None].expand(5, 4, 3))


def in_random_parts(x, y=None, rows=2):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x), subsample_size=rows) as index:
        pyro.sample(
            "y", dist.Normal(x[index] @ w, 1.0), obs=None if y is None else y[index]
        )
    return x @ w


def test_predictions_of_rows_that_a_plate_draws_anew_are_refused(draws, x):
    for kind in ("outputs", "mean", "samples"):
        with pytest.raises(
            ValueError, match=r"'data'.* draw other rows.*without subsample_size"
        ):
            predict(draws, in_random_parts, x, kind=kind)
    with pytest.raises(ValueError, match="other rows"):
        predict(draws, in_random_parts, x, torch.randn(9), kind="log_likelihood")
    assert predict(draws, in_random_parts, x, kind="mean", rows=9)["y"].shape == (40, 9)


def test_deterministic_sites_are_computed_anew_and_are_no_data(draws, x):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        mean = pyro.deterministic("mean", x @ w)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        pyro.deterministic("error", mean - (0 if y is None else y))

    y = torch.randn(9)
    found = predict(draws, model, x, y, kind="log_likelihood")
    assert list(found) == ["y"]
    assert torch.allclose(
        found["y"], dist.Normal(draws["w"] @ x.T, 1.0).log_prob(y), atol=1e-5
    )
    stale = {
        **draws,
        "mean": torch.zeros(len(draws["w"]), 4),
        "error": torch.zeros(len(draws["w"])),
    }
    for kind in ("mean", "samples"):
        predicted = predict(stale, model, x, kind=kind)
        assert set(predicted) == {"mean", "y", "error"}
        for site in ("mean", "error"):  # without targets, the error is the mean
            assert torch.allclose(predicted[site], draws["w"] @ x.T, atol=1e-5)
    assert torch.allclose(
        predict(stale, model, x, kind="mean")["y"], draws["w"] @ x.T, atol=1e-5
    )


def test_masked_observations_have_no_density() -> None:
    y, kept = torch.tensor([0.5, float("nan"), 1e3]), torch.tensor([True, False, False])

    def masked(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)), poutine.mask(mask=kept):
            pyro.sample("y", dist.Normal(mu, 1.0, validate_args=False), obs=y)

    found = predict({"mu": torch.tensor([0.0, 1.0])}, masked, y, kind="log_likelihood")[
        "y"
    ]
    torch.testing.assert_close(
        found[:, 0], dist.Normal(torch.tensor([0.0, 1.0]), 1.0).log_prob(y[0])
    )
    assert torch.equal(found[:, 1:], torch.zeros(2, 2))


def test_a_model_with_an_improper_prior_predicts(x) -> None:
    def flat(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample(
            "w", dist.ImproperUniform(dist.constraints.positive, (2,), ()).to_event(1)
        )
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    w = torch.rand(6, 2)
    torch.testing.assert_close(
        predict({"w": w}, flat, x, kind="mean", progress=False)["y"], w @ x.T
    )
    found = predict({"w": w}, flat, x, x[:, 0], kind="log_likelihood", progress=False)[
        "y"
    ]
    torch.testing.assert_close(found, dist.Normal(w @ x.T, 0.5).log_prob(x[:, 0]))
