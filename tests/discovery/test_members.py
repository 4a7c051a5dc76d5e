"""Networks stacked in one parameter: each member of a batched product has units of its
own, which the formula of the order counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify

Forward = Callable[[Any, Tensor], Tensor]
ROWS, INPUTS, OUTPUTS = 5, 3, 2


def log_factorial(n: int) -> float:
    return math.lgamma(n + 1)


class Stacked(nn.Module):
    """Members, each with its own weights of two layers, or three."""

    def __init__(self, forward: Forward, members: int, hidden: int, second: int = 0):
        super().__init__()
        self.run = forward
        self.up = nn.Parameter(torch.randn(members, INPUTS, hidden))
        self.bias = nn.Parameter(torch.randn(members, 1, hidden))
        self.between = nn.Parameter(torch.randn(members, hidden, second or 1))
        self.down = nn.Parameter(torch.randn(members, second or hidden, OUTPUTS))
        if not second:
            del self.between

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def by_matmul(net: Any, x: Tensor) -> Tensor:
    return torch.relu(x @ net.up + net.bias) @ net.down


def by_bmm(net: Any, x: Tensor) -> Tensor:
    copies = x.expand(len(net.up), *x.shape)
    return torch.bmm(torch.relu(torch.baddbmm(net.bias, copies, net.up)), net.down)


def by_einsum(net: Any, x: Tensor) -> Tensor:
    hidden = torch.einsum("bi,eih->ebh", x, net.up) + net.bias
    return torch.einsum("ebh,eho->ebo", torch.relu(hidden), net.down)


def by_vmap(net: Any, x: Tensor) -> Tensor:
    def member(up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return torch.relu(x @ up + bias) @ down

    return torch.vmap(member)(net.up, net.bias, net.down)


def by_multiplying(net: Any, x: Tensor) -> Tensor:
    hidden = torch.relu((x[None, :, :, None] * net.up[:, None]).sum(2) + net.bias)
    return (hidden[..., None] * net.down[:, None]).sum(2)


def of_three_layers(net: Any, x: Tensor) -> Tensor:
    return torch.relu(torch.relu(x @ net.up + net.bias) @ net.between) @ net.down


FORWARDS = {
    run.__name__: run for run in (by_matmul, by_bmm, by_einsum, by_vmap, by_multiplying)
}


def scales(symmetry: Symmetry) -> int:
    return sum(symmetry.group[name].count for name in symmetry.group.names("scale"))


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize(("members", "hidden"), [(2, 3), (4, 2)])
def test_members_have_permutations_of_their_own(
    name: str, members: int, hidden: int
) -> None:
    run = FORWARDS[name]
    x = torch.randn(ROWS, INPUTS)
    apart = find_symmetry(Stacked(run, members, hidden), x)
    assert apart.log_order() == pytest.approx(members * log_factorial(hidden))
    assert scales(apart) == members * hidden
    mean = Stacked(lambda net, x: run(net, x).mean(0), members, hidden)
    together = find_symmetry(mean, x)
    assert together.log_order() == pytest.approx(
        members * log_factorial(hidden) + log_factorial(members)
    )
    assert scales(together) == members * hidden
    # units of different members exchange too: outputs are linear in them
    assert together.at_least


def test_members_of_three_layers_and_signs() -> None:
    net = Stacked(of_three_layers, 3, 2, 4)
    symmetry = find_symmetry(net, torch.randn(ROWS, INPUTS))
    right = 3 * (log_factorial(2) + log_factorial(4))
    assert symmetry.log_order() == pytest.approx(right)
    assert scales(symmetry) == 3 * 6
    net = Stacked(lambda s, x: torch.tanh(x @ s.up + s.bias) @ s.down, 3, 2)
    signed = find_symmetry(net, torch.randn(ROWS, INPUTS))
    right = 3 * (log_factorial(2) + 2 * math.log(2))
    assert signed.log_order() == pytest.approx(right)


@pytest.mark.parametrize("mean", [True, False])
def test_a_single_hidden_unit_of_each_member_has_a_scale(mean: bool) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        y = by_matmul(net, x)
        return y.mean(0) if mean else y

    symmetry = find_symmetry(Stacked(run, 3, 1), torch.randn(ROWS, INPUTS))
    assert symmetry.log_order() == pytest.approx(log_factorial(3) if mean else 0.0)
    assert scales(symmetry) == 3


OTHERWISE: dict[str, Forward] = {
    "the first two members": lambda s, x: by_matmul(_Cut(s, slice(0, 2)), x).mean(0),
    "members one by one": lambda s, x: torch.stack(
        [by_matmul(_Cut(s, slice(e, e + 1)), x)[0] for e in range(len(s.up))]
    ).mean(0),
    "members in reverse": lambda s, x: torch.relu(x @ s.up + s.bias) @ s.down.flip(0),
    "a norm of all weights": lambda s, x: by_matmul(s, x).mean(0) / s.up.norm(),
    "members joined": lambda s, x: (
        torch.relu(x @ torch.cat([s.up, -s.up]) + torch.cat([s.bias, s.bias]))
        @ torch.cat([s.down, s.down])
    ),
    "hidden units shared": lambda s, x: torch.relu(x @ s.up + s.bias) @ s.down.mean(0),
    "hidden units in order": lambda s, x: (
        torch.cumsum(torch.relu(x @ s.up), -1) @ s.down
    ),
    "units of the first member": lambda s, x: (
        by_matmul(s, x).mean(0) + s.bias[0, 0, :2]
    ),
}


class _Cut:
    """Some members of a network."""

    def __init__(self, net: Any, members: slice):
        self.up, self.bias = net.up[members], net.bias[members]
        self.down = net.down[members]


@pytest.mark.parametrize("name", OTHERWISE)
def test_members_that_are_read_in_other_ways_have_no_wrong_moves(name: str) -> None:
    net = Stacked(OTHERWISE[name], 3, 2)
    x = torch.randn(ROWS, INPUTS)
    symmetry = find_symmetry(net, x, verify=False)
    assert verify(symmetry, net, x)
