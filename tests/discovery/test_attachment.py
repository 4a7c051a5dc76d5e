"""Multipliers on units that permute; what no group has is left out, and the rest is kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.discovery.scaling.attachment import attached
from pyro_symmetric.discovery.verify import verify
from pyro_symmetric.groups import Axis, Units


class MixedValues(nn.Module):
    """Values of heads, to which a depthwise convolution over their places is added, head by head."""

    def __init__(self, heads: int = 2, size: int = 4, attends: bool = False):
        super().__init__()
        self.heads, self.attends = heads, attends
        self.q, self.k, self.v = (nn.Linear(5, heads * size) for _ in range(3))
        self.o = nn.Linear(heads * size, 3)
        self.mix = nn.Conv2d(heads, heads, (3, 1), padding=(1, 0), groups=heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = torch.softmax(q @ k.mT, -1) @ v if self.attends else v
        return self.o((seen + self.mix(v)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attends", [False, True])
def test_rows_and_columns_of_a_depthwise_kernel_are_the_same_numbers(attends: bool) -> None:
    torch.manual_seed(0)
    net, x = MixedValues(attends=attends), torch.randn(2, 6, 5)
    symmetry = ps.find_symmetry(net, x)
    result = verify(symmetry, net, x, trials=3)
    assert result
    assert result.error < 1e-12
    # The heads; with queries and keys, the four places of each head that these meet in.
    least = math.log(2) + (2 * math.log(24) if attends else 0)
    assert symmetry.permutations.log_order() == pytest.approx(least)
    kernels = [axis for units in symmetry.group.units.values() for axis in units.axes if axis.site == "mix.weight"]
    assert kernels
    assert not any(axis.exponent for axis in kernels)  # what its rows take on, its columns take off
    assert symmetry.group.names("scale")


def _axis(site: str, *blocks: list[int], exponent: int = 0, dim: int = 0) -> Axis:
    return Axis(site, dim, torch.tensor(blocks, device="cpu"), exponent)


SHAPES = {"a": torch.Size([4]), "b": torch.Size([4]), "c": torch.Size([4])}


def test_multipliers_that_no_group_has_are_left_out_and_all_others_kept() -> None:
    units = [Units("u", 4, (_axis("a", [0, 1, 2, 3]), _axis("b", [0, 1, 2, 3]))), Units("w", 2, (_axis("c", [0, 1]),))]
    good = (_axis("a", [0, 1, 2, 3], exponent=1), _axis("b", [0, 1, 2, 3], exponent=-1))
    twice = (_axis("a", [0, 1, 2, 3], exponent=1), _axis("a", [0, 1, 2, 3], exponent=-1))
    torn = (_axis("c", [1, 2], exponent=1),)  # one of the units that permute, and something else
    for bad in (twice, torn):
        group = attached(units, {"scale": [bad], "flip": [good]}, [], SHAPES)
        assert group.log_order() == pytest.approx(math.log(24) + math.log(2) + 4 * math.log(2))
        assert {axis.site for one in group.units.values() if "flip" in one.moves for axis in one.axes} == {"a", "b"}
        assert not group.names("scale")
    for found in ([], [good]):
        group = attached(units, {"scale": found}, [], SHAPES)
        assert bool(group.names("scale")) == bool(found)
