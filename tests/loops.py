"""Densities of networks, one by one, by the network itself: what batched evaluations are compared with."""

import copy

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import pyro_symmetric as ps
from pyro_symmetric.mcmc import Density

NOISE = 0.3


def gaussian(net: nn.Module) -> ps.BayesianModel:
    return ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(NOISE))


def assert_equal_to_a_loop(
    density: Density, net: nn.Module, x: Tensor, y: Tensor, z: Tensor, rows: dict[str, Tensor] | None = None
) -> None:
    """Energy and gradient of each chain are those of a copy of the network that holds its weights."""
    energy, gradient = density.energy_and_gradient(z, rows)
    for chain, row in enumerate(z):
        own = copy.deepcopy(net)
        own.load_state_dict(density.layout.constrain(row), strict=False)
        part = slice(None) if rows is None else next(iter(rows.values()))[chain]
        loss = -Normal(own(x[part]), NOISE).log_prob(y[part]).sum() * len(x) / len(x[part])
        loss = loss - sum(prior.log_prob(own.get_parameter(name)) for name, prior in density.target.sites.items())
        free = [parameter for parameter in own.parameters() if parameter.requires_grad]
        slope = torch.cat([part.flatten() for part in torch.autograd.grad(loss, free)])
        torch.testing.assert_close(energy[chain], loss)
        torch.testing.assert_close(gradient[chain], slope)
