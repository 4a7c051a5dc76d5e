"""Units that mix: queries and keys, values and outputs, factors of low rank."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyro_symmetric as ps


class Attention(nn.Module):
    """Self-attention after a normalisation, perhaps with fewer keys than queries, rotary or with normalised queries."""

    def __init__(self, shared=4, bias=True, rotary=False, normalised=False):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 12, bias), nn.Linear(6, 3 * shared, bias), nn.Linear(6, 3 * shared, bias)
        self.o, self.norm = nn.Linear(12, 6, bias), nn.RMSNorm(6)
        self.of_q, self.of_k = (nn.RMSNorm(3), nn.RMSNorm(3)) if normalised else (nn.Identity(), nn.Identity())
        self.shared, self.rotary = shared, rotary

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (-1, 3)).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = self.of_q(q), self.of_k(k)
        if self.rotary:
            angles = torch.arange(x.shape[1]).to(x)[:, None] * torch.tensor([1.0, 0.3, 0.1]).to(x)
            q, k = q * angles.cos(), k * angles.cos()
        k, v = (one.repeat_interleave(4 // self.shared, 1) for one in (k, v))
        return x + self.o((((q @ k.mT).softmax(-1)) @ v).transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).relu()
        return self.attention(x, x, x, need_weights=False)[0].relu().mean(1)


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(2, 6, 3)) for _ in range(3))
        self.o = nn.Parameter(torch.randn(2, 3, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, own) for own in (self.q, self.k, self.v))
        return torch.einsum("bhtk,hkd->btd", (q @ k.mT).softmax(-1) @ v, self.o)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("full", torch.randn(5, 6))
        self.inner, self.outer = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.full + self.outer @ self.inner))


def values_before_relu() -> nn.Module:
    """Each ReLU unit is measured by what a linear map writes, whose units mix."""
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4), nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 2))


TOKENS, ROWS = torch.randn(2, 5, 6), torch.randn(4, 6)
# name -> (network, inputs, sizes of the units that mix: copies and units)
NETWORKS = {
    "attention": (Attention, TOKENS, [(4, 3), (4, 3)]),
    "without biases": (lambda: Attention(bias=False), TOKENS, [(4, 3), (4, 3)]),
    "shared keys": (lambda: Attention(shared=2), TOKENS, [(2, 3), (2, 3)]),
    "one key": (lambda: Attention(shared=1), TOKENS, [(1, 3), (1, 3)]),
    "rotary": (lambda: Attention(rotary=True), TOKENS, [(4, 3)]),
    "normalised queries": (lambda: Attention(normalised=True), TOKENS, [(4, 3)]),
    "fused": (MultiHead, TOKENS, [(2, 4), (2, 4)]),
    "einsum": (Einsum, TOKENS, [(2, 3), (2, 3)]),
    "low rank": (LowRank, ROWS, [(1, 3)]),
    "before relu": (values_before_relu, ROWS, [(1, 4)]),
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)), ROWS, [(1, 4), (1, 5)]),
    "narrow": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2), nn.Tanh()), ROWS, [(1, 5)]),
}


@functools.cache
def built(name: str) -> tuple[nn.Module, Tensor, ps.Symmetry, dict[str, Tensor]]:
    make, x, _ = NETWORKS[name]
    torch.manual_seed(0)
    net = make().double()
    with torch.no_grad():
        for value in net.parameters():
            value.add_(0.3 * torch.randn_like(value))
    symmetry = ps.find_symmetry(net, x.double())
    return net.requires_grad_(False), x.double(), symmetry, symmetry.weights_of(net)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_units_between_linear_maps_mix_and_no_others(name):
    symmetry = built(name)[2]
    found = [(symmetry.group[one].copies, symmetry.group[one].size) for one in symmetry.group.names("mix")]
    assert sorted(found) == NETWORKS[name][2]
    assert symmetry.log_order() == symmetry.without(list(symmetry.group.units), "mix").log_order()


def test_a_wrong_mixture_fails_verification():
    """Units that mix between linear maps don't if something odd and homogeneous, but not linear, lies between."""

    class Clipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(-0.5, 0.5)

    plain, other = (nn.Sequential(nn.Linear(6, 4), own, nn.Linear(4, 7)) for own in (nn.Identity(), Clipped()))
    symmetry = ps.find_symmetry(plain, ROWS)
    assert ps.verify(symmetry, plain, ROWS)
    assert {one.move for one in ps.verify(symmetry, other, ROWS).broken} == {"scale", "mix"}


def test_what_mixes_is_kept_in_files():
    symmetry = built("shared keys")[2]
    again = ps.Symmetry.from_dict(symmetry.to_dict())
    assert again.group.names("mix") == symmetry.group.names("mix") != ()
    assert again.finite.names("mix") == ()
    with pytest.raises(ValueError, match="norm"):
        symmetry.group.mixing(["norm"])
