"""One run: chains that start or resume, the loop that moves them, and a recorder that takes their draws.

What a run needs to resume is one value, :class:`RunState`, which is replaced between two iterations and never changed.
So wherever an interruption falls, the last boundary is whole: state, generator and draws belong together.
"""

from __future__ import annotations

import io
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric._process import LOCK, drawn_seed
from pyro_symmetric.mcmc.agreement import LIMIT, Agreement
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State, required
from pyro_symmetric.mcmc.resume import OTHER_MODEL, OtherRun, agree, energies, identify, require_same
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve, starting_points
from pyro_symmetric.storage import StoreError
from pyro_symmetric.store import Checkpoint, Contents, FolderRecorder, Recorder
from pyro_symmetric.weights import Weights

KERNELS = Kernel.__module__.rpartition(".")[0]
Hook = Callable[[int, Weights], Any]  # takes an iteration's number and the weights of all chains


def run(settings: Settings, progress: bool = False, hook: Hook | None = None) -> Contents:
    """Start, or resume, chains and move them. Ctrl-C while sampling returns what there is, marked as interrupted.

    :param hook: is called after every iteration.
    :raises KeyboardInterrupt: in warm-up, when there is nothing to return.
    """
    with _recorder(settings) as recorder:  # its lock comes first: who is refused has touched no generator
        chains = Run(settings, recorder)
        try:
            chains.go(progress, hook)
        except KeyboardInterrupt:
            if chains.at.draws == 0:
                raise KeyboardInterrupt(*_how_to_resume(settings, chains.at)) from None
        count = min(settings.num_samples, chains.at.draws)
        return recorder.draws(count, chains.metadata())


@dataclass(frozen=True, eq=False)
class RunState:
    """A run between two iterations.

    :param iteration: how many are done.
    :param generator: where the state's random generator stands; ``None`` if nothing is kept beyond the process.
    :param draws: how many are kept of each chain.
    :param num_warmup: how many of all are warm-up; while the chains are to end it, how many at most.
    :param r_hat: of the chains when they were last asked whether they agree; ``None`` if they weren't.
    """

    iteration: int
    state: State
    generator: Tensor | None
    draws: int
    num_warmup: int
    r_hat: float | None = None


