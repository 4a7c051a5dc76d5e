"""Readers of data: scikit-learn, torchvision, a CSV file, folders of pictures, UCI folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyro_symmetric.datasets.dataset import Task
from pyro_symmetric.networks import import_torchvision

SKLEARN = ("digits", "wine", "breast-cancer", "diabetes")
IMAGES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
MOST_CLASSES = 20  # different whole numbers in a target that are taken as classes


@dataclass(frozen=True)
class Raw:
    """A data set as read, before it is split, subset or standardised.

    :param x: rows, ``(N, C, H, W)`` unsigned bytes, or floats of 0 to 1, for images, ``(N, F)`` floats for tables.
    :param y: ``(N,)`` class indices (integers) or targets (floats).
    :param class_names: one name a class; empty for regression.
    :param parts: training and test rows, if the data set has parts of its own.
    """

    x: np.ndarray
    y: np.ndarray
    class_names: tuple[str, ...] = ()
    parts: tuple[np.ndarray, np.ndarray] | None = None
    feature_names: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        """The task that its targets set."""
        return "classification" if self.class_names else "regression"


def read_sklearn(name: str) -> Raw:
    """Read one of :data:`SKLEARN`, which need no files and no network."""
    from sklearn import datasets  # which the extra ``study`` brings

    more = {"scaled": False} if name == "diabetes" else {}
    bunch = getattr(datasets, f"load_{name.replace('-', '_')}")(**more)
    features, classes = (tuple(map(str, bunch.get(part, ()))) for part in ("feature_names", "target_names"))
    if name == "digits":
        return Raw(bunch.images[:, None] / 16, bunch.target.astype(np.int64), classes)
    return Raw(bunch.data, bunch.target.astype(np.int64 if classes else float), classes, feature_names=features)


def read_images(name: str, root: Path, download: bool) -> Raw:
    """Read the official training and test parts of one of :data:`IMAGES`, bytes as they are.

    :raises FileNotFoundError: if the data are not there, can't be read, or can't be downloaded.
    """
    import_torchvision()
    from torchvision import datasets

    parts: list[Any] = ["train", "test"] if name == "svhn" else [True, False]
    option = "split" if name == "svhn" else "train"
    try:
        train, test = (getattr(datasets, IMAGES[name])(root, download=download, **{option: part}) for part in parts)
    except (RuntimeError, ValueError, AssertionError, EOFError, OSError) as error:
        raise FileNotFoundError(
            f"{name} can't be read under {root.resolve()} ({error}); pass download=True (--download) to fetch it, or "
            "root (--data-root) to say where it is"
        ) from error
    x, y = (np.concatenate(both) for both in zip(_arrays(train), _arrays(test), strict=True))
    classes = tuple(map(str, range(10))) if name in ("mnist", "svhn") else tuple(train.classes)
    rows = np.arange(len(x))
    return Raw(x, y, classes, (rows[: len(train)], rows[len(train) :]))


def read_folder(name: str, side: int) -> Raw:
    """Read ``images:FOLDER``: a folder of pictures for each class, or such folders in ``train`` and ``test``.

    TinyImageNet, Textures and their like are laid out so. Of ``train`` alone, or beside other classes, only it is read.

    :param side: of the square that pictures are scaled and cut to, in pixels.
    :raises FileNotFoundError: if there is no such folder, or no picture in it.
    """
    import_torchvision()
    from torchvision import datasets, transforms

    root = Path(name.removeprefix("images:")).expanduser()
    cut = transforms.Compose([transforms.Resize(side), transforms.CenterCrop(side)])
    parts = [root / part for part in ("train", "test", "val") if (root / part).is_dir()]
    read = [datasets.ImageFolder(part, cut, allow_empty=True) for part in (parts[:2] or [root])]
    read = read if read[0].classes == read[-1].classes else read[:1]
    x = np.stack([np.asarray(picture).transpose(2, 0, 1) for part in read for picture, _ in part])
    y, rows = np.concatenate([part.targets for part in read]), np.arange(len(x))
    official = (rows[: len(read[0])], rows[len(read[0]) :]) if len(read) > 1 else None
    return Raw(x, y, tuple(read[0].classes), official)


def _arrays(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images ``(N, C, H, W)`` as bytes and labels ``(N,)``, without a detour over single Pillow images."""
    images = np.asarray(dataset.data)
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    labels = dataset.labels if hasattr(dataset, "labels") else dataset.targets
    return images, np.asarray(labels, dtype=np.int64)


