"""Guides averaged over permutations and signs, and over signs alone."""

import functools
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import ExactOrbit
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import AutoSymmetrized
from pyro_symmetric.guides.evidence import evidence_of
from pyro_symmetric.models import BayesianModel


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


@functools.cache
def symmetry_of_perceptron() -> Symmetry:
    """Once for all tests: tracing takes longer than most of them."""
    with torch.random.fork_rng():
        return find_symmetry(perceptron(), torch.zeros(2, 1))


def network() -> tuple[BayesianModel, Symmetry, torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 20)[:, None]
    return BayesianModel(perceptron(), 1.0, "gaussian"), symmetry_of_perceptron(), x, torch.sin(2 * x[:, 0])


def steps(model: Any, guide: Any, *data: torch.Tensor, number: int = 100) -> list[float]:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    return [svi.step(*data) for _ in range(number)]


def test_evidence_takes_the_finite_part_and_gains_up_to_its_log_order() -> None:
    """Units far apart and far from zero: all copies are distinct, and symmetrising is worth log 48 nats."""
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry, estimator=ExactOrbit(), init_scale=0.01).setup(x, y)
    with torch.no_grad():
        guide.base.loc[:3] = torch.tensor([1.0, -2.0, 3.0])
    worth = evidence_of(guide, lambda w: model.log_joint(w, x, y), symmetry.finite, ExactOrbit(), num_samples=10)
    assert worth.log_order == pytest.approx(math.log(48))
    assert worth.symmetrized_elbo - worth.elbo == pytest.approx(math.log(48), abs=1e-3)
    without = evidence_of(guide, lambda w: model.log_joint(w, x, y), symmetry.signs, ExactOrbit(), num_samples=10)
    assert without.symmetrized_elbo - without.elbo == pytest.approx(math.log(8), abs=1e-3)


def test_orbit_draws_flip_signs_and_leave_predictions_alone() -> None:
    """400 fair coins for each of 3 units: that one side shows for all of them has probability below 10^-100."""
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry.signs, init_scale=1e-4).setup(x, y)
    pyro.set_rng_seed(2)
    one = guide.sample_posterior((400,))
    pyro.set_rng_seed(2)
    every = guide.sample_posterior((400,), orbit=True)
    torch.testing.assert_close(every["0.bias"].abs(), one["0.bias"].abs())
    assert bool(((every["0.bias"] > 0).any(0) & (every["0.bias"] < 0).any(0)).all())
    torch.testing.assert_close(model.outputs(every, x), model.outputs(one, x), rtol=1e-4, atol=1e-4)


def test_a_relu_network_has_no_signs_and_a_declaration_of_them_is_refused() -> None:
    net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.linspace(-2, 2, 20)[:, None]
    model, symmetry = BayesianModel(net, 1.0, "gaussian"), find_symmetry(net, x)
    guide = AutoSymmetrized(model, symmetry)  # its scalings are continuous: left out
    assert guide.group == symmetry.permutations
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    axes = {"0.weight": ("unit", None), "0.bias": ("unit",), "2.weight": (None, "unit")}
    with pytest.raises(ValueError, match=r"\['unit'\](.|\n)*flipped"):
        AutoSymmetrized(model, Group.declare(axes, shapes, moves="flip")).setup(x, x[:, 0])


def test_signs_in_plates_and_beside_a_simplex() -> None:
    """Directions with weights on a simplex: exchanged together, flipped alone; one plate around the directions."""

    def model(data: torch.Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("directions", 3):
            slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(data)):
            pyro.sample("x", dist.Normal((data @ slopes.mT) ** 2 @ weights, 0.5), obs=data[:, 0])

    shapes = {"weights": torch.Size([3]), "slopes": torch.Size([3, 2])}
    axes = {"weights": ("k",), "slopes": ("k", None)}
    group = Group.declare(axes, shapes, moves=("permute", "flip"), even=["weights"])
    data = torch.randn(15, 2)
    assert verify_model(group, model, data)
    guide = AutoSymmetrized(model, group, estimator=ExactOrbit())
    losses = steps(model, guide, data, number=60)
    assert all(math.isfinite(loss) for loss in losses)
    torch.testing.assert_close(guide.sample_posterior((5,), orbit=True)["weights"].sum(-1), torch.ones(5))
