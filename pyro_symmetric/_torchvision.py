"""The one place that imports torchvision.

PyPI's Linux wheels of torchvision carry operators compiled for CUDA, which can't load beside a CPU-only torch. Then
``import torchvision`` itself fails (``operator torchvision::nms does not exist``), because it attaches shape functions
to two operators that were never registered, although its data sets and network definitions need none of them.
Registering the two schemas without a kernel lets the import through; calling such an operator still ends in an error.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType

import torch

_OPERATORS = ("torchvision::nms", "torchvision::qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """``import torchvision``, also beside a torch that its compiled operators don't fit.

    :raises ImportError: if torchvision is missing, or fails for any other reason than its missing operators; it says
        what to install.
    """
    with contextlib.suppress(RuntimeError):
        return _imported()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # Python drops the package whose import failed, not the submodules that it had loaded
    for name in _OPERATORS:
        with contextlib.suppress(RuntimeError):  # of one that is registered
            torch.library.define(name, _SCHEMA)
    try:
        return _imported()
    except RuntimeError as error:
        raise ImportError(f"torchvision can't be imported ({error}); {_advice()}") from error


def _imported() -> ModuleType:
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"torchvision isn't installed; pip install 'pyro-symmetric[vision]' brings it, or {_advice()}"
        ) from error
    except (ImportError, OSError) as error:  # a library of another CUDA release
        raise ImportError(f"torchvision can't be imported ({error}); {_advice()}") from error


def prepare_torchvision() -> None:
    """To call before an import of torchmetrics or Lightning, which import torchvision if there is one, and fail with
    it."""
    with contextlib.suppress(ImportError):
        import_torchvision()


def _advice() -> str:
    """The command that installs the torchvision that belongs to this torch."""
    build = str(torch.__version__).partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"install the release that belongs to this torch: pip install --no-deps torchvision{index}"
