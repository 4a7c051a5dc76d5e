"""Barriers and geodesics against closed forms."""

import math

import pytest
import torch
from pyro.distributions import constraints
from torch import Tensor

from pyro_symmetric.alignment import GaussianWeights, interpolate_gaussians, loss_barrier
from pyro_symmetric.alignment.barrier import marginalised_loss
from pyro_symmetric.symmetry.weights import Weights

GRID = torch.tensor([-1.0, 0.5])


def gaussian(mean: float, scale: float) -> GaussianWeights:
    return GaussianWeights({"w": torch.tensor([mean])}, {"w": torch.tensor([scale])})


def log_likelihood(weights: Weights) -> Tensor:
    """y = w + noise of variance 1, at two targets: E_q p(y|w) is a Gaussian in closed form."""
    return -0.5 * (GRID - weights["w"]) ** 2 - 0.5 * math.log(2 * math.pi)


def exact_loss(mean: float, scale: float) -> float:
    predictive = torch.distributions.Normal(mean, math.sqrt(1 + scale**2))
    return -float(predictive.log_prob(GRID).mean())


def test_losses_along_the_path_equal_the_closed_form() -> None:
    """20,000 draws; the relative error of a mean of densities is below 1 %, and 0.03 nats is over 4 standard errors."""
    curve = loss_barrier(gaussian(-3.0, 0.4), gaussian(2.0, 1.0), log_likelihood, num_points=5, num_samples=20_000)
    for t, loss in zip(curve.t.tolist(), curve.losses["loss"].tolist(), strict=True):
        assert loss == pytest.approx(exact_loss(-3 + 5 * t, 0.4 + 0.6 * t), abs=0.03)


def test_the_barrier_is_the_largest_excess_over_the_chord() -> None:
    curve = loss_barrier(
        {"w": torch.tensor([-2.0])},
        {"w": torch.tensor([2.0])},
        {"hill": lambda w: -(4 - w["w"] ** 2), "valley": lambda w: -(w["w"] ** 2)},
        metrics={"error": lambda w: (w["w"].abs() < 1).float().mean()},
        num_samples=1,
    )
    assert curve.barriers["hill"] == pytest.approx(4.0)
    assert curve.barriers["valley"] == pytest.approx(0.0)
    assert curve.barriers["error"] == pytest.approx(1.0)
    assert curve.barrier == curve.barriers["hill"]
    assert set(curve.to_dict()) == {"t", "losses", "metrics", "barriers"}


def test_the_marginalised_loss_averages_probabilities_not_their_logarithms() -> None:
    log_p = torch.tensor([[0.2, 0.5], [0.6, 0.1]]).log()
    assert float(marginalised_loss(log_p)) == pytest.approx(-(math.log(0.4) + math.log(0.3)) / 2, rel=1e-6)


def test_positive_sites_travel_in_unconstrained_space() -> None:
    ends = [
        GaussianWeights({"s": torch.tensor(value).log()}, {"s": torch.tensor(0.0)}, {"s": constraints.positive})
        for value in (1.0, 4.0)
    ]
    curve = loss_barrier(*ends, lambda w: w["s"][:, None], num_points=3, num_samples=1)
    assert (-curve.losses["loss"]).tolist() == pytest.approx([1.0, 2.0, 4.0])


def test_a_path_needs_ends_that_fit() -> None:
    with pytest.raises(ValueError, match="same sites"):
        interpolate_gaussians(gaussian(0.0, 1.0), GaussianWeights({"v": torch.ones(1)}, {"v": torch.ones(1)}), 0.5)
    with pytest.raises(ValueError, match="from 0 to 1"):
        interpolate_gaussians(gaussian(0.0, 1.0), gaussian(1.0, 1.0), 1.5)
    with pytest.raises(ValueError, match="num_points"):
        loss_barrier(gaussian(0.0, 1.0), gaussian(1.0, 1.0), log_likelihood, num_points=2)


def test_a_curve_can_be_plotted() -> None:
    curve = loss_barrier(gaussian(-3.0, 0.4), gaussian(2.0, 1.0), log_likelihood, num_points=3, num_samples=4)
    from matplotlib.figure import Figure

    ax = curve.plot(Figure().subplots(), label="aligned")
    path, chord = ax.get_lines()
    assert path.get_label() == "aligned loss"
    assert chord.get_ydata().tolist() == curve.losses["loss"][[0, -1]].tolist()


def test_functions_that_give_something_else_are_named() -> None:
    with pytest.raises(ValueError, match="not summed"):
        loss_barrier(gaussian(0.0, 1.0), gaussian(1.0, 1.0), lambda w: log_likelihood(w).sum(-1))
    with pytest.raises(TypeError, match="function of weights"):
        loss_barrier(gaussian(0.0, 1.0), gaussian(1.0, 1.0), torch.nn.Linear(1, 1))
