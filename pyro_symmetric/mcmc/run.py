"""The call that samples from a model: it starts or resumes chains, runs them and
returns the posterior.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Generator, Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.arguments import (
    Args,
    Device,
    Dtype,
    Entries,
    Function,
    Json,
    Keywords,
    Model,
)
from pyro_symmetric.density.density import Density, evaluated_once
from pyro_symmetric.density.traced import ContinuousStart, latent_sites
from pyro_symmetric.mcmc.kernels.adaptation import LIMIT, Agreement
from pyro_symmetric.mcmc.kernels.hmc import AdaptiveHMC
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, mini_batches
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.mcmc.resume import (
    VERSIONS,
    allowed_difference,
    digest_before_run,
    energies,
    identify,
    pack,
    require_same,
    require_same_energies,
    require_storable,
    unpack,
)
from pyro_symmetric.mcmc.stopping import CHECKS, MOST_DRAWS, Finding, look
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.diagnostics import (
    MIN_DRAWS,
    moving,
    sampler_failures,
    warm_up,
)
from pyro_symmetric.posterior.posterior import FROM_ABOVE, Posterior, Source
from pyro_symmetric.store import (
    CHECKPOINT,
    Array,
    Checkpoint,
    Contents,
    PathLike,
    Recorder,
    StoreError,
)
from pyro_symmetric.weights import (
    Tensors,
    Weights,
    batch_shape,
    drop_names,
    map_values,
    require_sites,
    stacked,
    turns_back,
)

MINIMUM = {"num_samples": 1, "num_warmup": 0, "num_chains": 1, "thinning": 1, "seed": 0}
PLACEHOLDERS = {
    "num_samples": "auto",
    "num_warmup": "auto",
    "seed": None,
}  # allowed instead of a number
# next to the progress bar
SHOWN = {"step_size": "step {:.2g}", "acceptance_rate": "accept {:.2f}"}
INITIALISATIONS = ("prior", "uniform")
MAX_TRIES = 100  # to find a start of finite energy and gradient
# nats above the best uniform start; starts beyond it are redrawn a few times
MAX_EXCESS = 1e6
FEW_TRIES = 10
# of the box of "uniform" starts, on the unconstrained scale, as in Pyro's MCMC
RADIUS = 2.0
# relative error of initial weights that are mapped to unconstrained coordinates and
# back
ROUNDING = 1e-3
FAR, MOST_FLAT = 30.0, 100  # a distance from all bounds; entries that are tried there
Initial = str | Tensors | Posterior | AutoGuide | Callable[[int], Tensors] | None
# takes an iteration's number and the weights of all chains
Hook = Callable[[int, Weights], Any]
MAX_CHAINS = 64
MAX_NETWORK_CHAINS = 16
MIN_CHAINS = 4
# from which on chains learn a common trajectory length better than each its own
MANY_CHAINS = 8
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
        every chain has settled.
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
        from pyro_symmetric.mcmc.tasks import run_tasks  # which imports this module

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


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of :func:`~pyro_symmetric.mcmc.sample` that determine the draws and
    their store. Picklable.

    :param chosen: the kernel and number of chains in words, if they were chosen for the
        model.
    :param code_before: digest of the code of model and kernel before the model is run,
        if there is a store.
    """

    kernel: Kernel
    args: Args = ()
    kwargs: Entries = field(default_factory=dict)
    num_samples: int | str = "auto"
    num_warmup: int | str = "auto"
    num_chains: int = 4
    thinning: int = 1
    initial: Any = None
    chain_chunk: int | None = None
    engine: str = "auto"
    store: Path | None = None
    resume: bool | str = "auto"
    seed: int | None = None
    device: Device = None
    dtype: Dtype = None
    chosen: str = ""
    code_before: str | None = None

    def __post_init__(self) -> None:
        for name, minimum in MINIMUM.items():
            value = getattr(self, name)
            if name not in PLACEHOLDERS or value != PLACEHOLDERS[name]:
                object.__setattr__(self, name, arguments.whole(name, value, minimum))
        arguments.one_of("resume", self.resume, ("auto", True, False))
        if self.resume is True and self.store is None:
            raise ValueError(
                "resume is True, but store is not given; pass the folder that the run "
                "was stored in"
            )

    @property
    def most_draws(self) -> int:
        """The largest number of draws of each chain."""
        return MOST_DRAWS if isinstance(self.num_samples, str) else self.num_samples

    def ending(self, density: Density) -> Ending:
        """Return the rule by which the run ends. ``"auto"`` ends early neither for
        networks, whose chains rarely agree, nor for stochastic gradients, whose bias no
        number of effective draws shows."""
        is_fixed = density.is_network or self.kernel.subsampled
        if is_fixed or not isinstance(self.num_samples, str):
            return Ending(self.most_draws)
        return Ending(MOST_DRAWS, CHECKS)

    def warmups(self, density: Density) -> tuple[int, ...]:
        """Return the lengths at which warm-up may end. ``"auto"`` has several, but one
        for networks, whose chains rarely agree: symmetries copy every mode."""
        if not isinstance(self.num_warmup, str):
            return (self.num_warmup,)
        return Kernel.warmups if density.is_network else self.kernel.warmups

    def density(self) -> Density:
        """Build the density of the kernel's model."""
        num_warmup = self.num_warmup
        if isinstance(num_warmup, str):
            num_warmup = self.kernel.warmups[0]  # at least
        return Density(
            self.kernel.model,
            self.args,
            self.kwargs,
            device=self.device,
            dtype=self.dtype,
            chain_chunk=self.chain_chunk,
            engine=self.engine,
            batch_size=self.kernel.batch_size,
            subsampled=self.kernel.subsampled,
            iterations=num_warmup + self.most_draws * self.thinning,
            num_steps=self.kernel.num_steps,
        )


