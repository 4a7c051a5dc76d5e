import functools
import json
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

from pyro_symmetric.ensembles import ensemble, far_off, fresh_members, initialised_by, trainer
from pyro_symmetric.ensembles.coordinates import standardising
from pyro_symmetric.ensembles.data_checks import require_data
from pyro_symmetric.ensembles.members import LOSSES
from pyro_symmetric.ensembles.trainer import Trainer
from pyro_symmetric.likelihoods import GaussianLikelihood
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import StoreError
from pyro_symmetric.store import FolderRecorder


def blobs(rows=60):
    y = torch.arange(rows) % 2
    return torch.randn(rows, 2) + 3 * (2 * y[:, None] - 1), y


def perceptron(outputs=2):
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


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
        net, (x, y), 4, epochs=20, batch_size=None, optimizer=optimizer, initial=lambda n: start, progress=False
    ).get_samples()
    for member in range(4):
        expected = alone(perceptron(), {k: v[member] for k, v in start.items()}, x, y, optimizer, 20)
        for name, value in expected.items():
            torch.testing.assert_close(found[name][member], value.detach(), atol=2e-5, rtol=1e-4)


def test_members_have_their_own_starts_and_their_own_batches():
    (x, y), net = blobs(), perceptron()
    same = {k: v[:1].expand(6, *v.shape[1:]) for k, v in fresh_members(net, 1).items()}
    found = ensemble(net, (x, y), 6, epochs=2, batch_size=10, initial=lambda n: same, progress=False).get_samples()
    assert len({tuple(row.flatten().tolist()) for row in found["0.weight"]}) == 6
    fresh = fresh_members(net, 6)["0.weight"]
    assert len({tuple(row.flatten().tolist()) for row in fresh}) == 6


@pytest.mark.stochastic
def test_training_learns_and_reports_each_members_loss():
    x, y = blobs()
    posterior = ensemble(perceptron(), (x, y), 20, progress=False)
    weights = posterior.get_samples()
    hidden = torch.tanh(torch.einsum("mhi,ni->mnh", weights["0.weight"], x) + weights["0.bias"][:, None])
    logits = torch.einsum("moh,mnh->mno", weights["2.weight"], hidden) + weights["2.bias"][:, None]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), y.expand(20, -1), reduction="none").mean(1)
    torch.testing.assert_close(posterior.statistics["loss"][0], losses, atol=1e-5, rtol=1e-4)
    assert float(losses.max()) < 0.3
    assert (posterior.num_chains, posterior.num_samples) == (1, 20)


@pytest.mark.stochastic
def test_initial_values_follow_the_modules_own_law():
    # uniform within 1/sqrt(fan_in): variance 1/(3 fan_in). 2,000 draws of 2 entries or more, relative error of it up to
    # 1.4 %: over 6 % for fewer than 1 of 10^4 seeds.
    net = nn.Sequential(nn.Linear(4, 2), nn.Conv2d(6, 2, 3, groups=2), nn.BatchNorm2d(2), nn.Embedding(3, 2))
    members = fresh_members(net, 2000)
    for name, fan_in in (("0.weight", 4), ("0.bias", 4), ("1.weight", 27), ("1.bias", 27)):
        assert float(members[name].var()) == pytest.approx(1 / (3 * fan_in), rel=0.06)
        assert float(members[name].abs().max()) <= fan_in**-0.5
    assert bool((members["2.weight"] == 1).all())
    assert float(members["3.weight"].var()) == pytest.approx(1, rel=0.06)  # normal, by the module's own reset


def test_a_member_that_diverges_stops_alone_and_is_redrawn():
    (x, y), net = blobs(), perceptron()
    calls = []

    def start(count):
        calls.append(count)
        members = fresh_members(net, count)
        if len(calls) == 1:
            members["2.weight"][1] = float("nan")
        return members

    with pytest.warns(RuntimeWarning, match=r"1 members diverged.*; others were trained in their place"):
        found = ensemble(net, (x, y), 5, epochs=4, initial=start, progress=False)
    assert calls == [5, 1]
    assert found.num_samples == 5
    assert bool(torch.isfinite(found.get_samples()["0.weight"]).all())
    assert [entry["epoch"] for entry in found.metadata["stopped"]] == [0]
    calls.clear()
    with pytest.warns(RuntimeWarning, match=r"1 members diverged.*; 4 of 5 are left"):
        assert ensemble(net, (x, y), 5, epochs=4, initial=start, redraw=False, progress=False).num_samples == 4


