"""Sample: the one call that runs a model's chains, in memory or to disk, here or on many machines."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.choice import FEWEST_CHAINS, chosen
from pyro_symmetric.mcmc.executor import run_tasks
from pyro_symmetric.mcmc.kernels.kernel import Kernel
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.mcmc.run import Hook, run
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import Initial
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.diagnostics import LEAST_DRAWS, Check, disagreement, moving, sampler_checks, warm_up
from pyro_symmetric.posterior.posterior import Posterior, Source
from pyro_symmetric.storage import PathLike

LEAST_AGREEING = 100  # draws of a chain, so that R-hat of a hundred converged entries fails once in 10,000 runs


def sample(
    kernel_or_model: Kernel | Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    num_samples: int = 1000,
    num_warmup: int | Literal["auto"] = "auto",
    num_chains: int | None = None,
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
    progress: bool = True,
    hook: Hook | None = None,
) -> Posterior:
    """Draw from a model's posterior with many chains at once.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> y = torch.randn(100)
    >>> posterior = ps.sample(model, y, num_samples=20, num_warmup=20, seed=0, progress=False)
    >>> abs(float(posterior.samples["mean"].mean() - y.mean())) < 0.1
    True

    Without a kernel, one is chosen for the model, with its mass matrix and the number of chains, by rules of counts
    (:mod:`~pyro_symmetric.mcmc.choice`); a line and ``metadata["chosen"]`` say which and why. To choose oneself:

    >>> posterior = ps.sample(ps.HMC(model), y, num_samples=20, num_warmup=20, num_chains=8, seed=0, progress=False)

    With ``store`` the draws go to disk as they are made. After Ctrl-C, ``kill -9`` or a power cut the same call
    resumes, in warm-up too, and gives draw for draw what an unbroken run gives; with a larger ``num_samples`` it adds
    draws. ``Posterior.load(store)`` reads what there is at any time. Without, Ctrl-C during sampling returns the draws
    made so far, with a warning and ``metadata["interrupted"]`` set; during warm-up it ends the program as usual.

    With ``executor`` or ``chains_per_task``, chains are cut into tasks that warm up by themselves, on one thread each,
    with seeds of their own: the draws depend on ``chains_per_task`` but not on the workers. Kernel, model and data
    travel by the executor's own means, usually pickle; on other machines ``store`` must be a folder that all of them
    see. After an error, or if a worker died, the same call with a store does what is left.

    :param kernel_or_model: the sampler, which holds the model; or the model.
    :param args: the model's positional arguments, data included: ``model(*args, **kwargs)``.
    :param kwargs: the model's keyword arguments, in a mapping of their own: they may be named like the sampler's.
    :param num_samples: draws to keep of each chain.
    :param num_warmup: iterations of each chain before them, to adapt and to be forgotten. ``"auto"``: until each has
        settled. The Hamiltonian samplers ask after 150, 200, 300, 500 and 900 iterations whether the halves of each
        chain agree over the second half of them, and the energies and acceptances of all chains, by an R-hat below
        1.05, and end at 1,700 in any case, with a warning if they don't; ``metadata["num_warmup"]`` says how many there
        were. Networks, whose modes have many copies, and the other samplers take 500. Of a number under 150, the
        Hamiltonian samplers learn their mass matrix from few draws, of chains that may not have arrived yet; under 20
        only the step size is adapted; with 0 it stays what the starting points suggest.
    :param num_chains: how many run at once. ``None``: 4, or what is chosen with the kernel.
    :param thinning: iterations for each draw that is kept.
    :param initial: where chains start: ``"prior"``; ``"uniform"`` in (-2, 2) on the unconstrained scale, as Pyro's
        ``MCMC``; weights of batch shape ``(num_chains,)``, or ``()`` for one start of all; a ``Posterior`` whose last
        draws to start from; a guide (ours, or any ``AutoGuide``) or a function ``num_chains -> weights`` to draw from.
        ``None``: ``"prior"`` for a ``BayesianModel``, ``"uniform"`` for any other model.
    :param chain_chunk: chains to evaluate at once. ``None``: on a CPU as many as keep intermediate results in the
        cache, about; on other devices all.
    :param engine: what computes energies. ``"eager"``: the model itself, mapped over chains. ``"layers"``: a loop for
        feed-forward networks that Numba compiles once, in a few seconds, and keeps. ``"compiled"``: PyTorch's compiler,
        for any model; programs take some seconds, and are kept, too. ``"auto"``: ``"layers"`` for a ``BayesianModel``
        of a feed-forward network; for other models ``"compiled"`` if the run is long enough for it to pay, else
        ``"eager"``. A warning says so if a compiler is missing.
    :param store: a folder for the draws, new or of this very run.
    :param resume: ``"auto"``: resume from the store if there is one; ``False``: there must be none; ``True``: there
        must be one, and it may come from another version of PyTorch or of this library, which changes rounding.
    :param seed: of the run's own random generator. ``None``: one is drawn from PyTorch's global generator, which is
        otherwise left alone; ``metadata["seed"]`` says which. A stored run that ``None`` resumes keeps its seed.
    :param device: where to compute; draws are moved to the CPU as they are made.
    :param dtype: of the chains, ``torch.float64`` for delicate posteriors.
    :param executor: any :class:`concurrent.futures.Executor`, such as a process pool or dask's.
    :param chains_per_task: chains of a task, which warm up together. By default about a quarter of ``num_chains``, but
        at least 4 and at most 16.
    :param hook: is called after every iteration with its number, counted from 0 and warm-up included, and the weights
        of all chains, of batch shape ``(num_chains,)``. For chains of this process that aren't cut into tasks.
    :return: draws, statistics of every draw, and metadata: the kernel's settings, ``seconds`` of warm-up and of
        sampling (of tasks their sum, not what a clock on the wall showed). With ``store``, draws are mapped from its
        files.
    :raises ValueError: naming the argument, or what differs if the store holds another run.
    :raises OSError: if the store can't be written (full disk, read-only, in use); what was committed stays.
    """
    kwargs = dict(kwargs or {})
    arguments.whole("num_chains", num_chains, 1, none="the default")
    settings = Settings(
        kernel_or_model if isinstance(kernel_or_model, Kernel) else NUTS(kernel_or_model),
        args,
        kwargs,
        num_samples=num_samples,
        num_warmup=num_warmup,
        num_chains=FEWEST_CHAINS if num_chains is None else num_chains,
        thinning=thinning,
        initial=initial,
        chain_chunk=chain_chunk,
        engine=engine,
        store=None if store is None else Path(store).absolute(),
        resume=resume,
        seed=seed,
        device=device,
        dtype=dtype,
    )
    if hook is not None and (executor is not None or chains_per_task is not None):
        raise ValueError("hook is given, but the chains are cut into tasks, which may run anywhere; pass hook=None")
    density = None
    if not isinstance(kernel_or_model, Kernel):
        settings, density = chosen(settings, num_chains)
        if progress:
            print(f"pyro_symmetric: {settings.chosen}", file=sys.stderr)
    source = Source(settings.kernel.model, args, kwargs, device, settings.kernel.subsampled)
    if executor is None and chains_per_task is None:
        posterior = Posterior(*run(settings, progress, hook, density), kind="chains", source=source)
    else:
        posterior = replace(run_tasks(settings, executor, chains_per_task, progress), source=source)
    _warn_of_trouble(posterior, settings)
    return posterior


def _warn_of_trouble(posterior: Posterior, settings: Settings) -> None:
    if posterior.metadata["interrupted"]:
        held = f"{posterior.num_samples} of {settings.num_samples} draws of each chain"
        if posterior.num_chains < settings.num_chains:
            held = f"{posterior.num_chains} of {settings.num_chains} chains"
        advice = "" if settings.store is None else f"; the same call resumes from what is kept in {settings.store}"
        warnings.warn(f"interrupted: the posterior holds {held}{advice}", RuntimeWarning, stacklevel=3)
    # A network's chains may sit in copies of one mode, and needn't agree.
    drawn = {s: value for s, value in posterior.samples.items() if s not in posterior.metadata.get("deterministic", ())}
    agreeing = None if isinstance(settings.kernel.model, BayesianModel) else drawn
    found = sampler_failures(posterior.statistics, settings.kernel.subsampled, agreeing)
    if drawn and not found:  # of a sampler that accepts, a chain that never moves in spite of what it says
        measured = "acceptance_rate" in posterior.statistics
        still = moving(drawn)
        if still.status == "fail" and (not measured or (still.value == 0.0 and posterior.num_samples >= LEAST_DRAWS)):
            found.append(still)
    early = list(warm_up(posterior.metadata)) if settings.num_warmup == "auto" else []
    if any(check.status != "pass" for check in early):  # which says it all
        found = [*early, *(check for check in found if check.name != "weights")]
    for check in found:
        warnings.warn(check.words, RuntimeWarning, stacklevel=3)


def sampler_failures(
    statistics: Mapping[str, Tensor], subsampled: bool, samples: Mapping[str, Tensor] | None = None
) -> list[Check]:
    """The checks that a sampler warns of at once: chains that hardly move, and many divergences; if chains must agree,
    also disagreement, and momenta that hardly change the energy. Of a sampler of mini-batches, which accepts and
    rejects nothing, also temperatures that are off.

    :param statistics: the sampler's own numbers of every draw, ``(chains, draws)`` each.
    :param samples: the draws, if chains must agree on them.
    """
    told = {"acceptance", "divergences", "energy error"}
    length = min((value.shape[1] for value in statistics.values()), default=0)
    apart = []
    if length >= (LEAST_DRAWS if subsampled else LEAST_AGREEING):
        told |= {"virial", "kinetic temperature"}
        apart = [disagreement(samples, subsampled)] if samples is not None else []
    arrived = all(check.status != "fail" for check in apart)
    checks = [*sampler_checks(statistics, subsampled, arrived), *apart]
    found = [check for check in checks if check.name in {*told, "weights"} and check.status == "fail"]
    return found + [check for check in checks if apart and check.name == "energy" and check.status in ("fail", "warn")]
