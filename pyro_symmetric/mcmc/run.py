"""Sample: the one call that runs a model's chains, from where they start to the posterior, in memory or to disk."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.mcmc.density.compiled import evaluated_once
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import LIMIT, Agreement
from pyro_symmetric.mcmc.kernels.hmc import AdaptiveHMC
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, mini_batches
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.mcmc.resume import (
    VERSIONS,
    energies,
    identify,
    packed,
    require_same,
    require_same_energies,
    require_storable,
    unpacked,
)
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.diagnostics import LEAST_DRAWS, Check, disagreement, moving, sampler_checks, warm_up
from pyro_symmetric.posterior.posterior import Posterior, Source
from pyro_symmetric.store import CHECKPOINT, Array, Checkpoint, Contents, PathLike, Recorder, StoreError
from pyro_symmetric.weights import Weights, batch_shape, require_sites

LEAST = {"num_samples": 1, "num_warmup": 0, "num_chains": 1, "thinning": 1, "seed": 0}
OPEN = {"num_warmup": "auto", "seed": None}  # what stands for a number
SHOWN = {"step_size": "step {:.2g}", "acceptance_rate": "accept {:.2f}"}  # beside the progress bar
INITIALISATIONS = ("prior", "uniform")
MOST_TRIES = 100  # of a chain that starts where nothing is finite
FAR, FEW_TRIES = 1e6, 10  # nats above the best start, from where only tiny steps lead back, so that others are tried
RADIUS = 2.0  # of the box that "uniform" draws from, on the unconstrained scale, as Pyro's MCMC has it
ROUNDING = 1e-3  # of initial weights that go to unconstrained coordinates and back, relative
Initial = str | Mapping[str, Tensor] | Posterior | AutoGuide | Callable[[int], Mapping[str, Tensor]] | None
Hook = Callable[[int, Weights], Any]  # takes an iteration's number and the weights of all chains
MOST_CHAINS, MOST_NETWORKS, FEWEST_CHAINS = 64, 16, 4
MANY_CHAINS = 8  # from which on they find the length of a trajectory better together than each by itself
MOST_NUMBERS = 2**19  # of the coordinates of all chains: a thousand draws of them take two gigabytes
DENSE = 200  # coordinates
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
        from pyro_symmetric.mcmc.tasks import run_tasks  # which stands on this module

        posterior = replace(run_tasks(settings, executor, chains_per_task, progress), source=source)
    else:
        posterior = Posterior(*run(settings, progress, hook, density), kind="chains", source=source)
    _warn_of_trouble(posterior, settings)
    return posterior


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of :func:`~pyro_symmetric.mcmc.sample` that decide on the draws, and where they go.

    They are checked when they are made, and can travel to another machine.

    :param chosen: why this kernel and number of chains, if they were chosen for the model.
    """

    kernel: Kernel
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 1000
    num_warmup: int | str = "auto"
    num_chains: int = 4
    thinning: int = 1
    initial: Any = None
    chain_chunk: int | None = None
    engine: str = "auto"
    store: Path | None = None
    resume: bool | str = "auto"
    seed: int | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    chosen: str = ""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if name not in OPEN or value != OPEN[name]:
                object.__setattr__(self, name, arguments.whole(name, value, least))
        arguments.one_of("resume", self.resume, ("auto", True, False))
        if self.device is not None and torch.device(self.device).type == "mps":
            raise ValueError(f"device is {str(self.device)!r}, which has no float64 to adapt step sizes in; use 'cpu'")
        if self.resume is True and self.store is None:
            raise ValueError("resume is True, but store is not given; pass the folder that the run was stored in")

    def warmups(self, density: Density) -> tuple[int, ...]:
        """Lengths at which warm-up may end; one, unless it is left to the chains and these can agree.

        Chains of a network rarely can: it has as many copies of each mode as symmetries.
        """
        if not isinstance(self.num_warmup, str):
            return (self.num_warmup,)
        return Kernel.warmups if density.is_network else self.kernel.warmups

    def density(self, **changes: Any) -> Density:
        """The density that the kernel moves on; ``chain_chunk`` and ``engine`` may be others than the settings'."""
        num_warmup = self.kernel.warmups[0] if isinstance(self.num_warmup, str) else self.num_warmup  # at least
        own = {name: getattr(self, name) for name in ("device", "dtype", "chain_chunk", "engine")}
        return Density(
            self.kernel.model,
            self.args,
            self.kwargs,
            batch_size=self.kernel.batch_size,
            subsampled=self.kernel.subsampled,
            iterations=num_warmup + self.num_samples * self.thinning,
            num_steps=self.kernel.num_steps,
            **{**own, **changes},
        )


