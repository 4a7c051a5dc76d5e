"""Tables from a user's CSV file: one header row, one target column, everything else features.

Numbers stay numbers. A column of words with at most :data:`MOST_CATEGORIES` different ones becomes one 0/1 feature a
word, named ``column=word``; with more, or with words and numbers mixed, it is refused by name, as are missing values:
what to do about them is the user's decision, not ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyro_symmetric.datasets.dataset import Raw, Task, shorten
from pyro_symmetric.datasets.tables import encode_target

if TYPE_CHECKING:
    import pandas as pd  # half a second, which only those who read a file should wait for

MOST_CATEGORIES = 20
"""The most different words in a column, and whole numbers in a target, that are taken as categories."""

_LARGEST = float(np.finfo(np.float32).max)

_MISSING = {"", "nan", "na", "n/a", "null", "?"}


def read_csv(name: str, target: str | None, task: Task | None = None) -> Raw:
    """Read ``csv:FILE``. Fields are separated by commas, semicolons or tabs, whichever the header row holds most of.

    :param target: name of the target column.
    :param task: by default classification where the target holds words, or at most :data:`MOST_CATEGORIES` different
        whole numbers; regression otherwise.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: naming the column and line of what can't be used.
    """
    path = Path(name.removeprefix("csv:")).expanduser()
    columns = _read_columns(path)
    if target is None:
        raise ValueError(f"{name} needs a target column (--target); its columns are {_list(columns)}")
    if target not in columns:
        raise ValueError(f"{path} has no column {target!r} for the target; its columns are {_list(columns)}")
    values = _typed(target, columns.pop(target), path)
    if not columns:
        raise ValueError(f"{path} has no column beside the target {target!r}; at least one feature is needed")
    is_words = values.dtype.kind == "U"
    if task == "regression" and is_words:
        raise ValueError(
            f"the target column {target!r} of {path} holds words ({values[0]!r}); regression needs numbers"
        )
    few = is_words or ((values == np.round(values)).all() and len(np.unique(values)) <= MOST_CATEGORIES)
    task = task or ("classification" if few else "regression")
    y, class_names = encode_target(values, task)
    features = [feature for column, cells in columns.items() for feature in _features(column, cells, path)]
    names, vectors = zip(*features, strict=True)
    return Raw(name, np.stack(vectors, axis=1), y, task, class_names, feature_names=names)


def read_csv_features(name: str, feature_names: tuple[str, ...]) -> np.ndarray:
    """The features of ``csv:FILE`` in the order and coding of another table's ``feature_names``, ``(N, F)``.

    A word that the other table doesn't have gets 0 in all of its columns.

    :raises ValueError: if a column is missing or holds something else.
    """
    path = Path(name.removeprefix("csv:")).expanduser()
    columns = _read_columns(path)
    vectors = []
    for feature in feature_names:
        column, _, word = feature.partition("=")
        if feature in columns:
            values = _typed(feature, columns[feature], path)
            if values.dtype.kind == "U":
                raise ValueError(f"column {feature!r} of {path} holds words ({values[0]!r}); numbers are needed")
            vectors.append(values)
        elif word and column in columns:
            vectors.append((columns[column] == word).to_numpy(dtype=np.float64))
        else:
            raise ValueError(f"{path} has no column {column!r}; its columns are {_list(columns)}")
    return np.stack(vectors, axis=1)


def _read_columns(path: Path) -> dict[str, pd.Series]:
    """Column name -> its cells as text, in the order of the file."""
    import pandas as pd

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} (looked in {path.resolve().parent})")
    try:
        head = path.read_text(encoding="utf-8-sig").lstrip().partition("\n")[0]
        separator = max(",;\t", key=head.count)
        cells = pd.read_csv(path, sep=separator, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        cells = pd.DataFrame()
    except (UnicodeDecodeError, pd.errors.ParserError) as error:
        raise ValueError(f"{path} can't be read as a CSV file in UTF-8: {error}") from error
    cells = cells.apply(lambda column: column.str.strip())
    cells = cells[cells.ne("").any(axis=1)].reset_index(drop=True)
    if len(cells) < 2:
        raise ValueError(f"{path} has {len(cells)} lines; a header row and rows of data are needed")
    header, rows = list(cells.iloc[0]), cells.iloc[1:]
    if not any(_numbers(cells.iloc[0]).isna()):
        raise ValueError(
            f"the first row of {path} holds only numbers ({shorten(header)}); a header row with names is needed"
        )
    if "" in header or len(set(header)) != len(header):
        raise ValueError(f"every column of {path} needs a name of its own; the header row has {_list(header)}")
    return dict(zip(header, (rows[column] for column in rows), strict=True))


def _typed(column: str, cells: pd.Series, path: Path) -> np.ndarray:
    """All cells as floats, or all as strings. Rows are counted from 1 after the header.

    :raises ValueError: for missing or infinite values, and for numbers and words mixed.
    """

    def refuse(bad: pd.Series, found: str) -> None:
        if bad.any():
            row = int(bad.idxmax())
            raise ValueError(f"column {column!r} of {path} {found.format(cell=cells[row], row=row)}")

    missing = cells.str.lower().isin(_MISSING)
    refuse(missing, "has a missing value ({cell!r}) in row {row}; fill such cells or remove their rows")
    numbers = _numbers(cells)
    words = numbers.isna()
    if words.all():
        return cells.to_numpy(dtype=np.str_)
    mixed = "mixes numbers and words ({cell!r} in row {row}); make it one or the other, or remove it"
    refuse(words, mixed)
    refuse(numbers.abs() == np.inf, "has an infinite value in row {row}; all must be finite")
    refuse(numbers.abs() > _LARGEST, "holds {cell} in row {row}, which single precision can't; scale it")
    return numbers.to_numpy(dtype=np.float64)


def _numbers(cells: pd.Series) -> pd.Series:
    """Cells as floats; NaN for words."""
    import pandas as pd

    return pd.to_numeric(cells, errors="coerce").astype(np.float64)


def _features(column: str, cells: pd.Series, path: Path) -> list[tuple[str, np.ndarray]]:
    """One feature of a column of numbers, or one a word of a column of words."""
    values = _typed(column, cells, path)
    if values.dtype.kind != "U":
        return [(column, values)]
    words = np.unique(values)
    if len(words) > MOST_CATEGORIES:
        raise ValueError(
            f"column {column!r} of {path} holds {len(words)} different words ({values[0]!r}, ...); at most "
            f"{MOST_CATEGORIES} can be coded as categories: remove the column, or turn it into numbers"
        )
    return [(f"{column}={word}", (values == word).astype(np.float64)) for word in words]


def _list(names: Iterable[str]) -> str:
    return shorten(repr(name) for name in names)
