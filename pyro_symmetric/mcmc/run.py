"""One run: chains that start or resume, the loop that moves them, and a recorder that takes their draws."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.mcmc.density.compiled import evaluated_once
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import LIMIT, Agreement
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, mini_batches
from pyro_symmetric.mcmc.resume import (
    VERSIONS,
    RunState,
    energies,
    identify,
    packed,
    require_same,
    require_same_model,
    unpacked,
)
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import CHECKPOINT, Checkpoint, Contents, FolderRecorder, Recorder, StoreError
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
            **{**own, **changes},
        )


def run(
    settings: Settings, progress: bool = False, hook: Hook | None = None, density: Density | None = None
) -> Contents:
    """Start, or resume, chains and move them. Ctrl-C while sampling returns what there is, marked as interrupted.

    :param hook: is called after every iteration.
    :param density: of a run that starts, if it has been built.
    :raises KeyboardInterrupt: in warm-up, when there is nothing to return.
    """
    initial = resolve(settings.initial, settings.num_chains, settings.args, settings.kwargs)
    settings = replace(settings, initial=initial)
    with _recorder(settings) as recorder:  # its lock comes first: who is refused has touched no generator
        chains = Run(settings, recorder, density)
        try:
            chains.go(progress, hook)
        except KeyboardInterrupt:
            if chains.at.draws == 0:
                begun = f"interrupted after {chains.at.iteration} of {chains.at.num_warmup} iterations of warm-up"
                kept = f"; they are kept in {settings.store}, and the same call resumes there" if settings.store else ""
                raise KeyboardInterrupt(f"{begun}{kept}") from None
        return recorder.draws(min(settings.num_samples, chains.at.draws), chains.metadata())


class Run:
    """One kernel's chains, from where they are to where the settings end.

    Where they are is one value, which is replaced between two iterations and never changed. So wherever an interruption
    falls, the last one is whole: state, generator and draws belong together.
    """

    at: RunState

    def __init__(self, settings: Settings, recorder: Recorder, density: Density | None = None):
        self.settings, self.recorder = settings, recorder
        self._clock, self._seconds = time.perf_counter(), {"warmup": 0.0, "sampling": 0.0}
        if recorder.last is None:
            self._start(settings.density() if density is None else density)
        else:
            self._resume(recorder.last)

    def go(self, progress: bool, hook: Hook | None = None) -> None:
        """Run all iterations that are left. However that ends, the recorder commits what was done."""
        bar = tqdm(initial=self._done, disable=not progress, mininterval=0.2)
        try:
            while self.at.draws < self.settings.num_samples:
                self._advance()
                if hook is not None:
                    hook(self.at.iteration - 1, self.density.layout.constrain(self.at.state.z))
                if self.recorder.is_due:
                    self._commit()
                if progress:
                    self._show(bar)
        finally:
            bar.close()
            if not self.recorder.failed:
                self._commit()

    def _advance(self) -> None:
        """One iteration of all chains."""
        at, kernel, density = self.at, self.settings.kernel, self.density
        draws, num_warmup, agreement, r_hat = at.draws, at.num_warmup, at.agreement, at.r_hat
        state = _required(kernel.step(density, at.state), at.state.z, kernel, "step")
        if at.iteration < num_warmup:
            if agreement is not None:
                rate = state.statistics.get("acceptance_rate")
                agreement = agreement.update(at.iteration, state.z, state.energy, rate)
                if at.iteration + 1 in self.settings.warmups(density):
                    r_hat = agreement.r_hat()
                    num_warmup = at.iteration + 1 if r_hat < LIMIT else num_warmup
                if at.iteration + 1 == num_warmup:
                    agreement = None
            state = kernel.adapt(density, state, at.iteration, num_warmup)
        elif (at.iteration + 1 - num_warmup) % self.settings.thinning == 0:
            self.recorder.append(draws, density.draws(state.z), state.statistics)
            draws += 1
        self.at = RunState(at.iteration + 1, state, state.generator.get_state(), draws, num_warmup, agreement, r_hat)
        now = time.perf_counter()
        self._seconds["warmup" if at.iteration < num_warmup else "sampling"] += now - self._clock
        self._clock = now

    def metadata(self) -> dict[str, Any]:
        """The course of the run so far."""
        settings, density = self.settings, self.density
        return {
            "kernel": type(settings.kernel).__name__,
            "settings": settings.kernel.settings(),
            **({"chosen": settings.chosen} if settings.chosen else {}),
            "num_warmup": self.at.num_warmup,
            "warmup_r_hat": self.at.r_hat,
            **({"one_start": True} if self._one_start else {}),
            "thinning": settings.thinning,
            "seed": self.seed,
            "device": str(density.device),
            "dtype": str(density.dtype).removeprefix("torch."),
            "chain_chunk": density.chain_chunk,
            "versions": dict(VERSIONS),
            "deterministic": list(density.target.computed),
            "engine": density.engine,  # as it turned out: compiling may have failed
            "engine_reason": density.engine_reason,
            "seconds": dict(self._seconds),
            "interrupted": self.at.draws < settings.num_samples,
        }

    # small steps ----------------------------------------------------------------------------------------------------

    def _start(self, density: Density) -> None:
        settings, self.density = self.settings, density
        self.seed = drawn_seed() if settings.seed is None else settings.seed
        generator = torch.Generator(density.device).manual_seed(self.seed)
        z = starting_points(density, settings.num_chains, settings.initial, generator)
        self._one_start = len(z) > 1 and bool((z == z[:1]).all())
        lengths = settings.warmups(density)
        state = _required(settings.kernel.init(density, z, lengths[-1], generator), z, settings.kernel, "init")
        agreement = Agreement() if len(lengths) > 1 else None
        self.at = RunState(0, state, state.generator.get_state(), 0, lengths[-1], agreement)
        if settings.store is not None:
            self.recorder.fingerprint = identify(settings, density, self.seed)
            unpacked(self._packed(), settings.kernel)  # so that a state that can't be kept is told now
            self._commit()

    def _resume(self, last: Checkpoint) -> None:
        """:raises StoreError: if the store is another run's."""
        settings = self.settings
        if not last.state:
            raise StoreError(f"the draw store {settings.store} holds draws, but no run that could resume")
        with _reading(settings):
            call, engine = last.fingerprint["call"], last.fingerprint["rounding"]["engine"]
            self.seed = call["seed"] if settings.seed is None else settings.seed
            # As they were: a longer run might choose another engine, which rounds differently.
            self.density = settings.density(
                chain_chunk=settings.chain_chunk or call["chain_chunk"],
                engine=engine if settings.engine == "auto" else settings.engine,
            )
            self.recorder.fingerprint = identify(settings, self.density, self.seed)
            require_same(settings, last.fingerprint, self.recorder.fingerprint)
            self.at, more = unpacked(last.state, settings.kernel)
            iteration, num_warmup, z = self.at.iteration, self.at.num_warmup, self.at.state.z
            draws, lengths = max(iteration - num_warmup, 0) // settings.thinning, settings.warmups(self.density)
            fits = iteration >= 0 and num_warmup in lengths and self.at.draws == draws == last.draws
            if not fits or z.shape != (settings.num_chains, self.density.dim):
                raise ValueError(f"{len(z)} chains have {last.draws} draws at iteration {iteration}")
            self._one_start, self._seconds = bool(last.metadata.get("one_start")), dict(more["seconds"])
            require_same_model(settings, self.density, z, more["energies"])

    def _commit(self) -> None:
        self.recorder.commit(self.at.draws, self.metadata, self._packed)

    def _packed(self) -> memoryview:
        where = energies(self.density, self.at.state.z)
        return packed(self.at, {"seconds": dict(self._seconds), "energies": where})

    @property
    def _done(self) -> int:
        """Iterations of warm-up, then draws, as they were asked for."""
        return min(self.at.iteration, self.at.num_warmup) + self.at.draws

    def _show(self, bar: tqdm[Any]) -> None:
        at, found, diverged = self.at, self.at.state.statistics, self.recorder.diverged
        bar.total = at.num_warmup + self.settings.num_samples
        bar.set_description("warm-up" if at.iteration < at.num_warmup else "sampling", refresh=False)
        if bar.update(self._done - bar.n):
            parts = [text.format(found[name].double().mean()) for name, text in SHOWN.items() if name in found]
            bar.set_postfix_str(", ".join([*parts, *([f"diverged {diverged}"] if diverged else [])]), refresh=False)


