"""Sample: the one call that runs a kernel's chains, in memory or to disk, here or on many machines."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Literal

import torch

from pyro_symmetric import arguments
from pyro_symmetric.calls import model_arguments
from pyro_symmetric.chain_findings import sampler_failures
from pyro_symmetric.mcmc.kernels.kernel import Kernel
from pyro_symmetric.mcmc.run import run
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import Initial
from pyro_symmetric.mcmc.tasks import run_tasks
from pyro_symmetric.posterior import Origin, Posterior
from pyro_symmetric.storage import PathLike


def sample(
    kernel: Kernel,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_samples: int = 1000,
    num_warmup: int = 500,
    num_chains: int = 4,
    thinning: int = 1,
    initial: Initial = None,
    chain_chunk: int | None = None,
    engine: str = "auto",
    store: PathLike | None = None,
    resume: bool | Literal["auto"] = "auto",
    seed: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    executor: Executor | None = None,
    chains_per_task: int | None = None,
    threads_per_task: int = 1,
    progress: bool = True,
) -> Posterior:
    """Draw from a model's posterior with many chains at once.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> posterior = sample(HMC(model), args=(torch.randn(100),), num_chains=8)

    With ``store`` the draws go to disk as they are made, into a file that has room for all of them from the beginning.
    After Ctrl-C, ``kill -9`` or a power cut the same call resumes, in warm-up too, and gives draw for draw what an
    unbroken run gives; with a larger ``num_samples`` it adds draws, as if they had been asked for at once.
    ``Posterior.load(store)`` reads what there is at any time.

    Without, Ctrl-C during sampling returns the draws made so far, with a warning and ``metadata["interrupted"]`` set;
    during warm-up, when there is nothing to return, it ends the program as usual.

    With ``executor`` or ``chains_per_task``, chains are cut into tasks that warm up by themselves and have seeds of
    their own, so the draws depend on ``chains_per_task`` but not on the workers. Tasks whose worker died are done
    again in this process. Kernel, model and data travel by the executor's own means, which is usually pickle; on other
    machines ``store`` must be a folder that all of them see. It takes twice the room of the draws: when all tasks are
    done, their chains are laid side by side there, to be mapped from one file.

    :param kernel: the sampler, which holds the model.
    :param args: the model's positional arguments, data included: ``model(*args, **kwargs)``.
    :param kwargs: the model's keyword arguments. They have a mapping of their own, so a model may have arguments named
        like the sampler's (``seed``, ``device``), and a misspelt option of the sampler never reaches the model.
    :param num_samples: draws to keep of each chain.
    :param num_warmup: iterations of each chain before them, to adapt and to be forgotten. The Hamiltonian samplers
        learn their mass matrix in windows of growing length. Under 150 iterations there is one window, three quarters
        of them: in 100 or fewer it holds few draws, of chains that may not have arrived yet, and the step size has few
        left to settle in. (Many chains make up for few draws, not for chains on their way.) Under 20 there is none and
        only the step size is adapted; with 0 it stays what the starting points suggest.
    :param thinning: iterations for each draw that is kept.
    :param initial: where chains start: ``"prior"``; ``"uniform"`` in (-2, 2) on the unconstrained scale, as Pyro's
        ``MCMC``; weights of batch shape ``(num_chains,)``, or ``()`` for one start of all; a ``Posterior`` whose last
        draws to start from; a guide (ours, or any ``AutoGuide``) or a function ``num_chains -> weights`` to draw from.
        ``None``: ``"prior"`` for a ``BayesianModel``, ``"uniform"`` for any other model.
    :param chain_chunk: chains to evaluate at once. ``None``: on a CPU as many as keep the largest intermediate result
        in the cache, on other devices all.
    :param engine: what computes energies. ``"native"``: code for feed-forward networks that the machine's C++ compiler
        builds once, in a few seconds, and that is kept. ``"inductor"``: PyTorch's compiler, for any model; programs
        take some seconds, and are kept, too. ``"torch"``: nothing is compiled. ``"auto"``: ``"native"`` for a
        ``BayesianModel`` of a feed-forward network; for other models ``"inductor"`` if the run is long enough for it to
        pay, else ``"torch"``. A warning says so if a compiler is missing.
    :param store: a folder for the draws, new or of this very run.
    :param resume: ``"auto"``: resume from the store if there is one; ``False``: there must be none; ``True``: there
        must be one, and it may come from another version of PyTorch or of this library, which changes rounding.
    :param seed: of the run's own random generator. ``None``: one is drawn from PyTorch's global generator, which is
        otherwise left alone; ``metadata["seed"]`` says which. A stored run that ``None`` resumes keeps its seed.
    :param device: where to compute; draws are moved to the CPU as they are made.
    :param dtype: of the chains, ``torch.float64`` for delicate posteriors.
    :param executor: any :class:`concurrent.futures.Executor`, such as a process pool or dask's.
    :param chains_per_task: chains of a task, which warm up together; they learn more from each other the more they
        are. By default a quarter of ``num_chains``, but at least 4 and about 16 at most.
    :param threads_per_task: of PyTorch within a task; sums are rounded alike only for the same number.
    :return: draws, statistics of every draw, and metadata: the kernel's settings, ``seconds`` of warm-up and of
        sampling (of tasks their sum, not what a clock on the wall showed), and ``trace``, the mean potential energy,
        acceptance and step size over all iterations, warm-up included. With ``store``, draws are mapped from its files.
    :raises ValueError: naming the argument, or what differs if the store holds another run.
    :raises OSError: if the store can't be written (full disk, read-only, in use); what was committed stays.
    :raises TaskError: if tasks failed, with the posterior of the others.
    """
    args, kwargs = model_arguments(args, kwargs)
    settings = Settings(
        kernel,
        args,
        kwargs,
        num_samples=num_samples,
        num_warmup=num_warmup,
        num_chains=num_chains,
        thinning=thinning,
        initial=initial,
        chain_chunk=chain_chunk,
        engine=engine,
        store=None if store is None else arguments.path("store", store).absolute(),
        resume=resume,
        seed=seed,
        device=device,
        dtype=dtype,
    )
    origin = Origin(kernel, args, kwargs, device)
    if executor is None and chains_per_task is None:
        posterior = Posterior(*run(settings, progress), rows="chains", origin=origin)
    else:
        posterior = replace(run_tasks(settings, executor, chains_per_task, threads_per_task, progress), origin=origin)
    _warn_of_trouble(posterior, settings)
    return posterior


def _warn_of_trouble(posterior: Posterior, settings: Settings) -> None:
    if posterior.metadata["interrupted"]:
        held = f"{posterior.num_samples} of {settings.num_samples} draws of each chain"
        if posterior.num_chains < settings.num_chains:
            held = f"{posterior.num_chains} of {settings.num_chains} chains"
        advice = "" if settings.store is None else f"; the same call resumes from what is kept in {settings.store}"
        warnings.warn(f"interrupted: the posterior holds {held}{advice}", RuntimeWarning, stacklevel=3)
    for finding in sampler_failures(posterior.statistics, settings.kernel.subsampled):
        warnings.warn(finding.words, RuntimeWarning, stacklevel=3)
