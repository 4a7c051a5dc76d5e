"""Canonical forms of networks, and of weights of another network."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import pyro_symmetric as ps


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in net.named_parameters()}


X = torch.randn(7, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "form", [ps.canonicalize, lambda net, symmetry: ps.minimal_mass(net, symmetry).weights], ids=["form", "mass"]
)
def test_a_network_gives_a_new_network_that_computes_the_same(form):
    net = perceptron(4, 6, 5, 3)
    symmetry = ps.find_symmetry(net, X)
    before = {name: value.clone() for name, value in weights_of(net).items()}
    found = form(net, symmetry)
    assert isinstance(found, nn.Sequential)
    torch.testing.assert_close(found(X).softmax(-1), net(X).softmax(-1))
    expected = form(before, symmetry)
    for name, value in weights_of(found).items():
        assert torch.equal(value, expected[name])
        assert torch.equal(weights_of(net)[name], before[name])
    element = ps.canonical.sorting_permutation(net, symmetry)
    assert element.equal(ps.canonical.sorting_permutation(before, symmetry))
