"""Image data sets through torchvision, and bringing images of one data set to the shape of another's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric._torchvision import import_torchvision
from pyro_symmetric.datasets.dataset import Raw

_DIGITS = tuple(str(digit) for digit in range(10))
# Brightness of a colour as ITU-R BT.601 weighs it; what Pillow's and torchvision's grey conversions use.
_LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class _Source:
    """A data set of torchvision: its class, what it looks for under the root, and its official size."""

    class_name: str
    looks_for: str
    num_train: int
    class_names: tuple[str, ...] = ()


SOURCES = {
    "mnist": _Source("MNIST", "MNIST/raw", 60_000, _DIGITS),
    "fashion-mnist": _Source("FashionMNIST", "FashionMNIST/raw", 60_000),
    "cifar10": _Source("CIFAR10", "cifar-10-batches-py", 50_000),
    "cifar100": _Source("CIFAR100", "cifar-100-python", 50_000),
    "svhn": _Source("SVHN", "train_32x32.mat and test_32x32.mat", 73_257, _DIGITS),
}


def read_torchvision(name: str, root: Path, download: bool) -> Raw:
    """Read the official training and test parts of one of :data:`SOURCES`, bytes as they are.

    :param root: the folder that torchvision calls ``root``.
    :param download: fetch the data there if they are missing.
    :raises FileNotFoundError: if the data are not there, or can't be downloaded.
    :raises ValueError: if what is there can't be read.
    """
    source = SOURCES[name]
    train, test = (_open(name, source, root, part, download) for part in ("train", "test"))
    train_x, train_y = _arrays(train)
    test_x, test_y = _arrays(test)
    if min(len(train_x), len(test_x)) == 0:
        raise ValueError(
            f"{name} under {root} holds {len(train_x)} training and {len(test_x)} test images; both need some"
        )
    whole = len(train_x) == source.num_train
    return Raw(
        name=name if whole else f"{name} ({len(train_x):,} of {source.num_train:,} training images)",
        x=np.concatenate([train_x, test_x]),
        y=np.concatenate([train_y, test_y]),
        task="classification",
        class_names=source.class_names or tuple(train.classes),
        train_rows=np.arange(len(train_x)),
        test_rows=np.arange(len(train_x), len(train_x) + len(test_x)),
        pixel_range=255.0,
    )


def to_shape(images: Tensor, shape: torch.Size) -> tuple[Tensor, list[str]]:
    """Bring ``images`` ``(N, C, H, W)`` to ``(N, *shape)``: grey or repeated channels, then a smoothed bilinear resize.

    :return: the images, and what was done to them, in words.
    :raises ValueError: if the numbers of channels can't be reconciled (only 1 and 3 can).
    """
    done = []
    channels, size = shape[0], tuple(shape[1:])
    if images.shape[1] != channels:
        if (images.shape[1], channels) == (3, 1):
            images = (images * images.new_tensor(_LUMINANCE)[:, None, None]).sum(1, keepdim=True)
            done.append("turned grey")
        elif (images.shape[1], channels) == (1, 3):
            images = images.expand(-1, 3, -1, -1)
            done.append("repeated in three channels")
        else:
            raise ValueError(f"images with {images.shape[1]} channels can't be brought to {channels} channels")
    if tuple(images.shape[2:]) != size:
        done.append(f"resized from {images.shape[2]}x{images.shape[3]} to {size[0]}x{size[1]}")
        images = torch.nn.functional.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)
    return images, done


def _open(name: str, source: _Source, root: Path, part: str, download: bool) -> Any:
    import_torchvision()
    from torchvision import datasets

    which = {"split": part} if name == "svhn" else {"train": part == "train"}
    try:
        return getattr(datasets, source.class_name)(root=root, download=download, **which)
    except (RuntimeError, ValueError, AssertionError, EOFError, OSError) as error:
        if download and isinstance(error, OSError | RuntimeError):
            raise FileNotFoundError(
                f"{name} could not be downloaded to {root} ({error}); fetch it elsewhere and give its folder as root "
                f"(--data-root), in which {source.looks_for} is looked for"
            ) from error
        if str(error).startswith("Dataset not found"):
            raise FileNotFoundError(
                f"{name} was not found: looked for {source.looks_for} under {root.resolve()}; pass download=True "
                "(--download) to fetch it, or root (--data-root) to say where it is"
            ) from error
        raise ValueError(
            f"{name} under {root.resolve()} can't be read ({error}); delete its files and download them anew"
        ) from error


def _arrays(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images ``(N, C, H, W)`` as bytes and labels ``(N,)``, without a detour over single Pillow images."""
    images = np.asarray(dataset.data)
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    labels = dataset.labels if hasattr(dataset, "labels") else dataset.targets
    return images, np.asarray(labels, dtype=np.int64)