class Cliff(torch.optim.SGD):
    """SGD whose very last step leads the second of several members too far."""

    def __init__(self, parameters, steps, rate):
        super().__init__(parameters, lr=0.05)
        self.left, self.rate = steps, rate

    def step(self):
        self.left -= 1
        for parameter in self.param_groups[0]["params"]:
            if self.left == 0 and len(parameter) > 1:
                parameter.grad[1] *= self.rate
        super().step()


@pytest.mark.parametrize("rate", [float("inf"), 1e39, float("nan")])
@pytest.mark.parametrize("redraw", [True, False])
@pytest.mark.filterwarnings("ignore:1 members diverged:RuntimeWarning")
def test_a_member_that_diverges_in_the_last_step_stops_like_any_other(rate, redraw):
    (x, y), net = blobs(), perceptron()
    make = functools.partial(Cliff, steps=3 * 4, rate=rate)
    options = {"epochs": 3, "batch_size": 15, "redraw": redraw, "progress": False}
    torch.manual_seed(3)
    with pytest.warns(RuntimeWarning, match="1 members diverged"):
        found = ensemble(net, (x, y), 5, optimizer=make, **options)
    assert found.num_samples == (5 if redraw else 4)
    assert [entry["epoch"] for entry in found.metadata["stopped"]] == [2]
    assert bool(torch.isfinite(found.statistics["loss"]).all())
    assert all(bool(torch.isfinite(value).all()) for value in found.samples.values())
    torch.manual_seed(3)
    whole = ensemble(net, (x, y), 5, optimizer=functools.partial(Cliff, steps=3 * 4, rate=1.0), **options)
    for name, value in whole.samples.items():
        assert torch.equal(found.samples[name][:, :4], value[:, [0, 2, 3, 4]])


def test_weights_that_are_not_finite_stop_a_member_whose_loss_hides_them():
    (x, y), net = blobs(), perceptron()

    def hiding(outputs, targets):
        return outputs.nan_to_num(0.0).square().mean()

    make = functools.partial(Cliff, steps=4, rate=float("nan"))
    with pytest.warns(RuntimeWarning, match="1 members diverged.*4 of 5 are left"):
        found = ensemble(
            net, (x, y), 5, loss=hiding, epochs=1, batch_size=15, optimizer=make, redraw=False, progress=False
        )
    assert all(bool(torch.isfinite(value).all()) for value in found.samples.values())


def test_the_rule_for_outliers_sees_the_loss_after_the_last_step():
    x, y, net = torch.randn(60, 2), torch.arange(60) % 2, perceptron()  # labels by chance: no weights fit them
    make = functools.partial(Cliff, steps=4, rate=1e9)
    options = {"epochs": 1, "batch_size": 15, "optimizer": make, "redraw": False, "progress": False}
    assert float(ensemble(net, (x, y), 5, **options).statistics["loss"].max()) > 1e3
    found = ensemble(net, (x, y), 5, outliers=far_off(1e3), **options)
    assert found.num_samples == 4
    assert found.metadata["stopped"][0]["loss"] > 1e3


def test_members_that_go_on_are_untouched_by_those_that_stop():
    (x, y), net = blobs(), perceptron()
    start = fresh_members(net, 3)
    broken = {k: v.clone() for k, v in start.items()}
    broken["0.weight"][1] = float("nan")
    options = {"epochs": 10, "batch_size": None, "optimizer": functools.partial(torch.optim.Adam, lr=0.05)}
    whole = ensemble(net, (x, y), 3, initial=lambda n: start, progress=False, **options).get_samples()
    with pytest.warns(RuntimeWarning, match="2 of 3 are left"):
        left = ensemble(net, (x, y), 3, initial=lambda n: broken, redraw=False, progress=False, **options).get_samples()
    for name, value in left.items():
        torch.testing.assert_close(value, whole[name][[0, 2]])


