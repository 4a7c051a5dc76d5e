"""The rows that train, test, and lie outside: all before anything is standardised."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from pyro_symmetric import arguments
from pyro_symmetric.datasets.dataset import Raw, shorten


def hold_out(raw: Raw, classes: Literal["auto"] | Sequence[str | int] | None) -> tuple[Raw, np.ndarray, str | None]:
    """``raw`` without some classes, relabelled from 0; the rows of these classes; and a name for them.

    :param classes: as :func:`~pyro_symmetric.datasets.load` takes them.
    """
    names = _held_out_names(raw, classes)
    if not names:
        return raw, np.zeros(0, dtype=np.int64), None
    kept = [index for index, label in enumerate(raw.class_names) if label not in names]
    if len(kept) < 2:
        raise ValueError(
            f"hold_out {list(names)} leaves {len(kept)} of the {len(raw.class_names)} classes of {raw.name}; "
            "at least 2 must stay"
        )
    relabel = np.full(len(raw.class_names), -1)
    relabel[kept] = np.arange(len(kept))
    y = relabel[raw.y]
    which = f"{'class' if len(names) == 1 else 'classes'} {', '.join(names)}"
    train_rows = np.arange(len(y)) if raw.train_rows is None else raw.train_rows
    outside = train_rows if raw.test_rows is None else raw.test_rows
    remaining = dataclasses.replace(
        raw,
        y=y,
        class_names=tuple(raw.class_names[index] for index in kept),
        train_rows=train_rows[y[train_rows] >= 0],
        test_rows=None if raw.test_rows is None else raw.test_rows[y[raw.test_rows] >= 0],
        notes=(*raw.notes, f"Kept out of training and test: {which}."),
    )
    return remaining, outside[y[outside] < 0], f"{raw.name}: {which}"


def _held_out_names(raw: Raw, classes: Literal["auto"] | Sequence[str | int] | None) -> tuple[str, ...]:
    if classes is None or (classes == "auto" and raw.task == "regression"):
        return ()
    if raw.task == "regression":
        raise ValueError(f"hold_out is {classes!r}, but {raw.name} is a regression and has no classes to hold out")
    if isinstance(classes, str):
        if classes != "auto":
            raise ValueError(f"hold_out is {classes!r}; it must be 'auto', None or a list of classes")
        count = len(raw.class_names)
        return raw.class_names[count - round(count / 5) :] if count >= 5 else ()
    names = tuple(str(label) for label in arguments.listed("hold_out", classes, (str, int), "classes"))
    if unknown := [label for label in names if label not in raw.class_names]:
        raise ValueError(f"hold_out names {unknown}, but the classes of {raw.name} are {shorten(raw.class_names)}")
    return names


def split(raw: Raw, test_fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows: the data set's own, or drawn at random and stratified by class."""
    rows = np.arange(len(raw.y)) if raw.train_rows is None else raw.train_rows
    if raw.test_rows is not None:
        return rows, raw.test_rows
    num_test = max(1, round(test_fraction * len(rows)))
    if len(rows) - num_test < 2:
        raise ValueError(f"{raw.name} has {len(rows)} rows, too few to train on 2 and test on {num_test}")
    rows = rows[_stratified_order(raw, rows, rng)]
    return rows[num_test:], rows[:num_test]


def subset(rows: np.ndarray, raw: Raw, most: int | None, rng: np.random.Generator) -> np.ndarray:
    """At most ``most`` of ``rows``, stratified by class."""
    if most is None or len(rows) <= most:
        return rows
    return rows[_stratified_order(raw, rows, rng)[:most]]


def _stratified_order(raw: Raw, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random order of ``rows`` in which every prefix holds each class in close to its share.

    Row number k of the n rows of a class (in random order) is placed at (k + 1/2) / n of the whole.
    """
    order = rng.permutation(len(rows))
    if raw.task == "regression":
        return order
    labels = raw.y[rows[order]]
    place = np.empty(len(rows))
    for label in np.unique(labels):
        of_class = labels == label
        place[of_class] = (np.arange(of_class.sum()) + 0.5) / of_class.sum()
    # Stable, so that ties between classes stay in random order.
    return order[np.argsort(place, kind="stable")]


def check(raw: Raw, train: np.ndarray) -> None:
    """:raises ValueError: if numbers aren't finite in single precision, or no training row is of some class."""
    if not all(
        (np.abs(values) <= np.finfo(np.float32).max).all() for values in (raw.x, raw.y) if values.dtype.kind == "f"
    ):
        raise ValueError(f"{raw.name} holds values that are NaN, infinite, or too large for single precision")
    if missing := [label for k, label in enumerate(raw.class_names) if k not in raw.y[train]]:
        raise ValueError(f"{raw.name} has too few rows: none of the {len(train)} training rows is of {missing}")
