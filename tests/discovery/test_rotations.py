"""Units that all orthogonal maps may mix: found in networks and Pyro models, beside
those whose rotations one detail breaks.
"""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps


class Attention(nn.Module):
    def __init__(self, width: int = 6, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
        return self.o(attended.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Attention in which every two heads of queries share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(5, 12), nn.Linear(12, 4)
        self.k, self.v = nn.Linear(5, 6), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 2, 3)).movedim(1, 3)
        k, v = (f(x).unflatten(-1, (2, 1, 3)).movedim(1, 3) for f in (self.k, self.v))
        attended = torch.softmax(q @ k.mT, -1) @ v
        return torch.tanh(self.o(attended.movedim(3, 1).flatten(2)))


class Stream(nn.Module):
    """A residual stream under RMSNorm, with gains or without."""

    def __init__(self, gains: bool, inputs: int = 3):
        super().__init__()
        self.into, self.out = nn.Linear(inputs, 5), nn.Linear(5, 2)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm = nn.RMSNorm(5, elementwise_affine=gains)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.out(self.norm(x))


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, with an activation in it or without."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.base, self.activation = nn.Linear(5, 4), activation
        self.a, self.b = nn.Linear(5, 3, bias=False), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.activation(self.a(x))))


NETWORKS = {
    "attention": (Attention, (2, 4, 6), {"q", "v"}),
    "grouped attention": (GroupedAttention, (2, 4, 5), {"q", "o"}),
    "stream": (lambda: Stream(gains=False), (4, 3), {"into"}),
    "stream with gains": (lambda: Stream(gains=True), (4, 3), set()),
    "adapter": (lambda: Adapted(nn.Identity()), (4, 5), {"a"}),
    "adapter with ReLU": (lambda: Adapted(nn.ReLU()), (4, 5), set()),
    "tanh": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        (4, 3),
        set(),
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_rotations_of_networks(kind):
    build, shape, rotating = NETWORKS[kind]
    torch.manual_seed(0)
    net, x = build(), torch.randn(shape)
    symmetry = ps.find_symmetry(net, x)
    assert set(symmetry.rotating) == rotating
    again = ps.Symmetry.from_dict(symmetry.to_dict())
    assert again.rotating == symmetry.rotating
    if not rotating:
        with pytest.raises(ValueError, match="no units rotate"):
            symmetry.with_rotations()
        return
    turned = symmetry.with_rotations()
    assert set(turned.group.names("rotate")) == rotating
    assert ps.verify(turned, net, x)
    element = turned.group.compact.sample(dtype=torch.float64)
    net = net.double()
    moved = turned.act(element.within(turned.group), net)
    torch.testing.assert_close(moved(x.double()), net(x.double()))
    assert "with_rotations()" in str(symmetry)


def factor_model(scale: Tensor, prior: type = dist.Normal):
    def model(data: Tensor) -> None:
        loadings = prior(torch.zeros(5, 3), scale)
        loadings = pyro.sample("W", loadings.to_event(2))
        scores = dist.Normal(torch.zeros(len(data), 3), 1.0)
        scores = pyro.sample("z", scores.to_event(2))
        noise = dist.Normal(scores @ loadings.mT, 0.5)
        pyro.sample("y", noise.to_event(2), obs=data)

    return model


def principal_components(data: Tensor) -> None:
    loadings = pyro.sample("W", dist.Normal(torch.zeros(5, 3), 1.0).to_event(2))
    covariance = loadings @ loadings.mT + torch.eye(5)
    with pyro.plate("rows", len(data)):
        noise = dist.MultivariateNormal(torch.zeros(5), covariance)
        pyro.sample("y", noise, obs=data)


def relevance(data: Tensor) -> None:
    scales = pyro.sample("a", dist.Gamma(torch.ones(3), 1.0).to_event(1))
    factor_model(scales)(data)


@pytest.mark.parametrize(
    ("model", "rotating"),
    [
        (principal_components, ("W",)),
        (factor_model(torch.tensor(1.0)), ("W",)),
        (factor_model(torch.tensor([1.0, 1.5, 2.0])), ()),
        (factor_model(torch.tensor(1.0), dist.Laplace), ()),
        (relevance, ()),
    ],
)
def test_rotations_of_models(model, rotating):
    torch.manual_seed(0)
    data = torch.randn(20, 5)
    symmetry = ps.find_symmetry(model, data)
    assert symmetry.rotating == rotating
    declared = ps.Group.declare({"W": (None, "f")}, {"W": (5, 3)}, moves="rotate")
    if model is principal_components:
        assert ps.verify_model(symmetry.with_rotations(), model, data)
        assert ps.verify_model(declared, model, data)
    else:
        assert not ps.verify_model(declared, model, data)


def test_factors_of_one_scale_rotate_among_themselves():
    model, data = factor_model(torch.tensor([1.0, 1.0, 2.0])), torch.randn(20, 5)
    symmetry = ps.find_symmetry(model, data)
    assert [symmetry.group[name].size for name in symmetry.rotating] == [2]
    assert ps.verify_model(symmetry.with_rotations(), model, data)


def test_explanations_name_rotations_and_what_the_function_allows():
    torch.manual_seed(0)
    symmetry = ps.find_symmetry(Attention(), torch.randn(2, 4, 6))
    invertible = "all invertible maps of q hold as well, scales among them"
    assert invertible in str(symmetry.explain("q.weight"))
    turned = symmetry.with_rotations()
    explained = str(turned.explain("k.weight"))
    assert explained.count(invertible) == 1
    assert invertible in str(turned)
    assert invertible in str(ps.Symmetry.from_dict(turned.to_dict()))
    stream = ps.find_symmetry(Stream(gains=False), torch.randn(4, 3))
    explained = str(stream.explain("down.weight"))
    assert "all orthogonal maps of into hold as well" in explained
    assert "invertible" not in explained


@pytest.mark.parametrize("parallel", [1, 2])
def test_no_continuous_move_is_missed_where_rotations_were_missing(parallel):
    """Of a stream under RMSNorm, whose other units meet tanh."""
    torch.manual_seed(parallel)
    net = nn.ModuleList(Stream(gains=False, inputs=7) for _ in range(parallel))
    for stream in net:
        stream.norm.eps = 0.1  # which leaves no scale that all units share
    both, x = Parallel(net), torch.randn(9, 7)
    symmetry = ps.find_symmetry(both, x)
    before = ps.discovery.completeness(symmetry, both, x)
    assert (before.null, before.found) == (10 * parallel, 0)  # planes of five units
    assert ps.discovery.completeness(symmetry.with_rotations(), both, x).complete


class Parallel(nn.Module):
    def __init__(self, parts: nn.ModuleList):
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tanh(part(x)) for part in self.parts], -1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["gains", "ReLU", "relevance", "unequal axes"])
def test_wrong_rotations_are_refused(kind, seed):
    """At networks and data of other seeds; of 50 seeds of each kind all are refused."""
    torch.manual_seed(100 + seed)
    if kind == "gains":
        network, inputs = Stream(gains=True), torch.randn(4, 3)
        nn.init.normal_(network.norm.weight, 1.0, 0.2)
        assert ps.find_symmetry(network, inputs).rotating == ()
    elif kind == "ReLU":
        network = Adapted(nn.ReLU())
        assert ps.find_symmetry(network, torch.randn(4, 5)).rotating == ()
    else:
        scales = 0.5 + 1.5 * torch.rand(3)
        model = relevance if kind == "relevance" else factor_model(scales)
        assert ps.find_symmetry(model, torch.randn(12, 5)).rotating == ()


class Pooled(nn.Module):
    """Attention by a learned query: its entries, and the heads' queries and keys, may
    rotate, but not both in one group, as they meet in one matrix.
    """

    def __init__(self):
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(self.probe.expand(len(x), -1, -1), x, x)[0]


@pytest.mark.parametrize("verify", [False, True])
def test_rotations_that_make_up_no_group_are_left_out_unverified_too(verify):
    torch.manual_seed(0)
    net = Pooled()
    x = torch.randn(3, 5, 8)
    found = ps.find_symmetry(net, x, verify=verify)
    symmetry = found.with_rotations()
    turned = symmetry.group.names("rotate")
    assert turned
    assert ps.verify(symmetry, net, x)
    left_out = [name for name in found.rotating if name not in turned]
    assert left_out == ([] if verify else ["attention"])
    for name in left_out:
        assert f"{name}: rotations that make up no group" in str(symmetry)


def test_relus_that_are_linear_at_the_example_are_not_taken_for_rotations():
    for seed in range(30):  # both units are on for all rows in 1 of 30
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
        symmetry = ps.find_symmetry(net, torch.randn(5, 3), verify=False)
        assert not symmetry.rotating