@dataclass(frozen=True, eq=False)
class RunState:
    """The state of a run between two iterations.

    :param iteration: number of finished iterations.
    :param generator: state of the random generator.
    :param draws: number of draws kept of each chain.
    :param num_warmup: length of warm-up; the largest one possible while the chains are
        yet to end it.
    :param agreement: record of warm-up that tells whether the chains have settled;
        ``None`` once it has ended.
    :param r_hat: of the last such check; ``None`` without any.
    :param seed: of the run, given or drawn.
    :param one_start: whether several chains started at one point.
    :param seconds: time spent in each phase, updated in place.
    """

    iteration: int
    state: State
    generator: Tensor
    draws: int
    num_warmup: int
    agreement: Agreement | None = None
    r_hat: float | None = None
    seed: int = 0
    one_start: bool = False
    seconds: dict[str, float] = field(
        default_factory=lambda: {"warmup": 0.0, "sampling": 0.0}
    )


@dataclass
class Ending:
    """The number of draws at which a run ends.

    :param most: draws of each chain after which it ends in any case.
    :param checks: numbers of draws at which it ends if they are enough.
    :ivar has_ended: whether it has.
    :ivar finding: of the last check.
    """

    most: int
    checks: tuple[int, ...] = ()
    has_ended: bool = False
    finding: Finding | None = None
    _checked: int = 0

    def ends(self, draws: int, posterior: Callable[[], Posterior]) -> bool:
        """Return whether the run ends after some draws of each chain.

        :param posterior: returns these draws.
        """
        if draws in self.checks and draws != self._checked:
            self._checked = draws
            self.finding = look(posterior())
        suffices = self.finding is not None and self.finding.precision.suffices
        self.has_ended = suffices or draws >= self.most
        return self.has_ended


# the run ------------------------------------------------------------------------------


