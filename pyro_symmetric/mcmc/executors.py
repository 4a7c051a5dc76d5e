"""Tasks done by the workers of any :class:`concurrent.futures.Executor`, or by this process one after another.

An error of one task doesn't end the others, and the tasks of a worker that died are done again here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.generators import lent
from pyro_symmetric.mcmc.job import Job, asked_for
from pyro_symmetric.mcmc.tasks import Parcel, cut, do_task, folder_of_tasks
from pyro_symmetric.mcmc.watch import SECONDS, Watch, Watched
from pyro_symmetric.samples import Posterior
from pyro_symmetric.store import Draws, join, read_store
from pyro_symmetric.store.joined import join_stores
from pyro_symmetric.store.reader import read_joined

LARGEST_TASK = 16  # chains, about as many as a processor's cache serves at once
SMALLEST_TASK = 4  # chains, for a warm-up that has something to pool
FEWEST_TASKS = 4
STOPPING_SECONDS = 5.0  # to wait, after Ctrl-C, for tasks to commit what they have


class TaskError(RuntimeError):
    """Some tasks failed.

    :param posterior: the chains of those that finished, or ``None``.
    """

    def __init__(self, message: str, posterior: Posterior | None = None):
        super().__init__(message)
        self.posterior = posterior


@dataclass
class Outcome:
    """What has become of the tasks so far, by number.

    :param done: what they returned.
    :param failed: why they didn't.
    :param lost: those whose worker died.
    :param refused: those that a broken executor didn't take.
    :param cause: the executor's first complaint.
    :param iterations: how many each has done, as far as is known.
    """

    done: dict[int, Parcel] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    cause: BaseException | None = None
    iterations: dict[int, int] = field(default_factory=dict)
    interrupted: bool = False

    def advance(self, bar: tqdm, task: int, iteration: int) -> None:
        """Show how far a task is."""
        bar.update(max(0, iteration - self.iterations.get(task, 0)))
        self.iterations[task] = max(iteration, self.iterations.get(task, 0))


def run_tasks(job: Job, executor: Executor | None, chains_per_task: int | None, threads: int, progress: bool) -> Draws:
    """Run a job's chains in tasks.

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
    threads = arguments.whole("threads_per_task", threads, 1)
    given = arguments.whole("chains_per_task", chains_per_task, 1, none="a quarter of all")
    chains_per_task = default_size(job.num_chains) if given is None else given
    with folder_of_tasks(job, chains_per_task) as seed:
        jobs = cut(job, chains_per_task, seed)
        outcome = Outcome()
        total = sum(part.plan.total for part in jobs)
        with tqdm(total=total, desc=f"{len(jobs)} tasks", disable=not progress, mininterval=0.2) as bar:
            try:
                if executor is not None:
                    with lent():  # workers may be threads of this process, and this one is in turn if a model asked
                        _by_workers(jobs, executor, threads, outcome, bar)
                    _warn_of_loss(jobs, outcome)
                again = sorted(outcome.lost + outcome.refused)
                _here(jobs, range(len(jobs)) if executor is None else again, threads, outcome, bar)
            except KeyboardInterrupt:
                outcome.interrupted = True
        draws = _gather(job, jobs, outcome)
    facts = {"seed": job.seed, "chains_per_task": chains_per_task, "interrupted": outcome.interrupted}
    return draws._replace(metadata={**draws.metadata, **facts})


# small steps --------------------------------------------------------------------------------------------------------


