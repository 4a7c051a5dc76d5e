"""Random networks of at most 15 weights: signs and permutations by brute force, scales
by a null space.
"""

import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.checks.random_networks import compared, network


# 96 reads a matrix twice, 134 and 214 divide by a length
@pytest.mark.parametrize("seed", [0, 10, 13, 22, 40, 96, 134, 214])
def test_nothing_is_wrong_or_missed_in_silence(seed: int) -> None:
    result = compared(network(seed))
    assert not result.wrong, result
    assert not result.missed_in_silence, result


class Normalised(nn.Module):
    """Units that are divided by their common length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h / h.norm(dim=-1, keepdim=True))


def test_units_in_front_of_a_norm_are_scaled_together() -> None:
    torch.manual_seed(0)
    symmetry = ps.find_symmetry(Normalised(), torch.randn(5, 2))
    assert list(symmetry.scalings.factors.values()) == [1]
    (units,) = symmetry.scalings.units.values()
    assert {(axis.site, axis.exponent) for axis in units.axes} == {
        ("first.weight", 1),
        ("first.bias", 1),
    }
    assert not symmetry.at_least


class Repeated(nn.Module):
    """A layer that is applied twice between two reads of another, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 2))
        self.bias = nn.Parameter(torch.randn(2))
        self.second = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.first.T + self.bias
        h = (z / z.norm()).relu()
        for _ in range(2):
            h = (h @ self.second.T).relu()
        return h @ self.first


@pytest.mark.parametrize("seed", range(4))
def test_a_scale_of_few_units_that_are_mostly_off_is_found_or_may_be_missed(
    seed: int,
) -> None:
    """The first layer times four and the second one by two leave outputs alone."""
    torch.manual_seed(seed)
    symmetry = ps.find_symmetry(Repeated(), torch.randn(5, 2))
    assert symmetry.at_least or symmetry.scalings.units
