"""The named networks: their sizes, as the papers give them, and that they compute;
torchvision's import.
"""

import subprocess
import sys

import pytest
import torch

from pyro_symmetric.networks import (
    NETWORKS,
    import_torchvision,
    optunet,
    prepare_torchvision,
    resnet20,
)


def count(net: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_optunet_has_392_parameters_and_a_bias_in_the_last_layer_only() -> None:
    net = optunet()
    assert count(net) == 392
    assert [name for name, _ in net.named_parameters() if name.endswith("bias")] == [
        "7.bias"
    ]
    assert net[3].groups == 2


def test_resnet20_has_the_parameters_of_its_convolutions_norms_and_last_layer() -> None:
    # He et al.'s Table 6 counts 0.27 million.
    convolutions = 9 * (
        3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64
    )
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert count(resnet20()) == convolutions + norms + 650
    assert count(resnet20(width=4)) < 20_000


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_every_network_takes_small_images(name: str, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        x = torch.randn(2, *shape)
        assert NETWORKS[name](shape, 7).eval().to(x.device)(x).shape == (2, 7)


# torchvision --------------------------------------------------------------------------


def test_data_sets_models_and_torchmetrics_are_usable_in_a_fresh_process():
    """A package that imports torchvision without our help, as torchmetrics does, finds
    it prepared.
    """
    program = (
        "import importlib.util, warnings\n"
        "from pyro_symmetric.networks import import_torchvision, prepare_torchvision\n"
        "prepare_torchvision()\n"
        "import torchvision.datasets, torchvision.models\n"
        "assert import_torchvision() is torchvision\n"
        "torchvision.models.squeezenet1_0()\n"
        "warnings.simplefilter('default')  # torchmetrics' own\n"
        "if importlib.util.find_spec('torchmetrics'):\n"
        "    import torchmetrics\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_without_torchvision_the_sentence_says_what_to_install_and_what_needs_none_does_without(
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="pip install"):
        import_torchvision()
    prepare_torchvision()
