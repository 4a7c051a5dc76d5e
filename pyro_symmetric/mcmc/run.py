"""One run: chains that start or resume, the loop that moves them, and a recorder that takes their draws.

What a run needs to resume is one value, :class:`Boundary`, which is replaced between two iterations and never changed.
So wherever an interruption falls, the last boundary is whole: state, generator and draws belong together.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric._process import LOCK, drawn_seed
from pyro_symmetric.fingerprint import VERSIONS
from pyro_symmetric.mcmc.curves import Curves
from pyro_symmetric.mcmc.identity import OTHER_MODEL, OtherRun, Passed, identify, require_same, tolerance_of
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve, starting_points
from pyro_symmetric.storage import StoreError
from pyro_symmetric.store import Checkpoint, Contents, FolderRecorder, MemoryRecorder

KERNELS = Kernel.__module__.rpartition(".")[0]


class Stop:
    """A wish that a run end early, which reaches the threads of this process; other processes get one of their own."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set, self.is_set = self._event.set, self._event.is_set

    def __reduce__(self) -> tuple[type[Stop], tuple[()]]:
        return Stop, ()


def run(settings: Settings, progress: bool = False, stop: Stop | None = None) -> Contents:
    """Start, or resume, chains and move them. Ctrl-C while sampling returns what there is, marked as interrupted.

    :param stop: has the effect of Ctrl-C.
    :raises KeyboardInterrupt: in warm-up, when there is nothing to return.
    """
    with _recorder(settings) as recorder:  # its lock comes first: who is refused has touched no generator
        chains = Run(settings, recorder)
        try:
            chains.go(progress, stop)
        except KeyboardInterrupt:
            if settings.draws(chains.at.iteration) == 0:
                raise KeyboardInterrupt(*_how_to_resume(settings, chains.at.iteration)) from None
        count = min(settings.num_samples, settings.draws(chains.at.iteration))
        return recorder.draws(count, chains.metadata())


@dataclass(frozen=True, eq=False)
class Boundary:
    """A run between two iterations.

    :param iteration: how many are done.
    :param generator: where the state's random generator stands; ``None`` if nothing is kept beyond the process.
    """

    iteration: int
    state: State
    generator: Tensor | None


