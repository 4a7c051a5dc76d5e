"""Reading a store: by anyone, at any time, also while it is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pyro_symmetric.storage import PathLike, StoreError
from pyro_symmetric.store.layout import CHECKPOINT, KIND, TASKS, VERSION, Commit, Draws, find_damage
from pyro_symmetric.store.spilled import concatenated

JOINED = "joined"  # the folder in a store of tasks where all chains lie side by side, once all tasks are done
OF_EACH_TASK = ("seed", "seconds", "chain_chunk", "interrupted", "trace")


def read_store(path: PathLike, *, verify: bool = False, salvage: bool = False) -> Draws:
    """The committed draws of a store, mapped from its files and read when they are touched.

    The chains of a store of tasks come side by side: mapped likewise once all tasks are done, before that copied, to
    memory or, where they are large, to a file that vanishes with them. Each of its ``task-...`` folders is a store that
    is mapped. Tasks that haven't finished are left out, unless none has.

    :param verify: read everything and compare it with the checksums.
    :param salvage: of a damaged store, return the draws before the damage.
    :raises OSError: if there is no store or it can't be read.
    :raises StoreError: if it holds no draws yet, is damaged, or is of a newer version.
    """
    folder = Path(path)
    if (folder / TASKS).exists():
        return _side_by_side(folder, verify, salvage)
    if not (folder / CHECKPOINT).exists():
        raise FileNotFoundError(f"there is no draw store at {path}")
    commit = Commit.read(folder)
    draws = commit.draws
    if damage := find_damage(folder, commit, thorough=verify or salvage):
        if not salvage:
            raise StoreError(damage.message)
        draws = damage.whole
    if draws == 0:
        raise StoreError(f"the draw store {path} holds no draws{' before the damage' if damage else ' yet'}")
    arrays: dict[str, dict[str, torch.Tensor]] = {"samples": {}, "statistics": {}}
    for column in commit.columns:
        arrays[column.kind][column.name] = column.map(folder, draws)
    return Draws(arrays["samples"], arrays["statistics"], commit.metadata)


def read_tasks(folder: Path) -> dict[str, Any]:
    """What ``tasks.json`` says: how the chains were shared out.

    :raises StoreError: if it is damaged or of a newer version.
    """
    try:
        tasks = json.loads((folder / TASKS).read_text(encoding="utf-8"))
        version, names = tasks["version"], tasks["folders"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{folder / TASKS} is damaged: {error!r}") from error
    if version > VERSION:
        raise StoreError(
            f"{folder} is of version {version} of the {KIND} format; this library reads versions up to {VERSION}, so a "
            "newer pyro_symmetric is needed"
        )
    return {**tasks, "folders": list(names)}


def read_joined(folder: Path, *, verify: bool = False) -> Draws | None:
    """All chains of a store of tasks side by side, as far as they have been laid out so; ``None`` if they haven't."""
    store = folder / JOINED
    if not (store / CHECKPOINT).exists() or Commit.read(store).draws == 0:
        return None
    return read_store(store, verify=verify)


def join(parts: Sequence[Draws], whole: Draws | None = None, folder: Path | None = None) -> Draws:
    """The chains of several runs side by side, cut to the shortest.

    Metadata are the first one's, but seconds are added up and the trace is the chains' mean; ``metadata["tasks"]``
    keeps each part's own.

    :param whole: their draws side by side already, so that none is copied; ignored if it has too few.
    :param folder: where large copies may be put rather than in memory.
    """
    chains = [len(next(iter(part.samples.values()))) for part in parts]
    lengths = [next(iter(part.samples.values())).shape[1] for part in parts]
    count = min(lengths)
    if whole is not None and _holds(whole, sum(chains), count):
        samples, statistics = ({name: v[:, :count] for name, v in kept.items()} for kept in whole[:2])
    else:
        samples, statistics = (
            {name: concatenated([part[kind][name][:, :count] for part in parts], folder) for name in parts[0][kind]}
            for kind in (0, 1)
        )
    every = [part.metadata for part in parts]
    tasks = [
        {"chains": count, **{name: own.get(name) for name in OF_EACH_TASK}}
        for count, own in zip(chains, every, strict=True)
    ]
    metadata = dict(every[0])
    if "seconds" in metadata:
        metadata["seconds"] = {phase: sum(own["seconds"][phase] for own in every) for phase in metadata["seconds"]}
    if "trace" in metadata:
        metadata["trace"] = _mean_trace([own["trace"] for own in every], chains)
    metadata["interrupted"] = any(own.get("interrupted", False) for own in every)
    return Draws(samples, statistics, metadata | {"tasks": tasks})


# small steps --------------------------------------------------------------------------------------------------------


def _side_by_side(folder: Path, verify: bool, salvage: bool) -> Draws:
    tasks = read_tasks(folder)
    stores = [folder / name for name in tasks["folders"]]
    begun = [store for store in stores if (store / CHECKPOINT).exists() and Commit.read(store).draws]
    parts = [read_store(store, verify=verify, salvage=salvage) for store in begun]
    if not parts:
        raise StoreError(f"the draw store {folder} holds no draws yet")
    finished = [part for part in parts if not part.metadata.get("interrupted")]
    whole = read_joined(folder, verify=verify) if len(finished) == len(stores) else None
    joined = join(finished or parts, whole, folder)
    left_out = len(stores) - len(finished or parts)
    metadata = {**joined.metadata, "seed": tasks["seed"], "chains_per_task": tasks["chains_per_task"]}
    metadata["interrupted"] = metadata["interrupted"] or left_out > 0
    return joined._replace(metadata=metadata)


def _holds(draws: Draws, chains: int, count: int) -> bool:
    found = next(iter(draws.samples.values())).shape
    return found[0] == chains and found[1] >= count


def _mean_trace(traces: Sequence[dict[str, list[Any]]], chains: Sequence[int]) -> dict[str, list[Any]]:
    """The mean over all chains at each iteration; ``None`` where any part has none."""
    shortest = min(traces, key=lambda trace: len(trace["iteration"]))
    mean: dict[str, list[Any]] = {"iteration": shortest["iteration"]}
    total = sum(chains)
    for name in [name for name in shortest if name != "iteration"]:
        rows = zip(*(trace[name] for trace in traces), strict=False)
        mean[name] = [
            None if None in row else sum(n * value for n, value in zip(chains, row, strict=True)) / total
            for row in rows
        ]
    return mean
