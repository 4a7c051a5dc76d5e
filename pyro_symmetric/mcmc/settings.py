"""The arguments of a run that determine its draws and their store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Args, Device, Dtype, Entries
from pyro_symmetric.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import MANY_CHAINS
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.stopping import CHECKS, MOST_DRAWS, Finding, judge
from pyro_symmetric.posterior.posterior import Posterior

MINIMUM = {"num_samples": 1, "num_warmup": 0, "num_chains": 1, "thinning": 1, "seed": 0}
EXPECTED_WARMUP = 300  # of a length that the chains decide
PLACEHOLDERS = {
    "num_samples": "auto",
    "num_warmup": "auto",
    "seed": None,
}  # allowed instead of a number


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

    def may_restart(self, density: Density, state: State) -> bool:
        """Return whether chains in modes of negligible mass restart at the positions of
        others: many chains that start at random. Chains of networks stay, as they are
        in many modes that are worth seeing.
        """
        # A user's tuning that extends one of ours may hold more of each chain.
        knows_chains = "of_chains" in vars(type(state.tuning))
        is_random = self.initial is None or isinstance(self.initial, str)
        return (
            is_random
            and self.kernel.init_strategy is None
            and self.num_chains >= MANY_CHAINS
            and not density.is_network
            and len(self.kernel.restarts) > 0
            and knows_chains
        )

    def build_density(self) -> Density:
        """Build the density of the kernel's model."""
        num_warmup = self.num_warmup
        if isinstance(num_warmup, str):
            num_warmup = max(self.kernel.warmups[0], EXPECTED_WARMUP)
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
            num_warmup=num_warmup,
            num_samples=self.most_draws * self.thinning,
            num_steps=self.kernel.num_steps,
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
            self.finding = judge(posterior())
        suffices = self.finding is not None and self.finding.precision.suffices
        self.has_ended = suffices or draws >= self.most
        return self.has_ended
