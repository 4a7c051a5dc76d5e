"""Data sets by name: read, split, standardise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.calls import did_you_mean
from pyro_symmetric.datasets import sources, splitting
from pyro_symmetric.datasets.dataset import Dataset, Raw, Task

KNOWN = (*sources.SKLEARN, *sources.IMAGES, "uci/<name>", "csv:FILE")
"""The names that :func:`load` reads."""

# Brightness of a colour as ITU-R BT.601 weighs it; what Pillow's and torchvision's grey conversions use.
LUMINANCE = (0.299, 0.587, 0.114)


def load(
    name: str,
    *,
    root: str | Path = "data",
    download: bool = False,
    target: str | None = None,
    task: Task | None = None,
    test_fraction: float = 0.2,
    hold_out: Literal["auto"] | Sequence[str | int] | None = None,
    split: int = 0,
    max_train: int | None = None,
    max_test: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Dataset:
    """Load a data set, split it, and standardise it by its training rows.

    :param name: one of :data:`KNOWN`. ``digits``, ``wine``, ``breast-cancer`` and ``diabetes`` come with scikit-learn
        and need no files; ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100`` and ``svhn`` are read by torchvision
        from ``root``; ``uci/<name>`` is a folder under ``root`` (see :func:`sources.read_uci`); ``csv:FILE`` is the
        user's own table (see :func:`sources.read_csv`).
    :param root: the folder in which data sets are looked for, and to which they are downloaded.
    :param download: fetch an image data set that is missing.
    :param target: the target column, for ``csv:FILE`` only.
    :param task: for tables whose target allows both, ``"classification"`` or ``"regression"``; guessed by default.
    :param test_fraction: share of the rows that is split off for testing (stratified by class), where a data set has no
        test part of its own.
    :param hold_out: classes, by name, that are kept out of training and test and become the out-of-distribution inputs.
        ``None`` holds out none; ``"auto"`` the last fifth where there are at least 5, as a note then says. From a data
        set with a test part of its own, only that part's rows of these classes are used.
    :param split: number of the split. UCI sets bring theirs; data sets without a test part are split anew for each.
    :param max_train: most training rows, a stratified subset drawn by ``seed``; ``None`` for all.
    :param max_test: most test rows, and most out-of-distribution rows.
    :param seed: of the split and the subsets, whatever the state of PyTorch's generator.
    :param dtype: of the inputs and regression targets; PyTorch's default by default.
    :raises ValueError: if the name is unknown, or what was read can't be used; says what was found.
    :raises FileNotFoundError: if the data are not where they were looked for.
    """
    root = arguments.path("root", root).expanduser()
    arguments.one_of("task", task, (None, *get_args(Task)))
    arguments.fraction("test_fraction", test_fraction)
    arguments.whole("max_train", max_train, 2, none="all")
    arguments.whole("max_test", max_test, 1, none="all")
    arguments.dtype("dtype", dtype, none="PyTorch's default")
    raw = _read(name, root, download, target, split, task)
    if task not in (None, raw.task):
        raise ValueError(f"{name} is a {raw.task} data set; task={task!r} doesn't fit it")
    rng = np.random.default_rng([seed, split])
    raw, outside, ood_name = splitting.hold_out(raw, hold_out)
    train, test = splitting.split(raw, test_fraction, rng)
    train = splitting.subset(train, raw, max_train, rng)
    test = splitting.subset(test, raw, max_test, rng)
    outside = splitting.subset(outside, raw, max_test, rng)
    splitting.check(raw, train)

    train_x, y = _inputs(raw.x[train], raw.pixel_range), torch.from_numpy(raw.y)
    x_mean, x_scale = _moments(train_x, dims=(0, 2, 3) if train_x.dim() == 4 else (0,))
    y_mean, y_scale = y.new_zeros((), dtype=torch.float64), y.new_ones((), dtype=torch.float64)
    if raw.task == "regression":
        y_mean, y_scale = _moments(y[train], dims=(0,))
        y = (y - y_mean) / y_scale

    def inputs(rows: np.ndarray) -> Tensor:
        return (_inputs(raw.x[rows], raw.pixel_range) - x_mean) / x_scale

    return Dataset(
        name=name,
        task=raw.task,
        train_x=inputs(train),
        train_y=y[train],
        test_x=inputs(test),
        test_y=y[test],
        ood_x=inputs(outside) if len(outside) else None,
        ood_name=ood_name if len(outside) else None,
        class_names=raw.class_names,
        feature_names=raw.feature_names,
        x_mean=x_mean,
        x_scale=x_scale,
        y_mean=y_mean,
        y_scale=y_scale,
        notes=raw.notes,
    ).to(device=device, dtype=dtype or torch.get_default_dtype())


def ood(
    name: str,
    like: Dataset,
    *,
    root: str | Path = "data",
    download: bool = False,
    max_rows: int | None = None,
    seed: int = 0,
) -> Dataset:
    """``like`` with the inputs of another data set as its out-of-distribution inputs.

    Images are brought to the shape of ``like``'s (grey or repeated channels, resized); a note says so. Tables must
    have the same features: by name for ``csv:FILE`` (a target column may be missing), by number otherwise. All are
    standardised by the training rows of ``like``. The test part is used where a data set has one, all rows otherwise.

    :param max_rows: most rows, a random subset drawn by ``seed``; ``None`` for all.
    :raises ValueError: if the data set is ``like`` itself, or can't be brought to its shape.
    :raises FileNotFoundError: if the data are not where they were looked for.
    """
    root = arguments.path("root", root).expanduser()
    arguments.whole("max_rows", max_rows, 1, none="all")
    if name == like.name:
        raise ValueError(f"ood is {name!r}, which is the data set itself; name another, or hold classes out")
    if name.startswith("csv:"):
        rows = sources.read_csv_features(name, like.feature_names)
        raw = Raw(name, rows, np.zeros(len(rows)), "regression")
    else:
        raw = _read(name, root, download, None, 0, None)
        rows = raw.x if raw.test_rows is None else raw.x[raw.test_rows]
    rows = rows[np.random.default_rng(seed).permutation(len(rows))[:max_rows]]
    x, notes = _inputs(rows, raw.pixel_range), raw.notes
    if like.is_image and x.dim() == 4:
        if x.shape[1:] != like.input_shape:
            notes = (*notes, f"Images of {name} were brought from {tuple(x.shape[1:])} to {tuple(like.input_shape)}.")
        x = to_shape(x, like.input_shape)
    if x.shape[1:] != like.input_shape:
        raise ValueError(
            f"rows of {name} have shape {tuple(x.shape[1:])}, but of {like.name} {tuple(like.input_shape)}"
        )
    x = (x.to(like.x_mean) - like.x_mean) / like.x_scale
    return dataclasses.replace(like, ood_x=x, ood_name=raw.name, notes=(*like.notes, *notes))


def _read(name: str, root: Path, download: bool, target: str | None, split: int, task: Task | None) -> Raw:
    if name in sources.SKLEARN:
        return sources.read_sklearn(name)
    if name in sources.IMAGES:
        if split != 0:
            raise ValueError(f"split is {split}, but {name} has one official split, number 0")
        return sources.read_images(name, root, download)
    if name.startswith("uci/"):
        return sources.read_uci(name, root, split, task)
    if name.startswith("csv:"):
        return sources.read_csv(name, target, task)
    raise ValueError(f"there is no data set {name!r}; known are {', '.join(KNOWN)}{did_you_mean(name, KNOWN)}")


def to_shape(images: Tensor, shape: torch.Size) -> Tensor:
    """Bring ``images`` ``(N, C, H, W)`` to ``(N, *shape)``: grey or repeated channels, then resized smoothly."""
    if (images.shape[1], shape[0]) == (3, 1):
        images = (images * images.new_tensor(LUMINANCE)[:, None, None]).sum(1, keepdim=True)
    images = images.expand(-1, shape[0], -1, -1)
    if images.shape[1:] == shape:
        return images
    return torch.nn.functional.interpolate(images, shape[1:], mode="bilinear", align_corners=False, antialias=True)


def _inputs(rows: np.ndarray, pixel_range: float | None) -> Tensor:
    """Rows as floats, pixels in 0..1. Single precision is exact enough for bytes and half the memory."""
    if pixel_range is None:
        return torch.from_numpy(rows).double()
    return torch.from_numpy(rows).float() / pixel_range


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (with 1/N, as the literature's) over ``dims``; a deviation of 1 for constants."""
    image = x.dim() == 4
    variance, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=image)
    constant = x.amax(dims, keepdim=image) == x.amin(dims, keepdim=image)
    scale = torch.where(constant, torch.ones_like(variance), variance.sqrt())
    return (mean[0], scale[0]) if image else (mean, scale)
