"""Networks of papers and of PyTorch's own layers: their whole symmetry, counted by hand, is found, and it is one."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.networks import NETWORKS
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify


def found(name: str) -> tuple[torch.nn.Module, torch.Tensor, Symmetry]:
    make, shape = NETWORKS[name]
    x = torch.randn(shape)
    net = make().to(x.device)
    symmetry = find_symmetry(net, x, verify=False)
    assert verify(symmetry, net, x).error < 1e-10
    return net, x, symmetry


def sizes(symmetry: Symmetry) -> list[int]:
    """The sizes of all symmetric groups: one in each unit of the parent."""
    group = symmetry.permutations
    return sorted(group[name].size for name in group.names("permute") for _ in range(group[name].copies))


def test_optunet_exchanges_its_groups_and_the_channels_within() -> None:
    net, x, symmetry = found("OptuNet")
    assert sum(p.numel() for p in net.parameters()) == 392
    # Both groups move as wholes with the channel that feeds them; in each, five channels are exchangeable.
    assert sizes(symmetry) == [2, 5, 5]
    assert symmetry.log_order() == pytest.approx(math.log(2 * 120**2))
    assert sum(symmetry.group[n].count for n in symmetry.group.names("scale")) == 2 + 10
    assert find_symmetry(net, x, logits=True).shifts.sites == ("7.bias",)


SIZES = {
    # The stream has 16 channels; shortcuts pad it with new ones, 8 on each side, then 16: they join the wider streams,
    # but only those of one age are exchangeable. Nine blocks have channels of their own.
    "ResNet-20 FRN SiLU": [16, 16, 32] + 3 * [16] + 3 * [32] + 3 * [64],
    "UNet": [8, 8, 8, 16],  # skipped channels and upsampled ones keep apart
    "weight-shared MLP": [16],  # a layer that is used three times ties its inputs to its outputs
    # A stream of 16; for each layer four heads, 4 rows of queries and keys and 4 of values in each, 32 hidden units.
    "TransformerEncoder": [16] + 2 * [4, 32] + 2 * 4 * [4, 4],
    "bidirectional LSTM": 4 * [8],  # for each layer and direction
    "bidirectional GRU": 4 * [8],
}


@pytest.mark.parametrize("name", SIZES)
def test_all_units_that_are_counted_by_hand_are_exchanged(name: str) -> None:
    assert sizes(found(name)[2]) == sorted(SIZES[name])
