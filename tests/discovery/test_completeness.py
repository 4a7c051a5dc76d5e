"""The null space of the Jacobian, against counts by hand and a singular value
decomposition of its own.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import pyro_symmetric as ps
from pyro_symmetric.discovery.completeness import Completeness
from pyro_symmetric.groups import Axis, Group, Units


class Attention(nn.Module):
    """Self-attention with separate projections, and fewer keys than queries."""

    def __init__(self, width=8, heads=4, shared=2, size=4):
        super().__init__()
        self.heads, self.shared, self.size, self.norm = (
            heads,
            shared,
            size,
            nn.LayerNorm(width),
        )
        self.q, self.o = (
            nn.Linear(width, heads * size, False),
            nn.Linear(heads * size, width, False),
        )
        self.k, self.v = (
            nn.Linear(width, shared * size, False),
            nn.Linear(width, shared * size, False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            one(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        k, v = (one.repeat_interleave(self.heads // self.shared, 1) for one in (k, v))
        return x + self.o(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Adapted(nn.Module):
    """A layer with factors of low rank beside its matrix, which stays as it is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("full", torch.randn(5, 6))
        self.inner, self.outer = (
            nn.Parameter(torch.randn(2, 6)),
            nn.Parameter(torch.zeros(5, 2)),
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ (self.full + self.outer @ self.inner).T))


def encoder(depth: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def normalised() -> nn.Module:
    first = [
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, bias=False),
        nn.BatchNorm2d(4),
    ]
    return nn.Sequential(
        *first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def between(middle: nn.Module) -> nn.Module:
    """Linear layers around another map, then ReLU units that read what has passed all
    of them.
    """
    return nn.Sequential(
        nn.Linear(3, 6), middle, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    )


# What a linear map of 3 inputs to 6 ReLU units and the layer behind them take: 6 x 3 +
# 6 and 2 x 6 + 2, less 6 scales.
TAKEN = 24 + 14 - 6


# name -> (network, inputs, null directions counted by hand, those that are found; None:
# not counted by hand)
NETWORKS = {
    "tanh": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(4, 3), 0, 0),
    # a scale for each unit; PyTorch's derivatives of this operator are wrong if they
    # are mapped over inputs
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 6), nn.PReLU(), nn.Linear(6, 2)), torch.randn(4, 3), 6, 6),
    # 8 x 3 + 8 + 2 x 8 + 2 weights make up one map with 2 x 3 + 2
    "linear": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.randn(4, 3), 50 - 8, 8),
    # the product has rank 2: 2 x (4 + 5 - 2); the biases one of 5
    "narrow": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 5)), torch.randn(4, 4), 10 + 15 - 14 - 5, 2),
    # for each of 2 heads, GL(4) of queries and keys and GL(4) of values and outputs;
    # biases of keys, of values
    "heads": (MultiHead, torch.randn(2, 5, 8), 2 * 32 + 8 + 8, 16),
    # for two groups of heads, GL(4) twice; the scales of the normalisation, whose
    # offset is taken up from its mean of zero without biases; what keys read there is
    # lost
    "offsets": (Attention, torch.randn(2, 5, 8), 64 + 8 + 8 + 8, 24),
    # as "heads"; scale, offset and mean of two normalisations with 24 and 16 readers;
    # 16 ReLU units. Then of the 2 biases that are added to the stream, a mean that the
    # next one takes back, which nothing between them sees
    "encoder": (lambda: encoder(1), torch.randn(2, 5, 8), 80 + 8 + 8 + 24 + 8 + 8 + 16 + 16 + 1, 48),
    # ReLU units that read positive numbers alone, of which most are always on, or off,
    # at weights as they start
    "positive": (
        lambda: nn.Sequential(nn.Linear(5, 12), nn.Softplus(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)),
        torch.randn(8, 5), 12, 12
    ),
    # a normalised stream matters by the Gram matrix of [W, b], 6 x 6, up to a scale,
    # and by what 12 units read of it; an epsilon takes up the part of the bias that no
    # input writes, and the mean doesn't count
    "narrow stream": (
        lambda: nn.Sequential(nn.Linear(5, 12), nn.LayerNorm(12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)),
        torch.randn(8, 5), 291 - (21 - 1 + 12 * 6) - 12 - (39 - 12), 24
    ),
    # nothing but linear maps before the ReLU units: 24 + 24 + 42 + 14 weights and
    # statistics; 4 x 6 scales are found
    "affine": (lambda: between(nn.BatchNorm1d(6)), torch.randn(8, 3), 104 - TAKEN, 24),
    # 24 + 6 + 42 + 42 + 14; scales of 6 ReLU units, of 6 directions, of the units
    # before and behind
    "directions": (
        lambda: between(parametrizations.weight_norm(nn.Linear(6, 6))), torch.randn(8, 3), 128 - TAKEN, None
    ),
    "factors": (Adapted, torch.randn(4, 6), 4, 2),
    "lstm": (Recurrent, torch.randn(2, 4, 3), 20, None),
    # 4 ReLU units after each normalisation; before, one scale for each of 4 + 4; a bias
    # before; and each channel's mean and variance against its bias and weight
    "statistics": (normalised, torch.randn(2, 2, 6, 6), 16 + 4 + 16, 24),
    # 7 x 4 + 3 x 4 + 3 weights make up a table of 7 x 3
    "tokens": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)), torch.arange(20).reshape(4, 5) % 7, 43 - 21, 4
    ),
}  # fmt: skip


