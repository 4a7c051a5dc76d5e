"""All that a run is asked to do, as one value that is checked when it is made and can travel to another machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel

LEAST = {"num_samples": 1, "num_warmup": 0, "num_chains": 1, "thinning": 1, "seed": 0}
OPEN = {"num_warmup": "auto", "seed": None}  # what stands for a number


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of :func:`~pyro_symmetric.mcmc.sample` that decide on the draws, and where they go.

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

    def density(self, chain_chunk: int | None = None, engine: str | None = None) -> Density:
        """The density that the kernel moves on.

        :param chain_chunk: if the settings leave it open.
        :param engine: another than theirs.
        """
        num_warmup = self.kernel.warmups[0] if isinstance(self.num_warmup, str) else self.num_warmup  # at least
        return Density(
            self.kernel.model,
            self.args,
            self.kwargs,
            device=self.device,
            dtype=self.dtype,
            chain_chunk=chain_chunk if self.chain_chunk is None else self.chain_chunk,
            engine=engine or self.engine,
            batch_size=self.kernel.batch_size,
            subsampled=self.kernel.subsampled,
            iterations=num_warmup + self.num_samples * self.thinning,
        )
