"""A folder of runs, each of some of the chains.

The folder::

    tasks.json          how the chains were shared out, with the fingerprint of the whole run
    task-0000, ...      a store for each task
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pyro_symmetric.storage import StoreError, inside, load_json
from pyro_symmetric.store.files import CHECKPOINT, KIND, TASKS, VERSION, Checkpoint, Contents, read_store


def task_folder(folder: Path, task: int) -> Path:
    """The folder of a task's own store."""
    return folder / f"task-{task:04d}"


def read_tasks(folder: Path) -> dict[str, Any]:
    """The contents of ``tasks.json``.

    :raises StoreError: if it is damaged or of a newer version.
    """
    note = load_json(folder / TASKS, "list of tasks")
    version, count = note.get("version"), note.get("num_tasks")
    if type(version) is not int or type(count) is not int or count < 1 or not isinstance(note.get("fingerprint"), dict):
        raise StoreError(f"the list of tasks {folder / TASKS} is damaged: it lacks a version, tasks or a fingerprint")
    if version > VERSION:
        raise StoreError(
            f"{folder} is of version {version} of the {KIND} format; this library reads versions up to {VERSION}, so a "
            "newer pyro_symmetric is needed"
        )
    return note


def stores_of_tasks(folder: Path) -> tuple[list[Path], bool]:
    """The stores of the tasks that have finished, or if none has, of those with draws; and whether these are all.

    :return: no stores if the folder isn't one of tasks.
    :raises StoreError: if there are no draws yet, or if a task's store is a copy of another's.
    """
    if not (folder / TASKS).exists():
        return [], True
    stores = [inside(folder, task_folder(folder, task).name) for task in range(read_tasks(folder)["num_tasks"])]
    found = {store: Checkpoint.read(store) for store in stores if (store / CHECKPOINT).exists()}
    first: dict[Any, Path] = {}
    for store, checkpoint in found.items():
        if (other := first.setdefault(checkpoint.fingerprint.get("seed"), store)) != store:
            raise StoreError(f"{store} is a copy of {other.name}. Restore it, or remove it: the run makes it anew")
    begun = [store for store, checkpoint in found.items() if checkpoint.draws]
    if not begun:
        raise StoreError(
            f"the draw store {folder} holds no draws yet: its warm-up isn't over; the call that began it resumes it"
        )
    finished = [store for store in begun if not found[store].metadata.get("interrupted")]
    return finished or begun, len(finished) == len(stores)


def read_folder(folder: Path, *, verify: bool = True) -> Contents:
    """The committed draws of a run, whether it was cut into tasks or not.

    The chains of tasks that have finished are copied side by side; if none has, as far as all of them have come.

    :param verify: as of :func:`~pyro_symmetric.store.files.read_store`, which says what is raised.
    """
    stores, are_all = stores_of_tasks(folder)
    if not stores:
        return read_store(folder, verify=verify)
    found = [read_store(store, verify=verify) for store in stores]
    held = [{(kind, n, v.shape[2:], v.dtype) for kind in (0, 1) for n, v in part[kind].items()} for part in found]
    if differing := {entry[1] for own in held for entry in own ^ held[0]}:
        raise StoreError(f"the tasks of {folder} hold different sites or statistics; what differs: {sorted(differing)}")
    chains, draws = zip(*(next(iter(part.samples.values())).shape[:2] for part in found), strict=True)
    samples, statistics = (
        {name: torch.cat([part[kind][name][:, : min(draws)] for part in found]) for name in found[0][kind]}
        for kind in (0, 1)
    )
    call = read_tasks(folder)["fingerprint"]
    facts = {"seed": call["seed"], "chains_per_task": call["call"]["chains_per_task"], "interrupted": not are_all}
    return Contents(samples, statistics, {**joint_metadata([part.metadata for part in found], chains), **facts})


def joint_metadata(every: Sequence[dict[str, Any]], chains: Sequence[int]) -> dict[str, Any]:
    """The metadata of several runs, together.

    :param chains: of each.
    :return: what they agree in; ``seconds`` are added up, ``trace`` is the chains' mean, ``interrupted`` is true if any
        was; ``parts`` keeps for each its ``chains``, ``seed``, ``seconds``, ``trace`` and whatever else differs.
    """
    names = [name for name in every[0] if name not in SUMMED]
    agreed = {name: every[0][name] for name in names if all(own.get(name) == every[0][name] for own in every)}
    parts = [
        {"chains": count, **{name: value for name, value in own.items() if name not in agreed}}
        for count, own in zip(chains, every, strict=True)
    ]
    metadata = {**agreed, "parts": parts}
    if all(isinstance(own.get("seconds"), dict) for own in every):
        metadata["seconds"] = {phase: sum(own["seconds"][phase] for own in every) for phase in every[0]["seconds"]}
    if all("trace" in own for own in every):
        metadata["trace"] = _mean_trace([own["trace"] for own in every], chains)
    if any("interrupted" in own for own in every):
        metadata["interrupted"] = any(own.get("interrupted", False) for own in every)
    return metadata


SUMMED = ("seconds", "trace", "interrupted")


def _mean_trace(traces: Sequence[dict[str, list[Any]]], chains: Sequence[int]) -> dict[str, list[Any]]:
    """The mean over all chains at each iteration; ``None`` if any part has none there."""
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
