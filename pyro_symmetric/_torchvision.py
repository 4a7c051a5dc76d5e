"""The one place that imports torchvision.

PyPI's Linux wheels of torchvision carry operators compiled for CUDA, which can't load beside a CPU-only torch. Then
``import torchvision`` itself fails (``operator torchvision::nms does not exist``), because it attaches shape functions
to two operators that were never registered, although its data sets and network definitions need none of them.
Registering the two schemas without a kernel lets the import through; calling such an operator still ends in an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

_BOXES_TO_KEEP = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = {"torchvision::nms": _BOXES_TO_KEEP, "torchvision::qnms": _BOXES_TO_KEEP}


def import_torchvision() -> ModuleType:
    """``import torchvision``, also beside a torch that its compiled operators don't fit.

    If torchvision imports by itself, nothing else is done.

    :raises ImportError: if torchvision is missing, or fails for any other reason than its missing operators; it says
        what to install.
    """
    if (loaded := sys.modules.get("torchvision")) is not None:
        return loaded
    if not is_installed():
        raise ImportError(
            "torchvision isn't installed, which reads image data and makes its networks; pip install "
            f"'pyro-symmetric[vision]' brings it, or {_advice()}"
        )
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise _unfit(error) from error
    except OSError as error:  # a library of another CUDA release
        raise _unfit(error) from error
    _forget_half_imported()
    for name, schema in _OPERATORS.items():
        if not _is_registered(name):
            torch.library.define(name, schema)
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        raise _unfit(error) from error


def is_installed() -> bool:
    """True if there is a torchvision, sound or not."""
    loaded = sys.modules.get("torchvision") is not None
    return loaded or importlib.util.find_spec("torchvision") is not None


def prepare_torchvision() -> None:
    """To call before an import of torchmetrics or Lightning, which import torchvision if there is one, and fail with
    it."""
    if is_installed():
        import_torchvision()


def _unfit(error: Exception) -> ImportError:
    return ImportError(f"torchvision can't be imported beside torch {torch.__version__} ({error}); {_advice()}")


def _advice() -> str:
    """The command that installs the torchvision that belongs to this torch."""
    build = str(torch.__version__).partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"install the release that belongs to this torch: pip install --force-reinstall --no-deps torchvision{index}"


def _forget_half_imported() -> None:
    """Python drops only the package whose import failed, not the submodules that it had already loaded."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]


def _is_registered(name: str) -> bool:
    namespace, operator = name.split("::")
    return hasattr(getattr(torch.ops, namespace), operator)
