"""Calls that follow sampling run in the draws' precision, whatever the data's is; data
are found at any depth.
"""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.density.traced import placed
from pyro_symmetric.mcmc import HMC, sample

X, Y = torch.linspace(-1, 1, 60).reshape(20, 3), torch.linspace(-1, 1, 20)
QUICK = {
    "num_samples": 8,
    "num_warmup": 4,
    "num_chains": 2,
    "seed": 0,
    "progress": False,
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of short runs


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def nested(data):
    model(*data["xy"])


@pytest.mark.cpu
def test_tensors_are_found_in_containers_and_modules_are_copied_only_if_they_must():
    net = nn.Linear(2, 1)
    same, args, kwargs = placed(
        net, ({"a": [X]}, 3), {"k": (Y, "s")}, None, torch.float64
    )
    assert same is not net
    assert same.weight.dtype == torch.float64
    assert net.weight.dtype == torch.float32
    assert args[0]["a"][0].dtype == kwargs["k"][0].dtype == torch.float64
    assert (args[1], kwargs["k"][1]) == (3, "s")
    assert placed(net, (torch.arange(3),), {}, "cpu", torch.float32)[0] is net
    assert (
        placed(net, (torch.arange(3),), {}, None, torch.float64)[1][0].dtype
        == torch.int64
    )


def test_a_traced_models_predictions_and_likelihoods_are_taken_in_the_draws_precision():
    posterior = sample(HMC(model), X, Y, dtype=torch.float64, **QUICK)
    w = posterior.get_samples()["w"]
    mean = ps.predict(posterior, model, X, None, kind="mean", progress=False)["y"]
    assert mean.dtype == torch.float64
    assert torch.allclose(mean, w @ X.double().T)
    tree = posterior.to_arviz(log_likelihood=True)
    expected = dist.Normal(mean, 1.0).log_prob(Y.double())
    assert np.allclose(
        tree["log_likelihood"]["y"].values.reshape(expected.shape), expected.numpy()
    )
    assert np.allclose(tree["observed_data"]["y"].values, Y.numpy())
    assert ps.diagnose(posterior)["temperature"].name == "temperature"


def test_data_in_containers_are_placed():
    data = {"xy": (X, Y)}
    flat = sample(HMC(model), X, Y, dtype=torch.float64, **QUICK)
    deep = sample(HMC(nested), data, dtype=torch.float64, **QUICK)
    assert torch.equal(deep.samples["w"], flat.samples["w"])


def test_a_networks_convergence_is_told_on_data_of_another_precision():
    net = ps.BayesianModel(
        nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)),
        likelihood="gaussian",
    )
    posterior = sample(HMC(net), X.double(), Y.double(), dtype=torch.float64, **QUICK)
    function = ps.diagnose(posterior).statistics
    density = {"density": posterior.statistics["lp"]}
    expected = float(
        ps.Posterior(density, kind="chains").diagnostics()["density"]["r_hat"]
    )
    assert function["log density"]["log density"].r_hat.item() == pytest.approx(
        expected, rel=1e-4
    )
    assert function["predictions"]["predictions"].r_hat.shape[0] == 20


@pytest.mark.cuda
def test_constrained_sites_on_a_gpu_are_sampled_checked_and_predicted_there():
    low = torch.zeros(3, device="cuda")

    def bounded(x, y):
        w = pyro.sample("w", dist.Uniform(low, low + 1).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    posterior = sample(HMC(bounded), X, Y, device="cuda", **QUICK)
    assert ps.diagnose(posterior)["temperature"]
    assert ps.predict(posterior, bounded, X, None, kind="mean", progress=False)[
        "y"
    ].shape == (16, 20)
