"""One run: chains that start or resume, the loop that moves them, and a recorder that takes their draws.

What a run needs to resume is one value, :class:`RunState`, which is replaced between two iterations and never changed.
So wherever an interruption falls, the last boundary is whole: state, generator and draws belong together.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric._process import LOCK, drawn_seed
from pyro_symmetric.mcmc.agreement import LIMIT, Agreement
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, required
from pyro_symmetric.mcmc.resume import OTHER_MODEL, OtherRun, agree, energies, identify, require_same
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve, starting_points
from pyro_symmetric.storage import PathLike, StoreError
from pyro_symmetric.store import CHECKPOINT, Checkpoint, Contents, FolderRecorder, Recorder
from pyro_symmetric.weights import Weights

KERNELS = Kernel.__module__.rpartition(".")[0]
SHOWN = {"step_size": "step {:.2g}", "acceptance_rate": "accept {:.2f}"}  # beside the progress bar
Hook = Callable[[int, Weights], Any]  # takes an iteration's number and the weights of all chains


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


@dataclass(frozen=True, eq=False)
class RunState:
    """A run between two iterations.

    :param iteration: how many are done.
    :param generator: where the state's random generator stands.
    :param draws: how many are kept of each chain.
    :param num_warmup: how many of all are warm-up; while the chains are to end it, how many at most.
    :param r_hat: of the chains when they were last asked whether they agree; ``None`` if they weren't.
    """

    iteration: int
    state: State
    generator: Tensor
    draws: int
    num_warmup: int
    r_hat: float | None = None


class Run:
    """One kernel's chains, from where they are to where the settings end."""

    at: RunState

    def __init__(self, settings: Settings, recorder: Recorder, density: Density | None = None):
        self.settings, self.recorder = settings, recorder
        self._agreement = Agreement()
        self._clock, self._seconds = time.perf_counter(), {"warmup": 0.0, "sampling": 0.0}
        if recorder.last is None:
            self._start(settings.density() if density is None else density)
        else:
            with _reading(settings.store):
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
                self._show(bar)
        finally:
            bar.close()
            if not self.recorder.failed:
                self._commit()

    def _advance(self) -> None:
        """One iteration of all chains."""
        at, kernel, density = self.at, self.settings.kernel, self.density
        num_warmup, r_hat = at.num_warmup, at.r_hat
        state = required(kernel.step(density, at.state), at.state.z, kernel, "step")
        if at.iteration < num_warmup:
            num_warmup, r_hat = self._settled(state)
            state = kernel.adapt(density, state, at.iteration, num_warmup)
        elif (at.iteration + 1 - num_warmup) % self.settings.thinning == 0:
            self.recorder.append(at.draws, density.draws(state.z), state.statistics)
        self._arrive(at.iteration + 1, state, num_warmup, r_hat)
        now = time.perf_counter()
        self._seconds["warmup" if at.iteration < at.num_warmup else "sampling"] += now - self._clock
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
            "versions": density.versions,
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
        generator = torch.Generator(self.density.device).manual_seed(self.seed)
        z = starting_points(self.density, settings.num_chains, settings.initial, generator)
        self._one_start = len(z) > 1 and bool((z == z[:1]).all())
        num_warmup = settings.warmups(self.density)[-1]
        state = settings.kernel.init(self.density, z, num_warmup, generator)
        self._arrive(0, required(state, z, settings.kernel, "init"), num_warmup)
        if settings.store is not None:
            self.recorder.fingerprint = identify(settings, self.density, self.seed)
            unpacked(self._packed(), settings.kernel)  # so that a state that can't be kept is told now
            self._commit()

    def _resume(self, last: Checkpoint) -> None:
        """:raises OtherRun: if the store is another run's."""
        settings = self.settings
        if not last.state:
            raise StoreError(f"the draw store {settings.store} holds draws, but no run that could resume")
        call, rounding = last.fingerprint["call"], last.fingerprint["rounding"]
        self.seed = call["seed"] if settings.seed is None else settings.seed
        # As it was: a longer run might choose another engine, which rounds differently.
        engine = rounding["engine"] if settings.engine == "auto" else settings.engine
        self.density = settings.density(call["chain_chunk"], engine)
        self.recorder.fingerprint = identify(settings, self.density, self.seed)
        require_same(settings, last.fingerprint, self.recorder.fingerprint)
        self.at, more = unpacked(last.state, settings.kernel)
        iteration, num_warmup, z = self.at.iteration, self.at.num_warmup, self.at.state.z
        draws = max(iteration - num_warmup, 0) // settings.thinning
        fits = iteration >= 0 and num_warmup in settings.warmups(self.density)
        if not fits or not self.at.draws == draws == last.draws or z.shape != (settings.num_chains, self.density.dim):
            raise ValueError(f"{len(z)} chains have {last.draws} draws at iteration {iteration} after {num_warmup}")
        self._one_start = bool(last.metadata.get("one_start"))
        self._agreement, self._seconds = Agreement(**more["agreement"]), dict(more["seconds"])
        if not agree(more["energies"], energies(self.density, z), self.density.dtype):
            raise OtherRun.of(settings.store, [OTHER_MODEL])

    def _settled(self, state: State) -> tuple[int, float | None]:
        """The length of warm-up, and R-hat of its chains if they are asked now whether it may end."""
        at, lengths, done = self.at, self.settings.warmups(self.density), self.at.iteration + 1
        if len(lengths) > 1:
            self._agreement.record(at.iteration, state.z, state.energy, state.statistics.get("acceptance_rate"))
        if len(lengths) == 1 or done not in lengths:
            return at.num_warmup, at.r_hat
        r_hat = self._agreement.r_hat(done)
        return done if r_hat < LIMIT else at.num_warmup, r_hat

    def _arrive(self, iteration: int, state: State, num_warmup: int, r_hat: float | None = None) -> None:
        draws = max(iteration - num_warmup, 0) // self.settings.thinning
        self.at = RunState(iteration, state, state.generator.get_state(), draws, num_warmup, r_hat)

    def _commit(self) -> None:
        self.recorder.commit(self.at.draws, self.metadata, self._packed)

    def _packed(self) -> memoryview:
        at, warming = self.at, self.at.iteration < self.at.num_warmup
        agreement = self._agreement if warming else Agreement()
        more = {"agreement": agreement.to_dict(at.iteration), "seconds": dict(self._seconds)}
        return packed(at, {**more, "energies": energies(self.density, at.state.z)})

    @property
    def _done(self) -> int:
        """Iterations of warm-up, then draws, as they were asked for."""
        return min(self.at.iteration, self.at.num_warmup) + min(self.at.draws, self.settings.num_samples)

    def _show(self, bar: tqdm[Any]) -> None:
        bar.total = self.at.num_warmup + self.settings.num_samples
        bar.set_description("warm-up" if self.at.iteration < self.at.num_warmup else "sampling", refresh=False)
        if bar.update(self._done - bar.n):
            found, diverged = self.at.state.statistics, self.recorder.diverged
            parts = [text.format(found[name].double().mean()) for name, text in SHOWN.items() if name in found]
            bar.set_postfix_str(", ".join([*parts, *([f"diverged {diverged}"] if diverged else [])]), refresh=False)


