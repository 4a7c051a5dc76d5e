"""A run cut into tasks of a few chains each, which may be done anywhere and in any order.

Every task is a run of its own: its chains share their warm-up with each other only, its seed is derived from the run's
seed and the task's number, and its draws go to a store of its own if there is one. So the draws depend on how the
chains are cut into tasks, and on nothing else about them. An error of one task doesn't end the others, and the tasks of
a worker that died are done again in this process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import PYRO, drawn_seed
from pyro_symmetric.fingerprint import agree
from pyro_symmetric.mcmc.cutting import cut, default_size
from pyro_symmetric.mcmc.identity import OTHER_MODEL, OtherRun, call_differences, identify, tolerance_of
from pyro_symmetric.mcmc.run import Stop, run
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import save_json
from pyro_symmetric.store import Contents
from pyro_symmetric.store.files import CHECKPOINT, TASKS, VERSION
from pyro_symmetric.store.recorders import LOCK as LOCK_FILE
from pyro_symmetric.store.recorders import lock_folder
from pyro_symmetric.store.tasks import join_tasks, joint_metadata, read_joined, read_tasks, task_folder

_is_forked = False
_threads_lock, _running = threading.Lock(), 0


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class TaskError(RuntimeError):
    """Some tasks failed.

    >>> def model():
    ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
    ...     pyro.factor("far", torch.where(w.abs() < 5, 0.0, torch.nan))
    >>> starts = {"w": torch.tensor([0.0, 0.0, 10.0, 10.0])}
    >>> options = dict(num_samples=20, num_warmup=20, num_chains=4, chains_per_task=2, progress=False)
    >>> try:
    ...     ps.sample(ps.HMC(model), initial=starts, **options)
    ... except ps.TaskError as error:
    ...     print("finished:", error.posterior.num_chains)
    finished: 2

    :param posterior: the chains of those that finished, or ``None``.
    """

    def __init__(self, message: str, posterior: Posterior | None = None):
        super().__init__(message)
        self.posterior = posterior


@dataclass
class Outcome:
    """The tasks' results so far, by number.

    :param done: what they returned.
    :param failed: why they didn't.
    :param lost: those whose worker died; ``refused``: those that a broken executor didn't take.
    :param cause: the executor's first complaint.
    """

    done: dict[int, Contents] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    cause: BaseException | None = None
    interrupted: bool = False

    def note(self, task: int, result: Callable[[], Contents]) -> None:
        """Write down how a task ended; an error of one doesn't end the others."""
        try:
            draws = result()
        except Exception as error:
            self.failed[task] = error
        else:
            if draws.metadata["interrupted"]:  # Ctrl-C reached the worker
                self.interrupted = True
            else:
                self.done[task] = draws


def run_tasks(
    settings: Settings, executor: Executor | None, chains_per_task: int | None, threads: int, progress: bool
) -> Posterior:
    """Run the chains of some settings in tasks.

    :param executor: whose workers do them; ``None``: this process.
    :param chains_per_task: ``None``: chosen by :func:`default_size`.
    :param threads: of PyTorch within each task.
    :raises TaskError: if tasks failed; it names them and carries the draws of the others.
    """
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor is a {type(executor).__name__}; it must be a concurrent.futures.Executor, such as "
            "ProcessPoolExecutor(4) or a dask Client's get_executor()"
        )
    if PYRO._is_owned():  # workers that are threads would wait for this one for ever
        executor = None
    threads = arguments.whole("threads_per_task", threads, 1)
    given = arguments.whole("chains_per_task", chains_per_task, 1, none="a quarter of all")
    size = default_size(settings.num_chains) if given is None else given
    outcome = Outcome()
    with _folder(settings, size) as seed:
        tasks = cut(settings, size, seed)
        with tqdm(total=len(tasks), desc="tasks", disable=not progress) as bar:
            try:
                if executor is not None:
                    _by_workers(tasks, executor, threads, outcome, bar)
                    _warn_of_loss(tasks, outcome)
                for task in range(len(tasks)) if executor is None else sorted(outcome.lost + outcome.refused):
                    outcome.note(task, partial(do_task, tasks[task], threads, Stop()))
                    bar.update(1)
                    if outcome.interrupted:
                        break
            except KeyboardInterrupt:
                outcome.interrupted = True
        return _gathered(settings, tasks, outcome, {"seed": seed, "chains_per_task": size})


