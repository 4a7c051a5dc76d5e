"""Networks by name: of the literature on posteriors, each built from the shape of one input and the number of outputs;
and a user's own, which ``package.module:callable`` names.

>>> ps.networks.optunet()(torch.zeros(2, 1, 28, 28)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

Shape = Sequence[int]


def optunet(input_shape: Shape = (1, 28, 28), num_outputs: int = 10) -> nn.Module:
    """OptuNet (Laurent, Aldea & Franchi 2024, arXiv 2310.08287): 392 parameters for images of 28 x 28 in ten classes.

    Two convolutions without biases, the second in two groups, and a linear layer. The paper gives the sum only; kernel
    sizes, channels and pooling are chosen here, by accuracy among those that give 392.
    """
    return nn.Sequential(
        nn.Conv2d(_image(input_shape)[0], 2, 4, bias=False),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(2, 10, 5, groups=2, bias=False),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(10, num_outputs),
    )


class FilterResponse(nn.Module):
    """Filter-response normalisation (Singh & Krishnan 2020, arXiv 1911.09737), with SiLU in place of its thresholded
    unit."""

    def __init__(self, channels: int, device: torch.device | str | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, device=device))
        self.bias = nn.Parameter(torch.zeros(channels, device=device))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6)
        return nn.functional.silu(x * self.weight[:, None, None] + self.bias[:, None, None])


class FilterResponseBlock(nn.Module):
    """Two convolutions and a shortcut that, where channels double, pads with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = FilterResponse(outputs), FilterResponse(outputs)
        self.stride, self.pad = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        short = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad))
        return short + self.norm2(self.conv2(self.norm1(self.conv1(x))))


def resnet20(input_shape: Shape = (3, 32, 32), num_outputs: int = 10, width: int = 16) -> nn.Module:
    """ResNet-20 (He et al. 2016) with filter-response normalisation and SiLU, as in Laurent, Aldea & Franchi 2024.

    :param width: channels of the first stage; the paper's have 16.
    """
    blocks = [FilterResponseBlock(width, width, 1) for _ in range(3)]
    for outputs in (2 * width, 4 * width):
        blocks += [FilterResponseBlock(outputs if k else outputs // 2, outputs, 1 if k else 2) for k in range(3)]
    stem = [nn.Conv2d(_image(input_shape)[0], width, 3, 1, 1, bias=False), FilterResponse(width)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_outputs))


def resnet18(input_shape: Shape = (3, 32, 32), num_outputs: int = 10) -> nn.Module:
    """torchvision's ResNet-18 for small images: the first convolution is 3 x 3 at stride 1, without pooling after it.

    It has batch normalisation: in a Bayesian model its running statistics are data.
    """
    net = import_torchvision().models.resnet18(weights=None, num_classes=num_outputs)
    net.conv1 = nn.Conv2d(_image(input_shape)[0], 64, 3, 1, 1, bias=False)
    net.maxpool = nn.Identity()
    return net


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "optunet": optunet,
    "resnet20": resnet20,
    "resnet18": resnet18,
}
"""The networks that a study's ``net`` may name by their bare names."""


def net_from_callable(spec: str, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The network that ``package.module:callable`` makes, of ``(input_shape, num_outputs)`` or of no arguments; or is.

    Modules of the current folder count.

    :param input_shape: of one row.
    :raises ValueError: if there is no such callable, it takes other arguments, or returns no network.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if spec.startswith("torchvision"):
        import_torchvision()
    try:
        build = pkgutil.resolve_name(spec)
    except (ValueError, ImportError, AttributeError) as error:
        known = ", ".join(NETWORKS)
        raise ValueError(f"{spec!r} can't be imported ({error}); write package.module:callable, or {known}") from error
    if isinstance(build, nn.Module):
        return build
    taken = [p for p in inspect.signature(build).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = sum(p.default is p.empty for p in taken)
    if len(taken) != 2 and needed:
        raise ValueError(f"{spec} needs {needed} arguments; it is called with (input_shape, num_outputs), or with none")
    net = build(input_shape, num_outputs) if len(taken) == 2 else build()
    if not isinstance(net, nn.Module):
        raise ValueError(f"{spec} returned a {type(net).__name__}; it must return a torch.nn.Module")
    return net


def _image(shape: Shape) -> Shape:
    if len(shape) != 3:
        raise ValueError(f"rows have shape {tuple(shape)}; this network needs images, (channels, height, width)")
    return shape


# torchvision ----------------------------------------------------------------------------------------------------------


def import_torchvision() -> ModuleType:
    """``import torchvision``, also beside a torch that its compiled operators don't fit.

    PyPI's Linux wheels of torchvision carry operators compiled for CUDA, which can't load beside a CPU-only torch. Then
    ``import torchvision`` fails (``operator torchvision::nms does not exist``), because it attaches shape functions to
    two operators that were never registered, although its data sets and network definitions need none of them.
    Registering the two without a kernel lets the import through; calling such an operator still ends in an error.

    :raises ImportError: if torchvision is missing, or fails for any other reason; it says what to install.
    """
    try:
        with contextlib.suppress(RuntimeError):
            return importlib.import_module("torchvision")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # Python drops the package whose import failed, not the submodules that it had loaded
        for name in ("torchvision::nms", "torchvision::qnms"):
            with contextlib.suppress(RuntimeError):  # of one that is registered
                torch.library.define(name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a library of another CUDA release
        build = str(torch.__version__).partition("+")[2]
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        raise ImportError(
            f"torchvision can't be imported ({error}); install the release that belongs to this torch: "
            f"pip install --no-deps torchvision{index}"
        ) from error


def prepare_torchvision() -> None:
    """To call before an import of torchmetrics or Lightning, which import torchvision if there is one, and fail with
    it."""
    with contextlib.suppress(ImportError):
        import_torchvision()