class Run:
    """One kernel's chains, from where they are to where the settings end."""

    def __init__(self, settings: Settings, recorder: Recorder):
        self.settings, self.recorder = settings, recorder
        self._clock = time.perf_counter()
        self._seconds = {"warmup": 0.0, "sampling": 0.0}
        self._agreement: Agreement | None = None
        self.at: RunState
        if isinstance(recorder, FolderRecorder):
            self._begin_in_folder(recorder)
        else:
            self.seed = drawn_seed() if settings.seed is None else settings.seed
            self.density = settings.density()
            self._start()

    def go(self, progress: bool, hook: Hook | None = None) -> None:
        """Run all iterations that are left. However that ends, the recorder commits what was done."""
        settings = self.settings
        if self.at.draws >= settings.num_samples:
            return
        total = self.at.num_warmup + settings.num_samples
        bar = tqdm(total=total, initial=self._counted, disable=not progress, mininterval=0.2)
        try:
            while self.at.draws < settings.num_samples:
                before = self.at.iteration
                bar.set_description("warm-up" if before < self.at.num_warmup else "sampling", refresh=False)
                self._advance()
                bar.total = self.at.num_warmup + settings.num_samples
                if hook is not None:
                    hook(self.at.iteration - 1, self.density.layout.constrain(self.at.state.z))
                if self.recorder.is_due:
                    self._commit()
                if bar.update(self._counted - bar.n):
                    bar.set_postfix_str(self._postfix(), refresh=False)
        finally:
            bar.close()
            if not (isinstance(self.recorder, FolderRecorder) and self.recorder.failed):
                self._commit()

    @property
    def _counted(self) -> int:
        """Iterations of warm-up, then draws, as they were asked for."""
        return min(self.at.iteration, self.at.num_warmup) + min(self.at.draws, self.settings.num_samples)

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

    def _begin_in_folder(self, recorder: FolderRecorder) -> None:
        settings, last = self.settings, recorder.last
        settings.require_resumable(last is not None)
        if last is None:
            self.seed = drawn_seed() if settings.seed is None else settings.seed
            self.density = settings.density()
            recorder.fingerprint = identify(settings, self.density, self.seed)
            self._start()
            unpacked(packed(self.at, {}), settings.kernel)  # so that a state that can't be kept is told now
            self._commit()
            return
        if not last.state:
            raise StoreError(f"the draw store {settings.store} holds draws, but no run that could resume")
        try:
            self.seed, density = int(last.fingerprint["seed"]), last.fingerprint["density"]
            chain_chunk, engine = density["chain_chunk"], density["engine"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the fingerprint in {settings.store} is damaged: {error!r}") from error
        # As it was: a longer run might choose another engine, which rounds differently.
        self.density = settings.density(chain_chunk, engine if settings.engine == "auto" else None)
        recorder.fingerprint = identify(settings, self.density, self.seed)
        require_same(settings, last.fingerprint, recorder.fingerprint)
        self._one_start = bool(last.metadata.get("one_start"))
        if not self._resume(last):
            raise OtherRun.of(settings.store, [OTHER_MODEL])

    def _start(self) -> None:
        settings, generator = self.settings, torch.Generator(self.density.device).manual_seed(self.seed)
        initial = resolve(settings.initial, settings.num_chains, settings.args, settings.kwargs)
        z = starting_points(self.density, settings.num_chains, initial, generator)
        self._one_start = len(z) > 1 and bool((z == z[:1]).all())
        lengths = settings.warmups(self.density)
        self._agreement = Agreement(z) if len(lengths) > 1 else None
        state = settings.kernel.init(self.density, z, lengths[-1], generator)
        self._arrive(0, required(state, z, settings.kernel, "init"), lengths[-1])

    def _resume(self, last: Checkpoint) -> bool:
        """Take up a checkpoint; whether the model is the run's, by its density where the chains stand."""
        shape = (self.settings.num_chains, self.density.dim)
        try:
            at, more = unpacked(last.state, self.settings.kernel)
            if at.state.z.shape != shape:
                raise ValueError(f"the state doesn't hold {shape[0]} chains of {shape[1]} coordinates")
            draws = max(at.iteration - at.num_warmup, 0) // self.settings.thinning
            right = at.iteration >= 0 and at.num_warmup in self.settings.warmups(self.density)
            if not right or not at.draws == draws == last.draws:
                raise ValueError(f"iteration {at.iteration} of {at.num_warmup} of warm-up has {last.draws} draws")
            if more["agreement"] is not None and at.iteration < at.num_warmup:
                self._agreement = Agreement(at.state.z)
                self._agreement.restore(more["agreement"])
            self._seconds = {phase: float(more["seconds"][phase]) for phase in self._seconds}
            same = agree(more["energies"], energies(self.density, at.state.z), self.density.dtype)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StoreError(f"the stored state of {self.settings.store} is damaged: {error!r}") from error
        self.at = at
        return same

    def _advance(self) -> None:
        """By an iteration of warm-up, or of sampling."""
        phase = "warmup" if self.at.iteration < self.at.num_warmup else "sampling"
        if phase == "warmup":
            self._warm_up()
        else:
            self._draw()
        now = time.perf_counter()
        self._seconds[phase] += now - self._clock
        self._clock = now

    def _moved(self) -> State:
        """One iteration."""
        at, kernel = self.at, self.settings.kernel
        return required(kernel.step(self.density, at.state), at.state.z, kernel, "step")

    def _draw(self) -> None:
        at = self.at
        state = self._moved()
        if (at.iteration + 1 - at.num_warmup) % self.settings.thinning == 0:
            self.recorder.append(at.draws, self.density.draws(state.z), state.statistics)
        self._arrive(at.iteration + 1, state, at.num_warmup, at.r_hat)

    def _warm_up(self) -> None:
        """An iteration of warm-up, and a question whether chains have agreed where it may end."""
        at, last = self.at, self.at.iteration
        state = self._moved()
        num_warmup, r_hat = at.num_warmup, at.r_hat
        if self._agreement is not None:
            self._agreement.record(last, state.z, state.energy, state.statistics.get("acceptance_rate"))
            if last + 1 in self.settings.warmups(self.density):
                r_hat = self._agreement.r_hat(last + 1)
                num_warmup = last + 1 if r_hat < LIMIT else num_warmup
        state = self.settings.kernel.adapt(self.density, state, last, num_warmup)
        self._arrive(last + 1, state, num_warmup, r_hat)

    def _arrive(self, iteration: int, state: State, num_warmup: int, r_hat: float | None = None) -> None:
        generator = None
        if isinstance(self.recorder, FolderRecorder):
            generator = state.generator.get_state()
        draws = max(iteration - num_warmup, 0) // self.settings.thinning
        self.at = RunState(iteration, state, generator, draws, num_warmup, r_hat)
        if iteration >= num_warmup:
            self._agreement = None

    def _commit(self) -> None:
        self.recorder.commit(self.at.draws, self.metadata, self._packed)

    def _packed(self) -> memoryview:
        at = self.at
        agreement = None if self._agreement is None else self._agreement.to_dict(at.iteration)
        found = energies(self.density, at.state.z)
        more = {"energies": found, "agreement": agreement, "seconds": dict(self._seconds)}
        return packed(at, more)

    def _postfix(self) -> str:
        found, diverged = self.at.state.statistics, self.recorder.diverged
        shown = {"step_size": "step {:.2g}", "acceptance_rate": "accept {:.2f}"}
        parts = [text.format(float(found[name].double().mean())) for name, text in shown.items() if name in found]
        return ", ".join([*parts, *([f"diverged {diverged}"] if diverged else [])])


def packed(at: RunState, more: dict[str, Any]) -> memoryview:
    """A boundary, and what else a run resumes from, as bytes that can be written without another copy.

    :raises TypeError: if the kernel's state holds what can't be stored.
    """
    state = replace(at.state, generator=None)  # type: ignore[arg-type]
    buffer = io.BytesIO()
    try:
        torch.save({**more, **vars(at), "state": state}, buffer)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"the kernel's state holds what a store can't keep: {error}; see State") from error
    return buffer.getbuffer()