class Run:
    """One kernel's chains, from where they are to where the settings end."""

    def __init__(self, settings: Settings, recorder: MemoryRecorder | FolderRecorder):
        self.settings, self.recorder = settings, recorder
        self._clock = time.perf_counter()
        self._seconds = {"warmup": 0.0, "sampling": 0.0}
        self._diverged = 0
        self._curves = Curves()
        self._passed: Passed | None = None
        self.at: Boundary
        if isinstance(recorder, FolderRecorder):
            self._begin_in_folder(recorder)
        else:
            self.seed = drawn_seed() if settings.seed is None else settings.seed
            self.density = settings.density()
            self._start()

    def go(self, progress: bool, stop: Stop | None) -> None:
        """Run all iterations that are left. However that ends, the recorder commits what was done."""
        settings = self.settings
        total = settings.num_warmup + settings.num_samples * settings.thinning
        if self.at.iteration >= total:
            return
        bar = tqdm(total=total, initial=self.at.iteration, disable=not progress, mininterval=0.2)
        try:
            while self.at.iteration < total:
                warming_up = self.at.iteration < settings.num_warmup
                bar.set_description("warm-up" if warming_up else "sampling", refresh=False)
                self._advance()
                if self.recorder.is_due:
                    self._commit()
                if stop is not None and stop.is_set():
                    raise KeyboardInterrupt
                if bar.update(1):
                    bar.set_postfix_str(self._postfix(), refresh=False)
        finally:
            bar.close()
            if not (isinstance(self.recorder, FolderRecorder) and self.recorder.failed):
                self._commit()

    def metadata(self) -> dict[str, Any]:
        """How the run went so far."""
        settings, density, done = self.settings, self.density, self.at.iteration
        return {
            "kernel": type(settings.kernel).__name__,
            "settings": settings.kernel.settings(),
            "num_warmup": settings.num_warmup,
            "thinning": settings.thinning,
            "seed": self.seed,
            "device": str(density.device),
            "dtype": str(density.dtype).removeprefix("torch."),
            "chain_chunk": density.chain_chunk,
            "versions": VERSIONS,
            "engine": density.engine,  # as it turned out: torch.compile may have failed on the way
            "engine_reason": density.engine_reason,
            "seconds": dict(self._seconds),
            "interrupted": settings.draws(done) < settings.num_samples,
            "trace": self._curves.curves(done),
        }

    # small steps ----------------------------------------------------------------------------------------------------

    def _begin_in_folder(self, recorder: FolderRecorder) -> None:
        settings, last = self.settings, recorder.last
        settings.require_resumable(last is not None)
        if last is None:
            self.seed = drawn_seed() if settings.seed is None else settings.seed
            self.density = settings.density()
            recorder.fingerprint = identify(settings, self.density, self.seed)
            self._passed = Passed(self.density, settings.num_chains)
            self._start()
            unpacked(packed(self.at, {}), settings.kernel)  # so that a state that can't be kept is told now
            self._commit()
            return
        if not last.state:
            raise StoreError(f"the draw store {settings.store} holds draws, but no run that could resume")
        try:
            self.seed, density = int(last.fingerprint["seed"]), last.fingerprint["density"]
            chain_chunk, engine = density.get("chain_chunk"), density.get("engine")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the fingerprint in {settings.store} is damaged: {error!r}") from error
        # As it was: a longer run might choose another engine, which rounds differently.
        self.density = settings.density(chain_chunk, engine if settings.engine == "auto" else None)
        recorder.fingerprint = identify(settings, self.density, self.seed)
        require_same(settings, last.fingerprint, recorder.fingerprint)
        self._passed = Passed(self.density, settings.num_chains)
        if not self._resume(last, tolerance_of(last.fingerprint, recorder.fingerprint)):
            raise OtherRun.of(settings.store, [OTHER_MODEL])

    def _start(self) -> None:
        settings, generator = self.settings, torch.Generator(self.density.device).manual_seed(self.seed)
        initial = resolve(settings.initial, settings.num_chains, settings.args, settings.kwargs)
        z = starting_points(self.density, settings.num_chains, initial, generator)
        self._arrive(0, settings.kernel.init(self.density, z, settings.num_warmup, generator))

    def _resume(self, last: Checkpoint, tolerance: float) -> bool:
        """Take up a checkpoint; whether the model is the run's, by its density where the chains have been."""
        assert self._passed is not None
        shape = (self.settings.num_chains, self.density.dim)
        try:
            at, more = unpacked(last.state, self.settings.kernel)
            if at.state.z.shape != shape:
                raise ValueError(f"the state doesn't hold {shape[0]} chains of {shape[1]} coordinates")
            if at.iteration < 0 or self.settings.draws(at.iteration) != last.draws:
                raise ValueError(f"iteration {at.iteration} has {last.draws} draws")
            self._curves.restore(more["trace"])
            self._seconds = {phase: float(more["seconds"][phase]) for phase in self._seconds}
            same = self._passed.restore(more["passed"], at.state.z, tolerance)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StoreError(f"the stored state of {self.settings.store} is damaged: {error!r}") from error
        self.at = at
        return same

    def _advance(self) -> None:
        settings, iteration = self.settings, self.at.iteration
        state = settings.kernel.step(self.density, self.at.state)
        self._curves.record(iteration, state)
        if iteration < settings.num_warmup:
            state = settings.kernel.adapt(self.density, state, iteration, settings.num_warmup)
        elif (iteration + 1 - settings.num_warmup) % settings.thinning == 0:
            statistics = {name: value.to("cpu") for name, value in state.statistics.items()}
            self.recorder.append(settings.draws(iteration), self.density.layout.constrain(state.z), statistics)
            self._diverged += int(statistics["diverging"].sum()) if "diverging" in statistics else 0
        now = time.perf_counter()
        self._seconds["warmup" if iteration < settings.num_warmup else "sampling"] += now - self._clock
        self._clock = now
        self._arrive(iteration + 1, state)

    def _arrive(self, iteration: int, state: State) -> None:
        generator = None
        if self._passed is not None:
            generator = state.generator.get_state()
            self._passed.note(iteration, state.z)
        self.at = Boundary(iteration, state, generator)

    def _commit(self) -> None:
        self.recorder.commit(self.settings.draws(self.at.iteration), self.metadata, self._packed)

    def _packed(self) -> bytes:
        assert self._passed is not None
        at = self.at
        passed = self._passed.to_dict(at.iteration, at.state.z)
        trace = self._curves.to_dict(at.iteration)
        return packed(at, {"passed": passed, "trace": trace, "seconds": dict(self._seconds)})

    def _postfix(self) -> str:
        means = {name: float(value.double().mean()) for name, value in self.at.state.statistics.items()}
        shown = {"step_size": "step {:.2g}", "acceptance_rate": "accept {:.2f}"}
        parts = [text.format(means[name]) for name, text in shown.items() if name in means]
        return ", ".join([*parts, *([f"diverged {self._diverged}"] if self._diverged else [])])


