"""Units that a network cuts, joins, masks and indexes: permutations by brute force."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.checks.shuffles import compared, network
from pyro_symmetric import find_symmetry


class Between(nn.Module):
    """A function without parameters between two layers of four units."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("ones", torch.ones(4))
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self, torch.tanh(self.a(x))))


EXCHANGES = {
    "unbind and stack": (lambda net, h: torch.stack(h.unbind(-1), -1), 24),
    "chunks that are exchanged": (
        lambda net, h: torch.cat(h.chunk(2, -1)[::-1], -1),
        24,
    ),
    "a buffer of equal entries": (lambda net, h: h * net.ones, 24),
    "an index that is an arange": (lambda net, h: h[:, torch.arange(4)], 24),
    "a mask made in forward": (lambda net, h: h * torch.ones(4), 24),
    "a mask of complex numbers": (
        lambda net, h: h * torch.polar(torch.ones(4), torch.zeros(4)).abs(),
        24,
    ),
    "a mask that leaves one out": (lambda net, h: h * (torch.arange(4) < 3), 6),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_units_stay_exchangeable_through(name: str) -> None:
    function, order = EXCHANGES[name]
    symmetry = find_symmetry(Between(function), torch.randn(3, 2))
    assert symmetry.permutations.order() == order


@pytest.mark.parametrize("seed", range(12))
def test_random_shuffles_have_the_permutations_of_brute_force(seed: int) -> None:
    result = compared(network(seed))
    assert result.sound, result
