"""The named networks: their sizes, as the papers give them, and that they compute."""

import pytest
import torch

from pyro_symmetric.networks import NETWORKS, optunet, resnet20


def count(net: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_optunet_has_392_parameters_and_a_bias_in_the_last_layer_only() -> None:
    net = optunet()
    assert count(net) == 392
    assert [name for name, _ in net.named_parameters() if name.endswith("bias")] == ["7.bias"]
    assert net[3].groups == 2


def test_resnet20_has_the_parameters_of_its_convolutions_norms_and_last_layer() -> None:
    # He et al.'s Table 6 counts 0.27 million.
    convolutions = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert count(resnet20()) == convolutions + norms + 650
    assert count(resnet20(width=4)) < 20_000


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_every_network_takes_small_images(name: str, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        x = torch.randn(2, *shape)
        assert NETWORKS[name](shape, 7).eval().to(x.device)(x).shape == (2, 7)
