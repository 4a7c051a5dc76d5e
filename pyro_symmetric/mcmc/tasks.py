"""A run cut into tasks of a few chains each, which may be done anywhere and in any order.

Every task is a run of its own: its chains share their warm-up with each other only, its seed is derived from the run's
seed and the task's number, and its draws go to a store of its own if there is one. So the draws depend on how the
chains are cut into tasks, and on nothing else about them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.generators import drawn_seed, seed_of_task, seeded, turn
from pyro_symmetric.mcmc.identity import OtherRun, differences, identify, identify_call
from pyro_symmetric.mcmc.job import Job, require_resumable, run_job
from pyro_symmetric.mcmc.starts import resolve
from pyro_symmetric.mcmc.watch import Watch, sweep
from pyro_symmetric.storage import dtype_of, raw_bytes, save_json
from pyro_symmetric.store import Draws, read_tasks
from pyro_symmetric.store.layout import CHECKPOINT, LOCK, TASKS, VERSION
from pyro_symmetric.store.writer import lock_folder
from pyro_symmetric.weights import batch_shape

_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class Parcel(NamedTuple):
    """Draws as bytes, which every executor can carry; only the metadata if the draws lie in a store."""

    samples: dict[str, tuple[Any, str, tuple[int, ...]]]
    statistics: dict[str, tuple[Any, str, tuple[int, ...]]]
    metadata: dict[str, Any]

    @classmethod
    def pack(cls, draws: Draws) -> Parcel:
        """What to send."""
        samples, statistics = ({name: _to_bytes(v) for name, v in kept.items()} for kept in draws[:2])
        return cls(samples, statistics, draws.metadata)

    def unpack(self) -> Draws:
        """What was sent."""
        samples, statistics = ({name: _from_bytes(*v) for name, v in kept.items()} for kept in self[:2])
        return Draws(samples, statistics, self.metadata)


def do_task(job: Job, threads: int, watch: Callable[[int], None]) -> Parcel:
    """One task, wherever it is done, with so many of PyTorch's threads.

    :param watch: called after each iteration; a :class:`~pyro_symmetric.mcmc.watch.Watch` may stop it.
    :return: the draws; without any, and marked as interrupted, if it was stopped before there were any.
    :raises ValueError: for several threads in a forked process, where OpenMP's are missing and waited for forever.
    """
    if _is_forked and threads > 1:
        raise ValueError(
            f"threads_per_task is {threads}, but this worker is a forked process, in which PyTorch's threads hang: use "
            "1, or ProcessPoolExecutor(..., mp_context=multiprocessing.get_context('spawn'))"
        )
    with turn():  # the threads of PyTorch, too, belong to the process
        if isinstance(watch, Watch) and watch.told_to_stop:
            return _STOPPED
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            draws = run_job(job, False, watch)
        except KeyboardInterrupt:
            if isinstance(watch, Watch) and watch.told_to_stop:
                return _STOPPED
            raise
        finally:
            torch.set_num_threads(before)
    return Parcel({}, {}, draws.metadata) if job.store is not None else Parcel.pack(draws)


_STOPPED = Parcel({}, {}, {"interrupted": True})


def cut(job: Job, size: int, seed: int) -> list[Job]:
    """The jobs of tasks of ``size`` chains; what is left over makes a smaller one."""
    starts = range(0, job.num_chains, size)
    with seeded(seed_of_task(seed, "initial")):
        given = _starts_of_tasks(job, [slice(start, start + size) for start in starts])
    return [
        replace(
            job,
            num_chains=min(size, job.num_chains - start),
            initial=initial,
            seed=seed_of_task(seed, task),
            store=None if job.store is None else job.store / _name(task),
            resume=True if job.resume is True and _begun(job, task) else "auto",
        )
        for task, (start, initial) in enumerate(zip(starts, given, strict=True))
    ]


@contextlib.contextmanager
def folder_of_tasks(job: Job, chains_per_task: int) -> Iterator[int]:
    """The run's seed. With a store, its folder is locked meanwhile, and remembers how the run is cut.

    :raises OtherRun: if the folder holds another run, or one that was cut otherwise.
    :raises OSError: if it holds other things, is in use or can't be written.
    """
    if job.store is None:
        yield _seed_of(job)
        return
    lock = lock_folder(job.store, _recognise)
    try:
        seed = _seed_of(job)  # after the lock: who is refused has touched no generator
        sweep(job.store)
        exists = (job.store / TASKS).exists()
        require_resumable(job, exists)
        now: dict[str, Any] = {"chains_per_task": chains_per_task, "identity": _identity(job, seed)}
        if exists:
            found = read_tasks(job.store)
            cut_otherwise = found["chains_per_task"] != chains_per_task
            differing = [f"chains_per_task: {found['chains_per_task']} there, {chains_per_task} here"] * cut_otherwise
            if differing := differing + differences(found["identity"], now["identity"]):
                raise OtherRun.of(job.store, differing)
            seed = found["drawn_seed"]
        else:
            folders = [_name(task) for task in range(-(-job.num_chains // chains_per_task))]
            note = {"version": VERSION, "seed": job.seed, **now, "drawn_seed": seed, "folders": folders}
            save_json(job.store / TASKS, note, "list of tasks")
        yield seed
    finally:
        lock.release()


# small steps --------------------------------------------------------------------------------------------------------


def _seed_of(job: Job) -> int:
    return drawn_seed() if job.seed is None else job.seed


def _starts_of_tasks(job: Job, tasks: Sequence[slice]) -> list[Any]:
    """Each task's ``initial``; guides and functions draw here, once for all chains, so they needn't travel."""
    initial = resolve(job.initial, job.num_chains, job.args, job.kwargs)
    for_each_chain = callable(initial)
    if callable(initial):
        initial = initial(job.num_chains)
    elif isinstance(initial, Mapping):
        shapes = job.potential(chain_chunk=job.num_chains).layout.site_shapes
        for_each_chain = bool(batch_shape(initial, shapes))
    if not for_each_chain:
        return [initial] * len(tasks)
    return [{site: value[chains] for site, value in initial.items()} for chains in tasks]


def _identity(job: Job, seed: int) -> dict[str, Any]:
    """What decides the draws, known before any task resumes: one that did would mix two runs.

    CUDA isn't woken up for it: this process may have none, and its forks couldn't use it any more.
    """
    if job.device is not None and torch.device(job.device).type == "cuda" and not torch.cuda.is_initialized():
        return identify_call(job)
    with seeded(seed_of_task(seed, "identity"), job.device):
        return identify(job, replace(job, compile=False).potential(chain_chunk=job.num_chains))


def _recognise(folder: Path) -> None:
    """:raises FileExistsError: if there are other things than a store of tasks."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
    if CHECKPOINT in names:
        raise FileExistsError(
            f"{folder} holds a run that wasn't cut into tasks; call as before, without executor and chains_per_task, "
            "or name another folder. It was left as it is"
        )
    if names and TASKS not in names:
        raise FileExistsError(f"{folder} is no draw store but holds {', '.join(names[:5])}; name a new folder")


def _name(task: int) -> str:
    return f"task-{task:04d}"


def _begun(job: Job, task: int) -> bool:
    return job.store is not None and (job.store / _name(task) / CHECKPOINT).exists()


def _to_bytes(value: Tensor) -> tuple[Any, str, tuple[int, ...]]:
    return raw_bytes(value).numpy(), str(value.dtype).removeprefix("torch."), tuple(value.shape)


def _from_bytes(value: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(value).view(dtype_of(dtype)).view(shape)
