"""Sample: the one call that runs a kernel's chains, in memory or to disk, here or on many machines."""

from __future__ import annotations

import warnings
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal

import torch

from pyro_symmetric.mcmc.executors import run_tasks
from pyro_symmetric.mcmc.job import Job, run_job
from pyro_symmetric.mcmc.kernel import Kernel
from pyro_symmetric.mcmc.starts import Initial
from pyro_symmetric.samples import Posterior
from pyro_symmetric.storage import PathLike

MANY_DIVERGENCES = 0.05


def sample(
    kernel: Kernel,
    *args: Any,
    num_samples: int = 1000,
    num_warmup: int = 500,
    num_chains: int = 4,
    thinning: int = 1,
    initial: Initial = None,
    chain_chunk: int | None = None,
    compile: bool | None = None,
    store: PathLike | None = None,
    resume: bool | Literal["auto"] = "auto",
    seed: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    executor: Executor | None = None,
    chains_per_task: int | None = None,
    threads_per_task: int = 1,
    progress: bool = True,
    **kwargs: Any,
) -> Posterior:
    """Draw from a model's posterior with many chains at once.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> posterior = sample(HMC(model), torch.randn(100), num_chains=8)

    With ``store`` the draws go to disk as they are made. After Ctrl-C, ``kill -9`` or a power cut the same call goes
    on, in warm-up too, and gives draw for draw what an unbroken run gives; with a larger ``num_samples`` it adds
    draws, as if they had been asked for at once. ``Posterior.load(store)`` reads what there is at any time.

    Without, Ctrl-C during sampling returns the draws made so far, with a warning and ``metadata["interrupted"]`` set;
    during warm-up, when there is nothing to return, it ends the program as usual.

    With ``executor`` or ``chains_per_task``, chains are cut into tasks that warm up by themselves and have seeds of
    their own, so the draws depend on ``chains_per_task`` but not on the workers. Tasks whose worker died are done
    again in this process. Kernel, model and data travel by the executor's own means, which is usually pickle; on other
    machines ``store`` must be a folder that all of them see.

    :param kernel: the sampler, which holds the model.
    :param args: what the model is called with, data included; ``kwargs`` likewise.
    :param num_samples: draws to keep of each chain.
    :param num_warmup: iterations of each chain before them, to adapt and to be forgotten.
    :param thinning: iterations for each draw that is kept.
    :param initial: ``"prior"``, ``"uniform"``, weights (see :meth:`Potential.initial`), a ``Posterior`` whose last
        draws to start from, a guide (ours, or any ``AutoGuide``) or a function ``num_chains -> weights`` to draw from.
    :param chain_chunk: chains to evaluate at once; ``None``: chosen; see :class:`Potential`.
    :param compile: whether to compile the model's energy; ``None``: where it is sure to pay; see :class:`Potential`.
    :param store: a folder for the draws, new or of this very run.
    :param resume: ``"auto"``: go on with the store if there is one; ``False``: there must be none; ``True``: there must
        be one, and it may come from another version of PyTorch or of this library, which changes rounding.
    :param seed: makes the run reproducible and leaves PyTorch's own generators as they were. ``None``: they are used;
        a store then remembers where they stood, and going on sets them.
    :param device: where to compute; draws are moved to the CPU as they are made.
    :param dtype: of the chains, ``torch.float64`` for delicate posteriors.
    :param executor: any :class:`concurrent.futures.Executor`, such as a process pool or dask's.
    :param chains_per_task: by default 16, or a quarter of ``num_chains`` if that is less.
    :param threads_per_task: of PyTorch within a task; sums are rounded alike only for the same number.
    :return: draws, statistics of every draw, and metadata: the kernel's settings, ``seconds``, and ``trace``, the mean
        potential energy, acceptance and step size over all iterations, warm-up included. With ``store``, draws are
        mapped from its files.
    :raises ValueError: naming the argument, or what differs if the store holds another run.
    :raises OSError: if the store can't be written (full disk, read-only, in use); what was committed stays.
    :raises TaskError: if tasks failed, with the posterior of the others.
    """
    job = Job(
        kernel,
        args,
        kwargs,
        num_samples,
        num_warmup,
        num_chains,
        thinning,
        initial,
        chain_chunk,
        compile,
        seed,
        device,
        dtype,
        None if store is None else Path(store).absolute(),
        resume,
    )
    if executor is None and chains_per_task is None:
        draws = run_job(job, progress)
    else:
        draws = run_tasks(job, executor, chains_per_task, threads_per_task, progress)
    posterior = Posterior(*draws).attach(kernel, *args, **kwargs)
    _warn_of_trouble(posterior, job)
    return posterior


def _warn_of_trouble(posterior: Posterior, job: Job) -> None:
    if posterior.metadata["interrupted"]:
        held = f"{posterior.num_samples} of {job.num_samples} draws of each chain"
        if posterior.num_chains < job.num_chains:
            held = f"{posterior.num_chains} of {job.num_chains} chains"
        advice = "" if job.store is None else f"; the same call goes on from what is kept in {job.store}"
        warnings.warn(f"interrupted: the posterior holds {held}{advice}", RuntimeWarning, stacklevel=3)
    share = float(posterior.divergences.sum()) / (posterior.num_chains * posterior.num_samples)
    if share > MANY_DIVERGENCES:
        warnings.warn(
            f"{share:.0%} of the draws diverged, so parts of the posterior are missed. Use a smaller step_size or a "
            "larger target_accept, a longer warm-up, dtype=torch.float64, or reparametrise the model",
            RuntimeWarning,
            stacklevel=3,
        )
