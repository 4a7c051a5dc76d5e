"""Chains cut into tasks: each a run by itself, with a seed of its own, in a folder of its own if there is a store.

So the draws depend on how the chains are cut into tasks, and on nothing else about them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import LOCK, drawn_seed, forked
from pyro_symmetric.mcmc.run import run
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.storage import make_folder
from pyro_symmetric.store import CHECKPOINT, Contents, read_store
from pyro_symmetric.weights import batch_shape

SMALLEST, LARGEST, FEWEST = 4, 16, 4  # chains of a task, which warm up together; and tasks
_forked: list[int] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(os.getpid()))


def run_tasks(
    settings: Settings, executor: Executor | None, chains_per_task: int | None, threads: int, progress: bool
) -> Posterior:
    """Run the chains of some settings in tasks. The error of a task is raised with a note that names its chains.

    :param executor: whose workers do them; ``None``: this process.
    :param chains_per_task: ``None``: chosen by :func:`default_size`.
    :param threads: of PyTorch within each task.
    """
    arguments.instance("executor", executor, (Executor, type(None)), "a concurrent.futures.Executor")
    threads = arguments.whole("threads_per_task", threads, 1)
    size = arguments.whole("chains_per_task", chains_per_task, 1, none="a quarter of all")
    size = default_size(settings.num_chains) if size is None else size
    if LOCK._is_owned():  # workers that are threads would wait for this one for ever
        executor = None
    store = settings.store
    if store is not None and store.exists() and (names := [e.name for e in store.iterdir() if e.name[:5] != "task-"]):
        raise FileExistsError(f"{store} is no draw store of tasks but holds {', '.join(names[:5])}; name a new folder")
    seed = drawn_seed() if settings.seed is None else settings.seed
    tasks, done, before = cut(settings, size, seed), list[Posterior](), torch.get_num_threads()
    do = partial(do_task, threads=threads, here=(os.getpid(), before))
    futures = [] if executor is None else [executor.submit(do, task) for task in tasks]
    try:
        for k, task in enumerate(tqdm(tasks, desc="tasks", disable=not progress)):
            found = futures[k].result() if futures else do(task)
            if found.metadata["interrupted"]:  # Ctrl-C reached the worker
                break
            kept = found if task.store is None else read_store(task.store, verify=False)
            samples, statistics = (
                {name: torch.as_tensor(v, device="cpu")[:, : task.num_samples] for name, v in own.items()}
                for own in kept[:2]
            )
            done.append(Posterior(samples, statistics, found.metadata, kind="chains"))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        first = size * len(done)
        error.add_note(f"in the task of chains {first} to {first + tasks[len(done)].num_chains - 1}")
        raise
    finally:
        for future in futures:
            future.cancel()
        torch.set_num_threads(before)  # part of which belongs to the process
    if not done:
        kept_in = f". What is done is kept in {settings.store}; the same call resumes there" if settings.store else ""
        raise KeyboardInterrupt(f"interrupted before any of {len(tasks)} tasks had finished{kept_in}")
    whole = Posterior.concat(done)
    facts = {"chains_per_task": size, "interrupted": len(done) < len(tasks)}
    facts |= {} if any(task.seed is None for task in tasks) else {"seed": seed}
    return replace(whole, metadata={**whole.metadata, **facts})


def do_task(settings: Settings, threads: int, here: tuple[int, int]) -> Contents:
    """One task, wherever it is done, with so many of PyTorch's threads.

    :param here: the process that asks for it, and how many threads that has.
    :return: the draws, as arrays, which every executor can carry; only the metadata, if they lie in a store.
    :raises ValueError: for several threads in a forked process, where OpenMP's are missing and waited for forever.
    """
    if threads > 1 and os.getpid() in _forked:
        raise ValueError(
            f"threads_per_task is {threads}, but this worker is a forked process, in which PyTorch's threads hang: use "
            "1, or ProcessPoolExecutor(..., mp_context=multiprocessing.get_context('spawn'))"
        )
    before = here[1] if here[0] == os.getpid() else torch.get_num_threads()  # a new thread would name another's
    torch.set_num_threads(threads)
    try:
        found = run(settings)
    finally:
        torch.set_num_threads(before)
    samples, statistics = ({name: v.numpy() for name, v in own.items()} for own in found[:2])
    return Contents({}, {}, found.metadata) if settings.store else Contents(samples, statistics, found.metadata)  # type: ignore[arg-type]


def cut(settings: Settings, size: int, seed: int) -> list[Settings]:
    """The settings of tasks of ``size`` chains; what is left over makes a smaller one."""
    initial, store = settings.initial, settings.store
    if initial is not None and not isinstance(initial, str):
        with forked(_seed_of(seed, "initial")):  # guides and functions draw for all at once
            initial = resolve(initial, settings.num_chains, settings.args, settings.kwargs)
            initial = initial(settings.num_chains) if callable(initial) else initial
    shapes = settings.density(settings.num_chains, "eager").layout.site_shapes if isinstance(initial, Mapping) else {}
    each = isinstance(initial, Mapping) and bool(batch_shape(initial, shapes))
    tasks = []
    for task, begin in enumerate(range(0, settings.num_chains, size)):
        folder = None if store is None else store / f"task-{task:04d}"
        own = {site: value[begin : begin + size] for site, value in initial.items()} if each else initial
        begun = folder is not None and (folder / CHECKPOINT).exists()
        tasks.append(
            replace(
                settings,
                num_chains=min(size, settings.num_chains - begin),
                seed=None if begun and settings.seed is None else _seed_of(seed, task),  # then it keeps its own
                initial=own,
                store=folder,
                resume=settings.resume if begun or not task else "auto",
            )
        )
        if folder is not None:  # at once, so that readers know how many there are to be
            make_folder(folder)
    return tasks


def default_size(num_chains: int) -> int:
    """Chains of a task: a quarter of all, but from ``SMALLEST`` to about ``LARGEST``, the last task's too."""
    size = max(SMALLEST, min(LARGEST, num_chains // FEWEST))
    fitting = (s for s in range(size, num_chains) if num_chains % s == 0 or num_chains % s >= SMALLEST)
    return next(fitting, num_chains)


# small steps --------------------------------------------------------------------------------------------------------


def _seed_of(seed: int, task: int | str) -> int:
    """A seed for one part of a run, independent of the others'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest(), "big") >> 1
