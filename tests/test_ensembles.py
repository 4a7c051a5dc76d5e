import functools
from typing import Any

import numpy as np
import pyro
import pytest
import scipy.optimize
import torch
from torch import nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.ensembles import LOSSES, ensemble, fresh_members
from pyro_symmetric.models import BayesianModel, GaussianLikelihood


def blobs(rows=60):
    y = torch.arange(rows) % 2
    return torch.randn(rows, 2) + 3 * (2 * y[:, None] - 1), y


def perceptron(outputs=2):
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def built_by(make):
    """Initial values of networks as they are built."""

    def initial(count):
        return torch.func.stack_module_state([make() for _ in range(count)])[0]

    return initial


def alone(net, start, x, y, optimizer, epochs, loss=nn.functional.cross_entropy):
    """One network in a plain loop over all data."""
    net.load_state_dict(start)
    optimiser = optimizer(list(net.parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for _ in range(epochs):
        optimiser.zero_grad()
        loss(net(x), y).backward()
        optimiser.step()
        schedule.step()
    return dict(net.named_parameters())


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        functools.partial(torch.optim.Adam, lr=0.02),
        functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    ],
)
def test_every_member_goes_where_it_would_go_alone(optimizer):
    (x, y), net = blobs(), perceptron()
    start = fresh_members(net, 4)
    found = ensemble(
        net,
        (x, y),
        4,
        epochs=20,
        batch_size=None,
        optimizer=optimizer,
        initial=lambda n: start,
        progress=False,
    ).get_samples()
    for member in range(4):
        expected = alone(
            perceptron(), {k: v[member] for k, v in start.items()}, x, y, optimizer, 20
        )
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name][member], value.detach(), atol=2e-5, rtol=1e-4
            )


@pytest.mark.parametrize("batch_size", [None, 10])
def test_stochastic_gradient_descent_commutes_with_permutations(batch_size):
    """Laurent et al. 2024, Proposition 3: from permuted weights and the same batches it
    ends at the permuted end.
    """
    (x, y), net = blobs(), perceptron()
    group = find_symmetry(net, x[:2]).permutations
    start = fresh_members(net, 4)
    element = group.sample((4,))
    ends = [
        ensemble(
            net,
            (x, y),
            4,
            epochs=10,
            batch_size=batch_size,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            initial=lambda n, first=first: first,
            progress=False,
            seed=3,
        ).get_samples()
        for first in (start, element(start))
    ]
    torch.testing.assert_close(element(ends[0]), ends[1], atol=2e-5, rtol=1e-4)


@pytest.mark.stochastic
def test_training_learns_and_reports_each_members_loss():
    x, y = blobs()
    posterior = ensemble(perceptron(), (x, y), 20, epochs=400, progress=False)
    weights = posterior.get_samples()
    hidden = torch.tanh(
        torch.einsum("mhi,ni->mnh", weights["0.weight"], x) + weights["0.bias"][:, None]
    )
    logits = (
        torch.einsum("moh,mnh->mno", weights["2.weight"], hidden)
        + weights["2.bias"][:, None]
    )
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2), y.expand(20, -1), reduction="none"
    ).mean(1)
    torch.testing.assert_close(
        posterior.statistics["loss"][0], losses, atol=1e-5, rtol=1e-4
    )
    assert float(losses.max()) < 0.3
    assert (posterior.num_chains, posterior.num_samples) == (1, 20)


@pytest.mark.stochastic
def test_initial_values_follow_the_modules_own_law():
    # uniform within 1/sqrt(fan_in): variance 1/(3 fan_in). 2,000 draws of 2 entries or
    # more, relative error of it up to 1.4 %: over 6 % for fewer than 1 of 10^4 seeds.
    net = nn.Sequential(
        nn.Linear(4, 2),
        nn.Conv2d(6, 2, 3, groups=2),
        nn.BatchNorm2d(2),
        nn.Embedding(3, 2),
    )
    members = fresh_members(net, 2000)
    for name, fan_in in (
        ("0.weight", 4),
        ("0.bias", 4),
        ("1.weight", 27),
        ("1.bias", 27),
    ):
        assert float(members[name].var()) == pytest.approx(1 / (3 * fan_in), rel=0.06)
        assert float(members[name].abs().max()) <= fan_in**-0.5
    assert bool((members["2.weight"] == 1).all())
    # normal, by the module's own reset
    assert float(members["3.weight"].var()) == pytest.approx(1, rel=0.06)


