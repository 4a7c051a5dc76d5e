"""Readers of data: scikit-learn, torchvision, a CSV file, a UCI folder in the layout of the literature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyro_symmetric._torchvision import import_torchvision
from pyro_symmetric.datasets.dataset import Raw, Task

if TYPE_CHECKING:
    import pandas as pd  # half a second, which only those who read a file should wait for

SKLEARN = ("digits", "wine", "breast-cancer", "diabetes")
IMAGES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
MOST_CLASSES = 20
"""The most different whole numbers in a target that are taken as classes."""


def read_sklearn(name: str) -> Raw:
    """Read one of :data:`SKLEARN`, which need no files and no network."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            f"the data sets {', '.join(SKLEARN)} come with scikit-learn, which is not installed; "
            "pip install 'pyro-symmetric[study]' brings it"
        ) from error
    if name == "diabetes":
        bunch = datasets.load_diabetes(scaled=False)
        return Raw(name, bunch.data, bunch.target, "regression", feature_names=tuple(bunch.feature_names))
    bunch = getattr(datasets, f"load_{name.replace('-', '_')}")()
    classes = tuple(str(label) for label in bunch.target_names)
    labels = bunch.target.astype(np.int64)
    if name == "digits":
        return Raw(name, bunch.images[:, None], labels, "classification", classes, pixel_range=16.0)
    features = tuple(str(feature) for feature in bunch.feature_names)
    return Raw(name, bunch.data, labels, "classification", classes, feature_names=features)


def read_images(name: str, root: Path, download: bool) -> Raw:
    """Read the official training and test parts of one of :data:`IMAGES`, bytes as they are.

    :raises FileNotFoundError: if the data are not there, can't be read, or can't be downloaded.
    """
    train, test = (_open(name, root, part, download) for part in ("train", "test"))
    x, y = (np.concatenate(both) for both in zip(_arrays(train), _arrays(test), strict=True))
    classes = tuple(map(str, range(10))) if name in ("mnist", "svhn") else tuple(train.classes)
    train_rows, test_rows = np.split(np.arange(len(x)), [len(train)])
    return Raw(name, x, y, "classification", classes, test_rows, train_rows, pixel_range=255.0)


def _open(name: str, root: Path, part: str, download: bool) -> Any:
    import_torchvision()
    from torchvision import datasets

    which = {"split": part} if name == "svhn" else {"train": part == "train"}
    try:
        return getattr(datasets, IMAGES[name])(root=root, download=download, **which)
    except (RuntimeError, ValueError, AssertionError, EOFError, OSError) as error:
        raise FileNotFoundError(
            f"{name} can't be read under {root.resolve()} ({error}); pass download=True (--download) to fetch it, or "
            "root (--data-root) to say where it is"
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


def read_csv(name: str, target: str | None, task: Task | None = None) -> Raw:
    """Read ``csv:FILE``: a header row, one target column, everything else features, which are numbers.

    :param task: by default classification where the target holds words, or at most :data:`MOST_CLASSES` different whole
        numbers; regression otherwise.
    :raises ValueError: naming the columns, if the target isn't one of them; or what can't be used.
    """
    frame = _frame(name)
    if target not in frame:
        raise ValueError(f"{name} needs a target column (--target), not {target!r}; its columns are {list(frame)}")
    values = frame.pop(target)
    words = values.dtype.kind not in "biuf"
    few = words or ((values == values.round()).all() and values.nunique() <= MOST_CLASSES)
    task = task or ("classification" if few else "regression")
    y, class_names = encode_target(values.to_numpy(), task)
    return Raw(name, _numbers(frame), y, task, class_names, feature_names=tuple(frame))


def read_csv_features(name: str, feature_names: tuple[str, ...]) -> np.ndarray:
    """The columns of ``csv:FILE`` that another table has, in its order, ``(N, F)``."""
    return _numbers(_frame(name, feature_names)[list(feature_names)])


def _frame(name: str, columns: tuple[str, ...] | None = None) -> pd.DataFrame:
    import pandas as pd

    path = Path(name.removeprefix("csv:")).expanduser()
    frame = pd.read_csv(path, usecols=columns, index_col=False, skipinitialspace=True, encoding="utf-8-sig")
    if (missing := frame.columns[frame.isna().any()]).any():
        raise ValueError(f"{path} has missing values in the columns {list(missing)}")
    return frame


def _numbers(frame: pd.DataFrame) -> np.ndarray:
    if words := [name for name, values in frame.items() if values.dtype.kind not in "biuf"]:
        raise ValueError(f"the columns {words} hold words; code them as numbers, with pandas.get_dummies, say")
    return frame.to_numpy(np.float64)


def read_uci(name: str, root: Path, split: int, task: Task | None = None) -> Raw:
    """Read ``uci/<set>`` with the given one of its splits.

    The layout that the Bayesian-network literature shares (Hernandez-Lobato & Adams 2015; Gal & Ghahramani 2016): a
    folder with ``data.txt`` (numbers, separated by blanks), ``index_features.txt`` and ``index_target.txt`` (columns,
    from 0), ``index_train_<k>.txt`` and ``index_test_<k>.txt`` (rows, from 0).

    :param root: a folder that holds ``uci/<set>`` or ``<set>``.
    :param task: ``"regression"`` unless told otherwise.
    :raises FileNotFoundError: if the folder, or a file of it, is missing.
    :raises ValueError: if a file doesn't fit the layout.
    """
    folder = _uci_folder(name.removeprefix("uci/"), root)
    data = np.loadtxt(folder / "data.txt", ndmin=2)
    features, target = (_indices(folder / f"index_{part}.txt", data.shape[1]) for part in ("features", "target"))
    train, test = (_indices(folder / f"index_{part}_{split}.txt", len(data)) for part in ("train", "test"))
    if len(target) != 1:
        raise ValueError(f"{name} has {len(target)} target columns in {folder}; exactly 1 is handled")
    if shared := len(np.intersect1d(train, test)):
        raise ValueError(f"split {split} of {name} has {shared} rows in both its training and its test part")
    y, class_names = encode_target(data[:, target[0]], task or "regression")
    return Raw(name, data[:, features], y, task or "regression", class_names, test_rows=test, train_rows=train)


def encode_target(values: np.ndarray, task: Task) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets ``(N,)`` as floats, or as class indices with the classes' names in sorted order."""
    if task == "regression":
        return values.astype(np.float64), ()
    classes, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(value if isinstance(value, str) else f"{value:g}" for value in classes)


def _uci_folder(name: str, root: Path) -> Path:
    for folder in (part for parent in (root / "uci", root) for part in (parent / name, parent / name / "data")):
        if name and (folder / "data.txt").is_file():
            return folder
    raise FileNotFoundError(
        f"uci/{name} was not found in {root.resolve()}; pass root (--data-root) to say where the uci folder is"
    )


def _indices(path: Path, size: int) -> np.ndarray:
    """Rows or columns; some of the shared files write them as floats ("3.000000e+00")."""
    values = np.loadtxt(path, ndmin=1).ravel()
    indices = values.astype(np.int64)
    if (indices != values).any() or len(np.unique(indices)) != len(indices) or not set(indices) <= set(range(size)):
        raise ValueError(f"{path} must hold different whole numbers from 0 to {size - 1}")
    return indices
