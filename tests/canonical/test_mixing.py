"""Units that mix: queries and keys, values and outputs, factors of low rank, in canonical form."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import pyro_symmetric as ps
from pyro_symmetric.groups.mixing import mixed, sides


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


def copies(symmetry: ps.Symmetry, weights: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Random elements and random linear maps of all units that mix, in turn."""
    weights = {site: value.detach().expand(number, *value.shape) for site, value in weights.items()}
    group = symmetry.group
    for _ in range(2):
        for name in group.names("mix"):
            one = group[name]
            matrix = torch.randn(number, one.copies, one.size, one.size, dtype=torch.float64)
            turned, _ = torch.linalg.qr(matrix)
            matrix = (
                turned * (0.5 + torch.rand(number, one.copies, 1, one.size, dtype=torch.float64)) @ turned.mT.roll(1, 0)
            )
            weights = mixed(group, name, weights, matrix)
        weights = group.sample((number,), 0.5, dtype=torch.float64)(weights)
    return weights


def outputs(net: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    number = len(next(iter(weights.values())))
    return torch.stack(
        [functional_call(net, {s: value[i] for s, value in weights.items()}, (x,)) for i in range(number)]
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_the_units_between_linear_maps_mix_and_no_others(name):
    symmetry = built(name)[2]
    found = [(symmetry.group[one].copies, symmetry.group[one].size) for one in symmetry.group.names("mix")]
    assert sorted(found) == NETWORKS[name][2]
    assert symmetry.log_order() == symmetry.without(list(symmetry.group.units), "mix").log_order()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("scalings", ["unit_norm", "unit_std", "minimal_norm"])
def test_copies_have_one_form_and_compute_the_same(name, scalings):
    net, x, symmetry, weights = built(name)
    many = copies(symmetry, weights, 50)
    before = outputs(net, {site: value[None] for site, value in weights.items()}, x)
    assert float((outputs(net, many, x) - before).abs().max()) < 1e-9
    form = ps.canonicalize(many, symmetry, scalings=scalings, warn=False)
    assert float((outputs(net, form, x) - before).abs().max()) < 1e-9
    worst = max(float((value - value[:1]).abs().max() / value.abs().max()) for value in form.values())
    assert worst < 1e-9
    plain = ps.canonicalize(many, symmetry, scalings=scalings, mixtures=False, warn=False)
    assert max(float((value - value[:1]).abs().max()) for value in plain.values()) > 1e-2


@pytest.mark.parametrize("name", ["attention", "low rank", "shared keys"])
def test_without_other_steps_the_form_has_the_factors_of_the_product(name):
    """Both sides have orthogonal rows of the same norms, whose squares are the product's singular values."""
    _, _, symmetry, weights = built(name)
    group = symmetry.group
    form = ps.canonicalize(weights, symmetry, permutations=None, scalings=None, signs=False)
    for one in group.names("mix"):
        entering, leaving = sides(group, one, form)
        before = sides(group, one, weights)
        product = before.entering.mT @ before.leaving
        values = torch.linalg.svdvals(product)[..., : group[one].size]
        torch.testing.assert_close(entering.mT @ leaving, product)
        torch.testing.assert_close(entering @ entering.mT, torch.diag_embed(values))
        torch.testing.assert_close(leaving @ leaving.mT, torch.diag_embed(values))


def test_the_least_norm_is_least():
    """The squared norm of balanced factors is twice the nuclear norm of their product, less than any copy's."""
    net, _, symmetry, weights = built("low rank")
    form = ps.canonicalize(copies(symmetry, weights, 20), symmetry, scalings="minimal_norm", warn=False)
    nuclear = torch.linalg.svdvals(net.outer.detach() @ net.inner.detach()).sum()
    size = sum(form[site].square().sum((-1, -2)) for site in ("inner", "outer"))
    torch.testing.assert_close(size, (2 * nuclear).expand(20))


def test_factors_that_start_with_zeros_are_zero():
    net, x, symmetry, weights = built("low rank")
    weights = {**weights, "outer": torch.zeros(5, 3).double()}
    form = ps.canonicalize(weights, symmetry)
    assert not torch.cat([form["inner"].flatten(), form["outer"].flatten()]).any()
    torch.testing.assert_close(functional_call(net, form, (x,)), functional_call(net, weights, (x,)))


def test_gradients_pass():
    """Of a function of the product alone, the gradient through the form is the gradient itself."""
    _, _, symmetry, weights = built("low rank")
    own = {site: value.detach().clone().requires_grad_() for site, value in weights.items()}
    form = ps.canonicalize(own, symmetry, permutations=None, scalings=None, signs=False)
    pull = torch.randn(5, 6, dtype=torch.float64)
    through = torch.autograd.grad(((form["outer"] @ form["inner"]) * pull).sum(), [own["outer"], own["inner"]])
    torch.testing.assert_close(through, (pull @ own["inner"].mT, own["outer"].mT @ pull))
    assert torch.autograd.gradcheck(
        lambda outer, inner: ps.canonicalize({"outer": outer, "inner": inner}, symmetry, None, None, False)[
            "inner"
        ].abs(),
        (own["outer"], own["inner"]),
    )


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
