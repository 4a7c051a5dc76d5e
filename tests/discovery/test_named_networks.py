"""Networks of papers and of PyTorch's own layers: their whole symmetry is found, and it is one."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify

SOURCE = Path(__file__).parents[2] / "benchmarks" / "networks.py"
pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="the benchmarks aren't part of an installed package")


def networks() -> ModuleType:
    """The module that the benchmarks take their networks from."""
    if "benchmark_networks" not in sys.modules:
        spec = importlib.util.spec_from_file_location("benchmark_networks", SOURCE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["benchmark_networks"] = module
        spec.loader.exec_module(module)
    return sys.modules["benchmark_networks"]


def found(name: str) -> tuple[torch.nn.Module, torch.Tensor, Symmetry]:
    make, shape = networks().NETWORKS[name]
    x = torch.randn(shape)
    net = make().to(x.device)
    symmetry = find_symmetry(net, x, strict=True, verify=False)
    result = verify(symmetry, net, x)
    assert result.error < 1e-10
    return net, x, symmetry


def sizes(symmetry: Symmetry) -> list[int]:
    """The sizes of all symmetric groups: one in each unit of the parent."""
    group = symmetry.permutations
    return sorted(group[name].size for name in group.names("permute") for _ in range(group[name].copies))


def log_factorial(n: int) -> float:
    return math.lgamma(n + 1)


def test_optunet_exchanges_its_groups_and_the_channels_within() -> None:
    net, x, symmetry = found("OptuNet")
    assert sum(p.numel() for p in net.parameters()) == 392
    # Both groups move as wholes with the channel that feeds them; in each, five channels are exchangeable.
    assert sizes(symmetry) == [2, 5, 5]
    assert symmetry.log_order() == pytest.approx(math.log(2 * 120**2))
    assert sum(symmetry.group[n].count for n in symmetry.group.names("scale")) == 2 + 10
    assert find_symmetry(net, x, logits=True).shifts.sites == ("7.bias",)


def test_resnet20_with_filter_response_normalisation_has_a_stream_and_nine_blocks() -> None:
    _, _, symmetry = found("ResNet-20 FRN SiLU")
    # The stream has 16 channels; shortcuts pad it with new ones, 8 on each side, then 16: they join the wider streams,
    # but only those of one age are exchangeable. Nine blocks have channels of their own.
    assert sizes(symmetry) == sorted([16, 16, 32] + 3 * [16] + 3 * [32] + 3 * [64])
    assert symmetry.log_order() >= sum(map(log_factorial, sizes(symmetry)))


def test_a_unet_keeps_skipped_channels_and_upsampled_ones_apart() -> None:
    _, _, symmetry = found("UNet")
    assert sizes(symmetry) == [8, 8, 8, 16]


def test_a_layer_that_is_used_three_times_ties_its_inputs_to_its_outputs() -> None:
    _, _, symmetry = found("weight-shared MLP")
    assert symmetry.permutations.factors == {"first": 16}
    assert {(axis.site, axis.dim) for axis in symmetry.permutations["first"].axes} >= {
        ("again.weight", 0),
        ("again.weight", 1),
    }


def test_a_transformer_encoder_exchanges_heads_and_what_is_inside() -> None:
    _, _, symmetry = found("TransformerEncoder")
    # A stream of 16; for each layer four heads, 4 rows of queries and keys and 4 of values in each, 32 hidden units.
    assert sizes(symmetry) == sorted([16] + 2 * [4, 32] + 2 * 4 * [4, 4])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_have_units_for_each_layer_and_direction(kind: str) -> None:
    _, _, symmetry = found(f"bidirectional {kind}")
    assert sizes(symmetry) == 4 * [8]
