"""Data sets for examples, studies and tests: tables and images, split, standardised and
ready for a network.

:func:`load` reads a data set by name; :func:`ood` adds the inputs of a second one as
out-of-distribution inputs. Both return a :class:`Dataset`, whose inputs are
standardised by the statistics of its training rows. :func:`reference` loads a reference
posterior of a checkout.

>>> data = ps.datasets.load("wine")
>>> data.input_shape, data.num_outputs
(torch.Size([13]), 3)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Device, Names, did_you_mean
from pyro_symmetric.networks import import_torchvision
from pyro_symmetric.references import Reference as Reference
from pyro_symmetric.references import reference as reference
from pyro_symmetric.store import load_pickled, require_stored

Task = Literal["classification", "regression"]
SKLEARN = ("digits", "wine", "breast-cancer", "diabetes")
IMAGES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
# An image of more pixels than this must have a byte of its file for each hundred: one
# colour alone compresses better.
MANY_PIXELS = 2**22
PIXELS_A_BYTE = 100
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")
TEST_SHARE = 0.2  # of the rows of a data set without an official test part
# a target with at most this many different whole numbers holds classes
MOST_CLASSES = 20
PREFIXES = ("uci/", "csv:", "images:")
KNOWN = (*SKLEARN, *IMAGES, "uci/<name>", "csv:FILE", "images:FOLDER")
"""The names that :func:`load` reads."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, test and out-of-distribution rows of one data set.

    Inputs are standardised by the training rows: ``x = (raw - x_mean) / x_scale``, per
    feature for tables and per channel for images, whose pixels are scaled to 0..1
    first. Regression targets are standardised likewise.

    :param name: the name passed to :func:`load`.
    :param train_x: ``(num_train, *input_shape)``; ``input_shape`` is ``(channels,
        height, width)`` or ``(features,)``.
    :param train_y: ``(num_train,)``, class indices ``0..num_outputs-1`` as int64, or
        standardised targets.
    :param ood_x: ``(num_ood, *input_shape)`` out-of-distribution inputs, or ``None``.
    :param ood_name: the source of ``ood_x``, e.g. ``"digits: 8, 9"``.
    :param class_names: the name of each class, in the order of the indices; empty for
        regression.
    :param feature_names: the name of each feature of a table; empty for images.
    :param x_scale: broadcasts with ``input_shape``; 1 where a feature is constant.
    :param y_scale: scalar, 1 for classification.
    """

    name: str
    task: Task
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    ood_x: Tensor | None
    ood_name: str | None
    class_names: Names
    feature_names: Names
    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor

    @property
    def input_shape(self) -> torch.Size:
        """Shape of one row of inputs."""
        return self.train_x.shape[1:]

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a network for this task: one for each class, or 1 for
        regression.
        """
        return len(self.class_names) or 1

    def unstandardize_y(self, y: Tensor) -> Tensor:
        """Transform standardised targets or predicted means, of any shape, to the
        data's units.
        """
        return y * self.y_scale + self.y_mean

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Dataset:
        """Move the data to another device or floating-point dtype; class indices stay
        integers.
        """
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                real = value.is_floating_point()
                moved[name] = value.to(device=device, dtype=dtype if real else None)
        return replace(self, **moved)

    def describe(self) -> str:
        """Describe rows, inputs and targets in a sentence for a report."""
        size = "x".join(map(str, self.input_shape))
        classes = self.class_names
        targets = f"targets of scale {self.y_scale:.4g}"
        if classes:
            targets = f"{len(classes)} classes ({shorten(classes)})"
        parts = [
            f"{self.name}: {len(self.train_x):,} training and {len(self.test_x):,} "
            "test rows",
            f"{'images of' if len(self.input_shape) == 3 else 'features:'} {size}",
            targets,
        ]
        if self.ood_x is not None:
            parts.append(
                f"{len(self.ood_x):,} out-of-distribution rows ({self.ood_name})"
            )
        return "; ".join(parts) + "."

    def __repr__(self) -> str:
        return f"Dataset({self.describe()})"


