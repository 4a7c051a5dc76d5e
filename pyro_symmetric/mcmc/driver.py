"""The loop of a run: step the kernel, adapt in warm-up, keep draws, and commit them where there is a store.

What a run needs to resume is one value, :class:`Boundary`, which is replaced between two iterations and never changed.
So wherever an interruption falls, the last boundary is whole: state, generators and draws belong together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric.generators import generator_states, set_generators
from pyro_symmetric.mcmc.codec import decode, encode
from pyro_symmetric.mcmc.kernel import Kernel, State
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.trace import Trace
from pyro_symmetric.mcmc.witnesses import Witnesses
from pyro_symmetric.storage import StoreError
from pyro_symmetric.store import Draws, DrawStore, Mark

COMMIT_SECONDS = 5.0  # at least so long between two commits,
COMMIT_SHARE = 0.05  # and so long that they take at most this share of the time


class Plan(NamedTuple):
    """How many iterations of what."""

    num_samples: int
    num_warmup: int
    num_chains: int
    thinning: int

    @property
    def total(self) -> int:
        """All iterations."""
        return self.num_warmup + self.num_samples * self.thinning

    def draws(self, iterations: int) -> int:
        """Draws that were kept in the first iterations."""
        return max(iterations - self.num_warmup, 0) // self.thinning


class Boundary(NamedTuple):
    """A run between two iterations.

    :param iteration: how many are done.
    :param generators: where the random generators stand; empty without a store.
    :param mark: where the store's draws end.
    """

    iteration: int
    state: State
    generators: dict[str, Tensor]
    mark: Mark


class MemoryDraws:
    """Draws in the CPU's memory, ``(chains, draws, ...)``."""

    def __init__(self, num_samples: int):
        self._num_samples = num_samples
        self._count = 0
        self._samples: dict[str, Tensor] = {}
        self._statistics: dict[str, Tensor] = {}

    @property
    def mark(self) -> Mark:
        """As a store has it."""
        return Mark(self._count, ())

    def append(self, samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        """Keep one draw of every chain."""
        for kept, values in ((self._samples, samples), (self._statistics, statistics)):
            for name, value in values.items():
                if name not in kept:
                    kept[name] = torch.empty(len(value), self._num_samples, *value.shape[1:], dtype=value.dtype)
                kept[name][:, self._count] = value.to("cpu")
        self._count += 1  # last, so that an interruption never leaves half a draw counted

    def read(self, metadata: dict[str, Any]) -> Draws:
        """What there is."""
        cut = [{name: v[:, : self._count] for name, v in kept.items()} for kept in (self._samples, self._statistics)]
        return Draws(cut[0], cut[1], metadata)


class Run:
    """One kernel's chains, from where they are to the end of the plan.

    :param sink: where draws go.
    :param facts: what the metadata say beside how it went.
    :param preamble: what every checkpoint says beside where the run is.
    :param watch: called with the number of iterations done after each; it may raise ``KeyboardInterrupt``.
    """

    def __init__(
        self,
        kernel: Kernel,
        potential: Potential,
        plan: Plan,
        sink: MemoryDraws | DrawStore,
        facts: Mapping[str, Any],
        preamble: Mapping[str, Any],
        progress: bool,
        started: float,
        watch: Callable[[int], None] | None = None,
    ):
        self.kernel, self.potential, self.plan, self.sink = kernel, potential, plan, sink
        self.store = sink if isinstance(sink, DrawStore) else None
        self._facts, self._preamble, self._progress = facts, preamble, progress
        self._watch = watch
        self._trace = Trace(potential.device)
        self._witnesses = Witnesses(potential, plan.num_chains)
        self._seconds = {"warmup": 0.0, "sampling": 0.0}
        self._clock = started
        self._next_commit = 0.0
        self._diverged = 0
        self.at: Boundary

    def start(self, z: Tensor) -> None:
        """Start the chains at ``z``."""
        state = self.kernel.init(self.potential, z, self.plan.num_warmup)
        self._arrive(0, state)
        if self.store is not None:
            self._commit()

    def take_up(self, checkpoint: Mapping[str, Any], tensors: Mapping[str, Tensor], tolerance: float) -> bool:
        """Go on from a checkpoint; sets the random generators.

        :param tolerance: relative, of densities.
        :return: whether the model is the run's, by its density where the chains have been.
        :raises StoreError: if it isn't a checkpoint of such chains.
        """
        device = self.potential.device
        state = decode(checkpoint["state"], _part(tensors, "state"), device, _modules(self.kernel))
        shape = (self.plan.num_chains, self.potential.dim)
        if not isinstance(state, State) or not isinstance(state.z, Tensor) or state.z.shape != shape:
            raise StoreError(
                f"the stored state is damaged: it doesn't hold {shape[0]} chains of {shape[1]} coordinates"
            )
        try:
            self._witnesses.restore(_part(tensors, "witnesses"))
            self._trace.restore(tensors["trace"], checkpoint["trace_stride"])
            self._seconds = {phase: float(checkpoint["seconds"][phase]) for phase in self._seconds}
            set_generators(_part(tensors, "generators"), device)
            iteration = int(checkpoint["iteration"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StoreError(f"the checkpoint is damaged: {error!r}") from error
        agrees = self._witnesses.agree(state.z, tolerance)
        self._arrive(iteration, state)
        self._next_commit = time.perf_counter() + COMMIT_SECONDS
        return agrees

    def go(self) -> None:
        """Run all iterations that are left. However that ends, what was done is committed if there is a store."""
        total = self.plan.total
        bar = tqdm(total=total, initial=min(self.at.iteration, total), disable=not self._progress, mininterval=0.2)
        if self.at.iteration >= total:
            return bar.close()
        try:
            while self.at.iteration < total:
                bar.set_description(
                    "warm-up" if self.at.iteration < self.plan.num_warmup else "sampling", refresh=False
                )
                self._advance()
                if self.store is not None and time.perf_counter() >= self._next_commit:
                    self._commit()
                if self._watch is not None:
                    self._watch(self.at.iteration)
                if bar.update(1):
                    bar.set_postfix_str(self._postfix(), refresh=False)
        except BaseException:
            if self.store is not None and not self.store.failed:
                self._commit()
            raise
        finally:
            bar.close()
        if self.store is not None:
            self._commit()

    def metadata(self) -> dict[str, Any]:
        """How the run went so far."""
        return {
            **self._facts,
            "route": self.potential.route,  # as it turned out: torch.compile may have failed on the way
            "route_reason": self.potential.route_reason,
            "seconds": dict(self._seconds),
            "interrupted": self.plan.draws(self.at.iteration) < self.plan.num_samples,
            "trace": self._trace.until(self.at.iteration),
        }

    # small steps ----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        iteration, warmup = self.at.iteration, self.plan.num_warmup
        state = self.kernel.step(self.potential, self.at.state)
        self._trace.record(iteration, state)
        if iteration < warmup:
            state = self.kernel.adapt(self.potential, state, iteration, warmup)
        elif (iteration + 1 - warmup) % self.plan.thinning == 0:
            statistics = {name: value.to("cpu") for name, value in state.statistics.items()}
            self.sink.append(self.potential.constrain(state.z), statistics)
            self._diverged += int(statistics["diverging"].sum()) if "diverging" in statistics else 0
        self._tick("warmup" if iteration < warmup else "sampling")
        self._arrive(iteration + 1, state)

    def _arrive(self, iteration: int, state: State) -> None:
        generators = {}
        if self.store is not None:
            generators = generator_states(self.potential.device)
            self._witnesses.note(iteration, state.z)
        self.at = Boundary(iteration, state, generators, self.sink.mark)

    def _tick(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._clock
        self._clock = now

    def _commit(self) -> None:
        assert self.store is not None
        began = time.perf_counter()
        own: dict[str, Tensor] = {}
        tree = encode(self.at.state, own, _modules(self.kernel))
        tensors = {f"state/{name}": value for name, value in own.items()}
        tensors |= {f"generators/{name}": value for name, value in self.at.generators.items()}
        tensors |= {f"witnesses/{name}": value for name, value in self._witnesses.tensors(self.at.state.z).items()}
        tensors["trace"] = self._trace.values
        checkpoint = {
            **self._preamble,
            "iteration": self.at.iteration,
            "state": tree,
            "trace_stride": self._trace.stride,
            "seconds": dict(self._seconds),
        }
        self.store.commit(self.metadata(), checkpoint, tensors, self.at.mark)
        self.at = self.at._replace(mark=self.store.mark)
        now = time.perf_counter()
        self._next_commit = now + max(COMMIT_SECONDS, (now - began) / COMMIT_SHARE)

    def _postfix(self) -> str:
        state = self.at.state
        parts = [f"step {float(state.tuning.step_size):.2g}"]
        if "acceptance_rate" in state.statistics:
            parts.append(f"accept {float(state.statistics['acceptance_rate'].mean()):.2f}")
        if self._diverged:
            parts.append(f"diverged {self._diverged}")
        return ", ".join(parts)


def _modules(kernel: Kernel) -> Collection[str]:
    """Modules that the kernel at hand comes from: its state's dataclasses may be defined there."""
    return {kind.__module__ for kind in type(kernel).__mro__}


def _part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
