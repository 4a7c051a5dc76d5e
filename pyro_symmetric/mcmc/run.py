"""A run of chains: started or resumed, moved one iteration after another, and kept."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor
from tqdm import tqdm

from pyro_symmetric._process import drawn_seed
from pyro_symmetric.arguments import Json
from pyro_symmetric.density.density import Density
from pyro_symmetric.errors import first_line
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.kernels.settling import (
    LIMIT,
    ON_THEIR_WAY,
    Agreement,
    ModeMasses,
    sources,
)
from pyro_symmetric.mcmc.resume import (
    VERSIONS,
    allowed_difference,
    energies,
    identify,
    pack,
    require_same,
    require_same_energies,
    require_storable,
    unpack,
)
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import resolve, starting_points
from pyro_symmetric.posterior.posterior import Posterior, Source
from pyro_symmetric.store import (
    CHECKPOINT,
    Array,
    Checkpoint,
    Contents,
    Recorder,
    StoreError,
)
from pyro_symmetric.weights import Weights

# next to the progress bar
SHOWN = {"step_size": "step {:.2g}", "acceptance_rate": "accept {:.2f}"}
# takes an iteration's number and the weights of all chains
Hook = Callable[[int, Weights], Any]


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
    :param masses: bounds of the masses of the chains' modes; ``None`` if no chain
        restarts any more.
    :param restarts: how often a chain has restarted at another one's position.
    :param seed: of the run, given or drawn.
    :param one_start: whether several chains started at one point.
    :param seconds: time spent in each phase, updated in place.
    """

    iteration: int
    kernel_state: State
    generator: Tensor
    draws: int
    num_warmup: int
    agreement: Agreement | None = None
    r_hat: float | None = None
    masses: ModeMasses | None = None
    restarts: int = 0
    seed: int = 0
    one_start: bool = False
    seconds: dict[str, float] = field(
        default_factory=lambda: {"warmup": 0.0, "sampling": 0.0}
    )