def do_task(settings: Settings, threads: int, stop: Stop) -> Contents:
    """One task, wherever it is done, with so many of PyTorch's threads.

    :return: the draws, as arrays, which every executor can carry; only the metadata, if they lie in a store or if the
        task was stopped before there were any.
    :raises ValueError: for several threads in a forked process, where OpenMP's are missing and waited for forever.
    """
    if _is_forked and threads > 1:
        raise ValueError(
            f"threads_per_task is {threads}, but this worker is a forked process, in which PyTorch's threads hang: use "
            "1, or ProcessPoolExecutor(..., mp_context=multiprocessing.get_context('spawn'))"
        )
    with _num_threads(threads):
        try:
            draws = run(settings, stop=stop)
        except KeyboardInterrupt:
            if stop.is_set():
                return Contents({}, {}, {"interrupted": True})
            raise
    if settings.store is not None:
        return Contents({}, {}, draws.metadata)
    samples, statistics = ({name: value.numpy() for name, value in kept.items()} for kept in draws[:2])
    return Contents(samples, statistics, draws.metadata)  # type: ignore[arg-type]


# small steps --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(settings: Settings, size: int) -> Iterator[int]:
    """The run's seed. With a store, its folder is locked meanwhile, and remembers how the run is cut.

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
        if exists:
            yield _seed_of_same(settings, size)
        else:
            seed = drawn_seed() if settings.seed is None else settings.seed
            count = -(-settings.num_chains // size)
            note = {"version": VERSION, "num_tasks": count, "chains_per_task": size}
            save_json(settings.store / TASKS, {**note, "fingerprint": _identity(settings, seed)}, "list of tasks")
            yield seed
    finally:
        lock.release()


def _seed_of_same(settings: Settings, size: int) -> int:
    """The seed of the run that the folder holds.

    :raises OtherRun: if that is another one.
    """
    assert settings.store is not None
    note = read_tasks(settings.store)
    found, there = note["fingerprint"], note["chains_per_task"]
    now = _identity(settings, found["seed"])
    differing = [f"chains_per_task: {there} there, {size} here"] * (there != size)
    differing += call_differences(settings, found, now)
    both = found["energies"] and now["energies"]  # a process without the run's GPU knows none
    if both and not differing and not agree(found["energies"], now["energies"], tolerance_of(found, now)):
        differing = [OTHER_MODEL]
    if differing:
        raise OtherRun.of(settings.store, differing)
    return int(found["seed"])


def _identity(settings: Settings, seed: int) -> dict[str, Any]:
    """All that decides the draws, known before any task resumes: one that did would mix two runs.

    CUDA isn't woken up for it: this process may have none, and its forks couldn't use it any more.
    """
    if settings.device is not None and torch.device(settings.device).type == "cuda" and not torch.cuda.is_initialized():
        return identify(settings, None, seed)
    return identify(settings, settings.density(chain_chunk=settings.num_chains, engine="torch"), seed)


def _require_free(folder: Path) -> None:
    """:raises FileExistsError: if there are other things than a store of tasks."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK_FILE)
    if CHECKPOINT in names:
        raise FileExistsError(
            f"{folder} holds a run that wasn't cut into tasks; call as before, without executor and chains_per_task, "
            "or name another folder. It was left as it is"
        )
    if names and TASKS not in names:
        raise FileExistsError(f"{folder} is no draw store but holds {', '.join(names[:5])}; name a new folder")


@contextlib.contextmanager
def _num_threads(count: int) -> Iterator[None]:
    """PyTorch's number of threads, part of which belongs to the process: whoever comes last puts it back."""
    global _running
    with _threads_lock:
        before = torch.get_num_threads()
        _running += 1
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _threads_lock:
            _running -= 1
            if not _running:
                torch.set_num_threads(before)


def _by_workers(tasks: Sequence[Settings], executor: Executor, threads: int, outcome: Outcome, bar: tqdm) -> None:
    futures: dict[Future[Contents], int] = {}
    stop = Stop()
    try:
        for task, settings in enumerate(tasks):
            try:
                futures[executor.submit(do_task, settings, threads, stop)] = task
            except BrokenExecutor as error:
                outcome.refused.append(task)
                outcome.cause = outcome.cause or error
        for future in as_completed(futures):
            _receive(future, futures[future], outcome)
            bar.update(1)
    except BaseException:
        stop.set()
        for future in futures:
            future.cancel()
        raise