def load(
    name: str,
    *,
    root: str | Path = "data",
    download: bool = False,
    target: str | None = None,
    task: Task | None = None,
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

    :param name: one of :data:`KNOWN`: a table or the digits of scikit-learn; images,
        read by torchvision from ``root``; ``uci/<name>``, a folder under ``root``;
        ``csv:FILE``, the user's own table; ``images:FOLDER``, the user's own images, in
        a folder for each class.
    :param root: the folder of data sets, also for downloads.
    :param download: whether to download an image data set that is missing.
    :param target: the target column, for ``csv:FILE`` only.
    :param task: the task of a table whose target allows both; guessed by default.
    :param hold_out: names of classes to leave out of training and test; their rows, of
        the official test part if there is one, are the out-of-distribution inputs.
        ``"auto"``: the last fifth of at least 5 classes.
    :param split: number of an official split of a UCI data set; else of a random split,
        stratified by class, with a fifth of the rows for test, unless there is an
        official test part.
    :param image_size: side in pixels to which ``images:FOLDER`` is resized and cropped.
    :param max_train: most training rows, a stratified subset; ``max_test`` likewise,
        and of out-of-distribution rows.
    :param seed: seed of the split and the subsets, independent of PyTorch's generator.
    :param dtype: dtype of the inputs and regression targets; PyTorch's default by
        default.
    :raises ValueError: if the name is unknown, or the data can't be used; says what was
        found.
    :raises FileNotFoundError: if the data aren't in ``root``.
    """
    arguments.one_of("task", task, (None, *get_args(Task)))
    arguments.whole("max_train", max_train, 2, none="all")
    arguments.whole("max_test", max_test, 1, none="all")
    folder = Path(root).expanduser()
    raw = _read(name, folder, download, target, split, task, image_size)
    if task not in (None, raw.task):
        raise ValueError(
            f"{name} is a {raw.task} data set, so task={task!r} doesn't fit"
        )
    held_out = _held_out(name, raw, hold_out)
    is_kept = ~np.isin(raw.class_names, held_out)
    rng = np.random.default_rng([seed, split])
    train, test, outside = _split(raw, is_kept, max_train, max_test, rng)
    if held_out:
        class_names = tuple(label for label in raw.class_names if label not in held_out)
        raw = replace(raw, y=is_kept.cumsum()[raw.y] - 1, class_names=class_names)
    _require_sound(name, raw, train)
    train_x = _inputs(raw.x[train])
    y = torch.from_numpy(raw.y)
    x_mean, x_scale = _moments(train_x)
    y_mean = y.new_zeros((), dtype=torch.float64)
    y_scale = y.new_ones((), dtype=torch.float64)
    if raw.task == "regression":
        y_mean, y_scale = _moments(y[train])
        y = (y - y_mean) / y_scale
    test_x = (_inputs(raw.x[test]) - x_mean) / x_scale
    ood_x = (_inputs(raw.x[outside]) - x_mean) / x_scale
    return Dataset(
        name=name,
        task=raw.task,
        train_x=(train_x - x_mean) / x_scale,
        train_y=y[train],
        test_x=test_x,
        test_y=y[test],
        ood_x=ood_x if len(outside) else None,
        ood_name=f"{name}: {shorten(held_out)}" if len(outside) else None,
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
    """Return ``like`` with the inputs of another data set as out-of-distribution
    inputs, standardised as its own.

    They must have the same shape. The features of ``csv:FILE`` are selected by name, so
    it needs no target column. Of a data set with an official test part only this part
    is used.

    :param max_rows: most rows, a random subset drawn by ``seed``; ``None`` for all.
    :raises ValueError: if the data set is ``like`` itself, or has another shape.
    :raises FileNotFoundError: if the data aren't in ``root``.
    """
    arguments.whole("max_rows", max_rows, 1, none="all")
    if name == like.name:
        raise ValueError(
            f"ood is {name!r}, the data set itself; name another data set, or hold out "
            "classes"
        )
    if name.startswith("csv:"):
        table = frame(name, like.feature_names)
        raw = Raw(numbers(table[list(like.feature_names)]), np.zeros(0))
    else:
        folder = Path(root).expanduser()
        side = like.input_shape[-1]
        raw = _read(name, folder, download, None, 0, None, side)
    rows = raw.x[raw.parts[1]] if raw.parts else raw.x
    order = np.random.default_rng(seed).permutation(len(rows))
    x = _inputs(rows[order[:max_rows]])
    if x.shape[1:] != like.input_shape:
        shape = tuple(x.shape[1:])
        expected = tuple(like.input_shape)
        raise ValueError(
            f"rows of {name} have shape {shape}, but of {like.name} {expected}"
        )
    return replace(
        like,
        ood_x=(x.to(like.x_mean) - like.x_mean) / like.x_scale,
        ood_name=name,
    )


# small steps --------------------------------------------------------------------------


def _read(
    name: str,
    root: Path,
    download: bool,
    target: str | None,
    split: int,
    task: Task | None,
    side: int,
) -> Raw:
    require_known(name)
    if name in SKLEARN:
        return read_sklearn(name)
    if name in IMAGES:
        if split != 0:
            raise ValueError(
                f"split is {split}, but {name} has one official split, number 0"
            )
        return read_images(name, root, download)
    if name.startswith("uci/"):
        return read_uci(name, root, split, task)
    if name.startswith("csv:"):
        return read_csv(name, target, task)
    return read_folder(name, side)


def require_known(name: str) -> None:
    """Raise ``ValueError`` if there is no data set of that name."""
    if name not in {*SKLEARN, *IMAGES} and not name.startswith(PREFIXES):
        raise ValueError(
            f"there is no data set {name!r}; known are "
            f"{', '.join(KNOWN)}{did_you_mean(name, KNOWN)}"
        )


def _held_out(
    name: str, raw: Raw, classes: Literal["auto"] | Sequence[str | int] | None
) -> list[str]:
    """Return the names of the classes to hold out."""
    names = raw.class_names
    if classes == "auto":
        classes = names[len(names) - round(len(names) / 5) :] if len(names) >= 5 else ()
    listed = arguments.listed("hold_out", classes or (), (str, int), "classes")
    held_out = [*map(str, listed)]
    known = set(held_out) <= set(names)
    if held_out and (not known or len(set(names) - set(held_out)) < 2):
        raise ValueError(
            f"hold_out is {held_out}; it must leave at least 2 of the classes of "
            f"{name}: {shorten(names)}"
        )
    return held_out


def _split(
    raw: Raw,
    is_kept: np.ndarray,
    max_train: int | None,
    max_test: int | None,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Return training, test and out-of-distribution rows; the latter are in classes
    that aren't kept.
    """
    inside = is_kept[raw.y] if raw.class_names else np.ones(len(raw.y), dtype=bool)
    train, test = raw.parts or (np.arange(len(raw.y)),) * 2
    train = train[inside[train]]
    outside = test[~inside[test]]
    test = test[inside[test]]
    if not raw.parts:
        rows = _stratified(train, raw, rng)
        num_test = max(1, round(TEST_SHARE * len(train)))
        train = rows[num_test:]
        test = rows[:num_test]
    subsets = []
    for rows, most in ((train, max_train), (test, max_test), (outside, max_test)):
        few = most is None or len(rows) <= most
        subsets.append(rows if few else _stratified(rows, raw, rng)[:most])
    return subsets


def _stratified(rows: np.ndarray, raw: Raw, rng: np.random.Generator) -> np.ndarray:
    """Return ``rows`` in a random order in which each prefix has nearly the class
    frequencies of all rows.

    The k-th of the n rows of a class, in random order, has the relative position (k +
    1/2) / n.
    """
    rows = rows[rng.permutation(len(rows))]
    position = np.zeros(len(rows))
    for label in range(len(raw.class_names)):
        of_class = raw.y[rows] == label
        count = of_class.sum()
        position[of_class] = (np.arange(count) + 0.5) / max(1, count)
    # stable: ties between classes keep their random order
    return rows[np.argsort(position, kind="stable")]


def _require_sound(name: str, raw: Raw, train: np.ndarray) -> None:
    for values in (raw.x, raw.y):
        if values.dtype.kind != "f":
            continue
        if not (np.abs(values) <= np.finfo(np.float32).max).all():
            raise ValueError(
                f"{name} holds values that are NaN, infinite, or too large for single "
                "precision"
            )
    lacks = ~np.isin(np.arange(len(raw.class_names)), raw.y[train])
    missing = [*compress(raw.class_names, lacks)]
    if missing or len(train) < 2:
        raise ValueError(
            f"{name} has too few rows: the {len(train)} training rows lack the classes "
            f"{missing}"
        )


def _inputs(rows: np.ndarray) -> Tensor:
    """Convert rows to floats: bytes to single precision in 0..1, others to double
    precision.
    """
    x = torch.from_numpy(rows)
    return x.float() / 255 if x.dtype == torch.uint8 else x.double()


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (with 1/N, as in the literature; 1 for
    constants), of images by channel.
    """
    dims = (0, 2, 3) if x.dim() == 4 else (0,)
    variance, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
    constant = x.amax(dims, keepdim=True) == x.amin(dims, keepdim=True)
    return mean[0], torch.where(constant, 1.0, variance.sqrt())[0]


def shorten(names: Sequence[str], most: int = 12) -> str:
    """Join names by commas, with an ellipsis for those beyond ``most``."""
    if len(names) > most:
        names = [*names[: most - 1], f"... {names[-1]}"]
    return ", ".join(names)


# readers: scikit-learn, torchvision, folders of images, CSV files, UCI folders --------


@dataclass(frozen=True)
class Raw:
    """A data set before it is split, subset or standardised.

    :param x: inputs: for images ``(N, C, H, W)`` unsigned bytes, or floats from 0 to 1;
        for tables ``(N, F)`` floats.
    :param y: ``(N,)`` class indices (integers) or targets (floats).
    :param class_names: the name of each class; empty for regression.
    :param parts: rows of the official training and test parts, or ``None``.
    """

    x: np.ndarray
    y: np.ndarray
    class_names: Names = ()
    parts: tuple[np.ndarray, np.ndarray] | None = None
    feature_names: Names = ()

    @property
    def task(self) -> Task:
        """The task: classification if there are classes."""
        return "classification" if self.class_names else "regression"


def read_sklearn(name: str) -> Raw:
    """Read one of :data:`SKLEARN`, which are part of scikit-learn."""
    from sklearn import datasets  # installed by the extra ``study``

    options = {"scaled": False} if name == "diabetes" else {}
    bunch = getattr(datasets, f"load_{name.replace('-', '_')}")(**options)
    features, classes = (
        tuple(map(str, bunch.get(part, ())))
        for part in ("feature_names", "target_names")
    )
    if name == "digits":
        return Raw(bunch.images[:, None] / 16, bunch.target.astype(np.int64), classes)
    return Raw(
        bunch.data,
        bunch.target.astype(np.int64 if classes else float),
        classes,
        feature_names=features,
    )


def read_images(name: str, root: Path, download: bool) -> Raw:
    """Read the official training and test parts of one of :data:`IMAGES` as bytes.

    :raises FileNotFoundError: if the data are missing, can't be read, or can't be
        downloaded.
    """
    import_torchvision()
    from torchvision import datasets

    parts = ["train", "test"] if name == "svhn" else [True, False]
    option = "split" if name == "svhn" else "train"
    try:
        # read instead of the data's own files if it's there, as old versions left it
        for file in (root / IMAGES[name] / "processed").glob("*.pt"):
            images, labels = load_pickled(file)
            require_stored({"images": images, "labels": labels}, file)
        train, test = (
            getattr(datasets, IMAGES[name])(root, download=download, **{option: part})
            for part in parts
        )
        for part in (train, test):
            images, labels = _arrays(part)
            if len(images) != len(labels):
                raise ValueError(f"{len(images)} images have {len(labels)} labels")
    # of whatever torchvision meets in damaged files
    except (
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        EOFError,
        OSError,
        UnpicklingError,
    ) as error:
        raise FileNotFoundError(
            f"{name} can't be read under {root.resolve()} ({error}); pass "
            "download=True (--download) to fetch it, or "
            "root (--data-root) to say where it is"
        ) from error
    x, y = (
        np.concatenate(pair) for pair in zip(_arrays(train), _arrays(test), strict=True)
    )
    classes = (
        tuple(map(str, range(10)))
        if name in ("mnist", "svhn")
        else tuple(train.classes)
    )
    rows = np.arange(len(x))
    return Raw(x, y, classes, (rows[: len(train)], rows[len(train) :]))


def read_folder(name: str, side: int) -> Raw:
    """Read ``images:FOLDER``: a folder of images for each class, or such folders in
    ``train`` and ``test`` or ``val``.

    TinyImageNet and Textures have this layout. If ``train`` and ``test`` differ in
    classes, only ``train`` is read.

    :param side: side in pixels of the square to which images are resized and cropped.
    :raises FileNotFoundError: if there is no such folder, or no image in it.
    """
    import_torchvision()
    from torchvision import datasets, transforms

    root = Path(name.removeprefix("images:")).expanduser()
    crop = transforms.Compose([transforms.Resize(side), transforms.CenterCrop(side)])
    folders = [
        root / part for part in ("train", "test", "val") if (root / part).is_dir()
    ]
    parts = [
        datasets.ImageFolder(folder, crop, loader=_open_image, allow_empty=True)
        for folder in (folders[:2] or [root])
    ]
    parts = parts if parts[0].classes == parts[-1].classes else parts[:1]
    x = np.stack(
        [np.asarray(image).transpose(2, 0, 1) for part in parts for image, _ in part]
    )
    # no pictures: an empty list
    y = np.concatenate([np.array(part.targets, dtype=np.int64) for part in parts])
    rows = np.arange(len(x))
    official = (
        (rows[: len(parts[0])], rows[len(parts[0]) :]) if len(parts) > 1 else None
    )
    return Raw(x, y, tuple(parts[0].classes), official)


def _open_image(path: str) -> Any:
    """Read an image in colours; refuse one whose header names far more pixels than its
    file can hold.
    """
    from PIL import Image

    with Image.open(path) as image:
        size = os.path.getsize(path)
        pixels = image.width * image.height
        if pixels > max(MANY_PIXELS, PIXELS_A_BYTE * size):
            raise ValueError(
                f"{path} has {size:,} bytes for {image.width} x {image.height} pixels; "
                "scale it down, or remove it"
            )
        return image.convert("RGB")


def _arrays(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``(N, C, H, W)`` as bytes and labels ``(N,)``, without converting
    single Pillow images.
    """
    images = np.asarray(dataset.data)
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    labels = dataset.labels if hasattr(dataset, "labels") else dataset.targets
    return images, np.asarray(labels, dtype=np.int64)


def read_csv(name: str, target: str | None, task: Task | None = None) -> Raw:
    """Read ``csv:FILE``: a header row, one target column, and numerical features in all
    other columns.

    :param task: default: classification if the target holds words or at most
        :data:`MOST_CLASSES` different whole numbers, regression otherwise.
    :raises ValueError: if ``target`` isn't a column, or a column can't be used; names
        the columns.
    """
    table = frame(name)
    if target not in table:
        raise ValueError(
            f"{name} needs a target column (--target), not {target!r}; its columns are "
            f"{list(table)}"
        )
    values = table.pop(target)
    words = values.dtype.kind not in "biuf"
    few = words or (
        (values == values.round()).all() and values.nunique() <= MOST_CLASSES
    )
    y, classes = _target(
        values.to_numpy(), task or ("classification" if few else "regression")
    )
    return Raw(numbers(table), y, classes, feature_names=tuple(table))


def frame(name: str, columns: Names | None = None) -> Any:
    """Read some columns of ``csv:FILE``, by default all, as a data frame; refuse
    missing values.
    """
    import pandas as pd  # takes half a second to import

    path = Path(name.removeprefix("csv:")).expanduser()
    _require_full_rows(path)
    table = pd.read_csv(
        path,
        compression=None,
        usecols=columns,
        index_col=False,
        skipinitialspace=True,
        encoding="utf-8-sig",
    )
    if (missing := table.columns[table.isna().any()]).any():
        raise ValueError(f"{path} has missing values in the columns {list(missing)}")
    return table


def _require_full_rows(path: Path) -> None:
    """Raise ``ValueError`` if a table could take far more memory than its file has
    bytes: it is compressed, or most of its rows are shorter than its header, which
    pandas would fill.
    """
    if path.suffix in COMPRESSED:
        raise ValueError(f"{path} is compressed; unpack it first")
    with open(path, "rb") as file:
        num_columns = file.readline().count(b",") + 1
        num_rows = sum(
            line.count(b"\n") for line in iter(lambda: file.read(2**20), b"")
        )
    # each cell ends with a comma or a new line
    if num_columns * num_rows > path.stat().st_size:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes for {num_rows:,} rows of "
            f"{num_columns:,} columns, as its header has it: some rows are too short"
        )


