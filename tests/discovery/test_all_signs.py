"""Signs against trying every sign of every weight."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry


class Chain(nn.Module):
    """``einsum("b,hk,kl,lh->b", x, *factors)``: rows of one factor against columns of
    another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.randn(2, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("b,hk,kl,lh->b", x, *self.factors)


def tanh(*widths: int, bias: bool = True) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(
        *[layer for i, o in pairs for layer in (nn.Linear(i, o, bias=bias), nn.Tanh())][
            :-1
        ]
    )


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Chain, (7,)),
        (lambda: tanh(2, 3, 1), (7, 2)),
        (lambda: tanh(2, 2, 2, 1, bias=False), (7, 2)),
    ],
    ids=["chain", "one layer", "two layers"],
)
def test_the_signs_of_single_weights_that_leave_the_function_alone_are_those_of_the_group(
    make, shape
):
    torch.manual_seed(0)
    net, x = make().double(), torch.randn(shape, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    weights = {site: value.detach() for site, value in net.named_parameters()}
    sizes = [value.numel() for value in weights.values()]
    every = torch.tensor(
        list(itertools.product((1.0, -1.0), repeat=sum(sizes))), dtype=torch.float64
    )

    def outputs(signs: Tensor) -> Tensor:
        pieces = zip(weights.items(), signs.split(sizes), strict=True)
        own = {
            site: value * piece.reshape(value.shape) for (site, value), piece in pieces
        }
        return torch.func.functional_call(net, own, (x,)).flatten()

    alone = (
        torch.func.vmap(outputs, chunk_size=4096)(every) - outputs(every[0])
    ).abs().amax(1) < 1e-9
    images = symmetry.signs.enumerate()(
        {site: torch.ones_like(value) for site, value in weights.items()}
    )
    mine = torch.cat([images[site].flatten(1) for site in weights], 1)
    assert {tuple(row) for row in mine.tolist()} == {
        tuple(row) for row in every[alone].tolist()
    }