def test_weights_that_are_not_finite_stop_a_member_whose_loss_hides_them():
    (x, y), net = blobs(), perceptron()
    start = fresh_members(net, 5)
    start["0.weight"][1] = float("nan")
    options = {
        "initial": lambda n: start,
        "epochs": 1,
        "batch_size": 15,
        "progress": False,
    }
    with pytest.warns(RuntimeWarning, match="1 members diverged.*4 of 5 are left"):
        found = ensemble(
            net,
            (x, y),
            5,
            loss=lambda out, _: out.nan_to_num(0.0).square().mean(),
            **options,
        )
    assert all(bool(torch.isfinite(value).all()) for value in found.samples.values())


def test_members_that_go_on_are_untouched_by_those_that_stop():
    (x, y), net = blobs(), perceptron()
    start = fresh_members(net, 3)
    broken = {k: v.clone() for k, v in start.items()}
    broken["0.weight"][1] = float("nan")
    options = {
        "epochs": 10,
        "batch_size": None,
        "optimizer": functools.partial(torch.optim.Adam, lr=0.05),
    }
    whole = ensemble(
        net, (x, y), 3, initial=lambda n: start, progress=False, **options
    ).get_samples()
    with pytest.warns(RuntimeWarning, match="2 of 3 are left"):
        left = ensemble(
            net, (x, y), 3, initial=lambda n: broken, progress=False, **options
        ).get_samples()
    for name, value in left.items():
        torch.testing.assert_close(value, whole[name][[0, 2]])


def test_a_seed_decides_the_members_and_leaves_the_global_generator_alone():
    (x, y), net = (
        blobs(),
        nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 2)),
    )
    before = torch.get_rng_state()
    first, again, other = (
        ensemble(net, (x, y), 3, epochs=2, seed=seed, progress=False).samples[
            "0.weight"
        ]
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    drawn = ensemble(net, (x, y), 3, epochs=2, progress=False)
    given = ensemble(
        net, (x, y), 3, epochs=2, seed=drawn.metadata["seed"], progress=False
    )
    assert torch.equal(drawn.samples["0.weight"], given.samples["0.weight"])


def test_map_members_end_at_the_mode_of_a_linear_model():
    # Gaussian prior 1, noise 0.5, no hidden layer: the mode is ridge regression
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * torch.randn(40).double()
    net = nn.Linear(3, 1, bias=False).double()
    model = BayesianModel(
        net, prior=1.0, likelihood=GaussianLikelihood(scale=0.5), num_data=40
    )
    optimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    found = ensemble(
        model,
        (x, y),
        3,
        epochs=400,
        batch_size=None,
        optimizer=optimizer,
        progress=False,
    )
    mode = torch.linalg.solve(x.T @ x + 0.25 * torch.eye(3).double(), x.T @ y)
    members = {"weight": found.get_samples()["weight"].to(x.device)}
    for member in members["weight"]:
        torch.testing.assert_close(member[0], mode, atol=1e-5, rtol=0)
    losses = -model.log_joint(members, x, y) / 40
    torch.testing.assert_close(
        found.statistics["loss"][0].double(), losses, atol=1e-5, rtol=0
    )
    assert found.metadata["losses"][-1] < found.metadata["losses"][0]


class StudentT:
    """A likelihood of one's own, whose distribution checks its arguments as it is
    made.
    """

    temperature = 1.0

    def latents(self, like):
        return {
            "df": pyro.distributions.Gamma(like.new_tensor(9.0), like.new_tensor(3.0))
        }

    def distribution(self, outputs, latents):
        return pyro.distributions.StudentT(
            latents["df"][..., None], outputs.squeeze(-1), 0.5
        )

    def targets(self, y):
        return y

    def mean(self, outputs):
        return outputs


@pytest.mark.parametrize("batch_size", [None, 5])
def test_a_member_that_stops_stops_no_others_of_a_likelihood_of_ones_own(batch_size):
    x, y = torch.randn(20, 2), torch.randn(20)
    model = BayesianModel(nn.Linear(2, 1), likelihood=StudentT())
    start = fresh_members(model, 3)
    start["weight"][1] = float("nan")
    options = {
        "initial": lambda n: start,
        "epochs": 3,
        "batch_size": batch_size,
        "progress": False,
    }
    with pytest.warns(RuntimeWarning, match="1 members diverged.*2 of 3 are left"):
        found = ensemble(model, (x, y), 3, **options)
    members = {site: value.to(x.device) for site, value in found.get_samples().items()}
    torch.testing.assert_close(
        found.statistics["loss"][0].to(x.device), -model.log_joint(members, x, y) / 20
    )


def test_running_statistics_are_each_members_own_and_kept():
    x, y = blobs()
    net = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(3, 2)
    )
    posterior = ensemble(net, (x, y), 4, epochs=3, progress=False)
    means = posterior.get_samples()["1.running_mean"]
    assert means.shape == (4, 3)
    assert float(means.std(0).min()) > 0
    assert "1.num_batches_tracked" not in posterior.samples
    # in eval mode with its own statistics each member has the loss that it reports
    weights = {k: v[2] for k, v in posterior.get_samples().items()}
    outputs = torch.func.functional_call(net.eval(), weights, (x,))
    assert float(nn.functional.cross_entropy(outputs, y)) == pytest.approx(
        float(posterior.statistics["loss"][0, 2])
    )


