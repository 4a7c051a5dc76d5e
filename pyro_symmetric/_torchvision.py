"""The one place that imports torchvision.

PyPI's Linux wheels of torchvision carry operators compiled for CUDA, which can't load beside a CPU-only torch. Then
``import torchvision`` itself fails (``operator torchvision::nms does not exist``), because it attaches shape functions
to two operators that were never registered, although its data sets and network definitions need none of them.
Registering the two schemas without a kernel lets the import through; calling such an operator still ends in an error.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_BOXES_TO_KEEP = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = {"torchvision::nms": _BOXES_TO_KEEP, "torchvision::qnms": _BOXES_TO_KEEP}


def import_torchvision() -> ModuleType:
    """``import torchvision``, also beside a torch that its compiled operators don't fit.

    Where torchvision imports by itself, nothing else is done.

    :raises ImportError: if torchvision is missing, or fails for any other reason than its missing operators.
    """
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise ImportError(f"torchvision can't be imported: {error}") from error
    _forget_half_imported()
    for name, schema in _OPERATORS.items():
        if not _is_registered(name):
            torch.library.define(name, schema)
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        raise ImportError(
            f"torchvision can't be imported beside torch {torch.__version__} ({error}); install the torchvision "
            "release that belongs to this torch"
        ) from error


def _forget_half_imported() -> None:
    """Python drops only the package whose import failed, not the submodules that it had already loaded."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]


def _is_registered(name: str) -> bool:
    namespace, operator = name.split("::")
    return hasattr(getattr(torch.ops, namespace), operator)
