"""Canonical forms don't depend on the order in which sites, units and layers were
defined.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.canonical.removal import largest_sign
from pyro_symmetric.groups import Axis, Group, Units

SHUFFLES = 2


class Attention(nn.Module):
    """A residual block that attends, normalised before, as in the smallest of language
    models; no bias anywhere.
    """

    def __init__(self, d: int = 6, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for f in (self.q, self.k, self.v)
        )
        mixed = torch.softmax(q @ k.mT, -1) @ v
        return x + self.o(mixed.transpose(-2, -3).flatten(-2))


class Gated(nn.Module):
    def __init__(self, d: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.gate, self.up = (
            nn.Linear(d, hidden, bias=False),
            nn.Linear(d, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def decoder() -> nn.Module:
    """A tiny Llama: attention and a gated layer between an embedding and a head."""
    head = nn.Linear(6, 11, bias=False)
    return nn.Sequential(
        nn.Embedding(11, 6), Attention(6, 2), Gated(), nn.RMSNorm(6), head
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 3),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3),
    )


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "decoder": (decoder, lambda: torch.arange(10).reshape(2, 5)),
    "tanh": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        lambda: torch.randn(3, 4),
    ),
    "convolutions": (convolutions, lambda: torch.randn(2, 2, 9, 9)),
}


def shuffled(net: nn.Module, seed: int) -> nn.Module:
    """The same network, its layers and parameters registered in another order."""
    draw = random.Random(seed)
    for module in net.modules():
        for held in (module._modules, module._parameters):
            if seed and not isinstance(module, nn.Sequential | nn.ModuleList):
                items = list(held.items())
                draw.shuffle(items)
                held.clear()
                held.update(items)
    return net


@pytest.mark.parametrize(
    ("key", "scalings"),
    [
        ("first", "unit_norm"),
        ("max", "unit_norm"),
        ("norm", "minimal_mass"),
        ("max", "minimal_norm"),
    ],
)
@pytest.mark.parametrize("name", NETS)
def test_copies_of_one_network_have_one_form_in_whatever_order_its_layers_were_registered(
    name, key, scalings
):
    make, inputs = NETS[name]
    torch.manual_seed(0)
    x = inputs()
    weights, forms = {}, []
    for seed in range(SHUFFLES):
        net = shuffled(make().eval(), seed).double()
        symmetry = ps.find_symmetry(
            net, x.double() if x.is_floating_point() else x, verify=False
        )
        sites = symmetry.weights_of(net)
        weights = weights or {site: torch.randn_like(v).abs() + 0.1 if "var" in site else torch.randn_like(v)
                              for site, v in sites.items()}  # fmt: skip
        copies = symmetry.group.sample((3,), spread=0.7, dtype=torch.float64)
        items = list(copies(weights).items())
        random.Random(seed).shuffle(items)
        forms.append(ps.canonicalize(dict(items), symmetry, key, scalings))
    for form in forms:
        for site, value in form.items():
            torch.testing.assert_close(
                value,
                forms[0][site][:1].expand_as(value),
                rtol=1e-6,
                atol=1e-8,
                msg=site,
            )


@pytest.mark.parametrize("shape", [(4, 3), (3, 4)])
def test_scales_of_two_sides_of_a_matrix_that_nothing_anchors_have_one_form(shape):
    """Rows and columns of one matrix are measured by one another, and by nothing
    else.
    """
    rows, columns = (torch.arange(n)[None] for n in shape)
    units = [
        Units("row", shape[0], (Axis("w", 0, rows, 1),), moves={"scale"}),
        Units("column", shape[1], (Axis("w", 1, columns, 1),), moves={"scale"}),
    ]
    weights = {"w": torch.randn(*shape, dtype=torch.float64)}
    weights["w"][0, 0] = 0.0
    for own in (units, units[::-1]):
        group = Group(own, {"w": shape})
        form = ps.canonicalize(group.sample((5,), dtype=torch.float64)(weights), group)
        torch.testing.assert_close(
            form["w"], form["w"][:1].expand_as(form["w"]), rtol=1e-9, atol=1e-12
        )
        # of which every row and column has mean one
        squares, counts = form["w"].square(), (form["w"] != 0).double()
        for dim in (1, 2):
            torch.testing.assert_close(
                squares.sum(dim), counts.sum(dim), rtol=1e-9, atol=0
            )


def test_the_sign_of_the_largest_entry_is_none_if_two_are_as_large():
    entries = torch.tensor([[2.0, -1.0], [1.0, -3.0], [1.0, -1.001], [0.0, 0.0]])
    assert largest_sign(entries, tie=0.01).tolist() == [1.0, -1.0, 0.0, 0.0]