def unpacked(content: bytes | memoryview, kernel: Kernel) -> tuple[RunState, dict[str, Any]]:
    """The boundary that :func:`packed` was given: of tensors, plain values and the kernel's own dataclasses only.

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
    r_hat = found["r_hat"] if found["r_hat"] is None else float(found["r_hat"])
    iteration, draws, num_warmup = (int(found[name]) for name in ("iteration", "draws", "num_warmup"))
    return RunState(iteration, state, found["generator"], draws, num_warmup, r_hat), found


# small steps --------------------------------------------------------------------------------------------------------


def _recorder(settings: Settings) -> AbstractContextManager[Recorder]:
    if settings.store is None:
        return nullcontext(Recorder(settings.num_samples))
    if not settings.store.exists():
        settings.require_resumable(False)  # before a folder is made
    return FolderRecorder(settings.store, settings.num_samples)


def _parts_of_states(kernel: Kernel) -> list[Any]:
    """The dataclasses of the library's kernels and of the modules that this kernel's classes come from."""
    names = {kind.__module__ for kind in type(kernel).__mro__}
    names |= {name for name in sys.modules if name.startswith(f"{KERNELS}.")}
    found = [value for name in names for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    return [kind for kind in found if is_dataclass(kind) and kind.__module__ in names and not issubclass(kind, Kernel)]


def _how_to_resume(settings: Settings, at: RunState) -> tuple[str, ...]:
    if settings.store is None:
        return ()
    return (
        f"interrupted in warm-up, after {at.iteration} of {at.num_warmup} iterations; they are kept in "
        f"{settings.store}, and the same call resumes there",
    )