@pytest.mark.parametrize("loss", ["mse", "binary_cross_entropy"])
def test_losses_of_one_output_take_flat_targets(loss):
    outputs, y = torch.randn(5, 1), torch.tensor([0, 1, 1, 0, 1])
    target = y.float()
    expected = {
        "mse": ((outputs[:, 0] - target) ** 2).mean(),
        "binary_cross_entropy": -(
            target * outputs[:, 0].sigmoid().log()
            + (1 - target) * (-outputs[:, 0]).sigmoid().log()
        ).mean(),
    }
    torch.testing.assert_close(LOSSES[loss](outputs, target), expected[loss])


class Positions(nn.Module):
    """A network with a parameter that no module resets."""

    def __init__(self):
        super().__init__()
        self.places, self.scale = (
            nn.Parameter(torch.randn(3, 2)),
            nn.Parameter(torch.ones(3)),
        )
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out((x @ self.places.T).tanh() * self.scale)


def test_parameters_that_no_module_resets_are_warned_of():
    net = Positions()
    with pytest.warns(
        UserWarning, match=r"no module resets the parameters \['places'\]"
    ):
        members = fresh_members(net, 5)
    assert torch.equal(members["places"], net.places.detach().expand(5, 3, 2))
    assert not torch.equal(members["out.weight"][0], members["out.weight"][1])
    options = {"initial": built_by(Positions), "epochs": 1, "progress": False}
    draws = ensemble(net, blobs(), 3, **options).get_samples()["places"]
    assert not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize("init", [None, built_by(perceptron)])
def test_frozen_parameters_stay_as_they_are_in_all_members(init):
    net = perceptron()
    net[0].requires_grad_(False)
    x, y = blobs()
    draws = ensemble(
        net, (x, y), 3, epochs=2, initial=init, progress=False
    ).get_samples()
    for name in ("0.weight", "0.bias"):
        assert torch.equal(
            draws[name], net.get_parameter(name).detach().expand_as(draws[name])
        )
    assert not torch.equal(draws["2.weight"][0], draws["2.weight"][1])
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        ensemble(net.requires_grad_(False), (x, y), 3, progress=False)


@pytest.mark.parametrize("make", [nn.Module, BayesianModel], ids=["network", "model"])
def test_a_frozen_trunk_counts_in_the_memory_of_members(make: Any) -> None:
    net = nn.Sequential(
        nn.Linear(2, 1000),
        nn.Linear(1000, 1000).requires_grad_(False),
        nn.Linear(1000, 2),
    )
    x, y = blobs()
    found = ensemble(
        net if make is nn.Module else make(net), (x, y), 5, epochs=1, progress=False
    )
    # of a million numbers each
    assert found.metadata["settings"]["members_at_once"] == 4