def test_far_off_losses_are_outliers():
    rule = far_off(10)
    losses = torch.tensor([0.10, 0.11, 0.09, 0.105, 0.7])
    assert rule(losses).tolist() == [False, False, False, False, True]
    (x, y), net = blobs(), perceptron()
    with pytest.raises(ValueError, match="all of 3 members stopped as outliers, the first in epoch 0"):
        ensemble(net, (x, y), 3, outliers=lambda values: values > -1, progress=False)
    with pytest.raises(ValueError, match="deviations is 0"):
        far_off(0)


def interrupted(monkeypatch, parts, *args, **options):
    """An ensemble that is stopped after so many parts."""
    train, made = Trainer.part, []

    def stopping(*arguments):
        if len(made) == parts:
            raise KeyboardInterrupt
        made.append(1)
        return train(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "part", stopping)
        with pytest.raises(KeyboardInterrupt):
            ensemble(*args, **options)


def test_a_stopped_run_is_taken_up_and_gives_the_same_members(tmp_path, monkeypatch):
    (x, y), net = blobs(), perceptron()
    options = {"epochs": 2, "members_at_once": 3, "progress": False}
    whole = ensemble(net, (x, y), 8, seed=5, **options)
    options["store"] = tmp_path / "run"
    interrupted(monkeypatch, 2, net, (x, y), 8, seed=5, **options)
    so_far = Posterior.load(tmp_path / "run")
    assert so_far.num_samples == 6
    assert so_far.rows == "independent"
    torch.manual_seed(99)  # the store knows its seed
    again = ensemble(perceptron(), (x, y), 8, **options)  # whose own values decide nothing
    for read in (again, Posterior.load(tmp_path / "run")):
        assert all(torch.equal(read.samples[name], value) for name, value in whole.samples.items())
        assert torch.equal(read.statistics["loss"], whole.statistics["loss"])
        assert read.metadata["losses"] == whole.metadata["losses"]
    with pytest.raises(StoreError, match=r"epochs: 2 there, 3 here"):
        ensemble(net, (x, y), 8, **{**options, "epochs": 3})
    with pytest.raises(StoreError, match=r"data\.x: their hash is another"):
        ensemble(net, (x + 1, y), 8, **options)
    with pytest.raises(StoreError, match=r"seed: 5 there, 6 here"):
        ensemble(net, (x, y), 8, seed=6, **options)