@dataclass(frozen=True, eq=False)
class RunState:
    """A run between two iterations.

    :param iteration: how many are done.
    :param generator: where the state's random generator stands.
    :param draws: how many are kept of each chain.
    :param num_warmup: how many of all are warm-up; while the chains are to end it, how many at most.
    :param agreement: of chains that are to end warm-up, while it lasts.
    :param r_hat: of the chains when they were last asked whether they agree; ``None`` if they weren't.
    :param seed: of the run, given or drawn.
    :param one_start: whether several chains started at one point.
    :param seconds: of the phases, which grow in place.
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
    seconds: dict[str, float] = field(default_factory=lambda: {"warmup": 0.0, "sampling": 0.0})


# the run --------------------------------------------------------------------------------------------------------------


def run(
    settings: Settings, progress: bool = False, hook: Hook | None = None, density: Density | None = None
) -> Contents:
    """Start, or resume, chains and move them. Ctrl-C while sampling returns what there is, marked as interrupted.

    Where the chains are is one value, which is replaced between two iterations. So wherever an interruption falls, the
    last one is whole: state, generator and draws belong together.

    :param hook: is called after every iteration.
    :param density: of a run that starts, if it has been built.
    :raises OSError: if a store exists that mustn't, or the other way round.
    :raises KeyboardInterrupt: in warm-up, when there is nothing to return.
    """
    store, count = settings.store, settings.num_samples
    settings = replace(settings, initial=resolve(settings.initial, settings.num_chains, settings.args, settings.kwargs))
    exists = store is not None and (store / CHECKPOINT).exists()
    if exists and settings.resume is False:
        raise FileExistsError(f"{store} is a draw store already; with resume=False, name a new folder")
    if not exists and settings.resume is True:
        raise FileNotFoundError(f"resume is True, but there is no run to resume at {store}")

    def commit() -> None:
        if store is not None and not recorder.failed:
            recorder.commit(
                at.draws, lambda: metadata(settings, chains, at), lambda: packed(vars(at), energies(chains, at.state.z))
            )

    with Recorder(store, count) as recorder:  # its lock comes first: who is refused has touched no generator
        clock = time.perf_counter()
        if recorder.last is None:
            chains = settings.density() if density is None else density
            at = started(settings, chains, recorder)
            commit()
        else:
            chains, at = resumed(settings, recorder.last, recorder)
        try:
            with tqdm(initial=done(at), disable=not progress, mininterval=0.2) as bar, contextlib.ExitStack() as last:
                last.callback(commit)  # however the loop ends; an interruption of it is one of the loop
                while at.draws < count:
                    at = advance(settings, chains, recorder, at)
                    before, clock = clock, time.perf_counter()
                    at.seconds["warmup" if at.iteration <= at.num_warmup else "sampling"] += clock - before
                    if hook is not None:
                        hook(at.iteration - 1, chains.layout.constrain(at.state.z))
                    if clock >= recorder.next_commit:
                        commit()
                    if progress:
                        show(bar, at, count, recorder.diverged)
        except KeyboardInterrupt:
            if at.draws == 0:
                begun = f"interrupted after {at.iteration} of {at.num_warmup} iterations of warm-up"
                kept = f"; they are kept in {store}, and the same call resumes there" if store else ""
                raise KeyboardInterrupt(f"{begun}{kept}") from None
        return recorder.draws(min(count, at.draws), metadata(settings, chains, at))


def advance(settings: Settings, density: Density, recorder: Recorder, at: RunState) -> RunState:
    """One iteration of all chains.

    :raises ValueError: if a kernel of the user's lost chains or coordinates.
    """
    kernel, draws = settings.kernel, at.draws
    state = kernel.step(density, at.state)
    if state.z.shape != (settings.num_chains, density.dim):
        raise ValueError(f"{kernel!r} moved {settings.num_chains} chains of {density.dim} to z {tuple(state.z.shape)}")
    if at.iteration < at.num_warmup:
        if at.agreement is not None:
            at = asked(at, at.agreement, state, settings.warmups(density))
        state = kernel.adapt(density, state, at.iteration, at.num_warmup)
    elif (at.iteration + 1 - at.num_warmup) % settings.thinning == 0:
        recorder.append(draws, density.draws(state.z), state.statistics)
        draws += 1
    return replace(at, iteration=at.iteration + 1, state=state, generator=state.generator.get_state(), draws=draws)


def asked(at: RunState, agreement: Agreement, state: State, lengths: tuple[int, ...]) -> RunState:
    """The run whose chains, now in ``state``, are asked at some lengths of warm-up whether it may end there."""
    length, num_warmup, r_hat = at.iteration + 1, at.num_warmup, at.r_hat
    agreement = agreement.update(at.iteration, state.z, state.energy, state.statistics.get("acceptance_rate"))
    if length in lengths:
        r_hat = agreement.r_hat()
        num_warmup = length if r_hat < LIMIT else num_warmup
    return replace(at, num_warmup=num_warmup, agreement=None if length == num_warmup else agreement, r_hat=r_hat)


def started(settings: Settings, density: Density, recorder: Recorder) -> RunState:
    """The chains where they start.

    :raises TypeError: if a store couldn't keep the kernel's state.
    :raises ValueError: if it couldn't keep the sites.
    """
    seed = drawn_seed() if settings.seed is None else settings.seed
    generator = torch.Generator(density.device).manual_seed(seed)
    z = starting_points(density, settings.num_chains, settings.initial, generator)
    lengths = settings.warmups(density)
    state = settings.kernel.init(density, z, lengths[-1], generator)
    agreement = Agreement() if len(lengths) > 1 else None
    one_start = len(z) > 1 and bool((z == z[:1]).all())
    at = RunState(0, state, state.generator.get_state(), 0, lengths[-1], agreement, seed=seed, one_start=one_start)
    if settings.store is not None:
        recorder.fingerprint = identify(settings, density, seed)
        require_storable(vars(at), settings.kernel)
        for name, draw in density.draws(z).items():  # told before the warm-up, not after it
            Array.of("posterior", name, draw.dtype, draw.shape)
    return at


def resumed(settings: Settings, last: Checkpoint, recorder: Recorder) -> tuple[Density, RunState]:
    """The density, and the chains where the last commit left them.

    :raises StoreError: if the store is another run's.
    """
    if not last.state:
        raise StoreError(f"the draw store {settings.store} holds draws, but no run that could resume")
    try:
        call, engine = last.fingerprint["call"], last.fingerprint["rounding"]["engine"]
        seed = call["seed"] if settings.seed is None else settings.seed
        # As they were: a longer run might choose another engine, which rounds differently.
        density = settings.density(
            chain_chunk=settings.chain_chunk or call["chain_chunk"],
            engine=engine if settings.engine == "auto" else settings.engine,
        )
        recorder.fingerprint = identify(settings, density, seed)
        require_same(settings, last.fingerprint, recorder.fingerprint)
        found, before = unpacked(last.state, settings.kernel)
        at = RunState(**{**found, "seed": seed})
        draws, z = max(at.iteration - at.num_warmup, 0) // settings.thinning, at.state.z
        fits = at.iteration >= 0 and at.num_warmup in settings.warmups(density) and at.draws == draws == last.draws
        if not fits or z.shape != (settings.num_chains, density.dim):
            raise ValueError(f"{len(z)} chains have {last.draws} draws at iteration {at.iteration}")
        require_same_energies(settings, density, z, before)
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, UnpicklingError) as error:
        said = str(error).partition("\n")[0]
        named = f"the run in the store {settings.store} is damaged, or can't go on here"
        raise StoreError(f"{named}: {type(error).__name__}: {said}") from error
    return density, at


def metadata(settings: Settings, density: Density, at: RunState) -> dict[str, Any]:
    """The course of the run so far."""
    return {
        "kernel": type(settings.kernel).__name__,
        "settings": settings.kernel.settings(),
        **({"chosen": settings.chosen} if settings.chosen else {}),
        "num_warmup": at.num_warmup,
        "warmup_r_hat": at.r_hat,
        **({"one_start": True} if at.one_start else {}),
        "thinning": settings.thinning,
        "seed": at.seed,
        "device": str(density.device),
        "dtype": str(density.dtype).removeprefix("torch."),
        "chain_chunk": density.chain_chunk,
        "versions": dict(VERSIONS),
        "deterministic": list(density.target.computed),
        "engine": density.engine,  # as it turned out: compiling may have failed
        "engine_reason": density.engine_reason,
        "seconds": dict(at.seconds),
        "interrupted": at.draws < settings.num_samples,
    }


def done(at: RunState) -> int:
    """Iterations of warm-up, then draws, as they were asked for."""
    return min(at.iteration, at.num_warmup) + at.draws


def show(bar: tqdm[Any], at: RunState, num_samples: int, diverged: int) -> None:
    """Bring the progress bar up to date."""
    bar.total, found = at.num_warmup + num_samples, at.state.statistics
    bar.set_description("warm-up" if at.iteration < at.num_warmup else "sampling", refresh=False)
    if bar.update(done(at) - bar.n):
        parts = [text.format(found[name].double().mean()) for name, text in SHOWN.items() if name in found]
        bar.set_postfix_str(", ".join([*parts, *([f"diverged {diverged}"] if diverged else [])]), refresh=False)


# where chains start ---------------------------------------------------------------------------------------------------


def resolve(initial: Any, num_chains: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``initial`` as ``None``, a name, weights, or a function ``num_chains -> weights``.

    Of a posterior the last draw of each chain is taken; for more chains than it has, also the draws before.

    :raises TypeError: if it is none of what :func:`~pyro_symmetric.mcmc.sample` takes.
    """
    if isinstance(initial, Posterior):
        rounds = -(-num_chains // initial.num_chains)
        if rounds > initial.num_samples:
            held = f"{initial.num_chains} x {initial.num_samples} draws"
            raise ValueError(f"initial is a posterior of {held}, too few to start {num_chains} chains from")
        last = {site: value[:, -rounds:].flip(1).transpose(0, 1) for site, value in initial.samples.items()}
        return {site: value.flatten(0, 1)[:num_chains] for site, value in last.items()}
    if hasattr(initial, "sample_posterior"):
        return lambda count: initial.sample_posterior((count,))
    if isinstance(initial, AutoGuide):  # of Pyro's own, which gives one draw at a time

        def draws(count: int) -> dict[str, Tensor]:
            with torch.no_grad():
                found = [initial(*args, **kwargs) for _ in range(count)]
            return {site: torch.stack([draw[site] for draw in found]) for site in found[0]}

        return draws
    if isinstance(initial, str | Mapping | None) or callable(initial):
        return initial
    raise TypeError(
        f"initial is a {type(initial).__name__}; it must be one of {INITIALISATIONS}, weights, a Posterior, a guide "
        "or a function num_chains -> weights"
    )


def starting_points(
    density: Density, num_chains: int, initial: Any = None, generator: torch.Generator | None = None
) -> Tensor:
    """Points ``(C, D)`` of finite energy and gradient. Chains that start at others are drawn anew, unless by weights;
    so are, a few times, those that start so far out in the box that others are better by :data:`FAR`.

    :param initial: what :func:`resolve` returned. ``None``: ``"prior"`` for a ``BayesianModel``, whose energy is huge
        far out, and ``"uniform"`` for any other model.
    :param generator: what random numbers come from; ``None``: one that is seeded from PyTorch's global one.
    :raises ValueError: if there are none, or if given weights have none.
    """
    if generator is None:
        generator = torch.Generator(density.device).manual_seed(drawn_seed())
    if initial is None:
        initial = "prior" if density.is_network else "uniform"
    if isinstance(initial, str):
        arguments.one_of("initial", initial, INITIALISATIONS, "a dict of weights")
    most = 1 if isinstance(initial, Mapping) else MOST_TRIES
    z = _drawn(density, num_chains, initial, generator)
    for tries in range(1, most + 1):
        energy, gradient = evaluated_once(density, z, mini_batches(density.row_counts, len(z), generator))
        bad = ~(torch.isfinite(energy) & torch.isfinite(gradient).all(-1) & torch.isfinite(z).all(-1))
        if initial == "uniform" and tries < FEW_TRIES and not bool(bad.all()):
            bad |= energy > energy[~bad].min() + FAR
        if not bool(bad.any()):
            break
        if tries == most:
            raise ValueError(
                f"chains {bad.nonzero().flatten().tolist()[:10]} of {num_chains} found no start with finite energy "
                f"and gradient among {tries} draws. Are all data finite, those under a mask, too, and in the supports "
                "of their distributions? If so, give initial= weights where the density is finite"
            )
        z[bad] = _drawn(density, int(bad.sum()), initial, generator)
    _tell_of_flat_sites(density, z)
    return z


def _drawn(density: Density, count: int, initial: Any, generator: torch.Generator) -> Tensor:
    """Points ``(C, D)``; guides and functions draw from global generators, which are put back afterwards.

    :raises ValueError: if chains would start elsewhere than at given weights; of draws that aren't finite others are to
        be drawn.
    """
    if initial == "uniform":
        box = torch.rand(count, density.dim, generator=generator, device=density.device, dtype=density.dtype)
        return (2 * box - 1) * RADIUS
    if initial == "prior":
        return density.draw_prior(count, generator)
    weights = initial
    if not isinstance(initial, Mapping):
        with forked(generator, density.device):
            weights = initial(count)
    arguments.weights("initial", weights)
    require_sites(weights, density.layout.site_shapes, "initial")
    found = batch_shape(weights, density.layout.site_shapes, "initial")
    if tuple(found) not in ((), (count,)):
        raise ValueError(
            f"initial has batch shape {tuple(found)}; it must be ({count},), one for each chain, or () for one start"
        )
    z = density.unconstrain(weights).expand(count, density.dim)
    known = z.isfinite().all(-1) | isinstance(initial, Mapping)
    for site, value in density.layout.constrain(z[known]).items():
        given = weights[site].to(value).expand(count, *value.shape[1:])[known]
        if not bool(((value - given).abs() <= ROUNDING * (1 + given.abs())).all()):
            raise ValueError(f"no chain can start at initial: outside of its support, or not finite, is {site!r}")
    return z.clone()


def _tell_of_flat_sites(density: Density, z: Tensor) -> None:
    """Warn of entries on which the density doesn't depend, as its gradient is exactly zero at all starts and beside
    them. Proper priors have no such entries, and chains would go on along them for ever."""
    if density.row_counts:
        return
    flat = (evaluated_once(density, torch.cat([z, 0.9 * z + 0.1]))[1] == 0).all(0)
    entries = density.layout.unflatten(flat[None]).items() if bool(flat.any()) else ()
    if words := [f"{int(v.sum())} of {v.numel()} entries of {site!r}" for site, v in entries if bool(v.any())]:
        warnings.warn(
            f"the density doesn't depend on {', '.join(words)}: no chain can settle there. Give the site a proper "
            "prior, or leave it out; instead of obs_mask, observe the rows that are known alone",
            RuntimeWarning,
            stacklevel=2,
        )


# what is chosen, and what is warned of --------------------------------------------------------------------------------


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