def read_csv(name: str, target: str | None, task: Task | None = None) -> Raw:
    """Read ``csv:FILE``: a header row, one target column, everything else features, which are numbers.

    :param task: by default classification where the target holds words, or at most :data:`MOST_CLASSES` different whole
        numbers; regression otherwise.
    :raises ValueError: naming the columns, if the target isn't one of them; or what can't be used.
    """
    table = frame(name)
    if target not in table:
        raise ValueError(f"{name} needs a target column (--target), not {target!r}; its columns are {list(table)}")
    values = table.pop(target)
    words = values.dtype.kind not in "biuf"
    few = words or ((values == values.round()).all() and values.nunique() <= MOST_CLASSES)
    y, classes = _target(values.to_numpy(), task or ("classification" if few else "regression"))
    return Raw(numbers(table), y, classes, feature_names=tuple(table))


def frame(name: str, columns: tuple[str, ...] | None = None) -> Any:
    """Some columns of ``csv:FILE``, by default all, as a data frame without missing values."""
    import pandas as pd  # half a second, which only those who read a file should wait for

    path = Path(name.removeprefix("csv:")).expanduser()
    found = pd.read_csv(path, usecols=columns, index_col=False, skipinitialspace=True, encoding="utf-8-sig")
    if (missing := found.columns[found.isna().any()]).any():
        raise ValueError(f"{path} has missing values in the columns {list(missing)}")
    return found


def numbers(table: Any) -> np.ndarray:
    """A data frame of numbers as an array."""
    if words := [name for name, values in table.items() if values.dtype.kind not in "biuf"]:
        raise ValueError(f"the columns {words} hold words; code them as numbers, with pandas.get_dummies, say")
    return table.to_numpy(np.float64)


def read_uci(name: str, root: Path, split: int, task: Task | None = None) -> Raw:
    """Read ``uci/<set>`` with the given one of its splits; a regression unless told otherwise.

    The layout that the Bayesian-network literature shares (Hernandez-Lobato & Adams 2015; Gal & Ghahramani 2016): a
    folder with ``data.txt`` (numbers, separated by blanks), ``index_features.txt`` and ``index_target.txt`` (columns,
    from 0), ``index_train_<k>.txt`` and ``index_test_<k>.txt`` (rows, from 0).

    :param root: a folder that holds ``uci/<set>`` or ``<set>``.
    :raises FileNotFoundError: if the folder, or a file of it, is missing.
    :raises ValueError: if a file doesn't fit the layout.
    """
    places = [root / up / name.removeprefix("uci/") / down for up in ("uci", "") for down in ("", "data")]
    folder = next((place for place in places if (place / "data.txt").is_file()), None)
    if folder is None:
        raise FileNotFoundError(f"{name} was not found in {root.resolve()}; root (--data-root) says where uci is")
    data = np.loadtxt(folder / "data.txt", ndmin=2)
    features, target = (_indices(folder / f"index_{part}.txt", data.shape[1]) for part in ("features", "target"))
    train, test = (_indices(folder / f"index_{part}_{split}.txt", len(data)) for part in ("train", "test"))
    if len(target) != 1 or np.intersect1d(train, test).size:
        raise ValueError(f"{folder} must have one target column, and no row in both the training and the test part")
    y, classes = _target(data[:, target[0]], task or "regression")
    return Raw(data[:, features], y, classes, (train, test))


def _target(values: np.ndarray, task: Task) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets ``(N,)`` as floats, or as class indices with the classes' names in sorted order."""
    if task == "regression":
        return values.astype(np.float64), ()
    classes, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(value if isinstance(value, str) else f"{value:g}" for value in classes)


def _indices(path: Path, size: int) -> np.ndarray:
    """Rows or columns; some of the shared files write them as floats ("3.000000e+00")."""
    values = np.loadtxt(path, ndmin=1).ravel()
    if not set(values) <= set(range(size)) or len(set(values)) < len(values):
        raise ValueError(f"{path} must hold different whole numbers from 0 to {size - 1}")
    return values.astype(np.int64)