def test_a_seed_decides_the_members_and_leaves_the_global_generator_alone():
    (x, y), net = blobs(), nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 2))
    before = torch.get_rng_state()
    first, again, other = (
        ensemble(net, (x, y), 3, epochs=2, seed=seed, progress=False).samples["0.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    drawn = ensemble(net, (x, y), 3, epochs=2, progress=False)
    given = ensemble(net, (x, y), 3, epochs=2, seed=drawn.metadata["seed"], progress=False)
    assert torch.equal(drawn.samples["0.weight"], given.samples["0.weight"])


def test_another_gpu_is_told_when_an_ensemble_resumes(tmp_path, monkeypatch):
    """Its members can't be told from an unbroken run's by their loss, and yet may be others."""
    (x, y), net = blobs(), perceptron()
    options = {"epochs": 1, "members_at_once": 2, "progress": False, "store": tmp_path / "e"}

    def on(gpu):
        found = {"versions": {"torch": "2.0"}, "rounding": {"threads": 1, "gpu": gpu}}
        monkeypatch.setattr(trainer, "surroundings", lambda device: found)

    on("H100")
    interrupted(monkeypatch, 1, net, (x, y), 4, seed=5, **options)
    on("H200")
    with pytest.warns(RuntimeWarning, match=r"gpu: 'H100' there, 'H200' here"):
        ensemble(net, (x, y), 4, **options)
    on("H200")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble(net, (x, y), 4, **{**options, "store": tmp_path / "other"})
        ensemble(net, (x, y), 4, **{**options, "store": tmp_path / "other"})


def test_a_second_writer_is_refused(tmp_path):
    with FolderRecorder(tmp_path / "e", 2), pytest.raises(BlockingIOError):
        ensemble(perceptron(), blobs(), 2, epochs=1, store=tmp_path / "e", progress=False)


def test_members_that_are_left_out_are_left_out_of_the_store(tmp_path):
    (x, y), net = blobs(), perceptron()

    def start(count):
        members = fresh_members(net, count)
        members["2.weight"][1] = float("nan")
        return members

    options = {"epochs": 2, "initial": start, "redraw": False, "members_at_once": 3, "progress": False}
    with pytest.warns(RuntimeWarning, match="4 of 6 are left"):
        found = ensemble(net, (x, y), 6, store=tmp_path / "e", **options)
    assert found.num_samples == Posterior.load(tmp_path / "e").num_samples == 4
    assert bool(torch.isfinite(found.samples["2.weight"]).all())


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="holds thesis"):
        ensemble(perceptron(), blobs(), 2, store=tmp_path, progress=False)


def test_a_member_whose_likelihood_diverges_stops_alone():
    """A learnt scale of noise that isn't a number any more is no error of the model."""
    x = torch.randn(20, 2)
    model = BayesianModel(nn.Linear(2, 1), 1.0, GaussianLikelihood(), 20)

    def start(count):
        return {"noise_scale": torch.tensor([1.0, float("nan"), 1.0])[:count], **fresh_members(model.net, count)}

    with pytest.warns(RuntimeWarning, match="1 members diverged"):
        found = ensemble(model, (x, x[:, 0]), 3, epochs=2, initial=start, redraw=False, progress=False)
    assert found.num_samples == 2


def crossing(outputs, targets):
    return (outputs - targets).square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        crossing,
        lambda outputs, targets: -torch.distributions.Normal(outputs, 1.0).log_prob(targets).mean(),
        lambda outputs, targets: torch.nn.functional.l1_loss(outputs, targets),
        lambda outputs, targets: (targets > outputs).float().mul(outputs - targets).mean(),
    ],
)
def test_a_loss_that_pairs_every_output_with_every_target_is_refused(loss):
    x, net = torch.randn(12, 2), perceptron(1)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"loss pairs every output with every target"):
        ensemble(net, (x, x[:, 0]), 2, loss=loss, epochs=1, seed=0, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"loss pairs every output"):
        ensemble(nn.Sequential(perceptron(1), nn.Flatten(0)), (x, x[:, :1]), 2, loss=crossing, progress=False)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: (outputs.squeeze(-1) - targets).square().mean(),
        lambda outputs, targets: (outputs - targets[:, None]).square().mean(),
        lambda outputs, targets: ((outputs - outputs.T) - (targets[:, None] - targets)).square().mean(),  # of pairs
    ],
)
def test_a_loss_that_doesnt_is_taken(loss):
    x = torch.randn(12, 2)
    ensemble(perceptron(1), (x, x[:, 0]), 2, loss=loss, epochs=1, progress=False)


def test_map_members_end_at_the_mode_of_a_linear_model():
    # Gaussian prior 1, noise 0.5, no hidden layer: the mode is ridge regression
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * torch.randn(40).double()
    net = nn.Linear(3, 1, bias=False).double()
    model = BayesianModel(net, prior=1.0, likelihood=GaussianLikelihood(scale=0.5), num_data=40)
    optimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    found = ensemble(model, (x, y), 3, epochs=400, batch_size=None, optimizer=optimizer, progress=False)
    mode = torch.linalg.solve(x.T @ x + 0.25 * torch.eye(3).double(), x.T @ y)
    members = {"weight": found.get_samples()["weight"].to(x.device)}
    for member in members["weight"]:
        torch.testing.assert_close(member[0], mode, atol=1e-5, rtol=0)
    losses = -model.log_joint(members, x, y) / 40
    torch.testing.assert_close(found.statistics["loss"][0].double(), losses, atol=1e-5, rtol=0)
    assert found.metadata["losses"][-1] < found.metadata["losses"][0]


