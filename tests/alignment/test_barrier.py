"""Barriers and geodesics against closed forms."""

import copy
import math
from typing import Any

import pytest
import torch
from pyro.distributions import constraints
from torch import Tensor, nn

from pyro_symmetric.alignment import GaussianWeights, barrier, loss_barrier
from pyro_symmetric.models import BayesianModel, CategoricalLikelihood
from pyro_symmetric.weights import Weights

GRID = torch.tensor([-1.0, 0.5])


def gaussian(mean: float, scale: float) -> GaussianWeights:
    return GaussianWeights({"w": torch.tensor([mean])}, {"w": torch.tensor([scale])})


def log_likelihood(weights: Weights) -> Tensor:
    """y = w + noise of variance 1, at two targets: E_q p(y|w) is a Gaussian in closed
    form.
    """
    return -0.5 * (GRID - weights["w"]) ** 2 - 0.5 * math.log(2 * math.pi)


def exact_loss(mean: float, scale: float) -> float:
    predictive = torch.distributions.Normal(mean, math.sqrt(1 + scale**2))
    return -float(predictive.log_prob(GRID).mean())


def test_losses_along_the_path_equal_the_closed_form() -> None:
    """20,000 draws; the relative error of a mean of densities is below 1 %, and 0.03
    nats is over 4 standard errors.
    """
    curve = loss_barrier(
        gaussian(-3.0, 0.4),
        gaussian(2.0, 1.0),
        log_likelihood,
        num_points=5,
        num_samples=20_000,
    )
    for t, loss in zip(curve.t.tolist(), curve.losses["loss"].tolist(), strict=True):
        assert loss == pytest.approx(exact_loss(-3 + 5 * t, 0.4 + 0.6 * t), abs=0.03)


def test_the_barrier_is_the_largest_excess_over_the_chord() -> None:
    ends = {"w": torch.tensor([-2.0])}, {"w": torch.tensor([2.0])}
    for expected, score in (
        (4.0, lambda w: w["w"] ** 2 - 4),
        (0.0, lambda w: -(w["w"] ** 2)),
    ):
        curve = loss_barrier(*ends, score, num_samples=1)
        assert curve.barrier == pytest.approx(expected)
        assert curve.to_dict()["barriers"] == curve.barriers


def test_positive_sites_travel_in_unconstrained_space() -> None:
    ends = [
        GaussianWeights(
            {"s": torch.tensor(value).log()},
            {"s": torch.tensor(0.0)},
            {"s": constraints.positive},
        )
        for value in (1.0, 4.0)
    ]
    curve = loss_barrier(*ends, lambda w: w["s"][:, None], num_points=3, num_samples=1)
    assert (-curve.losses["loss"]).tolist() == pytest.approx([1.0, 2.0, 4.0])


# models and networks ------------------------------------------------------------------


def classifier(
    width: int = 6,
) -> tuple[BayesianModel, GaussianWeights, GaussianWeights, Tensor, Tensor]:
    model = BayesianModel(
        nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 3)),
        1.0,
        "categorical",
    )
    shapes = model.site_shapes
    ends = [
        GaussianWeights(
            {site: torch.randn(shape) for site, shape in shapes.items()},
            {site: 0.3 * torch.rand(shape) for site, shape in shapes.items()},
        )
        for _ in range(2)
    ]
    return model, *ends, torch.randn(40, 2), torch.randint(3, (40,))


def test_a_model_with_data_gives_the_losses_and_errors_of_a_loop_over_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, first, second, x, y = classifier()
    data = {"train": (x[:25], y[:25]), "test": (x[25:], y[25:])}
    kept: list[Weights] = []

    def keep(*settings: Any) -> Weights:
        kept.append(draw(*settings))
        return kept[-1]

    draw = barrier.draw
    monkeypatch.setattr(barrier, "draw", keep)
    curve = loss_barrier(first, second, model, data, num_points=3, num_samples=8)
    assert list(curve.losses) == ["train", "test"]
    assert list(curve.metrics) == ["train error", "test error"]
    assert len(kept) == 3
    for point, weights in enumerate(kept):
        for name, (rows, labels) in data.items():
            probabilities = torch.stack(
                [
                    torch.func.functional_call(
                        model.net, {k: v[s] for k, v in weights.items()}, (rows,)
                    ).softmax(-1)
                    for s in range(8)
                ]
            ).mean(0)
            loss = -probabilities.gather(1, labels[:, None]).log().mean()
            assert float(curve.losses[name][point]) == pytest.approx(
                float(loss), rel=1e-5
            )
            error = (probabilities.argmax(-1) != labels).double().mean()
            assert float(curve.metrics[f"{name} error"][point]) == pytest.approx(
                float(error)
            )


