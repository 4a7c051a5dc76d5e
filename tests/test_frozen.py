"""Frozen parameters of a network are no sites of its model: they stay as they are, in every room."""

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.starts import starting_points

from .loops import assert_equal_to_a_loop, gaussian

LAST = ["2.weight", "2.bias"]


class Adapted(nn.Module):
    """A frozen recurrent layer and a frozen linear one, with a low-rank adapter, and a head whose weight is tied."""

    def __init__(self):
        super().__init__()
        self.layer, self.base = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 4)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.base.weight
        for part in (self.layer, self.base):
            part.requires_grad_(False)
        self.head.bias.requires_grad_(True)

    def forward(self, x):
        hidden = self.layer(x)[0][:, -1]
        return self.head((self.base(hidden) + self.up(self.down(hidden))).tanh())


def last_layer():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net[0].requires_grad_(False)
    return net


def test_frozen_parameters_are_no_sites_unless_all_are_frozen():
    net = last_layer()
    assert list(ps.BayesianModel(net).site_shapes) == LAST
    assert list(dict(net.named_parameters())) == ["0.weight", "0.bias", *LAST]  # the user's own is as it was
    assert list(ps.BayesianModel(net.requires_grad_(False)).site_shapes) == ["0.weight", "0.bias", *LAST]
    assert list(ps.BayesianModel(Adapted()).site_shapes) == ["down.weight", "up.weight", "head.bias"]


@pytest.mark.filterwarnings("ignore:networks are evaluated one by one")  # a recurrent layer is
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("kind", ["last layer", "adapters"])
def test_energy_and_gradient_equal_a_loop_with_the_frozen_ones_in_place(kind, batch_size):
    net = (last_layer() if kind == "last layer" else Adapted()).double()
    x = torch.randn(9, 3).double() if kind == "last layer" else torch.randn(9, 5, 3).double()
    y = torch.randn(9, 1 if kind == "last layer" else 4).double()
    model = gaussian(net)
    density = Density(model, args=(x, y), batch_size=batch_size, subsampled=True)
    z = starting_points(density, 3, model.initial_weights())
    rows = {name: torch.tensor([[0, 3, 5, 8], [1, 2, 6, 7], [6, 0, 1, 4]]) for name in density.row_counts} or None
    assert_equal_to_a_loop(density, net, x, y, z, rows)


def test_the_posterior_of_a_last_layer_goes_through_samplers_guides_ensembles_and_predictions():
    net, x, y = last_layer(), torch.randn(20, 3), torch.randn(20, 1)
    model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(0.3))
    symmetry = ps.find_symmetry(net, x[:2])
    drawn = ps.sample(ps.NUTS(model), x, y, num_samples=20, num_warmup=20, num_chains=2, progress=False)
    assert set(drawn.samples) == set(LAST)
    guide = ps.AutoSymmetrized(model, symmetry)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(x, y)
    assert set(guide(x, y)) == set(LAST)
    assert Predictive(model, guide=guide, num_samples=3)(x)["y"].shape == (3, 20)
    trained = ps.ensemble(model, (x, y), 3, epochs=1, progress=False)
    for posterior in (drawn, trained):
        from_net, from_model = ps.predict(posterior, net, x, progress=False), ps.predict(posterior, model, x)
        torch.testing.assert_close(from_net, from_model)
        net.load_state_dict({site: value[0] for site, value in posterior.get_samples().items()}, strict=False)
        torch.testing.assert_close(from_net[0], net(x))
    ps.diagnose(drawn, symmetry, model, x=x)
    ps.mmd(*ps.common_frame(drawn, drawn, symmetry))
