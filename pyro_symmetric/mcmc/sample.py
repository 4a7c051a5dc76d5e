"""The call that samples from a model: it chooses a kernel, if none is given, and runs
the chains in one run or in tasks.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Device, Dtype, Function, Keywords
from pyro_symmetric.density.density import Density
from pyro_symmetric.mcmc.kernels.hmc import AdaptiveHMC
from pyro_symmetric.mcmc.kernels.kernel import Kernel
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.mcmc.resume import digest_before_run
from pyro_symmetric.mcmc.run import Hook, run
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import Initial, placed_by
from pyro_symmetric.mcmc.tasks import run_tasks
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.diagnostics import (
    MIN_DRAWS,
    Check,
    moving,
    sampler_failures,
    warm_up,
)
from pyro_symmetric.posterior.posterior import FROM_ABOVE, Posterior, Source
from pyro_symmetric.store import PathLike
from pyro_symmetric.weights import drop_names, turns_back

MAX_CHAINS = 64
MAX_NETWORK_CHAINS = 16
MIN_CHAINS = 4
ENOUGH_CHAINS = 16  # of models whose results fill the cache
# from which on a common trajectory length pays; of networks, whose gradients take
# longer than the trees of NUTS, from more on
MANY_CHAINS, MANY_NETWORK_CHAINS = 4, 8
# chains times coordinates: a thousand draws of them take two gigabytes
MAX_NUMBERS = 2**19
DENSE = 200  # coordinates


@arguments.checks_keywords(
    {"warmup_steps": "num_warmup", "disable_progbar": "progress", "hook_fn": "hook"},
    "arguments of the model go into args, or kwargs={...}",
)
def sample(
    kernel_or_model: Kernel | Function,
    *args: Any,
    kwargs: Keywords | None = None,
    num_samples: int | Literal["auto"] = "auto",
    num_warmup: int | Literal["auto"] = "auto",
    num_chains: int | None = None,
    thinning: int = 1,
    initial: Initial = None,
    chain_chunk: int | None = None,
    engine: str = "auto",
    store: PathLike | None = None,
    resume: bool | Literal["auto"] = "auto",
    seed: int | None = None,
    device: Device = None,
    dtype: Dtype = None,
    executor: Executor | None = None,
    chains_per_task: int | None = None,
    progress: bool = True,
    hook: Hook | None = None,
) -> Posterior:
    """Draw from a model's posterior with many chains at once.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> posterior = ps.sample(
    ...     model, num_samples=20, num_warmup=20, seed=0, progress=False
    ... )

    Given a model, it chooses a kernel, prints the choice and records it in
    ``metadata["chosen"]``. See
    :doc:`/how-to/resume`, :doc:`/how-to/cluster` and, for the lengths of warm-up and
    sampling, :doc:`/explanation/chains`.

    :param kernel_or_model: a kernel, which holds the model; or the model itself, called
        with ``args`` and ``kwargs``.
    :param num_samples: draws to keep of each chain, one every ``thinning`` iterations.
        ``"auto"``: until there are 1,000 effective ones, at most 1,000 of each chain.
    :param num_warmup: iterations of adaptation, which are discarded. ``"auto"``: until
        every chain has settled. Unless ``initial`` is passed, 16 chains or more leave
        modes of negligible mass meanwhile, and restart where another one is.
    :param num_chains: chains that run at once. ``None``: 4, or chosen with the kernel.
    :param initial: starting points: ``"prior"`` (default for a ``BayesianModel``);
        ``"uniform"`` in (-2, 2) on the unconstrained scale (default otherwise);
        weights; a posterior; a guide; a function ``num_chains -> weights``.
    :param chain_chunk: chains to evaluate at once. ``None``: on a CPU as many as the
        cache holds; elsewhere all.
    :param engine: of energies and gradients: ``"eager"``, ``"layers"``, ``"compiled"``,
        or ``"auto"``, the fastest.
    :param store: folder for the draws. If it holds this very run, the run resumes.
    :param resume: ``"auto"``; ``False``: the store must be new; ``True``: it must
        exist, perhaps of other versions.
    :param seed: of the run's own generator. ``None``: drawn from PyTorch's generator,
        and kept in ``metadata["seed"]``.
    :param device, dtype: device and precision of the computation; draws are moved to
        the CPU.
    :param executor: a :class:`concurrent.futures.Executor`; ``chains_per_task`` chains
        warm up together.
    :param hook: called after every iteration with its number and the weights of all
        chains.
    """
    arguments.whole("num_chains", num_chains, 1, none="the default")
    strategy = getattr(kernel_or_model, "init_strategy", None)
    if isinstance(kernel_or_model, Kernel) and initial is None and strategy is not None:
        of_model = (kernel_or_model.model, args, dict(kwargs or {}))
        initial = functools.partial(placed_by, strategy, *of_model)
    settings = Settings(
        kernel_or_model
        if isinstance(kernel_or_model, Kernel)
        else NUTS(kernel_or_model),
        args,
        dict(kwargs or {}),
        num_samples=num_samples,
        num_warmup=num_warmup,
        num_chains=MIN_CHAINS if num_chains is None else num_chains,
        thinning=thinning,
        initial=initial,
        chain_chunk=chain_chunk,
        engine=engine,
        store=None if store is None else _folder(store),
        resume=resume,
        seed=seed,
        device=device,
        dtype=dtype,
    )
    in_tasks = executor is not None or chains_per_task is not None
    if hook is not None and in_tasks:
        raise ValueError(
            "hook is given, but the chains are cut into tasks, which may run anywhere; "
            "pass hook=None"
        )
    if settings.store is not None:
        settings = replace(settings, code_before=digest_before_run(settings.kernel))
    density = None
    if not isinstance(kernel_or_model, Kernel):
        settings, density = choose(settings, num_chains)
        if progress:
            print(f"pyro_symmetric: {settings.chosen}", file=sys.stderr)
    source = Source(
        settings.kernel.model, args, settings.kwargs, device, settings.kernel.subsampled
    )
    if in_tasks:
        posterior = replace(
            run_tasks(settings, executor, chains_per_task, progress), source=source
        )
    else:
        posterior = Posterior(
            *run(settings, progress, hook, density, source),
            kind="chains",
            source=source,
        )
        if progress and "ended" in posterior.metadata:
            print(f"pyro_symmetric: {posterior.metadata['ended']}", file=sys.stderr)
    _warn(posterior, settings)
    return posterior


def _folder(store: PathLike) -> Path:
    """Return the absolute path of a store; refuse an empty one, which would be the
    working directory.
    """
    arguments.instance("store", store, (str, os.PathLike), "the path of a folder")
    if not str(store).strip():
        raise ValueError(
            f"store is {store!r}, which names no folder; pass the path of a new "
            "folder, or None"
        )
    return Path(store).absolute()


# the choice of a kernel, and warnings -------------------------------------------------


def choose(settings: Settings, num_chains: int | None) -> tuple[Settings, Density]:
    """Choose a kernel and, unless it is given, the number of chains; return the new
    settings and the density.

    The rules use counts rather than timings, so that every run of a model chooses alike
    and a stored one resumes. They rest on measurements (``ordinary_models`` of commit
    4060604).

    * **Many chains**, as long as two of the largest intermediate results fit into the
      cache and the draws into memory: there, an evaluation of 64 chains costs little
      more than one of 4, and all of them inform warm-up. Of larger models 16 or 32
      chains have as many effective draws a second as 64, and enough of them sooner;
      of the largest even fewer fit. Compiled networks are evaluated chain by chain and
      gain from many chains only in warm-up.
    * **AdaptiveHMC** for 4 chains or more, of networks 8, which it moves in step; NUTS
      would wait for the longest tree, and builds it by many small operations.
    * **A dense mass matrix** for few coordinates, where it costs ``D ** 2`` operations
      a step and saves many steps. Not for networks, whose modes differ in their
      correlations.
    """
    density = settings.build_density()
    chunk = density.chain_chunk or 2 * MAX_CHAINS
    # two results of all chains fit, but for 16 chains one is enough
    in_cache = max(chunk // 2, min(chunk, ENOUGH_CHAINS))
    limits = {
        "as many as pay": MAX_NETWORK_CHAINS if density.is_network else MAX_CHAINS,
        "as many as the cache holds": in_cache,
        "as many as leave room for their draws": MAX_NUMBERS // density.dim,
    }
    if density.target.one_by_one:
        limits = {"few, as they are evaluated one after another": MIN_CHAINS}
    why = min(limits, key=lambda name: limits[name])
    most = limits[why]
    if most < MIN_CHAINS:
        why = "as few as can be compared"
        most = MIN_CHAINS
    chains = 1 << (most.bit_length() - 1)  # a power of two
    if num_chains is not None:
        why = "as asked"
        chains = num_chains
    full_mass = density.dim <= DENSE and not density.is_network
    many = MANY_NETWORK_CHAINS if density.is_network else MANY_CHAINS
    kind = AdaptiveHMC if chains >= many else NUTS
    count = f"{chains} chain{'s' * (chains > 1)}"
    choice = (
        f"{kind.__name__} with {count} ({why}), full_mass={full_mass} "
        f"(for {density.dim:,} dimensions)"
    )
    # a run that resumes keeps its engine
    if settings.store is None or not settings.store.exists():
        choice += f", engine {density.engine!r}"
    kernel = kind(settings.kernel.model, full_mass=full_mass)
    return replace(settings, kernel=kernel, num_chains=chains, chosen=choice), density


def _warn(posterior: Posterior, settings: Settings) -> None:
    """Warn of an interruption, of angles that turn back, and of failed checks."""
    messages = []
    if posterior.metadata["interrupted"]:
        size = f"{posterior.num_samples} of {settings.most_draws} draws of each chain"
        if posterior.num_chains < settings.num_chains:
            size = f"{posterior.num_chains} of {settings.num_chains} chains"
        advice = ""
        if settings.store is not None:
            advice = f"; the same call resumes from what is kept in {settings.store}"
        messages.append(f"interrupted: the posterior holds {size}{advice}")
    for site in posterior.metadata.get("angles", ()):
        if turns_back(posterior.samples[site]):
            messages.append(
                f"draws of the angle {site!r} lie at pi and -pi, where chains turn "
                "back although the circle goes on, so that they may miss part of a "
                "mode. Turn the circle: sample the angle from a fixed direction near "
                "the mode, and add that direction"
            )
    messages += [check.words for check in _failures(posterior, settings)]
    for message in messages:
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _failures(posterior: Posterior, settings: Settings) -> list[Check]:
    """Return the checks of the sampler, and of warm-up, that fail."""
    latent = drop_names(posterior.samples, posterior.metadata.get("deterministic", ()))
    # Chains of a network may sit in copies of one mode, and needn't agree.
    agreeing = None if isinstance(settings.kernel.model, BayesianModel) else latent
    failures = sampler_failures(
        posterior.statistics, settings.kernel.subsampled, agreeing
    )
    without_weights = [check for check in failures if check.name != "weights"]
    # chains may be in different copies of a mode
    if without_weights != failures:
        agree = posterior.metadata.get("agree_modulo_symmetry")
        if agree or FROM_ABOVE.chains_agree(posterior):
            failures = without_weights
    # a chain may never move although its acceptance rate is fine
    if latent and not failures:
        moves = moving(latent)
        measured = "acceptance_rate" in posterior.statistics
        if moves.status == "fail" and (
            not measured or (moves.value == 0.0 and posterior.num_samples >= MIN_DRAWS)
        ):
            failures.append(moves)
    if settings.num_warmup != "auto":
        return failures
    early = list(warm_up(posterior.metadata))
    # this explains the disagreement of the draws
    if any(check.status != "pass" for check in early):
        return [*early, *(check for check in failures if check.name != "weights")]
    return failures
