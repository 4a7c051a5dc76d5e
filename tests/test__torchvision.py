"""torchvision imports where its compiled operators fit torch, and where they don't."""

import subprocess
import sys

import pytest

from pyro_symmetric.networks import import_torchvision, prepare_torchvision


def test_data_sets_models_and_torchmetrics_are_usable_in_a_fresh_process():
    """A package that imports torchvision without our help, as torchmetrics does, finds it prepared."""
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
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_without_torchvision_the_sentence_says_what_to_install_and_what_needs_none_does_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="pip install"):
        import_torchvision()
    prepare_torchvision()
