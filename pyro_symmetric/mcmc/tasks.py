"""Chains cut into tasks, each a run of its own, for the workers of an executor."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import LOCK, drawn_seed, forked
from pyro_symmetric.arguments import Entries
from pyro_symmetric.mcmc.run import run
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import CHECKPOINT, make_folder
from pyro_symmetric.weights import batch_shape, map_values, select_rows

# chains that warm up together; number of tasks
SMALLEST_TASK = 4
LARGEST_TASK = 16
MIN_TASKS = 4


def run_tasks(
    settings: Settings,
    executor: Executor | None,
    chains_per_task: int | None,
    progress: bool,
) -> Posterior:
    """Run chains in tasks, each with its own seed and, within a store, its own folder;
    concatenate their posteriors.

    The draws depend on the size of the tasks and not on where they run. A note of a
    task's error names its chains.

    :param executor: its workers run the tasks. ``None``: this process does.
    :param chains_per_task: ``None``: see :func:`default_size`.
    """
    arguments.instance(
        "executor", executor, (Executor, type(None)), "a concurrent.futures.Executor"
    )
    arguments.whole(
        "chains_per_task", chains_per_task, 1, none="about a quarter of all"
    )
    size = chains_per_task or default_size(settings.num_chains)
    if LOCK._is_owned():  # threads of the executor would wait for this one for ever
        executor = None
    store = settings.store
    entries = store.iterdir() if store is not None and store.exists() else ()
    if names := [entry.name for entry in entries if entry.name[:5] != "task-"]:
        raise FileExistsError(
            f"{store} is no draw store of tasks but holds {', '.join(names[:5])}; name "
            "a new folder"
        )
    seed = drawn_seed() if settings.seed is None else settings.seed
    threads = torch.get_num_threads()
    tasks = cut(settings, size, seed)
    done = []
    work = partial(run_task, caller=(os.getpid(), threads))
    futures = (
        [] if executor is None else [executor.submit(work, task) for task in tasks]
    )
    try:
        for k, task in enumerate(tqdm(tasks, desc="tasks", disable=not progress)):
            arrays, metadata = futures[k].result() if futures else work(task)
            if metadata["interrupted"]:  # Ctrl-C reached the worker
                break
            if task.store is None:
                samples, statistics = (
                    map_values(torch.from_numpy, part) for part in arrays
                )
                done.append(Posterior(samples, statistics, metadata, kind="chains"))
            else:
                stored = Posterior.load(task.store, verify=False)
                stored = stored.select(draws=slice(task.most_draws))
                done.append(replace(stored, metadata=metadata))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        error.add_note(f"in the task of the chains from {size * len(done)} on")
        raise
    finally:
        for future in futures:
            future.cancel()
        torch.set_num_threads(threads)  # one of its settings is the whole process's
    if not done:
        advice = ""
        if store is not None:
            advice = f". What is done is kept in {store}; the same call resumes there"
        raise KeyboardInterrupt(
            f"interrupted before any of {len(tasks)} tasks had finished{advice}"
        )
    posterior = Posterior.concat(done)
    metadata = posterior.metadata
    metadata["chains_per_task"] = size
    metadata["interrupted"] = len(done) < len(tasks)
    if all(task.seed is not None for task in tasks):
        metadata["seed"] = seed
    return posterior


def default_size(num_chains: int) -> int:
    """Return the default number of chains of a task: about a quarter of all, in equal
    tasks, none of a single chain.
    """
    quarter = math.ceil(num_chains / MIN_TASKS)
    wanted = max(SMALLEST_TASK, min(LARGEST_TASK, quarter))
    size = math.ceil(num_chains / math.ceil(num_chains / wanted))
    while size > 1 and num_chains % size == 1:
        size += 1
    return size


def run_task(
    settings: Settings, caller: tuple[int, int]
) -> tuple[list[Entries], Entries]:
    """Run one task in this process, on one thread of PyTorch's.

    :param caller: id of the process that submits the task, and its number of threads.
    :return: samples and statistics as arrays, which every executor can send (none if
        there is a store), and metadata.
    """
    # a new thread reports another number
    before = caller[1] if caller[0] == os.getpid() else torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        *parts, metadata = run(settings)
    finally:
        torch.set_num_threads(before)
    parts = parts if settings.store is None else []
    return [map_values(Tensor.numpy, part) for part in parts], metadata


def cut(settings: Settings, size: int, seed: int) -> list[Settings]:
    """Cut the settings of a run into those of tasks of ``size`` chains; the last task
    may be smaller.
    """
    initial = settings.initial
    store = settings.store
    tasks = []
    if initial is not None and not isinstance(initial, str):
        # guides and functions draw for all chains at once
        with forked(_seed_of(seed, "initial")):
            initial = resolve(
                initial, settings.num_chains, settings.args, settings.kwargs
            )
            initial = initial(settings.num_chains) if callable(initial) else initial
    one_per_chain = False
    if isinstance(initial, Mapping):
        density = replace(settings, chain_chunk=1, engine="eager").build_density()
        one_per_chain = bool(batch_shape(initial, density.layout.site_shapes))
    for task, begin in enumerate(range(0, settings.num_chains, size)):
        folder = None if store is None else store / f"task-{task:04d}"
        exists = folder is not None and (folder / CHECKPOINT).exists()
        tasks.append(
            replace(
                settings,
                num_samples=settings.most_draws,  # parts of one length
                num_chains=min(size, settings.num_chains - begin),
                # None: the store's
                seed=None if exists and settings.seed is None else _seed_of(seed, task),
                initial=select_rows(initial, slice(begin, begin + size))
                if one_per_chain
                else initial,
                store=folder,
                resume=settings.resume if exists or not task else "auto",
            )
        )
        if folder is not None:  # now, so that readers can count the tasks
            make_folder(folder)
    return tasks


def _seed_of(seed: int, task: int | str) -> int:
    """Derive the seed of one part of a run, independent of the others'."""
    digest = hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
