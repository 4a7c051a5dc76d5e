"""Fused weights, whose slices read streams of their own, and heads that share the
weight of a norm.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify


def fact(n: int) -> int:
    return math.factorial(n)


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def tensors(net: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(value) for name, value in net.named_parameters()}


def checked(net: nn.Module, *inputs: Tensor, order: int) -> Symmetry:
    """The symmetry, after comparing its order with what was counted by hand, and
    elements with the network.

    Elements must leave the output unchanged; few enough permutations must all act
    differently.
    """
    net, inputs = (
        net.double().eval(),
        tuple(x.double() if x.is_floating_point() else x for x in inputs),
    )
    symmetry = find_symmetry(net, *inputs, verify=False)
    assert symmetry.permutations.order() == order
    weights = tensors(net)
    before = functional_call(net, weights, inputs)
    for _ in range(10):
        after = functional_call(
            net, symmetry.group.sample(dtype=torch.float64)(weights), inputs
        )
        torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
    if order <= 10_000:
        every = symmetry.permutations.enumerate()(weights)
        assert (
            len(
                torch.cat([value.flatten(1) for value in every.values()], -1).unique(
                    dim=0
                )
            )
            == order
        )
    assert verify(symmetry, net, *inputs)
    return symmetry


@pytest.mark.parametrize("rotary", [False, True])
def test_heads_that_share_the_weight_of_a_norm_are_exchanged(rotary: bool) -> None:
    """As in Qwen 3 and Gemma 3: one norm weight for all heads' queries, one for all
    keys, then a rotary embedding.
    """

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.outputs = nn.Linear(2, 3), nn.Linear(3, 2)
            self.q, self.k, self.v = (
                nn.Linear(3, n * 4, bias=False) for n in (4, 2, 2)
            )
            self.o = nn.Linear(16, 3)
            self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.inputs(x))
            q, k, v = (
                own(x).unflatten(-1, (-1, 4)).transpose(1, 2)
                for own in (self.q, self.k, self.v)
            )
            q, k = self.q_norm(q), self.k_norm(k)
            if rotary:
                angle = (
                    torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1]))
                    .repeat(1, 2)
                    .to(x)
                )
                q, k = (
                    y * angle.cos()
                    + torch.cat([-y[..., 2:], y[..., :2]], -1) * angle.sin()
                    for y in (q, k)
                )
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            return self.outputs(
                x
                + self.o(
                    F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
                )
            )

    # Groups of keys, the two queries of each, and the values' rows in each group; the
    # places of a head only if nothing is rotated, and for all heads alike, as they
    # share a weight.
    shared = 1 if rotary else fact(4)
    checked(
        Normed(),
        torch.randn(3, 5, 2),
        order=fact(3) * fact(2) * 2**2 * fact(4) ** 2 * shared,
    )


def test_the_two_streams_of_a_transformer_move_by_themselves() -> None:
    """Encoder and decoder meet in one fused weight only, whose slices read one of them
    each.
    """

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target, self.outputs = (
                nn.Linear(2, 4),
                nn.Linear(3, 4),
                nn.Linear(4, 2),
            )
            self.body = nn.Transformer(4, 2, 1, 1, dim_feedforward=3, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return self.outputs(self.body(self.source(source), self.target(target)))

    # Two streams; three attentions of two heads, with rows of queries and of values;
    # two feed-forward layers.
    checked(
        Translator(),
        torch.randn(2, 5, 2),
        torch.randn(2, 4, 3),
        order=fact(4) ** 2 * (2 * (2 * 2) ** 2) ** 3 * fact(3) ** 2,
    )


class Fused(nn.Module):
    """One weight whose first rows read one stream, and whose other rows read
    another.
    """

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.a, self.b, self.outputs = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(6, 2)
        self.weight = normal(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = torch.tanh(self.a(x)), torch.tanh(self.b(y))
        first, second = self.weight.split([2, 4])
        if self.how == "whole":  # reads the whole weight, too
            x = x + (self.weight.sum(0) if self.how == "whole" else 0)
        if self.how == "flipped":
            second = second.flip(1)
        if self.how == "one":
            y = x
        return self.outputs(
            torch.relu(torch.cat([F.linear(x, first), F.linear(y, second)], -1))
        )


@pytest.mark.parametrize(
    ("how", "streams"),
    # Read whole, both streams have the same order of columns; so they have if there is
    # one stream only, and then the second layer is idle.
    [
        ("apart", fact(3) ** 2),
        ("flipped", fact(3) ** 2),
        ("whole", fact(3)),
        ("one", fact(3)),
    ],
)
def test_slices_of_a_fused_weight_belong_to_the_streams_that_they_read(
    how: str, streams: int
) -> None:
    net = Fused(how)
    if how == "one":
        net.b = nn.Identity()
    checked(
        net, torch.randn(5, 2), torch.randn(5, 2), order=streams * fact(2) * fact(4)
    )


def test_a_slice_that_nothing_reads_is_no_symmetry() -> None:
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.outputs, self.table = (
                nn.Linear(2, 3),
                nn.Linear(3, 2),
                normal(5, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.outputs(torch.tanh(self.inputs(x)) + self.table[:4].sum(0))

    checked(Partial(), torch.randn(5, 2), order=fact(3) * fact(4))
