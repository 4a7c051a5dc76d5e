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
    >>> posterior = ps.sample(ps.HMC(model), y, num_samples=20, num_warmup=20, num_chains=8, seed=0, progress=False)

    Without a kernel one is chosen; a line and ``metadata["chosen"]`` say which and why. :doc:`/how-to/resume` tells of
    ``store`` and ``resume``, :doc:`/how-to/cluster` of ``executor`` and tasks, :doc:`/explanation/chains` of warm-up.

    :param kernel_or_model: the sampler, which holds the model; or the model.
    :param args: the model's positional arguments, data included; ``kwargs`` is a mapping of its keyword arguments.
    :param num_samples: draws to keep of each chain, one of every ``thinning`` iterations.
    :param num_warmup: iterations before them, to adapt and to be forgotten. ``"auto"``: until each chain has settled.
    :param num_chains: how many run at once. ``None``: 4, or what is chosen with the kernel.
    :param initial: where chains start: ``"prior"`` (default for a ``BayesianModel``); ``"uniform"`` in (-2, 2) on the
        unconstrained scale (for others); weights of batch shape ``(num_chains,)`` or ``()``; a ``Posterior`` whose last
        draws to take; a guide, or a function ``num_chains -> weights``, to draw from.
    :param chain_chunk: chains to evaluate at once. ``None``: on a CPU as many as the cache holds; elsewhere all.
    :param engine: what computes energies: ``"eager"`` (the model itself), ``"layers"`` (a loop for feed-forward
        networks, by Numba), ``"compiled"`` (PyTorch's compiler), or ``"auto"``: the fastest that pays.
    :param store: a folder for the draws, new or of this very run, which then resumes.
    :param resume: ``"auto"``; ``False``: there must be no run; ``True``: there must be one, perhaps of other versions.
    :param seed: of the run's own generator. ``None``: drawn from PyTorch's; ``metadata["seed"]`` says which.
    :param device, dtype: where, and in what precision, to compute; draws are moved to the CPU.
    :param executor: any :class:`concurrent.futures.Executor`; ``chains_per_task`` is how many warm up together.
    :param hook: is called after every iteration with its number and the weights of all chains.
    :return: draws, statistics of every draw, and metadata (settings, seconds). With ``store``, mapped from its files.
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
