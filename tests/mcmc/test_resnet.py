"""A ResNet-20 with filter-response normalisation under stochastic-gradient HMC; batch normalisation is refused."""

import pytest
import torch
from torch import nn

from pyro_symmetric.mcmc import SGHMC, Density, sample
from pyro_symmetric.mcmc.run import starting_points
from pyro_symmetric.models import BayesianModel, GaussianPrior
from pyro_symmetric.networks import resnet20


def test_chains_of_a_resnet20_have_the_gradients_of_their_own_batches_and_part():
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    net = resnet20(width=2)
    model = BayesianModel(net, GaussianPrior(1.0, fan_in=True))
    density = Density(model, args=(x, y), batch_size=4, subsampled=True)
    z = starting_points(density, 2, model.initial_weights())
    rows = torch.stack([torch.arange(4), torch.arange(10, 14)])
    _, gradient = density.energy_and_gradient(z, {"rows": rows})
    for chain in range(2):  # by plain backpropagation
        loss = nn.functional.cross_entropy(net(x[rows[chain]]), y[rows[chain]], reduction="sum") * 16 / 4
        loss = loss - sum(model.priors()[name].log_prob(p) for name, p in net.named_parameters())
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
        assert (gradient[chain] - expected).norm() < 1e-4 * expected.norm()
    kernel = SGHMC(model, batch_size=4, step_size=0.003, friction=10.0, num_steps=1)
    options = {"num_chains": 2, "num_samples": 1, "num_warmup": 1, "initial": model.initial_weights()}
    weights = sample(kernel, x, y, progress=False, **options).samples["0.weight"]
    assert weights.flatten(1).unique(dim=0).shape[0] == 2  # one start, two ways


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