def run(
    settings: Settings,
    progress: bool = False,
    hook: Hook | None = None,
    built: Density | None = None,
    source: Source | None = None,
) -> Contents:
    """Start or resume the chains and run them to the end. Ctrl-C while sampling returns
    the draws so far.

    The run's state is one value, replaced between two iterations. Wherever an
    interruption falls, the last one is complete: positions, generator and draws belong
    together.

    :param hook: called after every iteration.
    :param built: the density of a new run, if there is one already.
    :param source: the model behind the draws, with its symmetry.
    :raises OSError: if there is a store in spite of ``resume=False``, or none in spite
        of ``resume=True``.
    :raises KeyboardInterrupt: in warm-up, when there are no draws to return.
    """
    store = settings.store
    settings = replace(
        settings,
        initial=resolve(
            settings.initial, settings.num_chains, settings.args, settings.kwargs
        ),
    )
    exists = store is not None and (store / CHECKPOINT).exists()
    if exists and settings.resume is False:
        raise FileExistsError(
            f"{store} is a draw store already; with resume=False, name a new folder"
        )
    if not exists and settings.resume is True:
        raise FileNotFoundError(
            f"resume is True, but there is no run to resume at {store}"
        )

    def commit() -> None:
        if store is not None and not recorder.failed:
            recorder.commit(
                run_state.draws,
                lambda: metadata(settings, density, run_state, ending),
                lambda: pack(vars(run_state), energies(density, run_state.state.z)),
            )

    def drawn() -> Posterior:
        known = metadata(settings, density, run_state, ending)
        contents = recorder.draws(run_state.draws, known)
        return Posterior(*contents, kind="chains", source=source)

    # takes the lock before any random number is drawn
    with Recorder(store, settings.most_draws) as recorder:
        clock = time.perf_counter()
        if recorder.last is None:
            density = settings.density() if built is None else built
            ending = settings.ending(density)
            run_state = start(settings, density, recorder)
            commit()
        else:
            density, run_state = restore(settings, recorder.last, recorder)
            ending = settings.ending(density)
        try:
            with (
                tqdm(
                    initial=done(run_state),
                    total=run_state.num_warmup + ending.most,
                    disable=not progress,
                    mininterval=0.2,
                ) as bar,
                ExitStack() as at_end,
            ):
                at_end.callback(commit)  # however the loop ends
                while not ending.ends(run_state.draws, drawn):
                    run_state = advance(settings, density, recorder, run_state)
                    before = clock
                    clock = time.perf_counter()
                    phase = (
                        "warmup"
                        if run_state.iteration <= run_state.num_warmup
                        else "sampling"
                    )
                    run_state.seconds[phase] += clock - before
                    if hook is not None:
                        hook(
                            run_state.iteration - 1,
                            density.layout.constrain(run_state.state.z),
                        )
                    if clock >= recorder.next_commit:
                        commit()
                    if progress:
                        show(bar, run_state, ending, recorder.diverged)
                bar.total = bar.n
        except KeyboardInterrupt:
            if run_state.draws == 0:
                when = (
                    f"interrupted after {run_state.iteration} of "
                    f"{run_state.num_warmup} iterations of warm-up"
                )
                advice = (
                    f"; they are kept in {store}, and the same call resumes there"
                    if store
                    else ""
                )
                raise KeyboardInterrupt(f"{when}{advice}") from None
        return recorder.draws(
            min(ending.most, run_state.draws),
            metadata(settings, density, run_state, ending),
        )


def advance(
    settings: Settings, density: Density, recorder: Recorder, run_state: RunState
) -> RunState:
    """Move all chains by one iteration: step, then adapt in warm-up or record a
    draw.
    """
    kernel = settings.kernel
    iteration = run_state.iteration
    draws = run_state.draws
    state = kernel.step(density, run_state.state)
    if iteration < run_state.num_warmup:
        if run_state.agreement is not None:
            run_state = end_if_settled(
                run_state, run_state.agreement, state, settings.warmups(density)
            )
        state = kernel.adapt(density, state, iteration, run_state.num_warmup)
    elif (iteration + 1 - run_state.num_warmup) % settings.thinning == 0:
        recorder.append(draws, density.draws(state.z), state.statistics)
        draws += 1
    return replace(
        run_state,
        iteration=iteration + 1,
        state=state,
        generator=state.generator.get_state(),
        draws=draws,
    )


def end_if_settled(
    run_state: RunState, agreement: Agreement, state: State, lengths: tuple[int, ...]
) -> RunState:
    """End warm-up with this iteration if that is one of the ``lengths`` and the chains
    in ``state`` have settled.
    """
    length = run_state.iteration + 1
    num_warmup = run_state.num_warmup
    r_hat = run_state.r_hat
    agreement = agreement.update(
        run_state.iteration,
        state.z,
        state.energy,
        state.statistics.get("acceptance_rate"),
    )
    if length in lengths:
        r_hat = agreement.r_hat()
        num_warmup = length if r_hat < LIMIT else num_warmup
    return replace(
        run_state,
        num_warmup=num_warmup,
        agreement=None if length == num_warmup else agreement,
        r_hat=r_hat,
    )