def _receive(future: Future[Contents], task: int, outcome: Outcome) -> None:
    error = None if future.cancelled() else future.exception()
    if future.cancelled() or _is_loss(error):
        if not outcome.lost:  # why the first worker died says more than why the executor took no more
            outcome.cause = error or outcome.cause
        outcome.lost.append(task)
    else:
        outcome.note(task, future.result)


def _is_loss(error: BaseException | None) -> bool:
    """True if a worker died, rather than its task failed; dask's word for it isn't one of Python's."""
    return isinstance(error, BrokenExecutor | CancelledError) or type(error).__name__ == "KilledWorker"


def _gathered(settings: Settings, tasks: Sequence[Settings], outcome: Outcome, facts: Mapping[str, Any]) -> Posterior:
    """The chains of all tasks that finished, those of a store mapped.

    :param facts: what the metadata say beside what tasks say.
    """
    done = sorted(outcome.done)
    kept = f" What is done is kept in {settings.store}; the same call resumes there." if settings.store else ""
    whole = None
    if done:
        every, chains = [outcome.done[task].metadata for task in done], [tasks[task].num_chains for task in done]
        short = outcome.interrupted or len(done) < len(tasks)
        metadata = {**joint_metadata(every, chains), **facts, "interrupted": short}
        if settings.store is None:
            held = [_side_by_side([outcome.done[task][kind] for task in done]) for kind in (0, 1)]
            whole = Posterior(held[0], held[1], metadata, rows="chains")
        else:
            stores = [task_folder(settings.store, task) for task in done]
            joined = read_joined(settings.store, stores) or join_tasks(settings.store, stores, metadata)
            whole = Posterior(joined.samples, joined.statistics, metadata, rows="chains")
            whole = whole.select(draws=slice(settings.num_samples))
    if outcome.failed:
        first = min(outcome.failed)
        if outcome.cause is not None and outcome.failed[first].__cause__ is None:
            outcome.failed[first].__cause__ = outcome.cause
        alike: dict[str, list[int]] = {}
        for task, error in sorted(outcome.failed.items()):
            alike.setdefault(f"{type(error).__name__}: {error}", []).append(task)
        told = [
            f"task {some[0]} ({_chains(tasks, some[0])}){f' and {len(some) - 1} more' * (len(some) > 1)}: {error}"
            for error, some in alike.items()
        ]
        raise TaskError(
            f"{len(outcome.failed)} of {len(tasks)} tasks failed. {'; '.join(told[:5])}.{_advice(tasks[first])}{kept}",
            whole,
        ) from outcome.failed[first]
    if whole is None:
        raise KeyboardInterrupt(f"interrupted before any of {len(tasks)} tasks had finished.{kept}")
    return whole


def _side_by_side(parts: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The arrays of several tasks as tensors of all their chains."""
    return {name: torch.cat([torch.as_tensor(part[name], device="cpu") for part in parts]) for name in parts[0]}


def _advice(settings: Settings) -> str:
    """A hint if the task couldn't travel at all, which executors say in words of their own."""
    try:
        ForkingPickler.dumps(settings)
    except Exception as error:
        return (
            f" The model and its data must be picklable to reach another process, and aren't ({error}): define the "
            "model at the top level of a module, not as a lambda or inside a function."
        )
    return ""


def _warn_of_loss(tasks: Sequence[Settings], outcome: Outcome) -> None:
    if not outcome.lost and not outcome.refused:
        return
    named = ", ".join(f"task {task} ({_chains(tasks, task)})" for task in sorted(outcome.lost))
    said = f" ({_last_line(outcome.cause)})" if outcome.cause is not None else ""
    told = f"workers died{said}, and with them {named}" if outcome.lost else f"the executor was broken before{said}"
    if outcome.refused and outcome.lost:
        told += f"; {len(outcome.refused)} more weren't begun"
    broken = isinstance(outcome.cause, BrokenExecutor)
    warnings.warn(
        f"{told}. They are done in this process."
        + " The executor takes no more tasks: make a new one for the next call." * broken
        + " Workers die when memory runs out, or when they can't import the model, such as one that was defined after "
        "the executor was made." * bool(outcome.lost),
        RuntimeWarning,
        stacklevel=4,
    )


def _last_line(error: BaseException | None) -> str:
    """The first cause of an error, on one line."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).replace('"""', "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)


def _chains(tasks: Sequence[Settings], task: int) -> str:
    begin, count = sum(part.num_chains for part in tasks[:task]), tasks[task].num_chains
    return f"chain {begin}" if count == 1 else f"chains {begin} to {begin + count - 1}"