def run(
    settings: Settings,
    progress: bool = False,
    hook: Hook | None = None,
    density: Density | None = None,
    source: Source | None = None,
) -> Contents:
    """Start or resume the chains and run them to the end. Ctrl-C while sampling returns
    the draws so far.

    :param hook: called after every iteration.
    :param density: of a new run, if there is one already.
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
    with Recorder(store, settings.most_draws) as recorder:
        clock = time.perf_counter()
        if recorder.last is None:
            density = settings.build_density() if density is None else density
            chains = Run.start(settings, recorder, density, source)
        else:
            chains = Run.restore(settings, recorder, recorder.last, source)
        try:
            chains.to_the_end(progress, hook, clock)
        except KeyboardInterrupt:
            state = chains.state
            if state.draws == 0:
                advice = ""
                if store is not None:
                    advice = (
                        f"; they are kept in {store}, and the same call resumes there"
                    )
                raise KeyboardInterrupt(
                    f"interrupted after {state.iteration} of {state.num_warmup} "
                    f"iterations of warm-up{advice}"
                ) from None
        return chains.contents()


class Run:
    """A run of chains.

    Its state is one value, replaced between two iterations. Wherever an interruption
    falls, the last one is complete: positions, generator and draws belong together.

    :param settings: of the run, with ``initial`` as :func:`resolve` returns it.
    :param recorder: of its draws; its lock is taken before any random number is drawn.
    :param source: the model behind the draws, with its symmetry.
    """

    def __init__(
        self,
        settings: Settings,
        density: Density,
        recorder: Recorder,
        state: RunState,
        source: Source | None = None,
    ):
        self.settings = settings
        self.density = density
        self.recorder = recorder
        self.state = state
        self.source = source
        self.ending = settings.ending(density)

    @classmethod
    def start(
        cls,
        settings: Settings,
        recorder: Recorder,
        density: Density,
        source: Source | None = None,
    ) -> Run:
        """Place the chains of a new run at their starting points.

        :raises TypeError: if a store can't keep the kernel's state.
        :raises ValueError: if a store can't keep the sites.
        """
        seed = drawn_seed() if settings.seed is None else settings.seed
        if settings.store is not None:
            recorder.fingerprint = identify(settings, density, seed)
        generator = Generator(density.device).manual_seed(seed)
        z = starting_points(density, settings.num_chains, settings.initial, generator)
        lengths = settings.warmups(density)
        kernel_state = settings.kernel.init(density, z, lengths[-1], generator)
        may_restart = settings.may_restart(density, kernel_state)
        state = RunState(
            iteration=0,
            kernel_state=kernel_state,
            generator=kernel_state.generator.get_state(),
            draws=0,
            num_warmup=lengths[-1],
            agreement=Agreement() if len(lengths) > 1 else None,
            masses=ModeMasses() if may_restart else None,
            seed=seed,
            one_start=len(z) > 1 and bool((z == z[:1]).all()),
        )
        if settings.store is not None:
            require_storable(vars(state), settings.kernel)
            # refuses names and dtypes now rather than after warm-up
            for name, draw in density.draws(z).items():
                Array.of("posterior", name, draw.dtype, draw.shape)
        run = cls(settings, density, recorder, state, source)
        run.commit()
        return run

    @classmethod
    def restore(
        cls,
        settings: Settings,
        recorder: Recorder,
        last: Checkpoint,
        source: Source | None = None,
    ) -> Run:
        """Rebuild a run at its last commit.

        :raises StoreError: if the store holds another run, or a damaged one.
        """
        if not last.state:
            raise StoreError(
                f"the draw store {settings.store} holds draws, but no run that could "
                "resume"
            )
        try:
            density, state = _restored(settings, recorder, last)
        except StoreError:
            raise
        except Exception as error:  # a damaged state may raise any
            raise StoreError(
                f"the run in the store {settings.store} is damaged, or can't go on "
                f"here: {type(error).__name__}: {first_line(error)}"
            ) from error
        return cls(settings, density, recorder, state, source)

    def to_the_end(self, progress: bool, hook: Hook | None, clock: float) -> None:
        """Move the chains until there are enough draws; commit from time to time, and
        however the loop ends.

        :param clock: when the run began, by ``time.perf_counter``.
        :raises KeyboardInterrupt: at Ctrl-C.
        """
        bar = tqdm(
            initial=self.progress,
            total=self.most_progress,
            disable=not progress,
            mininterval=0.2,
            desc=None if self.density.engine == "eager" else "compiling",
        )
        begun = self.state.iteration
        with bar, ExitStack() as at_end:
            at_end.callback(self.commit)
            while not self.ending.ends(self.state.draws, self.posterior):
                self.advance()
                before, clock = clock, time.perf_counter()
                in_warmup = self.state.iteration <= self.state.num_warmup
                phase = "warmup" if in_warmup else "sampling"
                self.state.seconds[phase] += clock - before
                if hook is not None:
                    weights = self.density.layout.constrain(self.state.kernel_state.z)
                    hook(self.state.iteration - 1, weights)
                if clock >= self.recorder.next_commit:
                    self.commit()
                if self.state.iteration == begun + 1:
                    bar.unpause()  # compiling doesn't tell how long the others take
                if progress:
                    self.show(bar)
            bar.total = bar.n

    def advance(self) -> None:
        """Move all chains by one iteration: step, then adapt in warm-up or record a
        draw.
        """
        settings, density, run_state = self.settings, self.density, self.state
        kernel, iteration, draws = settings.kernel, run_state.iteration, run_state.draws
        moved = kernel.step(density, run_state.kernel_state)
        if moved.z.shape != (settings.num_chains, density.dim):  # a user's kernel
            raise ValueError(
                f"{kernel!r} moved {settings.num_chains} chains of {density.dim} "
                f"coordinates to z of shape {tuple(moved.z.shape)}; it must keep the "
                "shape"
            )
        if iteration < run_state.num_warmup:
            if run_state.masses is not None:
                run_state, moved = restart(
                    run_state, run_state.masses, moved, kernel, density
                )
            if run_state.agreement is not None:
                run_state = end_if_settled(
                    run_state, run_state.agreement, moved, settings.warmups(density)
                )
            moved = kernel.adapt(density, moved, iteration, run_state.num_warmup)
        elif (iteration + 1 - run_state.num_warmup) % settings.thinning == 0:
            self.recorder.append(draws, density.draws(moved.z), moved.statistics)
            draws += 1
        self.state = replace(
            run_state,
            iteration=iteration + 1,
            kernel_state=moved,
            generator=moved.generator.get_state(),
            draws=draws,
        )

    def commit(self) -> None:
        """Bring the draws so far, and the state to resume from, to the store."""
        if self.settings.store is None or self.recorder.failed:
            return
        state, density = self.state, self.density
        self.recorder.commit(
            state.draws,
            self.metadata,
            lambda: pack(vars(state), energies(density, state.kernel_state.z)),
        )

    def contents(self) -> Contents:
        """Return the draws so far, their statistics and metadata."""
        draws = min(self.ending.most, self.state.draws)
        return self.recorder.draws(draws, self.metadata())

    def posterior(self) -> Posterior:
        """Return the posterior of the draws so far."""
        return Posterior(*self.contents(), kind="chains", source=self.source)

    def metadata(self) -> Json:
        """Describe the run so far, for the posterior's metadata."""
        settings, density, state = self.settings, self.density, self.state
        finding = self.ending.finding if self.ending.has_ended else None
        return {
            "kernel": type(settings.kernel).__name__,
            "settings": settings.kernel.settings(),
            **({"chosen": settings.chosen} if settings.chosen else {}),
            "num_warmup": state.num_warmup,
            "warmup_r_hat": state.r_hat,
            **({"one_start": True} if state.one_start else {}),
            **({"restarts": state.restarts} if state.restarts else {}),
            "thinning": settings.thinning,
            "seed": state.seed,
            "device": str(density.device),
            "dtype": str(density.dtype).removeprefix("torch."),
            "chain_chunk": density.chain_chunk,
            "versions": dict(VERSIONS),
            "deterministic": list(density.target.computed),
            "angles": density.layout.angles,
            "engine": density.engine,  # after compiling, which may have failed
            "engine_reason": density.engine_reason,
            "seconds": dict(state.seconds),
            "interrupted": not self.ending.has_ended,
            **(finding.metadata() if finding else {}),
        }

    @property
    def progress(self) -> int:
        """Number of iterations of warm-up and of kept draws."""
        return min(self.state.iteration, self.state.num_warmup) + self.state.draws

    @property
    def most_progress(self) -> int:
        """Number of iterations of warm-up and of draws, unless the run ends early."""
        return self.state.num_warmup + self.ending.most

    def show(self, bar: tqdm[Any]) -> None:
        """Update the progress bar."""
        bar.total = self.most_progress
        phase = "warm-up"
        if self.state.iteration >= self.state.num_warmup:
            phase = "sampling"
        bar.set_description(phase, refresh=False)
        if not bar.update(self.progress - bar.n):
            return
        statistics = self.state.kernel_state.statistics
        parts = []
        for name, text in SHOWN.items():
            if name in statistics:
                parts.append(text.format(statistics[name].double().mean()))
        if self.ending.finding is not None:
            parts.append(f"{self.ending.finding.precision.effective:,.0f} effective")
        if self.recorder.diverged:
            parts.append(f"diverged {self.recorder.diverged}")
        bar.set_postfix_str(", ".join(parts), refresh=False)


