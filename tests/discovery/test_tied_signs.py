"""Signs of weights that are read twice, against all sign patterns of small networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import pyro_symmetric as ps


class Net(nn.Module):
    """Parameters of some shapes, and a function of them and of inputs."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def count_of_signs(net: nn.Module, x: Tensor) -> int:
    """Count the sign patterns of all weights that leave outputs as they are."""
    net, x = net.double(), x.double() if x.is_floating_point() else x
    own = {name: value.detach() for name, value in net.named_parameters()}
    sizes = [value.numel() for value in own.values()]
    patterns = torch.tensor([*itertools.product((1.0, -1.0), repeat=sum(sizes))])

    def outputs(signs: Tensor) -> Tensor:
        pairs = zip(own.items(), signs.split(sizes), strict=True)
        moved = {name: value * sign.view_as(value) for (name, value), sign in pairs}
        return functional_call(net, moved, (x,)).flatten()

    every = torch.vmap(outputs)(patterns.double())
    return int(((every - every[0]).abs().amax(1) < 1e-9).sum())


def decoded(net: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, net.a, net.b)), net.a.T)


def decoded_twice(net: Any, x: Tensor) -> Tensor:
    inner = torch.tanh(F.linear(torch.tanh(x @ net.a.T), net.b))
    return torch.tanh(inner @ net.b) @ net.a


def unrolled(net: Any, x: Tensor) -> Tensor:
    state = torch.tanh(x @ net.a)
    for _ in range(2):
        state = torch.tanh(x @ net.a + state @ net.b)
    return state @ net.a.T


def convolved(net: Any, x: Tensor) -> Tensor:
    return F.conv_transpose1d(torch.tanh(F.conv1d(x, net.a)), net.a)


def embedded(net: Any, rows: Tensor) -> Tensor:
    return torch.tanh(net.a[rows] @ net.b) @ net.b.T @ net.a.T


def compared(net: Any, x: Tensor) -> Tensor:
    first, second = torch.tanh(x @ net.a), torch.tanh(x.flip(0) @ net.a)
    return ((first @ net.b) * (second @ net.b)).sum(-1)


def outer(net: Any, x: Tensor) -> Tensor:
    units = torch.sin(x @ net.a + net.b)
    return torch.bmm(units[..., None], units[:, None]) @ net.c


def gram(net: Any, x: Tensor) -> Tensor:
    units = torch.tanh(x @ net.a + net.b)
    return units @ units.T


def distances(net: Any, x: Tensor) -> Tensor:
    units = torch.tanh(x @ net.a + net.b)
    return (units[:, None] - units).abs().sum(-1)


X = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
SHAPES: dict[Callable[..., Tensor], tuple[tuple[int, ...], ...]] = {
    decoded: ((3, 2), (3,)),
    decoded_twice: ((3, 2), (2, 3)),
    unrolled: ((2, 2), (2, 2)),
    convolved: ((2, 2, 2),),
    embedded: ((3, 2), (2, 2)),
    compared: ((2, 3), (3, 2)),
    gram: ((2, 3), (3,)),
    distances: ((2, 3), (3,)),
    outer: ((2, 2), (2,), (2, 1)),
}
INPUTS = {
    convolved: torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(2)),
    embedded: torch.tensor([0, 1, 2]),
}


@pytest.mark.parametrize("function", SHAPES, ids=lambda function: function.__name__)
def test_all_signs_are_found_or_the_symmetry_says_at_least(
    function: Callable[..., Tensor],
) -> None:
    shapes = dict(zip("abc", SHAPES[function], strict=False))
    net, x = Net(function, **shapes), INPUTS.get(function, X)
    symmetry = ps.find_symmetry(net, x)
    found = round(math.exp(symmetry.signs.log_order()))
    right = count_of_signs(net, x)
    assert found == right or (found < right and symmetry.at_least)
    if function not in (outer, distances):
        assert found == right


def test_autoencoder_of_three_units() -> None:
    net = Net(decoded, a=(3, 4), b=(3,))
    symmetry = ps.find_symmetry(net, torch.randn(5, 4))
    assert symmetry.log_order() == pytest.approx(math.log(48))
    assert not symmetry.at_least


class Language(nn.Module):
    """A stream of six features, whose embedding is the transposed output layer."""

    def __init__(self, features: int = 6, hidden: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(7, features)
        self.query, self.key, self.value, self.out = (
            nn.Linear(features, features) for _ in range(4)
        )
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        heads = (read(stream)[:, None] for read in (self.query, self.key, self.value))
        stream = stream + self.out(F.scaled_dot_product_attention(*heads)[:, 0])
        stream = stream + self.down(torch.tanh(self.up(stream)))
        return stream @ self.embedding.weight.T


def test_stream_of_a_language_model_with_tied_embedding() -> None:
    tokens = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(0))
    symmetry = ps.find_symmetry(Language(), tokens)

    def signed(n: int) -> float:
        return math.lgamma(n + 1) + n * math.log(2)

    # the stream, the hidden units, and the features of queries and of values
    assert symmetry.log_order() == pytest.approx(signed(5) + 3 * signed(6))
