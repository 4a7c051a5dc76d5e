"""All that a run is asked to do, as one value that is checked when it is made and can travel to another machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import CHAIN_DTYPES, ENGINES, Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel

EVALUATIONS = 4  # of an iteration, about: what engine "auto" reckons with
LEAST = {"num_samples": 1, "num_warmup": 0, "num_chains": 1, "thinning": 1}
AUTO = "auto"


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of :func:`~pyro_symmetric.mcmc.sample` that decide on the draws, and where they go.

    :param chosen: why this kernel and number of chains, if they were chosen for the model.
    """

    kernel: Kernel
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 1000
    num_warmup: int | str = AUTO
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
        counts = {name: least for name, least in LEAST.items() if name != "num_warmup" or self.num_warmup != AUTO}
        checked = {name: arguments.whole(name, getattr(self, name), least) for name, least in counts.items()}
        checked["seed"] = arguments.whole("seed", self.seed, 0, 2**64 - 1, none="no seed")
        checked["chain_chunk"] = arguments.whole("chain_chunk", self.chain_chunk, 1, none="all chains at once")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        arguments.one_of("engine", self.engine, ENGINES)
        arguments.one_of("resume", self.resume, ("auto", True, False))
        arguments.dtype("dtype", self.dtype, CHAIN_DTYPES)
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
        num_warmup = Kernel.warmups[-1] if isinstance(self.num_warmup, str) else self.num_warmup  # or about so many
        try:
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
                evaluations=EVALUATIONS * (num_warmup + self.num_samples * self.thinning),
            )
        except Exception as error:  # a model may take arrays; if it fails they are the likeliest cause
            named = [*enumerate(self.args), *((repr(name), value) for name, value in self.kwargs.items())]
            if arrays := [str(name) for name, value in named if isinstance(value, np.ndarray)]:
                are = "argument {} is a numpy array" if len(arrays) == 1 else "arguments {} are numpy arrays"
                cast = f"floating-point ones by torch.as_tensor(x, dtype={self.dtype or torch.get_default_dtype()})"
                raise TypeError(f"{are.format(', '.join(arrays))}; pass torch tensors, {cast}") from error
            raise

    def require_resumable(self, exists: bool) -> None:
        """:raises OSError: if a store exists that mustn't, or the other way round."""
        if exists and self.resume is False:
            raise FileExistsError(f"{self.store} is a draw store already; with resume=False, name a new folder")
        if not exists and self.resume is True:
            raise FileNotFoundError(f"resume is True, but there is no run to resume at {self.store}")
