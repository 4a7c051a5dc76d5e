"""Tables: scikit-learn's embedded data sets and UCI regression sets in the folder layout of the literature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pyro_symmetric.datasets.dataset import Raw, Task

SKLEARN = ("digits", "wine", "breast-cancer", "diabetes")


def read_sklearn(name: str) -> Raw:
    """Read one of :data:`SKLEARN`, which need no files and no network."""
    source = _sklearn_datasets()
    if name == "digits":
        bunch = source.load_digits()
        images = bunch.images[:, None]
        names = tuple(str(digit) for digit in bunch.target_names)
        return Raw(name, images, bunch.target.astype(np.int64), "classification", names, pixel_range=16.0)
    if name == "diabetes":
        bunch = source.load_diabetes(scaled=False)
        return Raw(name, bunch.data, bunch.target, "regression", feature_names=tuple(bunch.feature_names))
    bunch = source.load_wine() if name == "wine" else source.load_breast_cancer()
    return Raw(
        name=name,
        x=bunch.data,
        y=bunch.target.astype(np.int64),
        task="classification",
        class_names=tuple(str(label) for label in bunch.target_names),
        feature_names=tuple(str(feature) for feature in bunch.feature_names),
    )


def read_uci(name: str, root: Path, split: int, task: Task | None = None) -> Raw:
    """Read ``uci/<set>`` with the given one of its splits.

    The layout that the Bayesian-network literature shares (Hernandez-Lobato & Adams 2015; Gal & Ghahramani 2016): a
    folder with ``data.txt`` (numbers, separated by blanks), ``index_features.txt`` and ``index_target.txt`` (columns,
    from 0), ``index_train_<k>.txt`` and ``index_test_<k>.txt`` (rows, from 0).

    :param root: a folder that holds ``uci/<set>`` or ``<set>``.
    :param task: ``"regression"`` unless told otherwise.
    :raises FileNotFoundError: if the folder, or a file of it, is missing; says what is there.
    :raises ValueError: if a file doesn't fit the layout, or values are not finite.
    """
    folder = _uci_folder(name.removeprefix("uci/"), root)
    splits = sorted(int(path.stem.rpartition("_")[2]) for path in folder.glob("index_train_*.txt"))
    if split not in splits:
        raise ValueError(f"{name} has no split {split}; found in {folder}: {_ranges(splits)}")
    data = _numbers(folder / "data.txt", np.float64)
    features = _indices(folder / "index_features.txt", data.shape[1], "columns")
    target = _indices(folder / "index_target.txt", data.shape[1], "columns")
    if len(target) != 1:
        raise ValueError(
            f"{name} has {len(target)} target columns in {folder / 'index_target.txt'}; exactly 1 is handled"
        )
    train = _indices(folder / f"index_train_{split}.txt", len(data), "rows")
    test = _indices(folder / f"index_test_{split}.txt", len(data), "rows")
    if shared := len(np.intersect1d(train, test)):
        raise ValueError(f"split {split} of {name} has {shared} rows in both its training and its test part")
    used = data[:, np.concatenate([features, target])]
    if bad := int((~np.isfinite(used)).any(axis=1).sum()):
        raise ValueError(f"{name} holds NaN or infinite values in {bad} rows of {folder / 'data.txt'}")
    y, class_names = encode_target(data[:, target[0]], task or "regression")
    return Raw(name, data[:, features], y, task or "regression", class_names, test_rows=test, train_rows=train)


def encode_target(values: np.ndarray, task: Task) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets as floats, or as class indices with the classes' names in sorted order.

    :param values: ``(N,)`` numbers or strings.
    """
    if task == "regression":
        return values.astype(np.float64), ()
    classes, indices = np.unique(values, return_inverse=True)
    names = tuple(f"{value:g}" if isinstance(value, np.floating) else str(value) for value in classes)
    return indices.astype(np.int64), names


def _sklearn_datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            f"the data sets {', '.join(SKLEARN)} come with scikit-learn, which is not installed; "
            "pip install 'pyro-symmetric[study]' brings it"
        ) from error
    return datasets


def _uci_folder(name: str, root: Path) -> Path:
    parents = (root / "uci", root, root / "UCI_Datasets")
    candidates = [folder for parent in parents for folder in (parent / name, parent / name / "data")]
    for folder in candidates:
        if name and (folder / "data.txt").is_file():
            return folder
    there = sorted({path.parent.name for parent in (root / "uci", root) for path in parent.glob("*/data.txt")})
    raise FileNotFoundError(
        f"uci/{name} was not found: looked for data.txt in {candidates[0].resolve()} and {candidates[2].resolve()}; "
        + (
            f"there are uci/{', uci/'.join(there)}"
            if there
            else "pass root (--data-root) to say where the uci folder is"
        )
    )


def _numbers(path: Path, dtype: type) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; a UCI set needs it")
    if not path.read_text().strip():
        raise ValueError(f"{path} is empty")
    try:
        return np.loadtxt(path, dtype=dtype, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} can't be read as numbers: {error}") from error


def _indices(path: Path, size: int, what: str) -> np.ndarray:
    # Some of the shared files write their indices as floats ("3.000000e+00").
    values = _numbers(path, np.float64).ravel()
    indices = values.astype(np.int64)
    if (
        (indices != values).any()
        or indices.min() < 0
        or indices.max() >= size
        or len(np.unique(indices)) != len(indices)
    ):
        raise ValueError(f"{path} must hold different whole numbers from 0 to {size - 1}, the {what} of data.txt")
    return indices


def _ranges(splits: list[int]) -> str:
    if not splits:
        return "no index_train_<k>.txt at all"
    if splits == list(range(splits[0], splits[-1] + 1)):
        return f"splits {splits[0]} to {splits[-1]}"
    return f"splits {', '.join(map(str, splits))}"