def null_directions(
    net: nn.Module, symmetry: ps.Symmetry, x: Tensor, weights: dict[str, Tensor]
) -> int:
    """By a singular value decomposition, for inputs of its own."""
    net = copy.deepcopy(net).double().eval()
    sizes = [value.numel() for value in weights.values()]
    generator = torch.Generator().manual_seed(17)
    rows: list[Tensor] = []
    # PyTorch can't map the derivatives of weight normalisation over outputs.
    chunk = 1 if any(".parametrizations." in site for site in weights) else None

    def outputs(flat: Tensor, x: Tensor, pick: Tensor) -> Tensor:
        pieces = zip(weights.items(), flat.split(sizes), strict=True)
        own = {site: piece.reshape(value.shape) for (site, value), piece in pieces}
        return functional_call(net, own, (x,)).flatten()[pick]

    flat = torch.cat([value.flatten() for value in weights.values()])
    with torch.no_grad():
        number = net(x.double() if x.is_floating_point() else x).numel()
    while sum(map(len, rows)) < len(flat) + 100:
        drawn = torch.randint(7, x.shape, generator=generator)
        drawn = (
            torch.randn(x.shape, generator=generator).double() * 2
            if x.is_floating_point()
            else drawn
        )
        pick = torch.randperm(number, generator=generator)[:16]
        with sdpa_kernel(SDPBackend.MATH):
            rows.append(torch.func.jacrev(outputs, chunk_size=chunk)(flat, drawn, pick))
    values = torch.linalg.svdvals(torch.cat(rows))
    return int((values < 1e-11 * values[0]).sum())


@functools.cache
def counted(name: str) -> tuple[nn.Module, ps.Symmetry, Completeness]:
    make, x, *_ = NETWORKS[name]
    torch.manual_seed(1)
    net = make()
    symmetry = ps.find_symmetry(net, x)
    return net, symmetry, ps.discovery.completeness(symmetry, net, x)


@pytest.mark.cpu
@pytest.mark.parametrize("name", NETWORKS)
def test_null_directions_and_those_found_are_as_many_as_counted_by_hand(name):
    _, x, null, found = NETWORKS[name]
    net, symmetry, result = counted(name)
    assert not result.doubts
    assert null is None or result.null == null
    assert found is None or result.found == found
    assert result.complete == (result.null == result.found)
    # PyTorch can't differentiate BatchNorm2d here; inputs of one size leave some units
    # of these on, or off.
    plain = name not in ("positive", "narrow stream") and not any(
        isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d) for module in net.modules()
    )
    if plain:
        torch.manual_seed(5)
        weights = {
            site: value.detach().double() * (1 + torch.rand(value.shape))
            + 0.1 * torch.rand(value.shape)
            for site, value in symmetry.weights_of(net).items()
        }
        assert null_directions(net, symmetry, x, weights) == result.null