def numbers(table: Any) -> np.ndarray:
    """Convert a data frame of numbers to an array."""
    if words := [
        name for name, values in table.items() if values.dtype.kind not in "biuf"
    ]:
        raise ValueError(
            f"the columns {words} hold words; code them as numbers, with "
            "pandas.get_dummies, say"
        )
    return table.to_numpy(np.float64)


def read_uci(name: str, root: Path, split: int, task: Task | None = None) -> Raw:
    """Read ``uci/<set>`` with one of its splits, by default as a regression.

    The layout is that of the Bayesian-network literature (Hernandez-Lobato & Adams
    2015; Gal & Ghahramani 2016): a folder with ``data.txt`` (numbers, separated by
    blanks), ``index_features.txt`` and ``index_target.txt`` (columns, from 0),
    ``index_train_<k>.txt`` and ``index_test_<k>.txt`` (rows, from 0).

    :param root: the folder of ``uci/<set>`` or ``<set>``.
    :raises FileNotFoundError: if the folder, or a file in it, is missing.
    :raises ValueError: if a file doesn't fit the layout.
    """
    folders = [
        root / up / name.removeprefix("uci/") / down
        for up in ("uci", "")
        for down in ("", "data")
    ]
    folder = next(
        (folder for folder in folders if (folder / "data.txt").is_file()), None
    )
    if folder is None:
        raise FileNotFoundError(
            f"{name} wasn't found in {root.resolve()}; set root (--data-root) to the "
            "folder of uci"
        )
    data = _read_numbers(folder / "data.txt")
    features, target = (
        _indices(folder / f"index_{part}.txt", data.shape[1])
        for part in ("features", "target")
    )
    train, test = (
        _indices(folder / f"index_{part}_{split}.txt", len(data))
        for part in ("train", "test")
    )
    if len(target) != 1 or np.intersect1d(train, test).size:
        raise ValueError(
            f"{folder} must have one target column, and no row in both the training "
            "and the test part"
        )
    y, classes = _target(data[:, target[0]], task or "regression")
    return Raw(data[:, features], y, classes, (train, test))


def _target(values: np.ndarray, task: Task) -> tuple[np.ndarray, Names]:
    """Convert targets ``(N,)`` to floats, or to class indices and the sorted names of
    the classes.
    """
    if task == "regression":
        return values.astype(np.float64), ()
    classes, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(
        value if isinstance(value, str) else f"{value:g}" for value in classes
    )


def _indices(path: Path, size: int) -> np.ndarray:
    """Read indices of rows or columns; some of the files write them as floats
    ("3.000000e+00").
    """
    values = _read_numbers(path).ravel()
    is_index = (values >= 0) & (values < size) & (values == np.floor(values))
    if not is_index.all() or len(np.unique(values)) < len(values):
        raise ValueError(
            f"{path} must hold different whole numbers from 0 to {size - 1}"
        )
    return values.astype(np.int64)


def _read_numbers(path: Path) -> np.ndarray:
    """Read a table of numbers; NumPy would unpack ``path + ".gz"`` if it were given the
    path alone.
    """
    with open(path) as file:
        return np.loadtxt(file, ndmin=2)
