"""Networks that are hard to map over weights, in every room: fused attention, operators
that can't be mapped (which are computed one by one, told once), frozen and tied
parameters."""

import contextlib
import copy
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.starts import starting_points

FEATURES = 8
MESSAGE = "networks are evaluated one by one, which takes longer"
LAST = ["2.weight", "2.bias"]


class Encoder(nn.Module):
    """PyTorch's fused path of it knows no derivative."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            FEATURES, 2, 12, dropout=0.0, batch_first=True
        )
        self.out = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.out(self.layer(x).mean(1))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.three, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, 1)

    def forward(self, x):
        heads = self.three(x).unflatten(-1, (3, 2, FEATURES // 2)).movedim(-2, 1)
        mixed = nn.functional.scaled_dot_product_attention(
            *heads.unbind(-2), is_causal=True
        )
        return self.out(mixed.mean(2).flatten(1))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.first(x)
        return self.out(hidden.tanh() if bool(hidden.sum() > 0) else hidden.sin())


class Adapted(nn.Module):
    """A frozen recurrent layer and a frozen linear one, with a low-rank adapter, and a
    head whose weight is tied.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.base = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 4)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 1)
        self.layer.requires_grad_(False)
        self.base.requires_grad_(False)

    def forward(self, x):
        hidden = self.layer(x)[0][:, -1]
        adapted = self.base(hidden) + self.up(self.down(hidden))
        return self.head(nn.functional.linear(adapted.tanh(), self.base.weight))


def last_layer():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net[0].requires_grad_(False)
    return net


# Name -> what makes the network, the shape of a row, and whether it can't be mapped
# over weights.
NETWORKS = {
    "encoder": (Encoder, (5, FEATURES), False),
    "encoder in eval mode": (lambda: Encoder().eval(), (5, FEATURES), False),
    "plain attention": (Plain, (5, FEATURES), False),
    "branching": (Branching, (3,), True),
    # it can, unless each network has data of its own
    "adapters": (Adapted, (5, 3), None),
    "last layer": (last_layer, (3,), False),
}


def problem(name):
    make, shape, _ = NETWORKS[name]
    return make().double(), torch.randn(7, *shape).double(), torch.randn(7, 1).double()


def told(name):
    """A warning of networks that are evaluated one by one, once; else none, also of
    PyTorch's own loops.
    """
    if NETWORKS[name][2]:
        return pytest.warns(UserWarning, match=MESSAGE)
    quiet = contextlib.ExitStack()
    quiet.enter_context(warnings.catch_warnings())
    warnings.simplefilter(
        "ignore" if NETWORKS[name][2] is None else "error", UserWarning
    )
    return quiet


def holding(net, weights):
    """A copy in train mode, in which no fused path is taken; there is no dropout."""
    own = copy.deepcopy(net).train()
    own.load_state_dict(weights, strict=False)
    return own


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_energy_and_gradient_of_every_chain_equal_a_loop(name, batch_size):
    net, x, y = problem(name)
    model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(0.3))
    with told(name):
        density = Density(model, args=(x, y), batch_size=batch_size, subsampled=True)
    z = starting_points(density, 3, model.initial_weights())
    rows = {
        name: torch.tensor([[0, 3, 5], [1, 2, 6], [6, 0, 1]])
        for name in density.row_counts
    } or None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        energy, gradient = density.energy_and_gradient(z, rows)
    for chain, row in enumerate(z):
        own, part = (
            holding(net, density.layout.constrain(row)),
            slice(None) if rows is None else rows["rows"][chain],
        )
        loss = (
            -dist.Normal(own(x[part]), 0.3).log_prob(y[part]).sum()
            * len(x)
            / len(x[part])
        )
        loss = loss - sum(
            prior.log_prob(own.get_parameter(site))
            for site, prior in model.priors().items()
        )
        free = [parameter for parameter in own.parameters() if parameter.requires_grad]
        torch.testing.assert_close(energy[chain], loss)
        slope = torch.cat([part.flatten() for part in torch.autograd.grad(loss, free)])
        torch.testing.assert_close(gradient[chain], slope)


@pytest.mark.parametrize("name", ["encoder", "plain attention", "branching"])
def test_many_networks_are_trained_and_predict_as_each_does(name):
    net, x, y = problem(name)
    with told(name):
        trained = ps.ensemble(
            net, (x, y), 3, epochs=2, batch_size=7, loss="mse", progress=False
        )
    with told(name):
        predicted = ps.predict(trained, net, x, progress=False)
    for k, outputs in enumerate(predicted):
        own = holding(
            net, {site: value[k] for site, value in trained.get_samples().items()}
        )
        torch.testing.assert_close(outputs, own(x))


