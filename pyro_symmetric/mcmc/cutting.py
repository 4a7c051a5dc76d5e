"""The tasks that a run is cut into: their sizes, seeds, starting points and folders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyro_symmetric._process import forked
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve
from pyro_symmetric.store.files import CHECKPOINT
from pyro_symmetric.store.tasks import task_folder
from pyro_symmetric.weights import batch_shape

LARGEST_TASK = 16  # chains, about as many as a processor's cache serves at once
SMALLEST_TASK = 4  # chains, for a warm-up that has something to pool
FEWEST_TASKS = 4


def cut(settings: Settings, size: int, seed: int) -> list[Settings]:
    """The settings of tasks of ``size`` chains; what is left over makes a smaller one."""
    starts = range(0, settings.num_chains, size)
    with forked(seed_of_task(seed, "initial")):
        given = _starts_of_tasks(settings, [slice(start, start + size) for start in starts])
    folders = [None if settings.store is None else task_folder(settings.store, task) for task in range(len(starts))]
    begun = [folder is not None and (folder / CHECKPOINT).exists() for folder in folders]
    return [
        replace(
            settings,
            num_chains=min(size, settings.num_chains - start),
            initial=initial,
            seed=seed_of_task(seed, task),
            store=folder,
            resume=True if settings.resume is True and begun[task] else "auto",
        )
        for task, (start, initial, folder) in enumerate(zip(starts, given, folders, strict=True))
    ]


def default_size(num_chains: int) -> int:
    """Chains of a task: a quarter of all, but from ``SMALLEST_TASK`` to about ``LARGEST_TASK``, the last task's too."""
    size = max(SMALLEST_TASK, min(LARGEST_TASK, num_chains // FEWEST_TASKS))
    fitting = (s for s in range(size, num_chains) if num_chains % s == 0 or num_chains % s >= SMALLEST_TASK)
    return next(fitting, num_chains)


def seed_of_task(seed: int, task: int | str) -> int:
    """A seed for one part of a run, independent of the others'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest(), "big") >> 1


# small steps ----------------------------------------------------------------------------------------------------------


def _starts_of_tasks(settings: Settings, tasks: Sequence[slice]) -> list[Any]:
    """Each task's ``initial``; guides and functions draw here, once for all chains, so they needn't travel."""
    initial = resolve(settings.initial, settings.num_chains, settings.args, settings.kwargs)
    for_each_chain = callable(initial)
    if callable(initial):
        initial = initial(settings.num_chains)
    elif isinstance(initial, Mapping):
        shapes = settings.density(chain_chunk=settings.num_chains, engine="torch").layout.site_shapes
        for_each_chain = bool(batch_shape(initial, shapes))
    if not for_each_chain:
        return [initial] * len(tasks)
    return [{site: value[chains] for site, value in initial.items()} for chains in tasks]
