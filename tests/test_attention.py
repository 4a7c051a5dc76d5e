"""Networks with attention: PyTorch has fused paths for it that can't be mapped over weights or know no derivative."""

import copy
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.starts import starting_points

from .loops import assert_equal_to_a_loop, gaussian

ROWS, TOKENS, FEATURES = 6, 5, 8


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 12, dropout=0.0, batch_first=True)
        self.out = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.out(self.layer(x).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.out = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.three, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, 1)

    def forward(self, x):
        heads = self.three(x).unflatten(-1, (3, 2, FEATURES // 2)).movedim(-2, 1)
        mixed = nn.functional.scaled_dot_product_attention(*heads.unbind(-2), is_causal=True)
        return self.out(mixed.mean(2).flatten(1))


NETWORKS = [Encoder, Attention, Plain]


@pytest.fixture(autouse=True)
def loud():
    """PyTorch warns if it maps an operator over weights by a loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def data():
    return torch.randn(ROWS, TOKENS, FEATURES).double(), torch.randn(ROWS, 1).double()


def outputs_of(net, weights, x):
    """By a copy in train mode, in which no fused path is taken; there is no dropout."""
    own = copy.deepcopy(net).train()
    own.load_state_dict(weights)
    return own(x)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_energy_and_gradient_of_every_chain_equal_a_loop(kind, mode):
    net = getattr(kind().double(), mode)()
    model, (x, y) = gaussian(net), data()
    density = Density(model, args=(x, y))
    assert_equal_to_a_loop(
        density, copy.deepcopy(net).train(), x, y, starting_points(density, 3, model.initial_weights())
    )


def test_a_pyro_model_may_hold_such_a_network():
    net = Encoder().double().eval().requires_grad_(False)
    x, y = data()

    def model(x, y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([FEATURES]).to_event(1))
        pyro.sample("y", dist.Normal(net(x * scale), 0.3).to_event(2), obs=y)

    log_joint = ps.log_joint(model, x, y)
    scale = (torch.rand(4, FEATURES).double() + 0.5).requires_grad_()
    found = log_joint({"scale": scale})
    expected = torch.stack(
        [
            dist.LogNormal(0.0, 1.0).log_prob(own).sum() + dist.Normal(net.train()(x * own), 0.3).log_prob(y).sum()
            for own in scale
        ]
    )
    net.eval()
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(value.sum(), scale)[0] for value in (found, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("kind", NETWORKS)
def test_many_networks_are_trained_and_predict_at_once(kind):
    net, (x, y) = kind().double(), data()
    trained = ps.ensemble(net, (x, y), 3, epochs=2, batch_size=ROWS, loss="mse", progress=False)
    expected = torch.stack(
        [outputs_of(net, {site: value[k] for site, value in trained.get_samples().items()}, x) for k in range(3)]
    )
    torch.testing.assert_close(ps.predict(trained, net, x, progress=False), expected)