def test_running_statistics_are_each_members_own_and_kept():
    x, y = blobs()
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(3, 2))
    posterior = ensemble(net, (x, y), 4, epochs=3, progress=False)
    means = posterior.get_samples()["1.running_mean"]
    assert means.shape == (4, 3)
    assert float(means.std(0).min()) > 0
    assert "1.num_batches_tracked" not in posterior.samples
    # in eval mode with its own statistics each member has the loss that it reports
    weights = {k: v[2] for k, v in posterior.get_samples().items()}
    outputs = torch.func.functional_call(net.eval(), weights, (x,))
    assert float(nn.functional.cross_entropy(outputs, y)) == pytest.approx(float(posterior.statistics["loss"][0, 2]))


@pytest.mark.parametrize("loss", ["mse", "binary_cross_entropy"])
def test_losses_of_one_output_take_flat_targets(loss):
    outputs, y = torch.randn(5, 1), torch.tensor([0, 1, 1, 0, 1])
    target = y.float()
    expected = {
        "mse": ((outputs[:, 0] - target) ** 2).mean(),
        "binary_cross_entropy": -(
            target * outputs[:, 0].sigmoid().log() + (1 - target) * (-outputs[:, 0]).sigmoid().log()
        ).mean(),
    }
    torch.testing.assert_close(LOSSES[loss](outputs, target), expected[loss])


def test_result_is_a_posterior_that_can_be_stored(tmp_path):
    posterior = ensemble(perceptron(), blobs(), 3, epochs=1, progress=False)
    assert json.loads(json.dumps(posterior.metadata))["settings"]["optimizer"].startswith("Adam(lr=0.01")
    posterior.save(tmp_path / "e.safetensors")
    assert Posterior.load(tmp_path / "e.safetensors").num_samples == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "hinge"}, "loss is 'hinge'"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"members_at_once": 0}, "members_at_once is 0"),
        ({"num_members": 0}, "num_members is 0"),
        ({"initial": lambda n: {}}, "what initial gave is empty"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    options = {"num_members": 2, "progress": False, **change}
    with pytest.raises(ValueError, match=message):
        ensemble(perceptron(), blobs(), **options)


def test_data_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 inputs and 2 targets"):
        ensemble(perceptron(), (torch.randn(3, 2), torch.zeros(2)), 2, progress=False)
    with pytest.raises(TypeError, match="pair of tensors"):
        ensemble(perceptron(), torch.randn(3, 2), 2, progress=False)
    with pytest.raises(ValueError, match="no parameters"):
        ensemble(nn.ReLU(), blobs(), 2, progress=False)


X = torch.randn(20, 2, generator=torch.Generator(torch.empty(0).device).manual_seed(0))
LABELS = torch.arange(20) % 2


@pytest.mark.parametrize(
    ("outputs", "loss", "x", "y", "message"),
    [
        (2, "cross_entropy", X[:, :1], LABELS, r"can't take a tensor \(3, 1\)"),
        (2, "cross_entropy", X.double(), LABELS, r"pass inputs\.to\(torch\.float32\)"),
        (2, "cross_entropy", X.log(), LABELS, r"\d+ rows of the inputs aren't finite"),
        (2, "cross_entropy", X, LABELS + 1, "labels from 1 to 2, but the network has 2 outputs"),
        (2, "cross_entropy", X, LABELS - 101, "labels from -101 to -101"),
        (1, "mse", X, X[:, 0].log(), r"\d+ rows of the targets aren't finite"),
        (2, "cross_entropy", X, LABELS.float(), r"whole numbers: pass y\.long"),
        (2, "cross_entropy", X, LABELS[:, None], r"class labels must have shape \(20,\)"),
        (1, "cross_entropy", X, LABELS, "loss='binary_cross_entropy'"),
        (1, "mse", X, X, r"shape \(20, 2\), but the network's outputs are \(20, 1\)"),
        (2, "mse", X, X[:, 0], r"shape \(20,\), but the network's outputs are \(20, 2\)"),
        (1, "binary_cross_entropy", X, 2 * LABELS, "must lie in 0 to 1"),
    ],
)
def test_data_that_do_not_fit_the_network_or_the_loss_are_refused(outputs, loss, x, y, message):
    with pytest.raises(ValueError, match=message):
        ensemble(perceptron(outputs), (x, y), 2, loss=loss, progress=False)


@pytest.mark.parametrize(
    ("outputs", "loss", "y"),
    [
        (2, "cross_entropy", LABELS.int()),
        (2, "cross_entropy", X.softmax(-1)),
        (2, "mse", X),
        (1, "mse", X[:, 0]),
        (1, "binary_cross_entropy", LABELS[:, None]),
        (1, "binary_cross_entropy", X[:, 0].sigmoid()),
        (2, "cross_entropy", torch.where(torch.arange(20) < 3, -100, LABELS)),
        (1, lambda outputs, targets: (outputs[:, 0] - targets).nan_to_num(0.0).square().mean(), X[:, 0].log()),
        (3, lambda outputs, targets: (outputs[:, :2] - targets).abs().mean(), X),
    ],
)
def test_data_that_fit_are_taken(outputs, loss, y):
    posterior = ensemble(perceptron(outputs), (X, y), 2, loss=loss, epochs=1, progress=False)
    assert bool(torch.isfinite(posterior.statistics["loss"]).all())


def test_the_check_of_the_data_leaves_running_statistics_alone():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    require_data(net, "cross_entropy", X, LABELS)
    assert net.training
    assert torch.equal(net[1].running_mean, torch.zeros(3))


def test_labels_of_a_bayesian_model_are_checked_too():
    model = BayesianModel(perceptron(), prior=1.0, likelihood="categorical")
    with pytest.raises(ValueError, match="labels from 1 to 2"):
        ensemble(model, (X, LABELS + 1), 2, progress=False)


def test_something_that_is_no_network_is_named():
    with pytest.raises(TypeError, match=r"net is a function; it must be an nn\.Module"):
        ensemble(lambda x: x, (X, LABELS), 2, progress=False)


class Positions(nn.Module):
    """A network with a parameter that no module resets, and its activation in ``forward``."""

    def __init__(self, act=torch.tanh):
        super().__init__()
        self.places, self.scale = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.ones(3))
        self.out = nn.Linear(3, 2)
        self.act = act

    def forward(self, x):
        return self.out(self.act(x @ self.places.T) * self.scale)