def packed(at: RunState, more: dict[str, Any]) -> memoryview:
    """A boundary, and what else a run resumes from, as bytes that can be written without another copy.

    :raises TypeError: if the kernel's state holds what can't be stored.
    """
    state = replace(at.state, generator=None)  # type: ignore[arg-type]
    buffer = io.BytesIO()
    try:
        torch.save({**more, "at": {**vars(at), "state": state}}, buffer)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"the kernel's state holds what a store can't keep: {error}; see State") from error
    return buffer.getbuffer()


def unpacked(content: bytes | memoryview, kernel: Kernel) -> tuple[RunState, dict[str, Any]]:
    """The boundary that :func:`packed` was given: of tensors, plain values and the kernel's own dataclasses only.

    :raises TypeError: if there is anything else.
    """
    try:
        with LOCK, torch.serialization.safe_globals(_parts_of_states(kernel)):  # a list of the whole process
            more = torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        said = str(error).splitlines()[0]
        raise TypeError(f"the kernel's state holds what a store can't keep: {said}; see State") from error
    at = RunState(**more.pop("at"))
    generator = torch.Generator(at.state.z.device)
    generator.set_state(at.generator)
    return replace(at, state=replace(at.state, generator=generator)), more


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
def _reading(store: PathLike | None) -> Iterator[None]:
    """Tell what goes wrong with what a store holds."""
    try:
        yield
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise StoreError(f"the run in the store {store} is damaged, or can't go on here: {error!r}") from error


def _parts_of_states(kernel: Kernel) -> list[Any]:
    """The dataclasses of the library's kernels and of the modules that this kernel's classes come from."""
    names = {kind.__module__ for kind in type(kernel).__mro__}
    names |= {name for name in sys.modules if name.startswith(f"{KERNELS}.")}
    found = [value for name in names for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    return [kind for kind in found if is_dataclass(kind) and kind.__module__ in names and not issubclass(kind, Kernel)]
