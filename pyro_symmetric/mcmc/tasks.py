"""Chains cut into tasks, each a run by itself, for the workers of an executor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import LOCK, drawn_seed, forked
from pyro_symmetric.mcmc.run import Settings, resolve, run
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import CHECKPOINT, make_folder
from pyro_symmetric.weights import batch_shape

SMALLEST_TASK, LARGEST_TASK, FEWEST_TASKS = 4, 16, 4  # chains of a task, which warm up together; and tasks


def run_tasks(settings: Settings, executor: Executor | None, chains_per_task: int | None, progress: bool) -> Posterior:
    """Run the chains of some settings in tasks: each a run by itself, with a seed of its own, in a folder of its own if
    there is a store. So the draws depend on how the chains are cut into tasks, and on nothing else about them. The
    error of a task is raised with a note that names its chains.

    :param executor: whose workers do them; ``None``: this process.
    :param chains_per_task: ``None``: see :func:`default_size`.
    """
    arguments.instance("executor", executor, (Executor, type(None)), "a concurrent.futures.Executor")
    arguments.whole("chains_per_task", chains_per_task, 1, none="about a quarter of all")
    size = chains_per_task or default_size(settings.num_chains)
    if LOCK._is_owned():  # workers that are threads would wait for this one for ever
        executor = None
    store = settings.store
    if store is not None and store.exists() and (names := [e.name for e in store.iterdir() if e.name[:5] != "task-"]):
        raise FileExistsError(f"{store} is no draw store of tasks but holds {', '.join(names[:5])}; name a new folder")
    seed, threads = drawn_seed() if settings.seed is None else settings.seed, torch.get_num_threads()
    tasks, done = cut(settings, size, seed), list[Posterior]()
    do = partial(do_task, caller=(os.getpid(), threads))
    futures = [] if executor is None else [executor.submit(do, task) for task in tasks]
    try:
        for k, task in enumerate(tqdm(tasks, desc="tasks", disable=not progress)):
            arrays, metadata = futures[k].result() if futures else do(task)
            if metadata["interrupted"]:  # Ctrl-C reached the worker
                break
            if task.store is None:
                samples, statistics = ({name: torch.from_numpy(v) for name, v in own.items()} for own in arrays)
                done.append(Posterior(samples, statistics, metadata, kind="chains"))
            else:
                whole = Posterior.load(task.store, verify=False)
                done.append(replace(whole.select(draws=slice(task.num_samples)), metadata=metadata))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        error.add_note(f"in the task of the chains from {size * len(done)} on")
        raise
    finally:
        for future in futures:
            future.cancel()
        torch.set_num_threads(threads)  # part of which belongs to the process
    if not done:
        kept_in = f". What is done is kept in {store}; the same call resumes there" if store else ""
        raise KeyboardInterrupt(f"interrupted before any of {len(tasks)} tasks had finished{kept_in}")
    joint = Posterior.concat(done)
    facts = {"chains_per_task": size, "interrupted": len(done) < len(tasks)}
    facts |= {} if any(task.seed is None for task in tasks) else {"seed": seed}
    return replace(joint, metadata={**joint.metadata, **facts})


def default_size(num_chains: int) -> int:
    """Chains of a task: about a quarter of all, cut evenly and so that no chain is left to warm up alone."""
    count = -(-num_chains // max(SMALLEST_TASK, min(LARGEST_TASK, -(-num_chains // FEWEST_TASKS))))
    size = -(-num_chains // count)
    while size > 1 and num_chains % size == 1:
        size += 1
    return size


def do_task(settings: Settings, caller: tuple[int, int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One task, wherever it is done, on one of PyTorch's threads.

    :param caller: the process that asks for it, and how many threads that has.
    :return: samples and statistics as arrays, which every executor can carry, unless they lie in a store; the metadata.
    """
    before = caller[1] if caller[0] == os.getpid() else torch.get_num_threads()  # a new thread would name another's
    torch.set_num_threads(1)
    try:
        *kept, metadata = run(settings)
    finally:
        torch.set_num_threads(before)
    kept = kept if settings.store is None else []
    return [{name: v.numpy() for name, v in own.items()} for own in kept], metadata


def cut(settings: Settings, size: int, seed: int) -> list[Settings]:
    """The settings of tasks of ``size`` chains; what is left over makes a smaller one."""
    initial, store, tasks = settings.initial, settings.store, []
    if initial is not None and not isinstance(initial, str):
        with forked(_seed_of(seed, "initial")):  # guides and functions draw for all at once
            initial = resolve(initial, settings.num_chains, settings.args, settings.kwargs)
            initial = initial(settings.num_chains) if callable(initial) else initial
    each = isinstance(initial, Mapping) and bool(
        batch_shape(initial, settings.density(chain_chunk=1, engine="eager").layout.site_shapes)
    )
    for task, begin in enumerate(range(0, settings.num_chains, size)):
        folder = None if store is None else store / f"task-{task:04d}"
        begun = folder is not None and (folder / CHECKPOINT).exists()
        tasks.append(
            replace(
                settings,
                num_chains=min(size, settings.num_chains - begin),
                seed=None if begun and settings.seed is None else _seed_of(seed, task),  # then it keeps its own
                initial={site: v[begin : begin + size] for site, v in initial.items()} if each else initial,
                store=folder,
                resume=settings.resume if begun or not task else "auto",
            )
        )
        if folder is not None:  # at once, so that readers know how many there are to be
            make_folder(folder)
    return tasks


def _seed_of(seed: int, task: int | str) -> int:
    """A seed for one part of a run, independent of the others'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest(), "big") >> 1