def start(settings: Settings, density: Density, recorder: Recorder) -> RunState:
    """Place the chains of a new run at their starting points. Raise ``TypeError`` if a
    store can't keep the kernel's state, and ``ValueError`` if it can't keep the
    sites."""
    seed = drawn_seed() if settings.seed is None else settings.seed
    if settings.store is not None:
        recorder.fingerprint = identify(settings, density, seed)
    generator = Generator(density.device).manual_seed(seed)
    z = starting_points(density, settings.num_chains, settings.initial, generator)
    lengths = settings.warmups(density)
    state = settings.kernel.init(density, z, lengths[-1], generator)
    agreement = Agreement() if len(lengths) > 1 else None
    shared = len(z) > 1 and bool((z == z[:1]).all())
    run_state = RunState(
        0,
        state,
        state.generator.get_state(),
        0,
        lengths[-1],
        agreement,
        seed=seed,
        one_start=shared,
    )
    if settings.store is not None:
        require_storable(vars(run_state), settings.kernel)
        # refuses names and dtypes now rather than after warm-up
        for name, draw in density.draws(z).items():
            Array.of("posterior", name, draw.dtype, draw.shape)
    return run_state


def restore(
    settings: Settings, last: Checkpoint, recorder: Recorder
) -> tuple[Density, RunState]:
    """Rebuild the density and the state of the run at its last commit.

    :raises StoreError: if the store holds another run, or a damaged one.
    """
    if not last.state:
        raise StoreError(
            f"the draw store {settings.store} holds draws, but no run that could resume"
        )
    try:
        call = last.fingerprint["call"]
        engine = last.fingerprint["rounding"]["engine"]
        seed = call["seed"] if settings.seed is None else settings.seed
        # An extended run might choose another engine or chunk, which would round
        # differently.
        density = replace(
            settings,
            chain_chunk=settings.chain_chunk or call["chain_chunk"],
            engine=engine if settings.engine == "auto" else settings.engine,
        ).density()
        recorder.fingerprint = identify(settings, density, seed)
        same_rounding = require_same(settings, last.fingerprint, recorder.fingerprint)
        fields, stored_energies = unpack(last.state, settings.kernel)
        run_state = RunState(**{**fields, "seed": seed})
        iteration = run_state.iteration
        num_warmup = run_state.num_warmup
        z = run_state.state.z
        draws = max(iteration - num_warmup, 0) // settings.thinning
        fits = (
            iteration >= 0
            and num_warmup in settings.warmups(density)
            and run_state.draws == draws == last.draws
        )
        if not fits or z.shape != (settings.num_chains, density.dim):
            raise ValueError(
                f"{len(z)} chains have {last.draws} draws at iteration {iteration}"
            )
        tolerance = allowed_difference(density, stored_energies, same_rounding)
        require_same_energies(settings, density, z, stored_energies, tolerance)
    except StoreError:
        raise
    except Exception as error:  # a damaged state may raise any
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise StoreError(
            f"the run in the store {settings.store} is damaged, or can't go on here: "
            f"{reason}"
        ) from error
    return density, run_state


def metadata(
    settings: Settings, density: Density, run_state: RunState, ending: Ending
) -> Json:
    """Describe the run so far, for the posterior's metadata."""
    finding = ending.finding
    return {
        "kernel": type(settings.kernel).__name__,
        "settings": settings.kernel.settings(),
        **({"chosen": settings.chosen} if settings.chosen else {}),
        "num_warmup": run_state.num_warmup,
        "warmup_r_hat": run_state.r_hat,
        **({"one_start": True} if run_state.one_start else {}),
        "thinning": settings.thinning,
        "seed": run_state.seed,
        "device": str(density.device),
        "dtype": str(density.dtype).removeprefix("torch."),
        "chain_chunk": density.chain_chunk,
        "versions": dict(VERSIONS),
        "deterministic": list(density.target.computed),
        "angles": density.layout.angles,
        "engine": density.engine,  # after compiling, which may have failed
        "engine_reason": density.engine_reason,
        "seconds": dict(run_state.seconds),
        "interrupted": not ending.has_ended,
        **({"ended": finding.words} if finding and ending.has_ended else {}),
    }


def done(run_state: RunState) -> int:
    """Count iterations of warm-up and kept draws."""
    return min(run_state.iteration, run_state.num_warmup) + run_state.draws