def test_a_site_of_the_likelihood_is_trained_within_its_support() -> None:
    """The mode over weight and noise scale together, against SciPy, on the scale on
    which a draw is given.
    """
    torch.manual_seed(0)
    x = torch.randn(40, 1, dtype=torch.float64)
    y = 1.5 * x[:, 0] + 0.7 * torch.randn(40, dtype=torch.float64)
    model = BayesianModel(
        nn.Linear(1, 1, bias=False).double(), 1.0, GaussianLikelihood(), len(x)
    ).double()
    adam = functools.partial(torch.optim.Adam, lr=0.02)
    scales = torch.tensor(
        [0.5, 1.0, 2.0], dtype=torch.float64
    )  # a draw from the prior may be tiny, and Adam slow there
    start = {"weight": torch.zeros(3, 1, 1, dtype=torch.float64), "noise_scale": scales}
    options: dict[str, Any] = {
        "epochs": 1000,
        "batch_size": None,
        "optimizer": adam,
        "initial": lambda count: start,
    }
    found = ensemble(model, (x, y), 3, progress=False, **options)

    def objective(point: np.ndarray) -> float:
        weights = {
            "weight": torch.tensor([[point[0]]]),
            "noise_scale": torch.tensor(point[1]).exp(),
        }
        return -float(model.log_joint(weights, x, y))

    best = scipy.optimize.minimize(
        objective,
        np.zeros(2),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-10},
    )
    assert np.allclose(found.samples["weight"][0].flatten(), best.x[0], atol=1e-4)
    assert np.allclose(found.samples["noise_scale"][0], np.exp(best.x[1]), atol=1e-4)


def test_a_watch_sees_every_step_and_all_members() -> None:
    x, y = torch.randn(12, 2), torch.randint(2, (12,))
    seen: list[tuple[int, torch.Size]] = []

    def watch(step: int, weights: dict[str, torch.Tensor]) -> None:
        seen.append((step, weights["weight"].shape))

    ensemble(
        nn.Linear(2, 2), (x, y), 3, epochs=5, batch_size=6, watch=watch, progress=False
    )
    assert seen == [(step, (3, 2, 2)) for step in range(10)]


@pytest.mark.parametrize("loss", ["mse", "binary_cross_entropy"])
def test_targets_that_a_loss_would_pair_with_all_outputs_are_refused(loss):
    """A loss alone would broadcast ``(B,)`` against ``(B, 2)``, and train on in
    silence.
    """
    x = torch.randn(12, 2)
    with pytest.raises(
        ValueError,
        match=r"a target has shape \(\), but an output of the network \(2,\)",
    ):
        ensemble(perceptron(2), (x, x[:, 0].sigmoid()), 2, loss=loss, progress=False)
    for y in (x[:, 0].sigmoid(), x[:, :1].sigmoid()):
        assert (
            ensemble(
                perceptron(1), (x, y), 2, loss=loss, epochs=1, progress=False
            ).num_samples
            == 2
        )


def test_a_pass_visits_every_row_once_in_each_members_own_order():
    """Each row's gradient is a unit vector, so the weights tell which rows were
    seen.
    """
    options = {"epochs": 1, "batch_size": 3, "cosine": False, "progress": False}
    found = ensemble(
        nn.Linear(13, 1, bias=False),
        (torch.eye(13), torch.zeros(13, 1)),
        8,
        loss=lambda outputs, targets: 3 * outputs.mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        initial=lambda count: {"weight": torch.zeros(count, 1, 13)},
        **options,
    ).get_samples()["weight"][:, 0]
    # one row fills no batch
    assert torch.equal(
        found.sort().values, torch.tensor([-1.0] * 12 + [0.0]).expand(8, 13)
    )
    assert not torch.equal(found[:4], found[4:])


def test_a_loss_that_is_zero_for_all_weights_is_refused():
    x = torch.randn(6, 2)
    with pytest.raises(ValueError, match="zero for a network of one output"):
        ensemble(nn.Linear(2, 1), (x, x[:, :1].sigmoid()), 2, epochs=1, progress=False)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("binary_cross_entropy", [0.0, 3.0]),
        ("binary_cross_entropy", [-1.0, 1.0]),
        ("cross_entropy", [-100, 1]),
    ],
)
def test_labels_that_a_loss_would_score_without_a_meaning_are_refused(loss, labels):
    net = perceptron(1 if loss == "binary_cross_entropy" else 2)
    data = torch.randn(2, 2), torch.tensor(labels)
    with pytest.raises(ValueError, match=f"'{loss}'"):
        ensemble(net, data, 2, loss=loss, epochs=1, progress=False)
