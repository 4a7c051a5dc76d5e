"""Moves that lie along no axis: they are found, or the symmetry says what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyro_symmetric as ps


class Function(nn.Module):
    """A function of inputs and of parameters and modules by name."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def of(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def mlp(hidden: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def experts(net: Any, x: Tensor) -> Tensor:
    """Experts of three units each, weighted by a gate."""
    hidden = torch.einsum("ehi,bi->beh", net.w, x).relu()
    return torch.einsum("beh,eh,be->b", hidden, net.v, (x @ net.gate.T).softmax(-1))


def mean_of_members(net: Any, x: Tensor) -> Tensor:
    hidden = torch.bmm(x.expand(3, *x.shape), net.a).tanh()
    return torch.bmm(hidden, net.b).mean(0)


# name -> the network, and what its remarks must name
LACKING: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "product of two layers": (
        lambda: Function(
            lambda net, x: net.a(x).tanh() * net.b(x).tanh(),
            a=nn.Linear(2, 1),
            b=nn.Linear(2, 1),
        ),
        ["a and b exchange"],
    ),
    "sum of two networks": (
        lambda: Function(lambda net, x: net.p(x) + net.q(x), p=mlp(), q=mlp()),
        ["units of p.0 and others of q.0 exchange"],
    ),
    "sum of networks of two widths": (
        lambda: Function(lambda net, x: net.p(x) + net.q(x), p=mlp(), q=mlp(4)),
        ["units of p.0 and others of q.0 exchange"],
    ),
    "two numbers": (
        lambda: Function(lambda net, x: net.a * (net.b * x).tanh(), a=of(), b=of()),
        ["a, b change sign"],
    ),
    "four numbers": (
        lambda: Function(
            lambda net, x: net.a * (net.b * x).tanh() + net.c * (net.d * x).tanh(),
            a=of(),
            b=of(),
            c=of(),
            d=of(),
        ),
        ["a, b change sign; c, d change sign"],
    ),
    "gain in front of a layer": (
        lambda: Function(
            lambda net, x: net.gain * net.b(net.a(x).tanh()),
            a=nn.Linear(2, 3),
            b=nn.Linear(3, 1, bias=False),
            gain=of(),
        ),
        ["gain, b.weight change sign"],
    ),
    "slope of a layer": (
        lambda: Function(
            lambda net, x: (x @ net.w * net.t).relu() @ net.v,
            w=of(2, 3),
            t=of(1),
            v=of(3),
        ),
        ["w, t change sign"],
    ),
    "temperature": (
        lambda: Function(
            lambda net, x: (x @ net.w / net.t).softmax(-1) @ net.v,
            w=of(2, 3),
            t=of(),
            v=of(3),
        ),
        ["w, t change sign"],
    ),
    "gated experts": (
        lambda: Function(experts, gate=of(2, 2), w=of(2, 3, 2), v=of(2, 3)),
        ["units of w in one member exchange"],
    ),
    "mean of members": (
        lambda: Function(mean_of_members, a=of(3, 2, 4), b=of(3, 4, 1)),
        ["units of a and others of a exchange"],
    ),
    "stacked rows": (
        lambda: Function(
            lambda net, x: (x @ torch.stack([*net.rows]).T).tanh() @ net.v,
            rows=nn.ParameterList([torch.randn(2) for _ in range(3)]),
            v=of(3),
        ),
        ["v, rows.0, rows.1, rows.2 change sign"],
    ),
    "product of units": (
        lambda: Function(lambda net, x: (x @ net.w).tanh().prod(-1), w=of(2, 3)),
        ["units [0, 1] of w[1] change sign"],
    ),
    "even function": (
        lambda: Function(
            lambda net, x: (F.silu(x @ net.w) + F.silu(-x @ net.w)) @ net.v,
            w=of(2, 3),
            v=of(3),
        ),
        ["units [0] of w[1] change sign"],
    ),
    "real part": (
        lambda: Function(
            lambda net, x: torch.complex(x @ net.a, x @ net.b).pow(2).real @ net.v,
            a=of(2, 2),
            b=of(2, 2),
            v=of(2),
        ),
        ["units [0] of a[1]^1 change sign"],
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_move_along_no_axis_is_told(name: str) -> None:
    torch.manual_seed(0)
    make, words = LACKING[name]
    x = torch.randn(7, 1 if name.endswith("numbers") else 2)
    symmetry = ps.find_symmetry(make(), x)
    assert symmetry.at_least
    remarks = "\n".join(symmetry.remarks)
    assert all(word in remarks for word in words), remarks


class Attention(nn.Module):
    """Attention whose biases of keys have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).mT / 2).softmax(-1)
        return x + self.o(scores @ self.v(x))


class Recurrent(nn.Module):
    """Both biases of a recurrent layer are only read in their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


COMPLETE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tanh": (lambda: nn.Sequential(mlp(5), nn.Tanh(), nn.Linear(1, 2)), (5, 2)),
    "relu": (
        lambda: nn.Sequential(
            nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)
        ),
        (5, 2),
    ),
    "bounded": (
        lambda: nn.Sequential(nn.Linear(2, 6), nn.Hardtanh(), nn.Linear(6, 1)),
        (5, 2),
    ),
    "batch norm": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        ),
        (3, 1, 6, 6),
    ),
    "attention": (Attention, (2, 5, 4)),
    "recurrent": (Recurrent, (3, 4, 2)),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_ordinary_networks_lack_nothing(name: str) -> None:
    torch.manual_seed(0)
    make, shape = COMPLETE[name]
    symmetry = ps.find_symmetry(make(), torch.randn(shape))
    assert not symmetry.at_least
    assert not symmetry.remarks