def packed(at: Boundary, more: dict[str, Any]) -> bytes:
    """A boundary, and what else a run resumes from, as bytes.

    :raises TypeError: if the kernel's state holds what can't be stored.
    """
    state = replace(at.state, generator=None)  # type: ignore[arg-type]
    buffer = io.BytesIO()
    try:
        torch.save({**more, "iteration": at.iteration, "generator": at.generator, "state": state}, buffer)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"the kernel's state holds what a store can't keep: {error}; see State") from error
    return buffer.getvalue()


def unpacked(content: bytes, kernel: Kernel) -> tuple[Boundary, dict[str, Any]]:
    """What :func:`packed` was given. Nothing but tensors, plain values and the kernel's own dataclasses comes back.

    :raises TypeError: if there is anything else.
    """
    try:
        with LOCK, torch.serialization.safe_globals(_parts_of_states(kernel)):  # a list of the whole process
            found = torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        said = str(error).splitlines()[0]
        raise TypeError(f"the kernel's state holds what a store can't keep: {said}; see State") from error
    generator = torch.Generator(found["state"].z.device)
    generator.set_state(found["generator"])
    state = replace(found["state"], generator=generator)
    return Boundary(int(found["iteration"]), state, found["generator"]), found


# small steps --------------------------------------------------------------------------------------------------------


def _recorder(settings: Settings) -> AbstractContextManager[MemoryRecorder | FolderRecorder]:
    if settings.store is None:
        return nullcontext(MemoryRecorder(settings.num_samples))
    if not settings.store.exists():
        settings.require_resumable(False)  # before a folder is made
    return FolderRecorder(settings.store, settings.num_samples)


def _parts_of_states(kernel: Kernel) -> list[Any]:
    """The dataclasses of the library's kernels and of the modules that this kernel's classes come from."""
    names = {kind.__module__ for kind in type(kernel).__mro__}
    names |= {name for name in sys.modules if name.startswith(f"{KERNELS}.")}
    found = [value for name in names for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    return [kind for kind in found if is_dataclass(kind) and kind.__module__ in names and not issubclass(kind, Kernel)]


def _how_to_resume(settings: Settings, iteration: int) -> tuple[str, ...]:
    if settings.store is None:
        return ()
    return (
        f"interrupted in warm-up, after {iteration} of {settings.num_warmup} iterations; they are kept in "
        f"{settings.store}, and the same call resumes there",
    )