def default_size(num_chains: int) -> int:
    """Chains of a task: a quarter of all, but from ``SMALLEST_TASK`` to about ``LARGEST_TASK``, the last task's too."""
    size = max(SMALLEST_TASK, min(LARGEST_TASK, num_chains // FEWEST_TASKS))
    fitting = (s for s in range(size, num_chains) if num_chains % s == 0 or num_chains % s >= SMALLEST_TASK)
    return next(fitting, num_chains)


def _by_workers(jobs: Sequence[Job], executor: Executor, threads: int, outcome: Outcome, bar: tqdm) -> None:
    futures: dict[Future[Parcel], int] = {}
    watched = Watched(jobs[0].store.parent if jobs[0].store is not None else None)
    try:
        for task, job in enumerate(jobs):
            try:
                futures[executor.submit(do_task, job, threads, Watch(watched.folder, task))] = task
            except BrokenExecutor as error:
                outcome.refused.append(task)
                outcome.cause = outcome.cause or error
        left = set(futures)
        while left:
            ready, left = wait(left, timeout=SECONDS, return_when=FIRST_COMPLETED)
            for future in ready:
                _receive(future, futures[future], outcome)
                outcome.advance(bar, futures[future], jobs[futures[future]].plan.total)
            for future in left:
                outcome.advance(bar, futures[future], watched.iterations(futures[future]))
    except BaseException:
        watched.stop()
        raise
    finally:
        running = [future for future in futures if not future.cancel() and not future.done()]
        if not running or not wait(running, timeout=STOPPING_SECONDS).not_done:
            watched.close()


def _receive(future: Future[Parcel], task: int, outcome: Outcome) -> None:
    error = None if future.cancelled() else future.exception()
    if future.cancelled() or _is_loss(error):
        if not outcome.lost:  # why the first worker died says more than why the executor took no more
            outcome.cause = error or outcome.cause
        outcome.lost.append(task)
    else:
        _note(task, future.result, outcome)


def _here(jobs: Sequence[Job], tasks: Sequence[int], threads: int, outcome: Outcome, bar: tqdm) -> None:
    for task in tasks:
        _note(task, partial(do_task, jobs[task], threads, partial(outcome.advance, bar, task)), outcome)
        if outcome.interrupted:
            return
        outcome.advance(bar, task, jobs[task].plan.total)


def _note(task: int, result: Callable[[], Parcel], outcome: Outcome) -> None:
    """Write down how a task ended; an error of one doesn't end the others."""
    try:
        parcel = result()
    except Exception as error:
        outcome.failed[task] = error
    else:
        if parcel.metadata["interrupted"]:  # Ctrl-C reached the worker
            outcome.interrupted = True
        else:
            outcome.done[task] = parcel


def _is_loss(error: BaseException | None) -> bool:
    """Whether a worker died, rather than its task failed; dask's word for it isn't one of Python's."""
    return isinstance(error, BrokenExecutor | CancelledError) or type(error).__name__ == "KilledWorker"


def _gather(job: Job, jobs: Sequence[Job], outcome: Outcome) -> Draws:
    """The chains of all tasks that finished."""
    parts = []
    for task in sorted(outcome.done):
        store = jobs[task].store
        parts.append(
            asked_for(
                outcome.done[task].unpack() if store is None else read_store(store, verify=False), job.num_samples
            )
        )
    kept = f" What is done is kept in {job.store}; the same call resumes there." if job.store is not None else ""
    if outcome.failed:
        first = min(outcome.failed)
        alike: dict[str, list[int]] = {}
        for task, error in sorted(outcome.failed.items()):
            alike.setdefault(f"{type(error).__name__}: {error}", []).append(task)
        told = [
            f"task {tasks[0]} ({_chains(jobs, tasks[0])}){f' and {len(tasks) - 1} more' * (len(tasks) > 1)}: {error}"
            for error, tasks in alike.items()
        ]
        if outcome.cause is not None and outcome.failed[first].__cause__ is None:
            outcome.failed[first].__cause__ = outcome.cause
        raise TaskError(
            f"{len(outcome.failed)} of {len(jobs)} tasks failed. {'; '.join(told[:5])}.{_advice(jobs[first])}{kept}",
            Posterior(*join(parts, folder=job.store), rows="chains") if parts else None,
        ) from outcome.failed[first]
    if not parts:
        raise KeyboardInterrupt(f"interrupted before any of {len(jobs)} tasks had finished.{kept}")
    if job.store is None or len(parts) < len(jobs):
        return join(parts, folder=job.store)
    stores = [Path(str(task.store)) for task in jobs]
    join_stores(job.store, stores)
    return join(parts, read_joined(job.store, stores, verify=False), job.store)


def _advice(job: Job) -> str:
    """A hint if the task couldn't travel at all, which executors say in words of their own."""
    try:
        ForkingPickler.dumps(job)
    except Exception as error:
        return (
            f" The model and its data must be picklable to reach another process, and aren't ({error}): define the "
            "model at the top level of a module, not as a lambda or inside a function."
        )
    return ""


def _warn_of_loss(jobs: Sequence[Job], outcome: Outcome) -> None:
    if not outcome.lost and not outcome.refused:
        return
    named = ", ".join(f"task {task} ({_chains(jobs, task)})" for task in sorted(outcome.lost))
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


def _chains(jobs: Sequence[Job], task: int) -> str:
    begin, count = sum(job.num_chains for job in jobs[:task]), jobs[task].num_chains
    return f"chain {begin}" if count == 1 else f"chains {begin} to {begin + count - 1}"
