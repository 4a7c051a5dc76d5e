"""One run as a value: all that a call asks for, ready to be done here or on another machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_symmetric import arguments
from pyro_symmetric.generators import seeded
from pyro_symmetric.mcmc.driver import MemoryDraws, Plan, Run
from pyro_symmetric.mcmc.identity import (
    OTHER_MODEL,
    OtherRun,
    identify,
    require_same,
    surroundings,
    tolerance_of,
    versions,
)
from pyro_symmetric.mcmc.kernel import Kernel
from pyro_symmetric.mcmc.potential import CHAIN_DTYPES, Potential
from pyro_symmetric.mcmc.starts import resolve, starting_points
from pyro_symmetric.storage import StoreError
from pyro_symmetric.store import Draws, DrawStore, read_store

# the least of each
COUNTS = {"num_samples": 1, "num_warmup": 0, "num_chains": 1, "thinning": 1}


@dataclass(frozen=True, eq=False)
class Job:
    """Chains to run; the fields are the arguments of :func:`~pyro_symmetric.mcmc.sample`."""

    kernel: Kernel
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_samples: int = 1000
    num_warmup: int = 500
    num_chains: int = 4
    thinning: int = 1
    initial: Any = None
    chain_chunk: int | None = None
    compile: bool | None = None
    seed: int | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    store: Path | None = None
    resume: bool | str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            kind = type(self.kernel).__name__
            found = f"the class {self.kernel.__name__}" if isinstance(self.kernel, type) else f"a {kind}"
            raise TypeError(f"kernel is {found}; it must be a sampler such as HMC(model)")
        for name, least in COUNTS.items():
            object.__setattr__(self, name, arguments.whole(name, getattr(self, name), least))
        object.__setattr__(self, "seed", arguments.whole("seed", self.seed, 0, 2**64 - 1, none="no seed"))
        chunk = arguments.whole("chain_chunk", self.chain_chunk, 1, none="all chains at once")
        object.__setattr__(self, "chain_chunk", chunk)
        arguments.one_of("compile", self.compile, (None, True, False))
        arguments.one_of("resume", self.resume, ("auto", True, False))
        arguments.dtype("dtype", self.dtype, CHAIN_DTYPES)
        device = arguments.device("device", self.device, here=False)
        if device is not None and device.type == "mps":
            raise ValueError(f"device is {str(self.device)!r}, which has no float64 to adapt step sizes in; use 'cpu'")
        if self.resume is True and self.store is None:
            raise ValueError("resume is True, but store is not given; pass the folder that the run was stored in")

    @property
    def plan(self) -> Plan:
        """Its counts."""
        return Plan(self.num_samples, self.num_warmup, self.num_chains, self.thinning)

    def potential(self, chain_chunk: int | None = None) -> Potential:
        """What its kernel moves on.

        :param chain_chunk: where the job leaves it open.
        """
        try:
            return Potential(
                self.kernel.model,
                self.args,
                self.kwargs,
                device=self.device,
                dtype=self.dtype,
                chain_chunk=chain_chunk if self.chain_chunk is None else self.chain_chunk,
                compile=self.compile,
                batch_size=self.kernel.batch_size,
                subsampled=self.kernel.subsampled,
            )
        except Exception as error:  # a model may take arrays; where it fails they are the likeliest cause
            if arrays := [name for name, value in self._named_arguments() if isinstance(value, np.ndarray)]:
                are = "argument {} is a numpy array" if len(arrays) == 1 else "arguments {} are numpy arrays"
                raise TypeError(f"{are.format(', '.join(arrays))}; pass torch tensors: torch.as_tensor(x)") from error
            raise

    def _named_arguments(self) -> list[tuple[str, Any]]:
        return [(str(i), value) for i, value in enumerate(self.args)] + [(f"{k!r}", v) for k, v in self.kwargs.items()]


def run_job(job: Job, progress: bool, watch: Callable[[int], None] | None = None) -> Draws:
    """Run, or take up, the chains of a job. Ctrl-C while sampling returns what there is, marked as interrupted.

    :param watch: called after each iteration with their number; it may raise ``KeyboardInterrupt``.
    :raises KeyboardInterrupt: in warm-up, when there is nothing to return.
    """
    # The store first: who is refused by its lock has waited for no turn and touched no generator.
    with _opened(job) as sink, seeded(job.seed, job.device):
        started = time.perf_counter()
        store = sink if isinstance(sink, DrawStore) else None
        last = store.last if store is not None else None
        if job.store is not None:
            require_resumable(job, last is not None)
        if last is not None and not set(_PREAMBLE) <= last.checkpoint.keys():
            raise StoreError(f"the draw store {job.store} holds draws, but no run that could resume")
        potential = job.potential(last.checkpoint["chain_chunk"] if last is not None else None)
        preamble = {} if store is None else _preamble(job, potential)
        if last is not None:
            require_same(Path(str(job.store)), last.checkpoint, preamble, tolerant=job.resume is True)
        run = Run(job.kernel, potential, job.plan, sink, _facts(job, potential), preamble, progress, started, watch)
        if last is not None:
            tolerance = tolerance_of(last.checkpoint, preamble)
            if not run.take_up(last.checkpoint, last.tensors, tolerance):
                raise OtherRun.of(Path(str(job.store)), [OTHER_MODEL])
        else:
            initial = resolve(job.initial, job.num_chains, job.args, job.kwargs)
            run.start(starting_points(potential, job.num_chains, initial))
        try:
            run.go()
        except KeyboardInterrupt:
            if sink.mark.draws == 0:
                raise KeyboardInterrupt(*_how_to_go_on(job, run.at.iteration)) from None
        draws = sink.read(run.metadata()) if isinstance(sink, MemoryDraws) else read_store(sink.path, verify=False)
    return asked_for(draws, job.num_samples)


def require_resumable(job: Job, exists: bool) -> None:
    """:raises OSError: if a store exists that mustn't, or the other way round."""
    if exists and job.resume is False:
        raise FileExistsError(f"{job.store} is a draw store already; with resume=False, name a new folder")
    if not exists and job.resume is True:
        raise FileNotFoundError(f"resume is True, but there is no run to resume at {job.store}")