def test_parameters_that_no_module_resets_are_warned_of():
    net = Positions()
    with pytest.warns(UserWarning, match=r"no module resets the parameters \['places'\]"):
        members = fresh_members(net, 5)
    assert torch.equal(members["places"], net.places.detach().expand(5, 3, 2))
    assert not torch.equal(members["out.weight"][0], members["out.weight"][1])
    options = {"initial": initialised_by(Positions), "epochs": 1, "progress": False}
    draws = ensemble(net, blobs(), 3, **options).get_samples()["places"]
    assert not torch.equal(draws[0], draws[1])


def test_members_can_be_initialised_as_a_network_is_built():
    def make():
        net = perceptron()
        nn.init.constant_(net[0].bias, 0.25)  # what reset_parameters wouldn't do
        return net

    torch.manual_seed(3)
    expected = [make() for _ in range(4)]
    torch.manual_seed(3)
    members = initialised_by(make)(4)
    for name in members:
        assert torch.equal(members[name], torch.stack([net.get_parameter(name).detach() for net in expected]))
    ensemble(perceptron(), blobs(), 2, initial=initialised_by(make), epochs=1, progress=False)


@pytest.mark.parametrize("init", [None, initialised_by(perceptron)])
def test_frozen_parameters_stay_as_they_are_in_all_members(init):
    net = perceptron()
    net[0].requires_grad_(False)
    x, y = blobs()
    draws = ensemble(net, (x, y), 3, epochs=2, initial=init, progress=False).get_samples()
    for name in ("0.weight", "0.bias"):
        assert torch.equal(draws[name], net.get_parameter(name).detach().expand_as(draws[name]))
    assert not torch.equal(draws["2.weight"][0], draws["2.weight"][1])
    with pytest.raises(ValueError, match="no parameter of net requires a gradient"):
        ensemble(net.requires_grad_(False), (x, y), 3, progress=False)


