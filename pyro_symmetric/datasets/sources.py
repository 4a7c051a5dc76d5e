"""Readers of data: scikit-learn, torchvision, a CSV file, a UCI folder in the layout of the literature."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyro_symmetric._torchvision import import_torchvision
from pyro_symmetric.datasets.dataset import Raw, Task, shorten

if TYPE_CHECKING:
    import pandas as pd  # half a second, which only those who read a file should wait for

SKLEARN = ("digits", "wine", "breast-cancer", "diabetes")
MOST_CATEGORIES = 20
"""The most different words in a column, and whole numbers in a target, that are taken as categories."""


class Images(NamedTuple):
    """A data set of torchvision: its class, what it looks for under the root, and its official size."""

    class_name: str
    looks_for: str
    num_train: int


IMAGES = {
    "mnist": Images("MNIST", "MNIST/raw", 60_000),
    "fashion-mnist": Images("FashionMNIST", "FashionMNIST/raw", 60_000),
    "cifar10": Images("CIFAR10", "cifar-10-batches-py", 50_000),
    "cifar100": Images("CIFAR100", "cifar-100-python", 50_000),
    "svhn": Images("SVHN", "train_32x32.mat and test_32x32.mat", 73_257),
}


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

    :raises FileNotFoundError: if the data are not there, or can't be downloaded.
    :raises ValueError: if what is there can't be read.
    """
    train, test = (_open(name, root, part, download) for part in ("train", "test"))
    x, y = (np.concatenate(both) for both in zip(_arrays(train), _arrays(test), strict=True))
    count, official = len(train), IMAGES[name].num_train
    if not 0 < count < len(x):
        raise ValueError(f"{name} under {root} holds {count} training and {len(test)} test images; both need some")
    title = name if count == official else f"{name} ({count:,} of {official:,} training images)"
    classes = tuple(map(str, range(10))) if name in ("mnist", "svhn") else tuple(train.classes)
    rows = np.arange(len(x))
    return Raw(title, x, y, "classification", classes, rows[count:], rows[:count], pixel_range=255.0)


def _open(name: str, root: Path, part: str, download: bool) -> Any:
    import_torchvision()
    from torchvision import datasets

    which = {"split": part} if name == "svhn" else {"train": part == "train"}
    try:
        return getattr(datasets, IMAGES[name].class_name)(root=root, download=download, **which)
    except (RuntimeError, ValueError, AssertionError, EOFError, OSError) as error:
        looks_for = f"{IMAGES[name].looks_for} is looked for under {root.resolve()}"
        if download or str(error).startswith("Dataset not found"):
            raise FileNotFoundError(
                f"{name} was not found ({error}): {looks_for}; pass download=True (--download) to fetch it, or root "
                "(--data-root) to say where it is"
            ) from error
        raise ValueError(f"{name} can't be read ({error}): {looks_for}; delete it and download it anew") from error


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
    """Read ``csv:FILE``: a header row, one target column, everything else features.

    Numbers stay numbers. A column of words with at most :data:`MOST_CATEGORIES` different ones becomes one 0/1 feature
    a word, named ``column=word``; missing values are refused: what to do about them is the user's decision, not ours.

    :param task: by default classification where the target holds words, or at most :data:`MOST_CATEGORIES` different
        whole numbers; regression otherwise.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: naming the column of what can't be used.
    """
    frame = _frame(name)
    if target not in frame:
        raise ValueError(f"{name} needs a target column (--target), not {target!r}; its columns are {_columns(frame)}")
    values = frame.pop(target)
    if frame.empty:
        raise ValueError(f"{name} has no column beside the target {target!r}; at least one feature is needed")
    words = _is_words(values)
    if task == "regression" and words:
        raise ValueError(f"the target {target!r} of {name} holds words ({values[0]!r}); regression needs numbers")
    few = words or ((values == values.round()).all() and values.nunique() <= MOST_CATEGORIES)
    task = task or ("classification" if few else "regression")
    y, class_names = encode_target(values.to_numpy(), task)
    coded = _coded(frame)
    return Raw(name, coded.to_numpy(np.float64), y, task, class_names, feature_names=tuple(coded.columns))


def read_csv_features(name: str, feature_names: tuple[str, ...]) -> np.ndarray:
    """The features of ``csv:FILE`` in the order and coding of another table's ``feature_names``, ``(N, F)``.

    A word that the other table doesn't have gets 0 in all of its columns.

    :raises ValueError: if a column is missing.
    """
    frame = _frame(name)
    coded = _coded(frame)
    for feature in feature_names:
        if feature not in coded and feature.partition("=")[0] not in frame:
            raise ValueError(f"{name} has no column {feature.partition('=')[0]!r}; its columns are {_columns(frame)}")
    return coded.reindex(columns=list(feature_names), fill_value=0).to_numpy(np.float64)


