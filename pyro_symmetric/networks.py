"""Networks of the literature on posteriors, built from the shape of one input and the
number of outputs; users' own networks by ``package.module:callable``; and the import of
torchvision.

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
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric.errors import first_line

Shape = Sequence[int]


def optunet(input_shape: Shape = (1, 28, 28), num_outputs: int = 10) -> nn.Module:
    """Build OptuNet (Laurent, Aldea & Franchi 2024, arXiv 2310.08287): 392 parameters
    for 28 x 28 images in 10 classes.

    It has two convolutions without biases, the second in two groups, and a linear
    layer. The paper gives the number of parameters only; kernel sizes, channels and
    pooling are the most accurate choice among those with 392 parameters.
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
    """Filter-response normalisation (Singh & Krishnan 2020, arXiv 1911.09737) with SiLU
    in place of the TLU.
    """

    def __init__(self, channels: int, device: torch.device | str | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, device=device))
        self.bias = nn.Parameter(torch.zeros(channels, device=device))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6)
        return nn.functional.silu(
            x * self.weight[:, None, None] + self.bias[:, None, None]
        )


class FilterResponseBlock(nn.Module):
    """Residual block of two convolutions; where channels double, the shortcut is padded
    with zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1 = FilterResponse(outputs)
        self.norm2 = FilterResponse(outputs)
        self.stride = stride
        self.pad = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        shortcut = nn.functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad)
        )
        return shortcut + self.norm2(self.conv2(self.norm1(self.conv1(x))))


def resnet20(
    input_shape: Shape = (3, 32, 32), num_outputs: int = 10, width: int = 16
) -> nn.Module:
    """Build ResNet-20 (He et al. 2016) with filter-response normalisation and SiLU, as
    Laurent, Aldea & Franchi 2024.

    :param width: channels of the first stage; 16 in the paper.
    """
    blocks = [FilterResponseBlock(width, width, 1) for _ in range(3)]
    for outputs in (2 * width, 4 * width):
        blocks += [
            FilterResponseBlock(outputs if k else outputs // 2, outputs, 1 if k else 2)
            for k in range(3)
        ]
    stem = [
        nn.Conv2d(_image(input_shape)[0], width, 3, 1, 1, bias=False),
        FilterResponse(width),
    ]
    return nn.Sequential(
        *stem,
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_outputs),
    )


def resnet18(input_shape: Shape = (3, 32, 32), num_outputs: int = 10) -> nn.Module:
    """Build torchvision's ResNet-18 for small images: the first convolution is 3 x 3
    with stride 1, without pooling.

    It has batch normalisation, whose running statistics are data in a Bayesian model.
    """
    net = import_torchvision().models.resnet18(weights=None, num_classes=num_outputs)
    net.conv1 = nn.Conv2d(_image(input_shape)[0], 64, 3, 1, 1, bias=False)
    net.maxpool = nn.Identity()
    return net


# The networks that a study's ``net`` may name without a module.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "optunet": optunet,
    "resnet20": resnet20,
    "resnet18": resnet18,
}


def net_from_callable(spec: str, input_shape: Shape, num_outputs: int) -> nn.Module:
    """Build a network by ``package.module:callable``, called with ``(input_shape,
    num_outputs)`` or without arguments.

    The name may also be that of a network. Modules are also looked for in the current
    folder.

    :param input_shape: shape of one row.
    :raises ValueError: if there is no such callable, it takes other arguments, or
        returns no network.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if spec.startswith("torchvision"):
        import_torchvision()
    try:
        build = pkgutil.resolve_name(spec)
    except (ValueError, ImportError, AttributeError) as error:
        names = ", ".join(NETWORKS)
        raise ValueError(
            f"{spec!r} can't be imported ({error}); write package.module:callable, or "
            f"{names}"
        ) from error
    if isinstance(build, nn.Module):
        return build
    named = [
        p
        for p in inspect.signature(build).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    required = sum(p.default is p.empty for p in named)
    if len(named) != 2 and required:
        raise ValueError(
            f"{spec} needs {required} arguments; it is called with (input_shape, "
            "num_outputs) or with none"
        )
    net = build(input_shape, num_outputs) if len(named) == 2 else build()
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"{spec} returned a {type(net).__name__}; it must return a torch.nn.Module"
        )
    return net


def _image(shape: Shape) -> Shape:
    if len(shape) != 3:
        raise ValueError(
            f"rows have shape {tuple(shape)}; this network needs images, (channels, "
            "height, width)"
        )
    return shape


# torchvision --------------------------------------------------------------------------


@contextlib.contextmanager
def naming_layer(net: nn.Module, *args: Any) -> Iterator[None]:
    """Let an error that inputs cause in a network name the layer and both shapes.

    :raises ValueError: in place of a ``RuntimeError``, if two rows fail, too.
    """
    try:
        yield
    except RuntimeError as error:
        if layer := failing_layer(net, *args):
            raise ValueError(f"{type(net).__name__} fails in {layer}") from error
        raise


def failing_layer(net: nn.Module, *args: Any) -> str:
    """Describe the layer that two rows of inputs fail in; empty if none does."""
    names = {module: name for name, module in net.named_modules()}
    try:
        with torch.no_grad():
            net(*(arg[:2] if isinstance(arg, Tensor) else arg for arg in args))
        return ""
    except Exception as error:
        message = first_line(error)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    layer, inputs = net, args
    for frame in frames:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals["self"] in names:
            layer, inputs = frame.f_locals["self"], frame.f_locals["args"]
    shapes = [tuple(part.shape) for part in inputs if isinstance(part, Tensor)]
    parameter_shapes = {
        part: tuple(v.shape) for part, v in layer.named_parameters(recurse=False)
    }
    title = (
        f"layer {names[layer]!r}, {layer}" if parameter_shapes else type(layer).__name__
    )
    return (
        f"{title} with parameters {parameter_shapes}, given two rows {shapes}: "
        f"{message}"
    )


def import_torchvision() -> ModuleType:
    """Import torchvision, even if its compiled operators don't match the installed
    torch.

    PyPI's Linux wheels of torchvision contain operators compiled for CUDA, which a
    CPU-only torch can't load. Then ``import torchvision`` fails (``operator
    torchvision::nms does not exist``): it attaches shape functions to two operators
    that were never registered, although its data sets and network definitions need
    neither. Registering the two without a kernel lets the import succeed; calling them
    still raises an error.

    :raises ImportError: if torchvision is missing, or fails for any other reason; says
        what to install.
    """
    try:
        with contextlib.suppress(RuntimeError):
            return importlib.import_module("torchvision")
        for name in [
            name for name in sys.modules if name.partition(".")[0] == "torchvision"
        ]:
            # after a failed import Python removes the package, but not its loaded
            # submodules
            del sys.modules[name]
        for name in ("torchvision::nms", "torchvision::qnms"):
            with contextlib.suppress(RuntimeError):  # already registered
                torch.library.define(
                    name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return importlib.import_module("torchvision")
    # OSError: a library of another CUDA release
    except (ImportError, OSError, RuntimeError) as error:
        build = str(torch.__version__).partition("+")[2]
        index = (
            f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        )
        raise ImportError(
            f"torchvision can't be imported ({error}); install the release that "
            "belongs to this torch: "
            f"pip install --no-deps torchvision{index}"
        ) from error


def prepare_torchvision() -> None:
    """Import torchvision, if installed, before torchmetrics or Lightning do, whose
    imports would fail with its own.
    """
    with contextlib.suppress(ImportError):
        import_torchvision()
