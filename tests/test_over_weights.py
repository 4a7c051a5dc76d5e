"""Networks with operators that can't be mapped over weights: one by one, told once, and computed right."""

import warnings

import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.starts import starting_points

from .loops import assert_equal_to_a_loop, gaussian

MESSAGE = "networks are evaluated one by one, which takes longer"


class InPlace(nn.Module):
    """Adds to a tensor that holds no weights yet."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        total = torch.zeros(len(x), 4, dtype=x.dtype, device=x.device)
        total += self.first(x).tanh()
        return self.out(self.dropout(total))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.first(x)
        return self.out(hidden.tanh() if bool(hidden.sum() > 0) else hidden.sin())


def data():
    return torch.randn(7, 3).double(), torch.randn(7, 1).double()


@pytest.mark.parametrize("kind", [InPlace, Branching])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_energy_and_gradient_equal_a_loop(kind, batch_size):
    net, (x, y) = kind().double(), data()
    model = gaussian(net)
    with pytest.warns(UserWarning, match=MESSAGE):
        density = Density(model, args=(x, y), batch_size=batch_size, subsampled=True)
    z = starting_points(density, 3, model.initial_weights())
    rows = {name: torch.tensor([[0, 3, 5], [1, 2, 6], [6, 0, 1]]) for name in density.row_counts} or None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        assert_equal_to_a_loop(density, net, x, y, z, rows)


@pytest.mark.parametrize("kind", [InPlace, Branching])
def test_ensembles_are_trained_and_predict_as_each_network_does(kind):
    net, (x, y) = kind().double(), data()
    with pytest.warns(UserWarning, match=MESSAGE):
        trained = ps.ensemble(net, (x, y), 3, epochs=2, batch_size=7, loss="mse", progress=False)
    with pytest.warns(UserWarning, match=MESSAGE):
        predicted = ps.predict(trained, net, x, progress=False)
    for k, outputs in enumerate(predicted):
        net.load_state_dict({site: value[k] for site, value in trained.get_samples().items()})
        torch.testing.assert_close(outputs, net(x))


@pytest.mark.parametrize("words", ["not enough memory: you tried to allocate 8 bytes", "a matrix is singular"])
def test_failures_of_another_kind_are_passed_on_and_not_remembered(words, monkeypatch):
    model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(0.3))
    weights = {site: value.expand(2, *value.shape) for site, value in model.initial_weights().items()}
    kind = torch.linalg.LinAlgError if "singular" in words else RuntimeError

    def fail(*args, **kwargs):
        raise kind(words)

    with monkeypatch.context() as patch:
        patch.setattr(torch.func, "vmap", fail)
        with pytest.raises(kind, match=words[:12]):
            model.outputs(weights, torch.randn(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.outputs(weights, torch.randn(5, 3)).shape == (2, 5, 1)


def test_weights_shared_by_two_modules_begin_once_in_each_member():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x).mean(1))

    members = ps.ensembles.fresh_members(Tied(), 3)
    assert list(members) == ["embed.weight"]
    assert not torch.equal(members["embed.weight"][0], members["embed.weight"][1])
