"""The chains of all tasks side by side in one store, so that they are mapped from one file, however large they are."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.storage import StoreError
from pyro_symmetric.store.layout import CHECKPOINT, CHUNKS, Draws
from pyro_symmetric.store.reader import JOINED, origin, read_store
from pyro_symmetric.store.writer import DrawStore

BLOCK_BYTES = 2**28  # between two commits; the tasks' files are mapped anew then, so that no more stays in memory


def join_stores(folder: Path, stores: Sequence[Path]) -> None:
    """Write the draws that all tasks have to ``folder / "joined"``; those that are there already stay.

    It takes as much room on the disk as the tasks' own stores, which are needed to add draws. It is only a copy of
    them: if it is damaged, or of other tasks, it is made anew.

    :raises OSError: if it can't be written; nothing is lost then.
    """
    checkpoint = origin(stores)
    with _opened(folder / JOINED, checkpoint) as joined:
        while parts := _left(stores, joined.committed):
            size = sum(value[:, 0].nbytes for part in parts for kept in part[:2] for value in kept.values())
            count = min(part.samples[site].shape[1] for part in parts for site in part.samples)
            for k in range(min(count, max(1, BLOCK_BYTES // size))):
                samples, statistics = (
                    {name: torch.cat([part[kind][name][:, k] for part in parts]) for name in parts[0][kind]}
                    for kind in (0, 1)
                )
                joined.append(samples, statistics)
            joined.commit({}, checkpoint, {})


def _opened(path: Path, checkpoint: Mapping[str, Any]) -> DrawStore:
    """:param checkpoint: what the store must have been made from."""
    with contextlib.suppress(StoreError):
        joined = DrawStore(path)
        if joined.last is None or joined.last.checkpoint == checkpoint:
            return joined
        joined.close()
    for name in (CHECKPOINT, CHUNKS):
        (path / name).unlink(missing_ok=True)
    for name in ("samples", "statistics"):
        shutil.rmtree(path / name, ignore_errors=True)
    return DrawStore(path)


def _left(stores: Sequence[Path], begin: int) -> list[Draws]:
    """The tasks' draws from some place on; empty if a task has none there."""
    parts = [read_store(store, verify=False) for store in stores]
    left = [Draws(_cut(part.samples, begin), _cut(part.statistics, begin), {}) for part in parts]
    return left if all(value.shape[1] for part in left for value in part.samples.values()) else []


def _cut(values: Mapping[str, Tensor], begin: int) -> dict[str, Tensor]:
    return {name: value[:, begin:] for name, value in values.items()}