def test_what_is_taken_from_a_symmetry_is_missed():
    """Without its scales, a ReLU network has as many directions left that weren't
    found.
    """
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)),
        torch.randn(4, 3),
    )
    symmetry = ps.find_symmetry(net, x)
    whole, less = (
        ps.discovery.completeness(own, net, x)
        for own in (symmetry, symmetry.without(["0"]))
    )
    assert (whole.found, whole.null) == (9, 9)
    assert (less.found, less.null) == (0, 9)
    assert whole.complete
    assert not less.complete


def test_symmetries_that_are_none_are_doubted():
    """Scales of tanh units, with the right axes and exponents, change the outputs."""
    net, x = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        torch.randn(4, 3),
    )
    shapes = {name: value.shape for name, value in net.named_parameters()}
    axes = [
        Axis("0.weight", 0, torch.arange(4)[None], 1),
        Axis("0.bias", 0, torch.arange(4)[None], 1),
    ]
    axes.append(Axis("2.weight", 1, torch.arange(4)[None], -1))
    wrong = Group([Units("0", 4, tuple(axes), moves=frozenset({"scale"}))], shapes)
    result = ps.discovery.completeness(ps.Symmetry(wrong), net, x)
    assert result.found == result.null == 0
    assert result.doubts
    assert not result.complete


def test_softmax_outputs_lose_the_mean_of_the_last_layer():
    net, x = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)),
        torch.randn(4, 3),
    )
    plain, shifted = (
        ps.find_symmetry(net, x, logits=logits) for logits in (False, True)
    )
    assert ps.discovery.completeness(plain, net, x).null == 0
    result = ps.discovery.completeness(shifted, net, x)
    assert (result.found, result.null) == (1, 5)


def test_dead_weights_are_told_as_a_doubt():
    """A unit that no input switches on has no effect: that isn't a symmetry, so that it
    is doubted.
    """
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].bias[0] = -1e3
        net[0].weight[0] = 0.01
    result = ps.discovery.completeness(
        ps.find_symmetry(net, torch.randn(4, 3)), net, torch.randn(4, 3)
    )
    assert result.null > result.found
    assert result.doubts


def test_arguments_by_name_and_the_random_state():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return self.inner(x).masked_fill(mask, 0.0)

    net, x = Named(), torch.randn(4, 3)
    symmetry = ps.Symmetry(
        Group([], {name: value.shape for name, value in net.named_parameters()})
    )
    state = torch.get_rng_state()
    mask = torch.tensor([False, True])
    result = ps.discovery.completeness(symmetry, net, x, kwargs={"mask": mask})
    assert torch.equal(state, torch.get_rng_state())
    assert result.null == 4  # the row and the bias of an output that is masked


class Complex(nn.Module):
    """Three complex inputs, four units and two outputs."""

    def __init__(self, activation):
        super().__init__()
        self.a = nn.Linear(3, 4, dtype=torch.cfloat)
        self.b = nn.Linear(4, 2, dtype=torch.cfloat)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.activation(self.a(x)))


@pytest.mark.parametrize(
    ("activation", "null", "found"),
    [
        # a scale of each unit
        (lambda h: torch.complex(h.real.relu(), h.imag.relu()), 4, 4),
        # a phase of each unit, which no group here holds
        (lambda h: h * torch.sigmoid(h.abs()), 4, 0),
        # 2 x 3 entries and 2 biases of the function, of 26 complex weights
        (lambda h: h, 52 - 2 * 8, 4),
    ],
)
def test_complex_weights_are_two_numbers_each(activation, null, found):
    net, x = Complex(activation), torch.randn(5, 3, dtype=torch.cfloat)
    result = ps.discovery.completeness(ps.find_symmetry(net, x), net, x)
    assert (result.weights, result.null, result.found) == (52, null, found)
    assert not result.doubts


def test_a_weight_that_is_one_number_is_counted():
    # one norm for the whole matrix
    layer = parametrizations.weight_norm(nn.Linear(3, 5), dim=None)
    net, x = nn.Sequential(layer, nn.ReLU(), nn.Linear(5, 2)), torch.randn(5, 3)
    result = ps.discovery.completeness(ps.find_symmetry(net, x), net, x)
    # Five scales of units by all weights of the first layer, of which the library has
    # none, as the norm mixes rows; and that of the matrix that is normalised.
    assert (result.null, result.found) == (6, 1)