def test_a_pyro_model_may_hold_an_encoder():
    net, x, y = problem("encoder in eval mode")
    net.requires_grad_(False)

    def model(x, y):
        scale = pyro.sample(
            "scale", dist.LogNormal(0.0, 1.0).expand([FEATURES]).to_event(1)
        )
        pyro.sample("y", dist.Normal(net(x * scale), 0.3).to_event(2), obs=y)

    log_joint = ps.log_joint(model, x, y)
    scale = (torch.rand(4, FEATURES).double() + 0.5).requires_grad_()
    found = log_joint({"scale": scale})
    prior, own = dist.LogNormal(0.0, 1.0).log_prob(scale).sum(1), holding(net, {})
    expected = prior + torch.stack(
        [dist.Normal(own(x * one), 0.3).log_prob(y).sum() for one in scale]
    )
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(value.sum(), scale)[0] for value in (found, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize(
    "words",
    ["not enough memory: you tried to allocate 8 bytes", "a matrix is singular"],
)
def test_failures_of_another_kind_are_passed_on_and_not_remembered(words, monkeypatch):
    model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(0.3))
    weights = {
        site: value.expand(2, *value.shape)
        for site, value in model.initial_weights().items()
    }
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

    members = ps.ensembles.fresh_members(Tied(), 3)
    assert list(members) == ["embed.weight"]
    assert not torch.equal(members["embed.weight"][0], members["embed.weight"][1])


def test_a_module_with_two_names_keeps_its_own_weights():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    twice = nn.Sequential(net[0], net[1], net[0], net[2])
    model, x, y = (
        ps.BayesianModel(twice, likelihood="gaussian"),
        torch.randn(5, 3, dtype=torch.float64),
        torch.randn(5, dtype=torch.float64),
    )
    own, density = model.initial_weights(), Density(model, (x, y))
    z = starting_points(density, 3)
    found = density.energy(z)
    for chain, weights in enumerate(z):
        by_site = density.layout.constrain(weights[None])
        torch.testing.assert_close(found[chain], density.energy(weights[None])[0])
        torch.testing.assert_close(
            model.outputs(by_site, x)[0],
            model.call({name: by_site[name][0] for name in own}, x),
            # a product of batches may round its last bit otherwise than a single one
            rtol=0.0,
            atol=1e-14,
        )
    assert all(
        torch.equal(value, own[name]) for name, value in model.initial_weights().items()
    )


def test_a_network_may_hold_a_scripted_part():
    plain, x = (
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)),
        torch.randn(5, 3),
    )
    scripted = nn.Sequential(
        torch.jit.script(copy.deepcopy(plain[0])), plain[1], plain[2]
    )
    weights = {
        name: torch.stack([value.detach(), value.detach() + 1])
        for name, value in plain.named_parameters()
    }
    found, expected = (
        ps.predict(weights, net, x, kind="outputs") for net in (scripted, plain)
    )
    torch.testing.assert_close(found, expected)


def test_the_posterior_of_a_last_layer_goes_through_samplers_guides_ensembles_and_predictions():
    net, x, y = last_layer(), torch.randn(20, 3), torch.randn(20, 1)
    model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(0.3))
    assert list(ps.BayesianModel(last_layer().requires_grad_(False)).site_shapes) == [
        "0.weight",
        "0.bias",
        *LAST,
    ]
    symmetry = ps.find_symmetry(net, x[:2])
    drawn = ps.sample(
        ps.NUTS(model),
        x,
        y,
        num_samples=20,
        num_warmup=20,
        num_chains=2,
        progress=False,
    )
    assert set(drawn.samples) == set(LAST)
    guide = ps.AutoSymmetrized(model, symmetry)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(x, y)
    assert set(guide(x, y)) == set(LAST)
    assert Predictive(model, guide=guide, num_samples=3)(x)["y"].shape == (3, 20)
    trained = ps.ensemble(model, (x, y), 3, epochs=1, progress=False)
    for posterior in (drawn, trained):
        from_net, from_model = (
            ps.predict(posterior, net, x, progress=False),
            ps.predict(posterior, model, x),
        )
        torch.testing.assert_close(from_net, from_model)
        net.load_state_dict(
            {site: value[0] for site, value in posterior.get_samples().items()},
            strict=False,
        )
        torch.testing.assert_close(from_net[0], net(x))
    ps.diagnose(drawn, symmetry, model, x=x)
    ps.mmd(*ps.common_frame(drawn, drawn, symmetry))