def _recorder(settings: Settings) -> contextlib.AbstractContextManager[Recorder]:
    """:raises OSError: if a store exists that mustn't, or the other way round."""
    store, resume = settings.store, settings.resume
    if store is None:
        return contextlib.nullcontext(Recorder(settings.num_samples))
    exists = (store / CHECKPOINT).exists()
    if exists and resume is False:
        raise FileExistsError(f"{store} is a draw store already; with resume=False, name a new folder")
    if not exists and resume is True:
        raise FileNotFoundError(f"resume is True, but there is no run to resume at {store}")
    return FolderRecorder(store, settings.num_samples)


@contextlib.contextmanager
def _reading(settings: Settings) -> Iterator[None]:
    """Tell what goes wrong with what a store holds."""
    try:
        yield
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise StoreError(f"the run in the store {settings.store} is damaged, or can't go on here: {error!r}") from error


def _required(state: Any, z: Tensor, kernel: Kernel, method: str) -> State:
    """The state that a kernel returned, checked: chains at as many places as ``z``."""
    name = f"what {type(kernel).__name__}.{method} returned"
    arguments.instance(name, state, State, "a pyro_symmetric.mcmc.State")
    if state.z.shape != z.shape:
        raise ValueError(f"{name} has z of shape {tuple(state.z.shape)}; it must be {tuple(z.shape)}")
    return state


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
    """Points ``(C, D)``; guides and functions draw from global generators, which are put back afterwards."""
    if initial == "uniform":
        box = torch.rand(count, density.dim, generator=generator, device=density.device, dtype=density.dtype)
        return (2 * box - 1) * RADIUS
    if initial == "prior":
        return density.draw_prior(count, generator)
    if isinstance(initial, Mapping):
        return _placed(density, initial, count, all_known=True)
    with forked(generator, density.device):
        return _placed(density, initial(count), count, all_known=False)


def _placed(density: Density, weights: Mapping[str, Tensor], count: int, all_known: bool) -> Tensor:
    """Points ``(C, D)`` of weights, one for each chain or one for all.

    :raises ValueError: if chains would start elsewhere than at these weights. If not all need be known, those that
        aren't are to be drawn anew.
    """
    arguments.weights("initial", weights)
    shapes = density.layout.site_shapes
    require_sites(weights, shapes, "initial")
    found = batch_shape(weights, shapes, "initial")
    if tuple(found) not in ((), (count,)):
        raise ValueError(
            f"initial has batch shape {tuple(found)}; it must be ({count},), one for each chain, or () for one start"
        )
    z = density.unconstrain(weights).expand(count, density.dim)
    known = z.isfinite().all(-1) | all_known
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
