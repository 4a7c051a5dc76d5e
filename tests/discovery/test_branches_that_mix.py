"""Heads and experts in lists, with units that mix: whole branches are exchanged, and products alone matter inside."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pyro_symmetric as ps
from pyro_symmetric.discovery.apart import apart
from pyro_symmetric.discovery.symmetry import Symmetry, plain_weights
from pyro_symmetric.groups.mixing import mixed
from pyro_symmetric.weights import Weights

LN2 = math.log(2.0)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList(Head() for _ in range(3)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + sum(head(x) for head in self.heads)).tanh())


class Experts(nn.Module):
    """Each expert ends in two linear maps of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(4, 3), nn.Linear(4, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2, bias=False), nn.Linear(2, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        return self.out(sum(gate[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts)).tanh())


def found(kind: type[nn.Module], seed: int = 0) -> tuple[nn.Module, Tensor, Symmetry, Weights]:
    torch.manual_seed(seed)
    net, x = kind().double(), torch.randn(5, 6, 4, dtype=torch.float64)
    symmetry = ps.find_symmetry(net, x)
    return net, x, symmetry, plain_weights(net, symmetry.group)


@pytest.fixture(scope="module", params=[Heads, Experts])
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Symmetry, Weights]:
    return found(request.param)


def test_branches_and_what_mixes_inside_them_are_counted() -> None:
    heads, experts = (found(kind)[2] for kind in (Heads, Experts))
    assert heads.log_order() == pytest.approx(math.log(6) + 6 * (math.log(6) + 3 * LN2))
    # 5 hidden units and 2 of low rank in each expert; 4 units of the stream in front of tanh.
    inside = math.log(120) + math.log(2) + 2 * LN2
    assert experts.log_order() == pytest.approx(math.log(6) + 3 * inside + math.log(24) + 4 * LN2)
    assert set(heads.group.names("mix")) == {"heads.{0-2}.q", "heads.{0-2}.v"}
    assert set(experts.group.names("mix")) == {"experts.{0-2}.2"}


@pytest.mark.parametrize("scalings", ["unit_norm", "unit_std", "minimal_mass", "minimal_norm"])
def test_mixed_and_exchanged_copies_get_one_form(
    case: tuple[nn.Module, Tensor, Symmetry, Weights], scalings: str
) -> None:
    net, x, symmetry, weights = case
    copy = weights
    for name in symmetry.group.names("mix"):
        units = symmetry.group[name]
        copy = mixed(symmetry.group, name, copy, torch.randn(units.copies, units.size, units.size).double())
    assert list(copy) == list(weights)
    copy = symmetry.act(symmetry.sample(), copy)
    form, other = (ps.canonicalize(own, symmetry, scalings=scalings, warn=False) for own in (weights, copy))
    for site, value in form.items():
        torch.testing.assert_close(other[site], value, rtol=1e-7, atol=1e-7)
    for own in (copy, form):
        torch.testing.assert_close(functional_call(net, own, (x,)), net(x), rtol=1e-9, atol=1e-9)
    assert max(float((copy[site] - weights[site]).abs().max()) for site in weights) > 0.1


@pytest.mark.parametrize("by_activation", [False, True])
def test_an_alignment_undoes_an_exchange_of_branches(
    case: tuple[nn.Module, Tensor, Symmetry, Weights], by_activation: bool
) -> None:
    net, x, symmetry, weights = case
    copies = symmetry.act(symmetry.sample((3,), spread=0.3), weights)
    cost = ps.ActivationCost(net, x) if by_activation else "l2"
    result = ps.align(copies, weights, symmetry, cost=cost, progress=False)
    for site, value in symmetry.act(result.element, copies).items():
        torch.testing.assert_close(value, weights[site].expand_as(value), rtol=0, atol=1e-6)


def test_nothing_stays_unexplained_in_branches(case: tuple[nn.Module, Tensor, Symmetry, Weights]) -> None:
    net, x, symmetry, _ = case
    result = ps.completeness(symmetry, net, x)
    # In each head GL(3) of queries and keys, and of values and outputs, without their scales; biases of keys, which do
    # nothing; biases of values, which those of outputs take up. Of the 3 outputs' biases only the sum counts.
    # GL(2) of each expert, without scales; and what the router adds to all logits.
    acted, gauges = (18, 3 * (6 + 6 + 3 + 3) + 2 * 4) if isinstance(net, Heads) else (15 + 6, 3 * 2 + 5)
    assert (result.found, result.known, result.unexplained) == (acted, gauges, 0)


def test_a_group_of_stacks_taken_apart_acts_alike_but_exchanges_nothing(
    case: tuple[nn.Module, Tensor, Symmetry, Weights],
) -> None:
    net, x, symmetry, _ = case
    group = apart(symmetry.group)
    assert not group.stacks
    assert group.site_shapes == symmetry.site_shapes
    assert group.log_order() == pytest.approx(symmetry.log_order() - math.log(6))
    assert ps.verify(Symmetry(group), net, x, trials=5)
    assert apart(group) is group
