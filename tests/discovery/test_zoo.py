"""Symmetries of networks that people use don't change from one version to the next,
unless it is meant to.

``zoo.json`` holds the log-order of the permutations, and how many scales and signs
there are; it was made by what this test runs. A number that is larger than there is a
gain, and written there anew. Of some networks of papers and of PyTorch's own layers the
whole symmetry is counted by hand.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.networks import NETWORKS
from benchmarks.zoo import Case, images, plain
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify

FROZEN: dict[str, list[float]] = json.loads(
    (Path(__file__).parent / "zoo.json").read_text()
)
# others are counted by hand below
QUICK = ("MLP GroupNorm", "GRUCell", "siamese Bilinear", "masked sum")


def marked(library: str, case: Case) -> object:
    quick = library == "torch" and case.name in QUICK
    return pytest.param(
        case, id=f"{library}: {case.name}", marks=[] if quick else pytest.mark.slow
    )


CASES = [marked("torch", case) for case in plain.plain()] + [
    marked("torchvision", case)
    for case in images.torchvision()
    if f"torchvision: {case.name}" in FROZEN
]


@pytest.mark.parametrize("case", CASES)
def test_a_network_of_the_zoo_has_the_symmetries_that_were_found_before(
    case: Case, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    net, inputs = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # without a sign of ShuffleNet that fails verification
        group = find_symmetry(net.eval(), *inputs).group
    scales, signs = (
        sum(group[name].count for name in group.names(move))
        for move in ("scale", "flip")
    )
    log_order, *multipliers = FROZEN[request.node.callspec.id]
    assert group.permutations.log_order() == pytest.approx(log_order, abs=0.01)
    assert [scales, signs] == multipliers


# counted by hand ----------------------------------------------------------------------


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
    return sorted(
        group[name].size
        for name in group.names("permute")
        for _ in range(group[name].copies)
    )


def test_optunet_exchanges_its_groups_and_the_channels_within() -> None:
    net, x, symmetry = found("OptuNet")
    assert sum(p.numel() for p in net.parameters()) == 392
    # Both groups move as wholes with the channel that feeds them; in each, five
    # channels are exchangeable.
    assert sizes(symmetry) == [2, 5, 5]
    assert symmetry.log_order() == pytest.approx(math.log(2 * 120**2))
    assert sum(symmetry.group[n].count for n in symmetry.group.names("scale")) == 2 + 10
    assert find_symmetry(net, x, logits=True).shifts.sites == ("7.bias",)


SIZES = {
    # The stream has 16 channels; shortcuts pad it with new ones, 8 on each side, then
    # 16: they join the wider streams, but only those of one age are exchangeable. Nine
    # blocks have channels of their own.
    "ResNet-20 FRN SiLU": [16, 16, 32] + 3 * [16] + 3 * [32] + 3 * [64],
    "UNet": [8, 8, 8, 16],  # skipped channels and upsampled ones keep apart
    # a layer that is used three times ties its inputs to its outputs
    "weight-shared MLP": [16],
    # A stream of 16; for each layer four heads, 4 rows of queries and keys and 4 of
    # values in each, 32 hidden units.
    "TransformerEncoder": [16] + 2 * [4, 32] + 2 * 4 * [4, 4],
    "bidirectional LSTM": 4 * [8],  # for each layer and direction
    "bidirectional GRU": 4 * [8],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if "ResNet" in n else ()) for n in SIZES],
)
def test_all_units_that_are_counted_by_hand_are_exchanged(name: str) -> None:
    assert sizes(found(name)[2]) == sorted(SIZES[name])
