"""A run cut into tasks of a few chains each, which may be done anywhere and in any order.

Every task is a run of its own: its chains warm up with each other only, its seed comes of the run's seed and the task's
number, and its draws go to a folder of its own if there is a store. So the draws depend on how the chains are cut into
tasks, and on nothing else about them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import PYRO, drawn_seed, forked
from pyro_symmetric.mcmc.identity import identify, require_same
from pyro_symmetric.mcmc.run import run
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import save_json
from pyro_symmetric.store import Contents, read_store
from pyro_symmetric.store.files import CHECKPOINT, TASKS, VERSION
from pyro_symmetric.store.recorders import LOCK, lock_folder
from pyro_symmetric.store.tasks import read_tasks, task_folder
from pyro_symmetric.weights import batch_shape

LARGEST_TASK = 16  # chains, about as many as a processor's cache serves at once
SMALLEST_TASK = 4  # chains, for a warm-up that has something to pool
FEWEST_TASKS = 4
_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def run_tasks(
    settings: Settings, executor: Executor | None, chains_per_task: int | None, threads: int, progress: bool
) -> Posterior:
    """Run the chains of some settings in tasks. The error of a task is raised with a note that names its chains.

    :param executor: whose workers do them; ``None``: this process.
    :param chains_per_task: ``None``: chosen by :func:`default_size`.
    :param threads: of PyTorch within each task.
    """
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor is a {type(executor).__name__}; it must be a concurrent.futures.Executor, such as "
            "ProcessPoolExecutor(4) or a dask Client's get_executor()"
        )
    if PYRO._is_owned():  # workers that are threads would wait for this one for ever
        executor = None
    threads = arguments.whole("threads_per_task", threads, 1)
    size = arguments.whole("chains_per_task", chains_per_task, 1, none="a quarter of all")
    size = default_size(settings.num_chains) if size is None else size
    with _folder(settings, size) as seed:
        tasks, done = cut(settings, size, seed), list[Contents]()
        before = torch.get_num_threads()
        do = partial(do_task, threads=threads, here=(os.getpid(), before))
        futures = [] if executor is None else [executor.submit(do, task) for task in tasks]
        try:
            for task in tqdm(range(len(tasks)), desc="tasks", disable=not progress):
                found = futures[task].result() if futures else do(tasks[task])
                if found.metadata["interrupted"]:  # Ctrl-C reached the worker
                    break
                done.append(found)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            begin = size * len(done)
            error.add_note(f"in the task of chains {begin} to {begin + tasks[len(done)].num_chains - 1}")
            raise
        finally:
            for future in futures:
                future.cancel()
            torch.set_num_threads(before)  # part of which belongs to the process
        if not done:
            kept = f". What is done is kept in {settings.store}; the same call resumes there" if settings.store else ""
            raise KeyboardInterrupt(f"interrupted before any of {len(tasks)} tasks had finished{kept}")
        parts = [_posterior(*pair, settings.num_samples) for pair in zip(tasks, done, strict=False)]
    whole = Posterior.concat(parts)
    facts = {"seed": seed, "chains_per_task": size, "interrupted": len(done) < len(tasks)}
    return replace(whole, metadata={**whole.metadata, **facts})


def do_task(settings: Settings, threads: int, here: tuple[int, int]) -> Contents:
    """One task, wherever it is done, with so many of PyTorch's threads.

    :param here: the process that asks for it, and how many threads that has.
    :return: the draws, as arrays, which every executor can carry; only the metadata, if they lie in a store.
    :raises ValueError: for several threads in a forked process, where OpenMP's are missing and waited for forever.
    """
    if _is_forked and threads > 1:
        raise ValueError(
            f"threads_per_task is {threads}, but this worker is a forked process, in which PyTorch's threads hang: use "
            "1, or ProcessPoolExecutor(..., mp_context=multiprocessing.get_context('spawn'))"
        )
    before = here[1] if here[0] == os.getpid() else torch.get_num_threads()  # a new thread would name another's
    torch.set_num_threads(threads)
    try:
        draws = run(settings)
    finally:
        torch.set_num_threads(before)
    if settings.store is not None:
        return Contents({}, {}, draws.metadata)
    samples, statistics = ({name: value.numpy() for name, value in kept.items()} for kept in draws[:2])
    return Contents(samples, statistics, draws.metadata)  # type: ignore[arg-type]


def cut(settings: Settings, size: int, seed: int) -> list[Settings]:
    """The settings of tasks of ``size`` chains; what is left over makes a smaller one."""
    slices = [slice(start, start + size) for start in range(0, settings.num_chains, size)]
    with forked(seed_of_task(seed, "initial")):
        initial, for_each_chain = _starts(settings)
    tasks = []
    for task, chains in enumerate(slices):
        folder = None if settings.store is None else task_folder(settings.store, task)
        own = replace(
            settings,
            num_chains=min(size, settings.num_chains - chains.start),
            initial={site: value[chains] for site, value in initial.items()} if for_each_chain else initial,
            seed=seed_of_task(seed, task),
            store=folder,
            resume="auto" if folder is None or not (folder / CHECKPOINT).exists() else settings.resume,
        )
        tasks.append(own)
    return tasks


def default_size(num_chains: int) -> int:
    """Chains of a task: a quarter of all, but from ``SMALLEST_TASK`` to about ``LARGEST_TASK``, the last task's too."""
    size = max(SMALLEST_TASK, min(LARGEST_TASK, num_chains // FEWEST_TASKS))
    fitting = (s for s in range(size, num_chains) if num_chains % s == 0 or num_chains % s >= SMALLEST_TASK)
    return next(fitting, num_chains)


def seed_of_task(seed: int, task: int | str) -> int:
    """A seed for one part of a run, independent of the others'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest(), "big") >> 1


# small steps --------------------------------------------------------------------------------------------------------


def _starts(settings: Settings) -> tuple[Any, bool]:
    """Resolve starting points, and whether each has its own. Guides and functions draw for all at once."""
    initial = resolve(settings.initial, settings.num_chains, settings.args, settings.kwargs)
    if callable(initial):
        return initial(settings.num_chains), True
    if not isinstance(initial, Mapping):
        return initial, False
    return initial, bool(batch_shape(initial, _density(settings).layout.site_shapes))


def _density(settings: Settings) -> Any:
    return settings.density(chain_chunk=settings.num_chains, engine="eager")


@contextlib.contextmanager
def _folder(settings: Settings, size: int) -> Iterator[int]:
    """The run's seed. With a store, its folder is locked meanwhile, and remembers the run and how it is cut.

    :raises OtherRun: if the folder holds another run, or one that was cut otherwise.
    :raises OSError: if it holds other things, is in use or can't be written.
    """
    if settings.store is None:
        yield drawn_seed() if settings.seed is None else settings.seed
        return
    lock = lock_folder(settings.store, _require_free)
    try:
        exists = (settings.store / TASKS).exists()
        settings.require_resumable(exists)
        found = read_tasks(settings.store)["fingerprint"] if exists else None
        seed = found["seed"] if found else drawn_seed() if settings.seed is None else settings.seed
        # CUDA isn't woken up for it: this process may have none, and its forks couldn't use it any more.
        on_gpu = settings.device is not None and torch.device(settings.device).type == "cuda"
        now = identify(settings, None if on_gpu else _density(settings), seed)
        now["call"]["chains_per_task"] = size
        if found:
            require_same(settings, found, now)  # before any task goes on, or two runs would be mixed
        else:
            note = {"version": VERSION, "num_tasks": -(-settings.num_chains // size), "fingerprint": now}
            save_json(settings.store / TASKS, note, "list of tasks")
        yield int(seed)
    finally:
        lock.release()


def _require_free(folder: Path) -> None:
    """:raises FileExistsError: if there are other things than a store of tasks."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
    if CHECKPOINT in names:
        raise FileExistsError(
            f"{folder} holds a run that wasn't cut into tasks; call as before, without executor and chains_per_task, "
            "or name another folder. It was left as it is"
        )
    if names and TASKS not in names:
        raise FileExistsError(f"{folder} is no draw store but holds {', '.join(names[:5])}; name a new folder")


def _posterior(task: Settings, found: Contents, num_samples: int) -> Posterior:
    """A task's draws, as it returned them or mapped from its store."""
    kept = found if task.store is None else read_store(task.store, verify=False)
    samples, statistics = (
        {name: torch.as_tensor(value, device="cpu")[:, :num_samples] for name, value in own.items()} for own in kept[:2]
    )
    return Posterior(samples, statistics, found.metadata, rows="chains")
