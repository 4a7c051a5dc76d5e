"""A ResNet-20 under stochastic-gradient HMC: with filter-response normalisation; batch normalisation is refused."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from pyro_symmetric.mcmc import SGHMC, Density, sample
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.models import BayesianModel, GaussianPrior

SOURCE = Path(__file__).parents[2] / "benchmarks" / "networks.py"
ROWS, BATCH = 32, 4


def resnet20() -> nn.Module:
    spec = importlib.util.spec_from_file_location("benchmark_networks", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.resnet20()


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE.exists(), reason="the benchmarks aren't part of an installed package")
def test_sixteen_chains_of_a_resnet20_take_steps_along_the_gradient_of_their_own_batches():
    x, y = torch.randn(ROWS, 3, 8, 8), torch.arange(ROWS) % 10
    model = BayesianModel(resnet20(), GaussianPrior(1.0, fan_in=True))
    density = Density(model, args=(x, y), batch_size=BATCH, subsampled=True)
    z = starting_points(density, 2, model.initial_weights())
    rows = torch.stack([torch.arange(4), torch.arange(10, 14)])
    _, gradient = density.energy_and_gradient(z, {"rows": rows})
    for chain in range(2):  # by plain backpropagation
        net = resnet20()
        net.load_state_dict(model.initial_weights())
        loss = nn.functional.cross_entropy(net(x[rows[chain]]), y[rows[chain]], reduction="sum") * ROWS / BATCH
        priors = model.priors()
        loss = loss - sum(priors[name].log_prob(p) for name, p in net.named_parameters())
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
        assert (gradient[chain] - expected).norm() < 1e-4 * expected.norm()

    kernel = SGHMC(model, batch_size=BATCH, step_size=0.003, friction=10.0, num_steps=2)
    posterior = sample(
        kernel, x, y, num_chains=16, num_samples=2, num_warmup=1, initial=model.initial_weights(), progress=False
    )
    weights = posterior.samples["0.weight"]
    assert weights.shape == (16, 2, 16, 3, 3, 3)
    assert torch.isfinite(weights).all()
    assert not posterior.statistics["diverging"].any()
    assert weights[:, -1].flatten(1).unique(dim=0).shape[0] == 16  # one start, sixteen ways


def test_batch_normalisation_in_train_mode_is_refused_and_in_eval_mode_sampled():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8)
    model = BayesianModel(net)
    model.train()
    with pytest.raises(ValueError, match=r"'net\.1' is batch normalisation in train mode.*\.eval\(\)"):
        sample(SGHMC(model, batch_size=4), x, y, progress=False)
    kernel = SGHMC(model.eval(), batch_size=4, step_size=1e-3, num_steps=1)
    posterior = sample(kernel, x, y, num_chains=2, num_samples=1, num_warmup=0, progress=False)
    assert torch.isfinite(posterior.samples["1.weight"]).all()