def _frame(name: str) -> pd.DataFrame:
    """The table of ``csv:FILE``, separated by commas, semicolons or tabs: whole columns of numbers or of words."""
    import pandas as pd

    path = Path(name.removeprefix("csv:")).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} (looked in {path.resolve().parent})")
    try:
        head = path.read_text(encoding="utf-8-sig").lstrip().partition("\n")[0]
        separator = max(",;\t", key=head.count)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows of more fields than the header has
            frame = pd.read_csv(path, sep=separator, index_col=False, skipinitialspace=True, encoding="utf-8-sig")
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} can't be read as a CSV file in UTF-8: {error}") from error
    if frame.empty:
        raise ValueError(f"{path} has no rows below its header")
    frame.columns = frame.columns.str.strip()
    numbers = frame.apply(pd.to_numeric, errors="coerce")
    for column, values in frame.items():
        if values.isna().any():
            raise ValueError(
                f"column {column!r} of {path} has a missing value in row {int(values.isna().argmax()) + 1}"
            )
        if (found := numbers[column].notna()).any() and not found.all():
            raise ValueError(f"column {column!r} of {path} mixes numbers and words ({values[~found].iloc[0]!r})")
        if (numbers[column].abs() > np.finfo(np.float32).max).any():
            raise ValueError(f"column {column!r} of {path} holds numbers that single precision can't; scale them")
    return frame


def _coded(frame: pd.DataFrame) -> pd.DataFrame:
    """Every column of words as 0/1 columns, where it stood."""
    import pandas as pd

    parts = []
    for column, values in frame.items():
        words = _is_words(values)
        if words and values.nunique() > MOST_CATEGORIES:
            raise ValueError(
                f"column {column!r} holds {values.nunique()} different words ({values.iloc[0]!r}, ...); at most "
                f"{MOST_CATEGORIES} can be coded as categories: remove the column, or turn it into numbers"
            )
        parts.append(pd.get_dummies(values, prefix=column, prefix_sep="=") if words else values.to_frame())
    return pd.concat(parts, axis=1)


def _is_words(values: pd.Series) -> bool:
    return values.dtype.kind not in "biuf"


def _columns(frame: pd.DataFrame) -> str:
    return shorten(repr(name) for name in frame.columns)


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
    if not (folder / f"index_train_{split}.txt").is_file():
        found = sorted(path.name for path in folder.glob("index_train_*.txt"))
        raise ValueError(f"{name} has no split {split}; found in {folder}: {shorten(found) or 'none'}")
    data = np.loadtxt(folder / "data.txt", ndmin=2)
    features, target = (_indices(folder / f"index_{part}.txt", data.shape[1]) for part in ("features", "target"))
    train, test = (_indices(folder / f"index_{part}_{split}.txt", len(data)) for part in ("train", "test"))
    if len(target) != 1:
        raise ValueError(f"{name} has {len(target)} target columns in {folder}; exactly 1 is handled")
    if shared := len(np.intersect1d(train, test)):
        raise ValueError(f"split {split} of {name} has {shared} rows in both its training and its test part")
    if bad := int((~np.isfinite(data[:, [*features, *target]])).any(axis=1).sum()):
        raise ValueError(f"{name} holds NaN or infinite values in {bad} rows of {folder / 'data.txt'}")
    y, class_names = encode_target(data[:, target[0]], task or "regression")
    return Raw(name, data[:, features], y, task or "regression", class_names, test_rows=test, train_rows=train)


def encode_target(values: np.ndarray, task: Task) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets ``(N,)`` as floats, or as class indices with the classes' names in sorted order."""
    if task == "regression":
        return values.astype(np.float64), ()
    classes, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(value if isinstance(value, str) else f"{value:g}" for value in classes)


def _uci_folder(name: str, root: Path) -> Path:
    parents = (root / "uci", root, root / "UCI_Datasets")
    for folder in (part for parent in parents for part in (parent / name, parent / name / "data")):
        if name and (folder / "data.txt").is_file():
            return folder
    there = sorted({f"uci/{path.parent.name}" for parent in parents for path in parent.glob("*/data.txt")})
    raise FileNotFoundError(
        f"uci/{name} was not found: looked for data.txt in {root.resolve()}/uci/{name} and {root.resolve()}/{name}; "
        + (f"there are {', '.join(there)}" if there else "pass root (--data-root) to say where the uci folder is")
    )


def _indices(path: Path, size: int) -> np.ndarray:
    """Rows or columns; some of the shared files write them as floats ("3.000000e+00")."""
    values = np.loadtxt(path, ndmin=1).ravel()
    indices = values.astype(np.int64)
    if (indices != values).any() or len(np.unique(indices)) != len(indices) or not set(indices) <= set(range(size)):
        raise ValueError(f"{path} must hold different whole numbers from 0 to {size - 1}")
    return indices