# small steps --------------------------------------------------------------------------


def restart(
    run_state: RunState,
    masses: ModeMasses,
    state: State,
    kernel: Kernel,
    density: Density,
) -> tuple[RunState, State]:
    """Restart chains in negligible modes at the positions of others, with those chains'
    histories, if ``kernel.restarts`` names this iteration and warm-up goes on.
    """
    done = run_state.iteration + 1
    checks = [time for time in kernel.restarts if done <= time < run_state.num_warmup]
    if not checks:
        return replace(run_state, masses=None), state
    masses = masses.update(run_state.iteration, state.z, state.energy)
    if done not in checks:
        return replace(run_state, masses=masses), state
    # another one, so that looking at the modes leaves the chains' random numbers
    generator = Generator(density.device).manual_seed((run_state.seed + done) % 2**63)
    energies = functools.partial(kernel.energies, density, state)
    gaps = masses.gaps(energies, generator)
    chains = sources(gaps, generator)
    have_arrived = bool((gaps >= -ON_THEIR_WAY).all())
    run_state = replace(run_state, masses=ModeMasses(have_arrived=have_arrived))
    moved = chains != torch.arange(len(chains), device=chains.device)
    if not moved.any():
        return run_state, state
    agreement = run_state.agreement
    run_state = replace(
        run_state,
        agreement=None if agreement is None else agreement.of_chains(chains),
        restarts=run_state.restarts + int(moved.sum()),
    )
    return run_state, state.of_chains(chains)


def end_if_settled(
    run_state: RunState, agreement: Agreement, state: State, lengths: tuple[int, ...]
) -> RunState:
    """End warm-up with this iteration if that is one of the ``lengths``, the chains in
    ``state`` have settled, and none restarted or is on its way from a negligible mode.
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
    masses = run_state.masses
    if length in lengths and (masses is None or masses.have_arrived):
        r_hat = agreement.r_hat()
        num_warmup = length if r_hat < LIMIT else num_warmup
    return replace(
        run_state,
        num_warmup=num_warmup,
        masses=None if length == num_warmup else masses,
        agreement=None if length == num_warmup else agreement,
        r_hat=r_hat,
    )


def _restored(
    settings: Settings, recorder: Recorder, last: Checkpoint
) -> tuple[Density, RunState]:
    """Rebuild the density and the state of a run, and check that both fit."""
    call = last.fingerprint["call"]
    engine = last.fingerprint["rounding"]["engine"]
    seed = call["seed"] if settings.seed is None else settings.seed
    # An extended run might choose another engine or chunk, which would round
    # differently.
    density = replace(
        settings,
        chain_chunk=settings.chain_chunk or call["chain_chunk"],
        engine=engine if settings.engine == "auto" else settings.engine,
    ).build_density()
    recorder.fingerprint = identify(settings, density, seed)
    same_rounding = require_same(settings, last.fingerprint, recorder.fingerprint)
    fields, stored_energies = unpack(last.state, settings.kernel)
    state = RunState(**{**fields, "seed": seed})
    iteration = state.iteration
    num_warmup = state.num_warmup
    z = state.kernel_state.z
    draws = max(iteration - num_warmup, 0) // settings.thinning
    fits = (
        iteration >= 0
        and num_warmup in settings.warmups(density)
        and state.draws == draws == last.draws
    )
    if not fits or z.shape != (settings.num_chains, density.dim):
        raise ValueError(
            f"{len(z)} chains have {last.draws} draws at iteration {iteration}"
        )
    tolerance = allowed_difference(density, stored_energies, same_rounding)
    require_same_energies(settings, density, z, stored_energies, tolerance)
    return density, state
