"""Data sets by name: read, split, standardise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import did_you_mean
from pyro_symmetric.datasets import sources
from pyro_symmetric.datasets.dataset import Dataset, Task, shorten
from pyro_symmetric.datasets.sources import Raw

KNOWN = (*sources.SKLEARN, *sources.IMAGES, "uci/<name>", "csv:FILE", "images:FOLDER")
"""The names that :func:`load` reads."""


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
    image_size: int = 64,
    max_train: int | None = None,
    max_test: int | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Dataset:
    """Load a data set, split it, and standardise it by its training rows.

    :param name: one of :data:`KNOWN`: a table or the digits of scikit-learn; images, read by torchvision from ``root``;
        ``uci/<name>``, a folder under ``root``; ``csv:FILE``, the user's own table; ``images:FOLDER``, the user's own
        pictures, a folder for each class.
    :param root: the folder in which data sets are looked for, and to which they are downloaded.
    :param download: fetch an image data set that is missing.
    :param target: the target column, for ``csv:FILE`` only.
    :param task: for tables whose target allows both; guessed by default.
    :param test_fraction: share of the rows that is split off for testing (stratified by class), where a data set has no
        test part of its own.
    :param hold_out: classes, by name, that are kept out of training and test and become the out-of-distribution inputs;
        ``"auto"`` the last fifth where there are at least 5. Of a test part of its own, where there is one.
    :param split: number of the split. UCI sets bring theirs; data sets without a test part are split anew for each.
    :param image_size: the side in pixels to which the pictures of ``images:FOLDER`` are scaled and cut.
    :param max_train: most training rows, a stratified subset; ``max_test`` likewise, and of out-of-distribution rows.
    :param seed: of the split and the subsets, whatever the state of PyTorch's generator.
    :param dtype: of the inputs and regression targets; PyTorch's default by default.
    :raises ValueError: if the name is unknown, or what was read can't be used; says what was found.
    :raises FileNotFoundError: if the data are not where they were looked for.
    """
    arguments.one_of("task", task, (None, *get_args(Task)))
    arguments.fraction("test_fraction", test_fraction)
    arguments.whole("max_train", max_train, 2, none="all")
    arguments.whole("max_test", max_test, 1, none="all")
    raw = _read(name, Path(root).expanduser(), download, target, split, task, image_size)
    if task not in (None, raw.task):
        raise ValueError(f"{name} is a {raw.task} data set; task={task!r} doesn't fit it")
    rng = np.random.default_rng([seed, split])
    held = _held_out(name, raw, hold_out)
    known = np.array([label not in held for label in raw.class_names])  # of each class
    inside = known[raw.y] if held else np.ones(len(raw.y), dtype=bool)
    train, test = raw.parts or (np.arange(len(raw.y)),) * 2
    train, test, outside = train[inside[train]], test[inside[test]], test[~inside[test]]
    if not raw.parts:
        rows, num_test = _stratified(train, raw, rng), max(1, round(test_fraction * len(train)))
        train, test = rows[num_test:], rows[:num_test]
    sizes = zip((train, test, outside), (max_train, max_test, max_test), strict=True)
    train, test, outside = (
        rows if most is None or len(rows) <= most else _stratified(rows, raw, rng)[:most] for rows, most in sizes
    )
    if held:
        kept = tuple(label for label in raw.class_names if label not in held)
        raw = replace(raw, y=known.cumsum()[raw.y] - 1, class_names=kept)
    _require_sound(name, raw, train)
    train_x, y = _inputs(raw.x[train]), torch.from_numpy(raw.y)
    x_mean, x_scale = _moments(train_x)
    y_mean, y_scale = y.new_zeros((), dtype=torch.float64), y.new_ones((), dtype=torch.float64)
    if raw.task == "regression":
        y_mean, y_scale = _moments(y[train])
        y = (y - y_mean) / y_scale
    test_x, ood_x = ((_inputs(raw.x[rows]) - x_mean) / x_scale for rows in (test, outside))
    return Dataset(
        name=name,
        task=raw.task,
        train_x=(train_x - x_mean) / x_scale,
        train_y=y[train],
        test_x=test_x,
        test_y=y[test],
        ood_x=ood_x if len(outside) else None,
        ood_name=f"{name}: {shorten(held)}" if len(outside) else None,
        class_names=raw.class_names,
        feature_names=raw.feature_names,
        x_mean=x_mean,
        x_scale=x_scale,
        y_mean=y_mean,
        y_scale=y_scale,
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
    """``like`` with the inputs of another data set as its out-of-distribution inputs, standardised as its own are.

    They must have the same shape; the features of ``csv:FILE`` are taken by name (a target column may be missing). The
    test part is used where a data set has one, all rows otherwise.

    :param max_rows: most rows, a random subset drawn by ``seed``; ``None`` for all.
    :raises ValueError: if the data set is ``like`` itself, or has another shape.
    :raises FileNotFoundError: if the data are not where they were looked for.
    """
    arguments.whole("max_rows", max_rows, 1, none="all")
    if name == like.name:
        raise ValueError(f"ood is {name!r}, which is the data set itself; name another, or hold classes out")
    if name.startswith("csv:"):
        raw = Raw(sources.numbers(sources.frame(name, like.feature_names)[list(like.feature_names)]), np.zeros(0))
    else:
        raw = _read(name, Path(root).expanduser(), download, None, 0, None, like.input_shape[-1])
    rows = raw.x[raw.parts[1]] if raw.parts else raw.x
    x = _inputs(rows[np.random.default_rng(seed).permutation(len(rows))[:max_rows]])
    if x.shape[1:] != like.input_shape:
        found, wanted = tuple(x.shape[1:]), tuple(like.input_shape)
        raise ValueError(f"rows of {name} have shape {found}, but of {like.name} {wanted}")
    return replace(like, ood_x=(x.to(like.x_mean) - like.x_mean) / like.x_scale, ood_name=name)


# small steps --------------------------------------------------------------------------------------------------------


def _read(name: str, root: Path, download: bool, target: str | None, split: int, task: Task | None, side: int) -> Raw:
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
    if name.startswith("images:"):
        return sources.read_folder(name, side)
    raise ValueError(f"there is no data set {name!r}; known are {', '.join(KNOWN)}{did_you_mean(name, KNOWN)}")


def _held_out(name: str, raw: Raw, classes: Literal["auto"] | Sequence[str | int] | None) -> list[str]:
    """The names of the classes that are kept out."""
    known = raw.class_names
    if classes == "auto":
        classes = known[len(known) - round(len(known) / 5) :] if len(known) >= 5 else ()
    held = [str(label) for label in arguments.listed("hold_out", classes or (), (str, int), "classes")]
    if held and (not set(held) <= set(known) or len(set(known) - set(held)) < 2):
        raise ValueError(f"hold_out is {held}; it must leave at least 2 of the classes of {name}: {shorten(known)}")
    return held


def _stratified(rows: np.ndarray, raw: Raw, rng: np.random.Generator) -> np.ndarray:
    """``rows`` in a random order in which every prefix holds each class in close to its share.

    Row number k of the n rows of a class (in random order) is placed at (k + 1/2) / n of the whole.
    """
    rows = rows[rng.permutation(len(rows))]
    place = np.zeros(len(rows))
    for label in range(len(raw.class_names)):
        of_class = raw.y[rows] == label
        place[of_class] = (np.arange(of_class.sum()) + 0.5) / max(1, of_class.sum())
    return rows[np.argsort(place, kind="stable")]  # so that ties between classes stay in random order


def _require_sound(name: str, raw: Raw, train: np.ndarray) -> None:
    floats = [values for values in (raw.x, raw.y) if values.dtype.kind == "f"]
    if not all((np.abs(values) <= np.finfo(np.float32).max).all() for values in floats):
        raise ValueError(f"{name} holds values that are NaN, infinite, or too large for single precision")
    missing = [label for k, label in enumerate(raw.class_names) if k not in raw.y[train]]
    if missing or len(train) < 2:
        raise ValueError(f"{name} has too few rows: none of the {len(train)} training rows is of {missing}")


def _inputs(rows: np.ndarray) -> Tensor:
    """Rows as floats, bytes in 0..1. Single precision is exact enough for these and half the memory."""
    x = torch.from_numpy(rows)
    return x.float() / 255 if x.dtype == torch.uint8 else x.double()


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (with 1/N, as the literature's), of images by channel; 1 for constants."""
    dims = (0, 2, 3) if x.dim() == 4 else (0,)
    variance, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
    constant = x.amax(dims, keepdim=True) == x.amin(dims, keepdim=True)
    return mean[0], torch.where(constant, 1.0, variance.sqrt())[0]