@pytest.mark.filterwarnings("ignore:no module resets the parameters")
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.5)}, "optimizer"),
        ({"loss": lambda o, y: 2 * nn.functional.cross_entropy(o, y)}, "loss: "),
        ({"net": Positions(torch.relu)}, "at the same weights it is another"),
    ],
)
def test_a_folder_is_not_taken_up_by_functions_that_only_look_alike(tmp_path, change, what):
    options = {
        "net": Positions(),
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "loss": lambda o, y: nn.functional.cross_entropy(o, y),
    }
    options |= {"data": blobs(), "num_members": 2, "epochs": 1, "store": tmp_path, "progress": False}
    first, again = ensemble(**options), ensemble(**options)
    assert torch.equal(first.samples["places"], again.samples["places"])
    with pytest.raises(ValueError, match=what):
        ensemble(**{**options, **change})


def test_something_that_makes_no_optimiser_of_members_is_refused():
    net = perceptron()
    with pytest.raises(TypeError, match=r"functools\.partial\(torch\.optim\.Adam, lr="):
        ensemble(net, blobs(), 2, optimizer=torch.optim.Adam(net.parameters()), progress=False)
    with pytest.raises(ValueError, match="LBFGS"):
        ensemble(net, blobs(), 2, optimizer=torch.optim.LBFGS, progress=False)


def test_with_a_store_a_part_is_a_tenth_of_the_members(tmp_path):
    found = ensemble(perceptron(), blobs(), 60, epochs=1, store=tmp_path, progress=False)
    assert found.metadata["settings"]["members_at_once"] == 25


def test_an_optimiser_may_have_groups_and_a_loss_noise_and_both_are_taken_up(tmp_path):
    def groups(rate):
        def make(parameters):
            weight, bias, *others = parameters
            return torch.optim.SGD([{"params": [weight, bias], "lr": rate}, {"params": others}], lr=0.1)

        return make

    def noisy(outputs, targets):
        return nn.functional.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), targets)

    options = {"loss": noisy, "epochs": 1, "store": tmp_path, "progress": False}
    torch.manual_seed(0)
    first = ensemble(perceptron(), blobs(), 2, optimizer=groups(0.01), **options)
    torch.manual_seed(0)
    net, data = perceptron(), blobs()
    again = ensemble(net, data, 2, optimizer=groups(0.01), **options)
    assert torch.equal(first.samples["0.weight"], again.samples["0.weight"])
    with pytest.raises(ValueError, match="optimizer"):
        ensemble(net, data, 2, optimizer=groups(0.5), **options)


def test_a_site_of_the_likelihood_is_trained_within_its_support() -> None:
    """The mode over weight and noise scale together, against SciPy, on the scale on which a draw is given."""
    torch.manual_seed(0)
    x = torch.randn(40, 1, dtype=torch.float64)
    y = 1.5 * x[:, 0] + 0.7 * torch.randn(40, dtype=torch.float64)
    model = BayesianModel(nn.Linear(1, 1, bias=False).double(), 1.0, GaussianLikelihood(), len(x)).double()
    adam = functools.partial(torch.optim.Adam, lr=0.02)
    scales = torch.tensor(
        [0.5, 1.0, 2.0], dtype=torch.float64
    )  # a draw from the prior may be tiny, and Adam slow there
    start = {"weight": torch.zeros(3, 1, 1, dtype=torch.float64), "noise_scale": scales}
    options: dict[str, Any] = {"epochs": 1000, "batch_size": None, "optimizer": adam, "initial": lambda count: start}
    found = ensemble(model, (x, y), 3, progress=False, **options)

    def objective(point: np.ndarray) -> float:
        weights = {"weight": torch.tensor([[point[0]]]), "noise_scale": torch.tensor(point[1]).exp()}
        return -float(model.log_joint(weights, x, y))

    best = scipy.optimize.minimize(
        objective, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10}
    )
    assert np.allclose(found.samples["weight"][0].flatten(), best.x[0], atol=1e-4)
    assert np.allclose(found.samples["noise_scale"][0], np.exp(best.x[1]), atol=1e-4)