def test_chunks_of_draws_and_of_rows_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither does which data are measured: all points, data and chunks see the same
    noise.
    """
    model, first, second, x, y = classifier()
    curves = []
    size = sum(shape.numel() for shape in model.site_shapes.values())
    for draws, numbers in ((8, 40), (8, 2**24), (3, 2**24)):
        monkeypatch.setattr(barrier, "CHUNK_WEIGHTS", draws * size)
        monkeypatch.setattr(barrier, "CHUNK_NUMBERS", numbers)
        torch.manual_seed(3)
        whole = loss_barrier(first, second, model, (x, y), num_points=3, num_samples=8)
        curves.append(whole)
    # Chunks of three draw other noise than one of eight, so those two are compared at
    # the ends of other settings.
    torch.testing.assert_close(curves[0].losses["loss"], curves[1].losses["loss"])
    torch.manual_seed(3)
    again = loss_barrier(
        first, second, model, {"a": (x, y), "b": (x, y)}, num_points=3, num_samples=8
    )
    torch.testing.assert_close(again.losses["a"], curves[2].losses["loss"])
    torch.testing.assert_close(again.losses["b"], again.losses["a"])


def test_real_targets_give_a_root_mean_square_and_learnt_noise_counts() -> None:
    model = BayesianModel(nn.Linear(2, 1), 1.0, "gaussian")
    w = {
        "weight": torch.tensor([[1.0, -1.0]]),
        "bias": torch.zeros(1),
        "noise_scale": torch.tensor(0.5),
    }
    other = {**w, "bias": torch.ones(1)}
    x, y = torch.randn(30, 2), torch.randn(30)
    curve = loss_barrier(w, other, model, (x, y), num_points=3)
    for t, loss, rmse in zip(
        curve.t.tolist(), curve.losses["loss"], curve.metrics["RMSE"], strict=True
    ):
        mean = x[:, 0] - x[:, 1] + t
        assert float(rmse) == pytest.approx(
            float((mean - y).square().mean().sqrt()), rel=1e-5
        )
        assert float(loss) == pytest.approx(
            -float(torch.distributions.Normal(mean, 0.5).log_prob(y).mean()), rel=1e-5
        )


def test_the_loss_is_untempered() -> None:
    model, first, second, x, y = classifier()
    cold = BayesianModel(model.net, 1.0, CategoricalLikelihood(temperature=0.1))
    torch.manual_seed(0)
    curve = loss_barrier(first, second, model, (x, y), num_points=3)
    torch.manual_seed(0)
    torch.testing.assert_close(
        loss_barrier(first, second, cold, (x, y), num_points=3).losses, curve.losses
    )


def test_networks_are_ends_and_bring_their_running_statistics() -> None:
    nets = [
        nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        .eval()
        .requires_grad_(False)
        for _ in range(2)
    ]
    for net in nets:
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2.0)
    x, y = torch.randn(30, 2), torch.randint(3, (30,))
    curve = loss_barrier(
        *nets, BayesianModel(nets[0], 1.0, "categorical"), (x, y), num_points=3
    )
    for net, loss in zip(nets, curve.losses["loss"][[0, -1]], strict=True):
        assert float(loss) == pytest.approx(
            float(nn.functional.cross_entropy(net(x), y)), rel=1e-5
        )


def test_ends_without_running_statistics_are_warned_about():
    net = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)
    ).eval()
    model, x, y = BayesianModel(net), torch.randn(8, 2), torch.randint(2, (8,))
    weights = {name: value.detach() for name, value in net.named_parameters()}
    with pytest.warns(
        UserWarning, match=r"no running statistics .*'1.running_mean'"
    ) as told:
        loss_barrier(weights, weights, model, (x, y), num_points=3)
    assert told[0].filename == __file__
    # Networks bring theirs; warnings are errors here.
    loss_barrier(net, copy.deepcopy(net), model, (x, y), num_points=3)


def test_targets_that_broadcast_to_other_shapes_are_refused() -> None:
    model, first, second, x, y = classifier()
    for wrong in (y[:, None], nn.functional.one_hot(y)):
        with pytest.raises(
            ValueError, match=r"data\['loss'\] has targets of shape .* takes \(40,\)"
        ):
            loss_barrier(first, second, model, (x, wrong))
    with pytest.raises(ValueError, match="not summed"):
        loss_barrier(first, second, lambda w: model.log_likelihood(w, x, y).sum(-1))


def test_networks_without_the_noise_that_a_model_infers_are_refused() -> None:
    net, x = nn.Linear(1, 1), torch.randn(5, 1)
    with pytest.raises(ValueError, match="noise_scale"):
        loss_barrier(
            net, net, BayesianModel(net, likelihood="gaussian", num_data=5), (x, x)
        )


def test_a_loss_that_is_no_number_is_refused_and_not_an_error_of_zero() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    broken = copy.deepcopy(net)
    broken[1].running_var.fill_(-1.0)
    model = BayesianModel(net, 1.0, "categorical")
    with pytest.raises(ValueError, match=r"NaN at t = 1"):
        loss_barrier(
            net,
            broken,
            model,
            (torch.randn(5, 2), torch.randint(2, (5,))),
            num_points=3,
        )


def test_the_chord_goes_from_the_first_loss_to_the_last() -> None:
    losses = {"loss": torch.tensor([1.0, 4.0, 2.0])}
    curve = barrier.BarrierCurve(torch.tensor([0.0, 0.25, 1.0]), losses, {})
    assert curve.barrier == pytest.approx(4 - 1.25)


def test_all_points_share_their_noise() -> None:
    """Between equal ends the loss of few draws is the same all along."""
    end = gaussian(0.5, 1.0)
    curve = loss_barrier(end, end, log_likelihood, num_points=4, num_samples=3)
    torch.testing.assert_close(curve.losses["loss"], curve.losses["loss"][:1].expand(4))


def test_draws_of_all_chunks_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "CHUNK_WEIGHTS", 2)
    end = gaussian(0.5, 1.0)
    curve = loss_barrier(
        end, end, lambda w: torch.zeros(len(w["w"]), 3), num_points=3, num_samples=7
    )
    assert curve.losses["loss"].tolist() == pytest.approx([0.0] * 3)
