"""Tasks done by the workers of any :class:`concurrent.futures.Executor`, or by this process one after another.

An error of one task doesn't end the others, and the tasks of a worker that died are done again here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler

from tqdm import tqdm

from pyro_symmetric.mcmc.job import Job, asked_for
from pyro_symmetric.mcmc.tasks import Parcel, cut, do_task, folder_of_tasks
from pyro_symmetric.samples import Posterior
from pyro_symmetric.store import Draws, join, read_store

LARGEST_TASK = 16  # chains, about as many as a processor's cache serves at once
FEWEST_TASKS = 4


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
    """

    done: dict[int, Parcel] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    interrupted: bool = False


def run_tasks(job: Job, executor: Executor | None, chains_per_task: int | None, threads: int, progress: bool) -> Draws:
    """Run a job's chains in tasks.

    :param executor: whose workers do them; ``None``: this process.
    :param chains_per_task: ``None``: at most ``LARGEST_TASK``, and so few that there are ``FEWEST_TASKS`` tasks.
    :param threads: of PyTorch within each task.
    :raises TaskError: if tasks failed; it names them and carries the draws of the others.
    """
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor is a {type(executor).__name__}; it must be a concurrent.futures.Executor, such as "
            "ProcessPoolExecutor(4) or a dask Client's get_executor()"
        )
    if chains_per_task is None:
        chains_per_task = max(1, min(LARGEST_TASK, job.num_chains // FEWEST_TASKS))
    for name, count in {"chains_per_task": chains_per_task, "threads_per_task": threads}.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
    chains_per_task = int(chains_per_task)
    with folder_of_tasks(job, chains_per_task) as seed:
        jobs = cut(job, chains_per_task, seed)
        outcome = Outcome()
        with tqdm(total=len(jobs), desc="tasks", disable=not progress, mininterval=0.2) as bar:
            try:
                if executor is not None:
                    _by_workers(jobs, executor, threads, outcome, bar)
                    _warn_of_loss(jobs, outcome.lost)
                _here(jobs, range(len(jobs)) if executor is None else outcome.lost, threads, outcome, bar)
            except KeyboardInterrupt:
                outcome.interrupted = True
        draws = _gather(job, jobs, outcome)
    facts = {"seed": job.seed, "chains_per_task": chains_per_task, "interrupted": outcome.interrupted}
    return draws._replace(metadata={**draws.metadata, **facts})


# small steps --------------------------------------------------------------------------------------------------------


def _by_workers(jobs: Sequence[Job], executor: Executor, threads: int, outcome: Outcome, bar: tqdm) -> None:
    futures: dict[Future[Parcel], int] = {}
    try:
        for task, job in enumerate(jobs):
            try:
                futures[executor.submit(do_task, job, threads)] = task
            except BrokenExecutor:
                outcome.lost.append(task)
        for future in as_completed(futures):
            if not future.cancelled() and not _is_loss(future.exception()):
                _note(futures[future], future.result, outcome, bar)
            else:
                outcome.lost.append(futures[future])
    finally:
        for future in futures:
            future.cancel()


def _here(jobs: Sequence[Job], tasks: Sequence[int], threads: int, outcome: Outcome, bar: tqdm) -> None:
    for task in tasks:
        _note(task, partial(do_task, jobs[task], threads), outcome, bar)
        if outcome.interrupted:
            return


def _note(task: int, result: Callable[[], Parcel], outcome: Outcome, bar: tqdm) -> None:
    """Write down how a task ended; an error of one doesn't end the others."""
    try:
        parcel = result()
    except Exception as error:
        outcome.failed[task] = error
    else:
        if parcel.metadata["interrupted"]:  # Ctrl-C reached the worker
            outcome.interrupted = True
            return
        outcome.done[task] = parcel
    bar.update(1)


def _is_loss(error: BaseException | None) -> bool:
    """Whether a worker died, rather than its task failed; dask's word for it isn't one of Python's."""
    return isinstance(error, BrokenExecutor | CancelledError) or type(error).__name__ == "KilledWorker"


def _gather(job: Job, jobs: Sequence[Job], outcome: Outcome) -> Draws:
    """The chains of all tasks that finished."""
    parts = []
    for task in sorted(outcome.done):
        store = jobs[task].store
        parts.append(asked_for(outcome.done[task].unpack() if store is None else read_store(store), job.num_samples))
    kept = f" What is done is kept in {job.store}; the same call goes on from there." if job.store is not None else ""
    if outcome.failed:
        first = min(outcome.failed)
        told = [f"task {task} ({_chains(jobs, task)}): {error!r}" for task, error in sorted(outcome.failed.items())]
        raise TaskError(
            f"{len(told)} of {len(jobs)} tasks failed. {'; '.join(told[:5])}.{_advice(jobs[first])}{kept}",
            Posterior(*join(parts)) if parts else None,
        ) from outcome.failed[first]
    if not parts:
        raise KeyboardInterrupt(f"interrupted before any of {len(jobs)} tasks had finished.{kept}")
    return join(parts)


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


def _warn_of_loss(jobs: Sequence[Job], lost: Sequence[int]) -> None:
    if lost:
        warnings.warn(
            f"workers died, and with them {', '.join(f'task {task} ({_chains(jobs, task)})' for task in lost)}; what "
            "was lost is done again in this process",
            RuntimeWarning,
            stacklevel=4,
        )


def _chains(jobs: Sequence[Job], task: int) -> str:
    begin = sum(job.num_chains for job in jobs[:task])
    return f"chains {begin} to {begin + jobs[task].num_chains - 1}"
