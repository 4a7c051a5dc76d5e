"""One run: chains that start or resume, the loop that moves them, and a recorder that takes their draws."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed
from pyro_symmetric.fingerprint import VERSIONS
from pyro_symmetric.mcmc.agreement import LIMIT, Agreement
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel, required
from pyro_symmetric.mcmc.resume import (
    RunState,
    energies,
    identify,
    packed,
    require_same,
    require_same_model,
    unpacked,
)
from pyro_symmetric.mcmc.starts import resolve, starting_points
from pyro_symmetric.storage import StoreError
from pyro_symmetric.store import CHECKPOINT, Checkpoint, Contents, FolderRecorder, Recorder
from pyro_symmetric.weights import Weights

LEAST = {"num_samples": 1, "num_warmup": 0, "num_chains": 1, "thinning": 1, "seed": 0}
OPEN = {"num_warmup": "auto", "seed": None}  # what stands for a number
SHOWN = {"step_size": "step {:.2g}", "acceptance_rate": "accept {:.2f}"}  # beside the progress bar
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
        draws, num_warmup, r_hat = at.draws, at.num_warmup, at.r_hat
        state = required(kernel.step(density, at.state), at.state.z, kernel, "step")
        if at.iteration < num_warmup:
            if self._agreement is not None:
                self._agreement.record(at.iteration, state.z, state.energy, state.statistics.get("acceptance_rate"))
                if at.iteration + 1 in self.settings.warmups(density):
                    r_hat = self._agreement.r_hat(at.iteration + 1)
                    num_warmup = at.iteration + 1 if r_hat < LIMIT else num_warmup
            state = kernel.adapt(density, state, at.iteration, num_warmup)
        elif (at.iteration + 1 - num_warmup) % self.settings.thinning == 0:
            self.recorder.append(draws, density.draws(state.z), state.statistics)
            draws += 1
        self.at = RunState(at.iteration + 1, state, state.generator.get_state(), draws, num_warmup, r_hat)
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
        self._agreement = Agreement() if len(lengths) > 1 else None
        state = required(settings.kernel.init(density, z, lengths[-1], generator), z, settings.kernel, "init")
        self.at = RunState(0, state, state.generator.get_state(), 0, lengths[-1])
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
            self._agreement = Agreement(**more["agreement"]) if len(lengths) > 1 else None
            require_same_model(settings, self.density, z, more["energies"])

    def _commit(self) -> None:
        self.recorder.commit(self.at.draws, self.metadata, self._packed)

    def _packed(self) -> memoryview:
        asking = self._agreement if self.at.iteration < self.at.num_warmup else None
        agreement = {} if asking is None else asking.to_dict(self.at.iteration)
        where = energies(self.density, self.at.state.z)
        return packed(self.at, {"agreement": agreement, "seconds": dict(self._seconds), "energies": where})

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