def show(bar: tqdm[Any], run_state: RunState, ending: Ending, diverged: int) -> None:
    """Update the progress bar."""
    bar.total = run_state.num_warmup + ending.most
    statistics = run_state.state.statistics
    bar.set_description(
        "warm-up" if run_state.iteration < run_state.num_warmup else "sampling",
        refresh=False,
    )
    if bar.update(done(run_state) - bar.n):
        parts = [
            text.format(statistics[name].double().mean())
            for name, text in SHOWN.items()
            if name in statistics
        ]
        if ending.finding is not None:
            parts.append(f"{ending.finding.precision.effective:,.0f} effective")
        bar.set_postfix_str(
            ", ".join([*parts, *([f"diverged {diverged}"] if diverged else [])]),
            refresh=False,
        )


# where chains start -------------------------------------------------------------------


def resolve(initial: Any, num_chains: int, args: Args, kwargs: Keywords) -> Any:
    """Convert ``initial`` to ``None``, a name, weights, or a function ``num_chains ->
    weights``.

    A posterior gives the last draw of each of its chains and, for more chains than it
    has, the draws before.

    :raises TypeError: unless :func:`~pyro_symmetric.mcmc.sample` takes it.
    """
    if isinstance(initial, Posterior):
        rounds = -(-num_chains // initial.num_chains)
        if rounds > initial.num_samples:
            size = f"{initial.num_chains} x {initial.num_samples} draws"
            raise ValueError(
                f"initial is a posterior of {size}, too few to start {num_chains} "
                "chains from"
            )
        last = map_values(
            lambda value: value[:, -rounds:].flip(1).transpose(0, 1), initial.samples
        )
        return map_values(lambda value: value.flatten(0, 1)[:num_chains], last)
    if hasattr(initial, "sample_posterior"):
        return lambda count: initial.sample_posterior((count,))
    if isinstance(initial, AutoGuide):  # Pyro's guides give one draw at a time

        def draw(count: int) -> Weights:
            with torch.no_grad():
                return stacked([initial(*args, **kwargs) for _ in range(count)])

        return draw
    if isinstance(initial, str | Mapping | None) or callable(initial):
        return initial
    raise TypeError(
        f"initial is a {type(initial).__name__}; it must be one of {INITIALISATIONS}, "
        "weights, a Posterior, a guide "
        "or a function num_chains -> weights"
    )


@torch.no_grad()
def placed_by(
    strategy: Callable[[Any], Any],
    model: Model,
    args: Args,
    kwargs: Keywords,
    count: int,
) -> Weights:
    """Start chains where one of Pyro's strategies, such as ``init_to_median``, puts the
    sites of a model."""
    starts = []
    for _ in range(count):
        with InitMessenger(ContinuousStart(strategy)):
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        starts.append({site["name"]: site["value"] for site in latent_sites(trace)})
    return stacked(starts)


def starting_points(
    density: Density,
    num_chains: int,
    initial: Any = None,
    generator: Generator | None = None,
) -> Tensor:
    """Find starting points ``(C, D)`` of finite energy and gradient.

    Others are redrawn, but for given weights. So are, a few times, points in the
    uniform box whose energy exceeds the best one by :data:`MAX_EXCESS`, from which only
    tiny steps would lead back.

    :param initial: as :func:`resolve` returns it. ``None``: ``"prior"`` for a
        ``BayesianModel``, whose energy is huge far from it, and ``"uniform"`` for any
        other model.
    :param generator: source of all random numbers. ``None``: a new one, seeded from
        PyTorch's global generator.
    :raises ValueError: if no such points are found.
    """
    if generator is None:
        generator = Generator(density.device).manual_seed(drawn_seed())
    if initial is None:
        initial = "prior" if density.is_network else "uniform"
    if isinstance(initial, str):
        arguments.one_of("initial", initial, INITIALISATIONS, "a dict of weights")
    max_tries = 1 if isinstance(initial, Mapping) else MAX_TRIES
    z = _draw_starts(density, num_chains, initial, generator)
    for tries in range(1, max_tries + 1):
        energy, gradient = evaluated_once(
            density, z, mini_batches(density.row_counts, len(z), generator)
        )
        bad = ~(
            torch.isfinite(energy)
            & torch.isfinite(gradient).all(-1)
            & torch.isfinite(z).all(-1)
        )
        if initial == "uniform" and tries < FEW_TRIES and not bad.all():
            bad |= energy > energy[~bad].min() + MAX_EXCESS
        if not bad.any():
            break
        if tries == max_tries:
            target = density.target
            nan = arguments.holding_nan(target.model, target.args, target.kwargs)
            raise ValueError(
                f"chains {bad.nonzero().flatten().tolist()[:10]} of {num_chains} found "
                "no start with finite energy "
                f"and gradient in {tries} draws. Check that all data, masked rows "
                "included, are finite and in the "
                "supports of their distributions; if they are, pass initial= weights "
                f"where the density is finite{nan}"
            )
        z[bad] = _draw_starts(density, int(bad.sum()), initial, generator)
    _warn_of_flat_entries(density, z)
    return z


def _draw_starts(
    density: Density, count: int, initial: Any, generator: Generator
) -> Tensor:
    """Draw points ``(C, D)``. Guides and functions use the global generators, whose
    states are restored afterwards.

    :raises ValueError: if weights are outside their support, so that chains would start
        elsewhere; or if given ones aren't finite (of a guide or a function, such points
        are left to be redrawn).
    """
    if initial == "uniform":
        box = torch.rand(
            count,
            density.dim,
            generator=generator,
            device=density.device,
            dtype=density.dtype,
        )
        return (2 * box - 1) * RADIUS
    if initial == "prior":
        return density.draw_prior(count, generator)
    weights = initial
    if not isinstance(initial, Mapping):
        with forked(generator, density.device):
            weights = initial(count)
    arguments.weights("initial", weights)
    require_sites(weights, density.layout.site_shapes, "initial")
    batch = batch_shape(weights, density.layout.site_shapes, "initial")
    if tuple(batch) not in ((), (count,)):
        raise ValueError(
            f"initial has batch shape {tuple(batch)}; it must be ({count},), one for "
            "each chain, or () for one start"
        )
    z = density.unconstrain(weights).expand(count, density.dim)
    checked = z.isfinite().all(-1) | isinstance(initial, Mapping)
    for site, value in density.layout.constrain(z[checked]).items():
        wanted = weights[site].to(value).expand(count, *value.shape[1:])[checked]
        if not ((value - wanted).abs() <= ROUNDING * (1 + wanted.abs())).all():
            raise ValueError(
                "no chain can start at initial: outside of its support, or not "
                f"finite, is {site!r}"
            )
    return z.clone()


def _warn_of_flat_entries(density: Density, z: Tensor) -> None:
    """Warn of entries whose gradient is exactly zero at all starts and near them, as
    under no proper prior. The density doesn't depend on them, and chains would drift
    along them for ever."""
    if density.row_counts:
        return
    flat = (evaluated_once(density, torch.cat([z, 0.9 * z + 0.1]))[1] == 0).all(0)
    ends = _ends_somewhere(density, z[0], flat)
    if bounded := _entries(density, ends):
        warnings.warn(
            f"the density is constant along {bounded} and ends at bounds that the "
            "support doesn't tell: chains step over them. Sample uniform values "
            "on their own support, and transform them by pyro.deterministic",
            RuntimeWarning,
            stacklevel=2,
        )
    if named := _entries(density, flat & ~ends):
        warnings.warn(
            f"the density doesn't depend on {named}: no chain can settle "
            "there. Give the site a proper "
            "prior, or leave it out; instead of obs_mask, observe only the rows that "
            "are known",
            RuntimeWarning,
            stacklevel=2,
        )


def _entries(density: Density, mask: Tensor) -> str:
    """Describe the entries of a mask ``(D,)`` by their sites; empty without any."""
    if not mask.any():
        return ""
    return ", ".join(
        f"{int(v.sum())} of {v.numel()} entries of {site!r}"
        for site, v in density.layout.unflatten(mask[None]).items()
        if v.any()
    )


def _ends_somewhere(density: Density, start: Tensor, flat: Tensor) -> Tensor:
    """Return which of the flat entries have a density that is zero far from a start:
    those of a uniform law, which is constant within its bounds."""
    ends = torch.zeros_like(flat)
    for entry in flat.nonzero().flatten()[:MOST_FLAT].tolist():
        far = start.repeat(2, 1)
        far[:, entry] = start.new_tensor([-FAR, FAR])
        energy, _ = evaluated_once(density, far)
        ends[entry] = bool((energy == torch.inf).any())
    return ends


# the choice of a kernel, and warnings -------------------------------------------------


def choose(settings: Settings, num_chains: int | None) -> tuple[Settings, Density]:
    """Choose a kernel and, unless it is given, the number of chains; return the new
    settings and the density.

    The rules use counts rather than timings, so that every run of a model chooses alike
    and a stored one resumes. They rest on measurements (``ordinary_models`` of commit
    4060604).

    * **Many chains**, as long as the largest intermediate result fits into the cache
      and the draws into memory: there, an evaluation of 64 chains costs little more
      than one of 4, and all of them inform warm-up. Compiled networks are evaluated
      chain by chain and gain from many chains only in warm-up.
    * **AdaptiveHMC** for many chains, which it moves in step; NUTS would wait for the
      longest tree.
    * **A dense mass matrix** for few coordinates, where it costs ``D ** 2`` operations
      a step and saves many steps. Not for networks, whose modes differ in their
      correlations.
    """
    density = settings.density()
    limits = {
        "as many as pay": MAX_NETWORK_CHAINS if density.is_network else MAX_CHAINS,
        "as many as the cache holds": density.chain_chunk or MAX_CHAINS,
        "as many as leave room for their draws": MAX_NUMBERS // density.dim,
    }
    if density.target.one_by_one:
        limits = {"few, as they are evaluated one after another": MIN_CHAINS}
    why = min(limits, key=lambda name: limits[name])
    if limits[why] < MIN_CHAINS:
        limits = {(why := "as few as can be compared"): MIN_CHAINS}
    chains = 1 << (limits[why].bit_length() - 1)
    if num_chains is not None:
        chains = num_chains
        why = "as asked"
    full_mass = density.dim <= DENSE and not density.is_network
    kind = AdaptiveHMC if chains >= MANY_CHAINS else NUTS
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
    """Warn of an interruption and of failed checks."""
    if posterior.metadata["interrupted"]:
        size = f"{posterior.num_samples} of {settings.most_draws} draws of each chain"
        if posterior.num_chains < settings.num_chains:
            size = f"{posterior.num_chains} of {settings.num_chains} chains"
        advice = (
            ""
            if settings.store is None
            else f"; the same call resumes from what is kept in {settings.store}"
        )
        warnings.warn(
            f"interrupted: the posterior holds {size}{advice}",
            RuntimeWarning,
            stacklevel=4,
        )
    for site in posterior.metadata.get("angles", ()):
        if turns_back(posterior.samples[site]):
            warnings.warn(
                f"draws of the angle {site!r} lie at pi and -pi, where chains turn "
                "back although the circle goes on, so that they may miss part of a "
                "mode. Turn the circle: sample the angle from a fixed direction near "
                "the mode, and add that direction",
                RuntimeWarning,
                stacklevel=3,
            )
    latent = drop_names(posterior.samples, posterior.metadata.get("deterministic", ()))
    # Chains of a network may sit in copies of one mode, and needn't agree.
    agreeing = None if isinstance(settings.kernel.model, BayesianModel) else latent
    failures = sampler_failures(
        posterior.statistics, settings.kernel.subsampled, agreeing
    )
    # chains may be in different copies of a mode
    disagree = any(check.name == "weights" for check in failures)
    if disagree and FROM_ABOVE["agree"](posterior):
        failures = [check for check in failures if check.name != "weights"]
    # a chain may never move although its acceptance rate is fine
    if latent and not failures:
        moves = moving(latent)
        measured = "acceptance_rate" in posterior.statistics
        if moves.status == "fail" and (
            not measured or (moves.value == 0.0 and posterior.num_samples >= MIN_DRAWS)
        ):
            failures.append(moves)
    early = list(warm_up(posterior.metadata)) if settings.num_warmup == "auto" else []
    # this explains the disagreement of the draws
    if any(check.status != "pass" for check in early):
        failures = [*early, *(check for check in failures if check.name != "weights")]
    for check in failures:
        warnings.warn(check.words, RuntimeWarning, stacklevel=4)