def asked_for(draws: Draws, num_samples: int) -> Draws:
    """As many draws as were asked for, where the store holds more."""
    samples, statistics = ({name: v[:, :num_samples] for name, v in kept.items()} for kept in draws[:2])
    found = next(iter(samples.values())).shape[1]
    return Draws(samples, statistics, {**draws.metadata, "interrupted": found < num_samples})


# small steps --------------------------------------------------------------------------------------------------------

_PREAMBLE = ("identity", "versions", "surroundings", "chain_chunk")  # what every checkpoint of a run says of it


def _opened(job: Job) -> contextlib.AbstractContextManager[MemoryDraws | DrawStore]:
    return contextlib.nullcontext(MemoryDraws(job.num_samples)) if job.store is None else DrawStore(job.store)


def _preamble(job: Job, potential: Potential) -> dict[str, Any]:
    return {
        "identity": identify(job, potential),
        "versions": versions(),
        "surroundings": {**surroundings(), "route": potential.route},
        "chain_chunk": potential.chain_chunk,
    }


def _facts(job: Job, potential: Potential) -> dict[str, Any]:
    return {
        "kernel": type(job.kernel).__name__,
        "settings": job.kernel.settings(),
        "num_warmup": job.num_warmup,
        "thinning": job.thinning,
        "seed": job.seed,
        "device": str(potential.device),
        "dtype": str(potential.dtype).removeprefix("torch."),
        "chain_chunk": potential.chain_chunk,
        "versions": versions(),
    }


def _how_to_go_on(job: Job, iteration: int) -> tuple[str, ...]:
    if job.store is None:
        return ()
    return (
        f"interrupted in warm-up, after {iteration} of {job.num_warmup} iterations; they are kept in {job.store}, and "
        "the same call resumes there",
    )
