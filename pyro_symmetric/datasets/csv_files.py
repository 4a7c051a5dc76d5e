"""Tables from a user's CSV file: one header row, one target column, everything else features.

Numbers stay numbers. A column of words with at most :data:`MOST_CATEGORIES` different ones becomes one 0/1 feature a
word, named ``column=word``; with more, or with words and numbers mixed, it is refused by name, as are missing values:
what to do about them is the user's decision, not ours.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pyro_symmetric.datasets.dataset import Raw, Task, shorten
from pyro_symmetric.datasets.tables import encode_target

MOST_CATEGORIES = 20
"""How many different words a column may hold, and how many whole numbers a target, to be taken as categories."""

_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf(inity)?)", re.ASCII | re.IGNORECASE)
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
            vectors.append(np.array([cell == word for cell in columns[column]], dtype=np.float64))
        else:
            raise ValueError(f"{path} has no column {column!r}; its columns are {_list(columns)}")
    return np.stack(vectors, axis=1)


def _read_columns(path: Path) -> dict[str, list[str]]:
    """Column name -> its cells as text, in the order of the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} (looked in {path.resolve().parent})")
    try:
        text = path.read_text(encoding="utf-8-sig")
        delimiter = max(",;\t", key=text.lstrip().partition("\n")[0].count)
        lines = [line for line in csv.reader(io.StringIO(text), delimiter=delimiter) if any(map(str.strip, line))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} can't be read as a CSV file in UTF-8: {error}") from error
    if len(lines) < 2:
        raise ValueError(f"{path} has {len(lines)} lines; a header row and rows of data are needed")
    header, *rows = [[cell.strip() for cell in line] for line in lines]
    if all(_number(cell) is not None for cell in header):
        raise ValueError(
            f"the first row of {path} holds only numbers ({shorten(header)}); a header row with names is needed"
        )
    if "" in header or len(set(header)) != len(header):
        raise ValueError(f"every column of {path} needs a name of its own; the header row has {_list(header)}")
    for index, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(f"row {index + 1} of {path} has {len(row)} cells, but the header row has {len(header)}")
    return {name: [row[index] for row in rows] for index, name in enumerate(header)}


def _typed(column: str, cells: list[str], path: Path) -> np.ndarray:
    """All cells as floats, or all as strings. Rows are counted from 1 after the header.

    :raises ValueError: for missing or infinite values, and for numbers and words mixed.
    """
    for index, cell in enumerate(cells):
        if cell.lower() in _MISSING:
            raise ValueError(
                f"column {column!r} of {path} has a missing value ({cell!r}) in row {index + 1}; "
                "fill such cells or remove their rows"
            )
    numbers = [_number(cell) for cell in cells]
    words = [index for index, number in enumerate(numbers) if number is None]
    if len(words) == len(cells):
        return np.array(cells, dtype=np.str_)
    if words:
        raise ValueError(
            f"column {column!r} of {path} mixes numbers and words ({cells[words[0]]!r} in row {words[0] + 1}); "
            "make it one or the other, or remove it"
        )
    values = np.array(numbers, dtype=np.float64)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"column {column!r} of {path} has an infinite value in row {row + 1}; all must be finite")
    if (large := np.abs(values) > _LARGEST).any():
        row = int(np.flatnonzero(large)[0])
        raise ValueError(
            f"column {column!r} of {path} holds {cells[row]} in row {row + 1}, which single precision can't; scale it"
        )
    return values


def _features(column: str, cells: list[str], path: Path) -> list[tuple[str, np.ndarray]]:
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


def _number(cell: str) -> float | None:
    """A number as CSV files write them: no ``1_00`` and no digits of other scripts, which ``float`` would take."""
    return float(cell) if _NUMBER.fullmatch(cell) else None


def _list(names: Iterable[str]) -> str:
    return shorten(repr(name) for name in names)