def test_a_watch_sees_every_step_and_a_perturbation_moves_the_likelihood_alone() -> None:
    x, y = torch.randn(12, 2), torch.randint(2, (12,))
    model = BayesianModel(nn.Linear(2, 2), 1.0)
    steps: list[int] = []

    def watch(step: int, weights: dict[str, torch.Tensor]) -> None:
        steps.append(step)
        assert weights["weight"].shape == (3, 2, 2)

    def without_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {site: 0.0 * value for site, value in weights.items()}

    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    options: dict[str, Any] = {"epochs": 200, "batch_size": 6, "optimizer": sgd, "progress": False}
    found = ensemble(model, (x, y), 3, perturb=without_weights, watch=watch, cosine=False, **options)
    assert steps == list(range(400))
    # The likelihood doesn't depend on the weights, so that the prior alone draws them to its mode, zero.
    assert float(found.samples["weight"].abs().max()) < 1e-5
    with pytest.raises(ValueError, match="perturb"):
        ensemble(model.net, (x, y), 3, perturb=without_weights, progress=False)


def test_coordinates_are_those_of_a_network_on_standardised_data():
    net = perceptron(1).double()
    x = torch.randn(50, 2, dtype=torch.float64) * torch.tensor([100.0, 0.01]) + torch.tensor([700.0, 3.0])
    y = 5 + 20 * torch.randn(50, dtype=torch.float64)
    frame = standardising(net, x, y)
    free = {name: torch.randn(4, *p.shape, dtype=torch.float64) for name, p in net.named_parameters()}
    weights = frame.weights(free)
    for member in range(4):
        own, there = ({name: value[member] for name, value in w.items()} for w in (weights, free))
        found = torch.func.functional_call(net, own, (x,))[:, 0]
        standard = torch.func.functional_call(net, there, ((x - x.mean(0)) / x.std(0, correction=0),))[:, 0]
        torch.testing.assert_close(found, y.mean() + y.std(correction=0) * standard)
    again = frame.free(weights)
    assert all(torch.allclose(again[name], value) for name, value in free.items())


@pytest.mark.stochastic
@pytest.mark.parametrize("bayesian", [False, True])
def test_defaults_fit_a_regression_whatever_its_units(bayesian):
    """Noise 1 of a target of deviation 10: 5 members of 8 units come under 4, where the mean alone has 10."""
    x = torch.rand(300, 2) * 2 - 1
    y = (3 * x[:, 0]).sin() + 0.7 * x[:, 1]
    y = (y - y.mean()) / y.std() + 0.1 * torch.randn(300)
    data = (x * torch.tensor([200.0, 0.01]) + torch.tensor([700.0, 3.0]), 10 * y + 20)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    model = BayesianModel(net, prior=300.0, likelihood=GaussianLikelihood(prior_scale=10.0), num_data=300)
    draws = ensemble(model if bayesian else net, data, 5, loss="mse", seed=1, progress=False).get_samples()
    weights = {name: draws[name] for name, _ in net.named_parameters()}
    outputs = torch.func.vmap(lambda w: torch.func.functional_call(net, w, (data[0],)))(weights)
    assert float((outputs[..., 0] - data[1]).square().mean().sqrt()) < 4


def test_layers_that_dont_see_the_data_keep_their_coordinates():
    x, y = torch.randn(10, 2), torch.randn(10)
    frame = standardising(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Sigmoid()).eval(), x, y)
    assert (frame.first, frame.last) == (None, None)
    assert standardising(perceptron(1), x, None).last is None
    assert standardising(perceptron(1), x, y, {"0.weight"}).first is None
    assert standardising(nn.Linear(2, 1), x, y).first is None  # a network that is itself the layer
