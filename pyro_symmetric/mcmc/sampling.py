"""Sample: the one call that runs a model's chains, in memory or to disk, here or on many machines."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import LOCK, drawn_seed, forked
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.hmc import AdaptiveHMC
from pyro_symmetric.mcmc.kernels.kernel import Kernel
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.mcmc.run import Hook, Initial, Settings, resolve, run
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.diagnostics import LEAST_DRAWS, Check, disagreement, moving, sampler_checks, warm_up
from pyro_symmetric.posterior.posterior import Posterior, Source
from pyro_symmetric.store import CHECKPOINT, PathLike, make_folder
from pyro_symmetric.weights import batch_shape

MOST_CHAINS, MOST_NETWORKS, FEWEST_CHAINS = 64, 16, 4
MANY_CHAINS = 8  # from which on they find the length of a trajectory better together than each by itself
MOST_NUMBERS = 2**19  # of the coordinates of all chains: a thousand draws of them take two gigabytes
DENSE = 200  # coordinates
SMALLEST_TASK, LARGEST_TASK, FEWEST_TASKS = 4, 16, 4  # chains of a task, which warm up together; and tasks
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

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> posterior = ps.sample(model, num_samples=20, num_warmup=20, seed=0, progress=False)

    Without a kernel one is chosen; a line and ``metadata["chosen"]`` say which and why. :doc:`/how-to/resume` tells of
    ``store`` and ``resume``, :doc:`/how-to/cluster` of ``executor``, :doc:`/explanation/chains` of warm-up.

    :param kernel_or_model: the sampler, which holds the model; or the model. Its arguments are ``args`` and ``kwargs``.
    :param num_samples: draws to keep of each chain, one of every ``thinning`` iterations.
    :param num_warmup: iterations before them, to adapt and to be forgotten. ``"auto"``: until each chain has settled.
    :param num_chains: how many run at once. ``None``: 4, or what is chosen with the kernel.
    :param initial: where chains start: ``"prior"`` (default for a ``BayesianModel``); ``"uniform"`` in (-2, 2) on the
        unconstrained scale (for others); weights; a ``Posterior``; a guide, or a function ``num_chains -> weights``.
    :param chain_chunk: chains to evaluate at once. ``None``: on a CPU as many as the cache holds; elsewhere all.
    :param engine: what computes energies: ``"eager"``, ``"layers"``, ``"compiled"``, or ``"auto"``, the fastest.
    :param store: a folder for the draws, new or of this very run, which then resumes.
    :param resume: ``"auto"``; ``False``: there must be no run; ``True``: there must be one, perhaps of other versions.
    :param seed: of the run's own generator. ``None``: drawn from PyTorch's; ``metadata["seed"]`` says which.
    :param device, dtype: where, and in what precision, to compute; draws are moved to the CPU.
    :param executor: a :class:`concurrent.futures.Executor`; ``chains_per_task`` is how many warm up together.
    :param hook: is called after every iteration with its number and the weights of all chains.
    """
    arguments.whole("num_chains", num_chains, 1, none="the default")
    settings = Settings(
        kernel_or_model if isinstance(kernel_or_model, Kernel) else NUTS(kernel_or_model),
        args,
        dict(kwargs or {}),
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
    in_tasks = executor is not None or chains_per_task is not None
    if hook is not None and in_tasks:
        raise ValueError("hook is given, but the chains are cut into tasks, which may run anywhere; pass hook=None")
    density = None
    if not isinstance(kernel_or_model, Kernel):
        settings, density = chosen(settings, num_chains)
        if progress:
            print(f"pyro_symmetric: {settings.chosen}", file=sys.stderr)
    source = Source(settings.kernel.model, args, settings.kwargs, device, settings.kernel.subsampled)
    if in_tasks:
        posterior = replace(run_tasks(settings, executor, chains_per_task, progress), source=source)
    else:
        posterior = Posterior(*run(settings, progress, hook, density), kind="chains", source=source)
    _warn_of_trouble(posterior, settings)
    return posterior


def chosen(settings: Settings, num_chains: int | None) -> tuple[Settings, Density]:
    """Settings whose kernel and number of chains suit their model, and which say why; and the model's density.

    By rules of counts and not by timing, so that every run of a model decides alike and a stored one resumes. What they
    rest on was measured by ``ordinary_models`` of commit 4060604. **Many chains**, as long as the largest
    intermediate result stays in the cache and the draws in memory: there an evaluation for 64 chains costs little more
    than one for 4, and warm-up learns from all of them. Compiled networks go chain by chain, so that only warm-up gains
    by many. **AdaptiveHMC** for many chains, which it moves in step; those of NUTS wait for the longest tree of any.
    **A dense mass matrix** for few coordinates, where it costs ``D ** 2`` operations a step and spares many steps. Not
    for a network, whose modes each have correlations of their own.

    :param num_chains: ``None``: to be chosen, too.
    """
    density = settings.density()
    limits = {
        "as many as pay": MOST_NETWORKS if density.is_network else MOST_CHAINS,
        "as many as the cache holds": density.chain_chunk or MOST_CHAINS,
        "as many as leave room for their draws": MOST_NUMBERS // density.dim,
    }
    if density.target.one_by_one:
        limits = {"few, as they are evaluated one after another": FEWEST_CHAINS}
    why = min(limits, key=lambda name: limits[name])
    if limits[why] < FEWEST_CHAINS:
        limits = {(why := "as few as can be compared"): FEWEST_CHAINS}
    chains = 1 << (limits[why].bit_length() - 1)
    if num_chains is not None:
        chains, why = num_chains, "as asked"
    mass = "dense" if density.dim <= DENSE and not density.is_network else "diagonal"
    kind = AdaptiveHMC if chains >= MANY_CHAINS else NUTS
    counted = f"{chains} chain{'s' * (chains > 1)}"
    words = f"{kind.__name__} with {counted} ({why}), mass={mass!r} (for {density.dim:,} dimensions)"
    if settings.store is None or not settings.store.exists():  # a run that resumes keeps its engine
        words += f", engine {density.engine!r}"
    kernel = kind(settings.kernel.model, mass=mass)
    return replace(settings, kernel=kernel, num_chains=chains, chosen=words), density


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
    told = {"acceptance", "divergences", "energy error", "weights"}
    length = min((value.shape[1] for value in statistics.values()), default=0)
    apart = []
    if length >= (LEAST_DRAWS if subsampled else LEAST_AGREEING):
        told |= {"virial", "kinetic temperature"}
        apart = [disagreement(samples, subsampled)] if samples is not None else []
    arrived = all(check.status != "fail" for check in apart)
    checks = [*sampler_checks(statistics, subsampled, arrived), *apart]
    found = [check for check in checks if check.name in told and check.status == "fail"]
    return found + [check for check in checks if apart and check.name == "energy" and check.status in ("fail", "warn")]


# chains cut into tasks ------------------------------------------------------------------------------------------------


def run_tasks(settings: Settings, executor: Executor | None, chains_per_task: int | None, progress: bool) -> Posterior:
    """Run the chains of some settings in tasks: each a run by itself, with a seed of its own, in a folder of its own if
    there is a store. So the draws depend on how the chains are cut into tasks, and on nothing else about them. The
    error of a task is raised with a note that names its chains.

    :param executor: whose workers do them; ``None``: this process.
    :param chains_per_task: ``None``: see :func:`default_size`.
    """
    arguments.instance("executor", executor, (Executor, type(None)), "a concurrent.futures.Executor")
    arguments.whole("chains_per_task", chains_per_task, 1, none="about a quarter of all")
    size = chains_per_task or default_size(settings.num_chains)
    if LOCK._is_owned():  # workers that are threads would wait for this one for ever
        executor = None
    store = settings.store
    if store is not None and store.exists() and (names := [e.name for e in store.iterdir() if e.name[:5] != "task-"]):
        raise FileExistsError(f"{store} is no draw store of tasks but holds {', '.join(names[:5])}; name a new folder")
    seed, threads = drawn_seed() if settings.seed is None else settings.seed, torch.get_num_threads()
    tasks, done = cut(settings, size, seed), list[Posterior]()
    do = partial(do_task, caller=(os.getpid(), threads))
    futures = [] if executor is None else [executor.submit(do, task) for task in tasks]
    try:
        for k, task in enumerate(tqdm(tasks, desc="tasks", disable=not progress)):
            arrays, metadata = futures[k].result() if futures else do(task)
            if metadata["interrupted"]:  # Ctrl-C reached the worker
                break
            if task.store is None:
                samples, statistics = ({name: torch.from_numpy(v) for name, v in own.items()} for own in arrays)
                done.append(Posterior(samples, statistics, metadata, kind="chains"))
            else:
                whole = Posterior.load(task.store, verify=False)
                done.append(replace(whole.select(draws=slice(task.num_samples)), metadata=metadata))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        error.add_note(f"in the task of the chains from {size * len(done)} on")
        raise
    finally:
        for future in futures:
            future.cancel()
        torch.set_num_threads(threads)  # part of which belongs to the process
    if not done:
        kept_in = f". What is done is kept in {store}; the same call resumes there" if store else ""
        raise KeyboardInterrupt(f"interrupted before any of {len(tasks)} tasks had finished{kept_in}")
    joint = Posterior.concat(done)
    facts = {"chains_per_task": size, "interrupted": len(done) < len(tasks)}
    facts |= {} if any(task.seed is None for task in tasks) else {"seed": seed}
    return replace(joint, metadata={**joint.metadata, **facts})


def default_size(num_chains: int) -> int:
    """Chains of a task: about a quarter of all, cut evenly and so that no chain is left to warm up alone."""
    count = -(-num_chains // max(SMALLEST_TASK, min(LARGEST_TASK, -(-num_chains // FEWEST_TASKS))))
    size = -(-num_chains // count)
    while size > 1 and num_chains % size == 1:
        size += 1
    return size


def do_task(settings: Settings, caller: tuple[int, int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One task, wherever it is done, on one of PyTorch's threads.

    :param caller: the process that asks for it, and how many threads that has.
    :return: samples and statistics as arrays, which every executor can carry, unless they lie in a store; the metadata.
    """
    before = caller[1] if caller[0] == os.getpid() else torch.get_num_threads()  # a new thread would name another's
    torch.set_num_threads(1)
    try:
        found = run(settings)
    finally:
        torch.set_num_threads(before)
    kept = found[:2] if settings.store is None else []
    return [{name: v.numpy() for name, v in own.items()} for own in kept], found.metadata


def cut(settings: Settings, size: int, seed: int) -> list[Settings]:
    """The settings of tasks of ``size`` chains; what is left over makes a smaller one."""
    initial, store, tasks = settings.initial, settings.store, []
    if initial is not None and not isinstance(initial, str):
        with forked(_seed_of(seed, "initial")):  # guides and functions draw for all at once
            initial = resolve(initial, settings.num_chains, settings.args, settings.kwargs)
            initial = initial(settings.num_chains) if callable(initial) else initial
    each = isinstance(initial, Mapping) and bool(
        batch_shape(initial, settings.density(chain_chunk=1, engine="eager").layout.site_shapes)
    )
    for task, begin in enumerate(range(0, settings.num_chains, size)):
        folder = None if store is None else store / f"task-{task:04d}"
        begun = folder is not None and (folder / CHECKPOINT).exists()
        tasks.append(
            replace(
                settings,
                num_chains=min(size, settings.num_chains - begin),
                seed=None if begun and settings.seed is None else _seed_of(seed, task),  # then it keeps its own
                initial={site: v[begin : begin + size] for site, v in initial.items()} if each else initial,
                store=folder,
                resume=settings.resume if begun or not task else "auto",
            )
        )
        if folder is not None:  # at once, so that readers know how many there are to be
            make_folder(folder)
    return tasks


def _seed_of(seed: int, task: int | str) -> int:
    """A seed for one part of a run, independent of the others'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest(), "big") >> 1
