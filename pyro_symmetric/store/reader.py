"""Reading a store: by anyone, at any time, also while it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyro_symmetric.storage import PathLike, StoreError, inside, load_json
from pyro_symmetric.store.layout import CHECKPOINT, KIND, TASKS, VERSION, Commit, Draws, find_damage
from pyro_symmetric.store.spilled import concatenated

JOINED = "joined"  # the folder in a store of tasks where all chains lie side by side, once all tasks are done
OF_EACH_TASK = ("seed", "seconds", "chain_chunk", "interrupted", "trace")


def read_store(path: PathLike, *, verify: bool = True, salvage: bool = False) -> Draws:
    """The committed draws of a store, mapped from its files.

    The chains of a store of tasks come side by side: mapped likewise once all tasks are done, before that copied, to
    memory or, where they are large, to a file that vanishes with them. Each of its ``task-...`` folders is a store that
    is mapped. Tasks that haven't finished are left out, unless none has.

    :param verify: read everything and compare it with the checksums, at some 4 GB a second from memory; otherwise draws
        are read when they are touched.
    :param salvage: of a damaged store, return the draws before the damage.
    :raises OSError: if there is no store or it can't be read.
    :raises StoreError: if it holds no draws yet, is damaged, or is of a newer version.
    """
    folder = Path(path)
    if (folder / TASKS).exists():
        return _side_by_side(folder, verify, salvage)
    if not (folder / CHECKPOINT).exists():
        raise FileNotFoundError(f"there is no draw store at {path}")
    return _mapped(folder, Commit.read(folder), verify, salvage)


def _mapped(folder: Path, commit: Commit, verify: bool, salvage: bool) -> Draws:
    draws = commit.draws
    if damage := find_damage(folder, commit, thorough=verify or salvage):
        if not salvage:
            raise StoreError(damage.message)
        draws = damage.whole
    if draws == 0:
        raise StoreError(f"the draw store {folder} holds no draws{' before the damage' if damage else ' yet'}")
    arrays: dict[str, dict[str, torch.Tensor]] = {"samples": {}, "statistics": {}}
    for column in commit.columns:
        arrays[column.kind][column.name] = column.map(folder, draws)
    return Draws(arrays["samples"], arrays["statistics"], commit.metadata)


def read_tasks(folder: Path) -> dict[str, Any]:
    """What ``tasks.json`` says: how the chains were shared out.

    :raises StoreError: if it is damaged or of a newer version.
    """
    tasks = load_json(folder / TASKS, "list of tasks")
    version, names = tasks.get("version"), tasks.get("folders")
    if not isinstance(version, int) or not isinstance(names, list):
        raise StoreError(f"the list of tasks {folder / TASKS} is damaged: it has no version, or no folders")
    if version > VERSION:
        raise StoreError(
            f"{folder} is of version {version} of the {KIND} format; this library reads versions up to {VERSION}, so a "
            "newer pyro_symmetric is needed"
        )
    for name in names:
        inside(folder, name)
    return tasks


def read_joined(folder: Path, stores: Sequence[Path], *, verify: bool) -> Draws | None:
    """All chains of a store of tasks side by side, as far as they have been laid out so.

    :return: ``None`` if they haven't, or if that copy is damaged or of other tasks: the tasks themselves hold all.
    """
    with contextlib.suppress(StoreError):
        store = inside(folder, JOINED)
        if (store / CHECKPOINT).exists() and (commit := Commit.read(store)).checkpoint == origin(stores):
            return _mapped(store, commit, verify, salvage=False)
    return None


def origin(stores: Sequence[Path]) -> dict[str, Any]:
    """What a copy of these tasks side by side says of where it comes from."""
    return {"tasks": [Commit.read(store).token for store in stores]}


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
    if whole is not None and _holds(whole, count):
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
    commits = {store: Commit.read(store) for store in stores if (store / CHECKPOINT).exists()}
    _refuse_copies(commits)
    begun = {store: commit for store, commit in commits.items() if commit.draws}
    if not begun:
        raise StoreError(f"the draw store {folder} holds no draws yet")
    finished = [store for store, commit in begun.items() if not commit.metadata.get("interrupted")]
    whole = read_joined(folder, stores, verify=verify or salvage) if len(finished) == len(stores) else None
    if whole is not None and not _holds(whole, min(commit.draws for commit in begun.values())):
        whole = None
    thorough = verify and whole is None  # one copy of the draws is enough to check: that which is returned
    parts = [_mapped(store, begun[store], thorough, salvage and whole is None) for store in finished or begun]
    joined = join(parts, whole, folder)
    left_out = len(stores) - len(parts)
    metadata = {**joined.metadata, "seed": tasks["seed"], "chains_per_task": tasks["chains_per_task"]}
    metadata["interrupted"] = metadata["interrupted"] or left_out > 0
    return joined._replace(metadata=metadata)


def _refuse_copies(commits: Mapping[Path, Commit]) -> None:
    """:raises StoreError: if a task's folder is a copy of another's, whose chains would count twice."""
    first: dict[int, Path] = {}
    for store, commit in commits.items():
        if (other := first.setdefault(commit.token, store)) != store:
            raise StoreError(f"{store} is a copy of {other.name}. Restore it, or remove it: the run makes it anew")


def _holds(draws: Draws, count: int) -> bool:
    return next(iter(draws.samples.values())).shape[1] >= count


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
