"""Drive a kernel: start the chains, warm them up, collect draws."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric.mcmc.kernel import Kernel, State
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.weights import Weights

TRACE_POINTS = 2000  # a longer run's trace is thinned to about as many iterations
MANY_DIVERGENCES = 0.05


def sample(
    kernel: Kernel,
    *args: Any,
    num_samples: int = 1000,
    num_warmup: int = 500,
    num_chains: int = 4,
    thinning: int = 1,
    initial: str | Mapping[str, Tensor] | None = None,
    chain_chunk: int | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Posterior:
    """Draw from a model's posterior with many chains at once.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> posterior = sample(HMC(model), torch.randn(100), num_chains=8)

    Ctrl-C during sampling returns the draws made so far, with a warning and ``metadata["interrupted"]`` set; during
    warm-up, when there is nothing to return, it ends the program as usual.

    :param kernel: the sampler, which holds the model.
    :param args: what the model is called with, data included; ``kwargs`` likewise.
    :param num_samples: draws to keep of each chain.
    :param num_warmup: iterations of each chain before them, to adapt and to be forgotten.
    :param thinning: iterations for each draw that is kept.
    :param initial: ``"prior"``, ``"uniform"`` or weights to start from; see :meth:`Potential.initial`.
    :param chain_chunk: chains to evaluate at once; ``None`` for all.
    :param seed: makes the run reproducible and leaves PyTorch's own generators as they were. ``None``: they are used.
    :param device: where to compute; draws are moved to the CPU as they are made.
    :param dtype: of the chains, ``torch.float64`` for delicate posteriors.
    :return: draws, statistics of every draw, and metadata: the kernel's settings, ``seconds``, and ``trace``, the mean
        potential energy, acceptance and step size over all iterations, warm-up included.
    """
    counts = {"num_samples": num_samples, "num_chains": num_chains, "thinning": thinning, "num_warmup": num_warmup}
    for name, count in counts.items():
        if count < (least := 0 if name == "num_warmup" else 1):
            raise ValueError(f"{name} is {count}; it must be at least {least}")
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel is a {type(kernel).__name__}; it must be a sampler such as HMC(model)")
    started = time.perf_counter()
    with _seeded(seed):
        potential = Potential(
            kernel.model,
            *args,
            device=device,
            dtype=dtype,
            chain_chunk=chain_chunk,
            batch_size=kernel.batch_size,
            subsampled=kernel.subsampled,
            **kwargs,
        )
        state = kernel.init(potential, potential.initial(num_chains, initial), num_warmup)
        run = _Run(kernel, potential, num_samples, num_warmup, num_chains, thinning, progress)
        interrupted = run.go(state)
    posterior = Posterior(run.samples(), run.statistics(), run.metadata(started, seed, interrupted))
    _warn_of_trouble(posterior, interrupted, num_samples)
    return posterior


class _Run:
    """One run's storage: draws and statistics on the CPU, the trace on the chains' device."""

    def __init__(
        self,
        kernel: Kernel,
        potential: Potential,
        num_samples: int,
        num_warmup: int,
        num_chains: int,
        thinning: int,
        progress: bool,
    ):
        self.kernel, self.potential = kernel, potential
        self.num_samples, self.num_warmup, self.thinning = num_samples, num_warmup, thinning
        self.total = num_warmup + num_samples * thinning
        self.stored = 0
        self._samples: Weights = {
            site: torch.empty(num_chains, num_samples, *shape, dtype=potential.dtype)
            for site, shape in potential.layout.site_shapes.items()
        }
        self._statistics: dict[str, Tensor] = {}
        self._stride = -(-self.total // TRACE_POINTS)
        self._trace = torch.full((3, -(-self.total // self._stride)), torch.nan, device=potential.device)
        self._progress = progress
        self._sampling_since = 0.0

    def go(self, state: State) -> bool:
        """Run all iterations; returns whether they were interrupted after the first draw was stored."""
        bar = tqdm(total=self.total, disable=not self._progress, desc="warm-up", mininterval=0.2)
        try:
            for iteration in range(self.total):
                if iteration == self.num_warmup:
                    self._sampling_since = time.perf_counter()
                    bar.set_description("sampling")
                state = self.kernel.step(self.potential, state)
                self._record(iteration, state)
                if iteration < self.num_warmup:
                    state = self.kernel.adapt(self.potential, state, iteration, self.num_warmup)
                elif (iteration + 1 - self.num_warmup) % self.thinning == 0:
                    self._store(state)
                if bar.update(1):
                    bar.set_postfix_str(self._postfix(state), refresh=False)
        except KeyboardInterrupt:
            if self.stored == 0:
                raise
            return True
        finally:
            bar.close()
        return False

    def _store(self, state: State) -> None:
        weights = self.potential.constrain(state.z)
        if not self._statistics:
            self._statistics = {
                name: torch.empty(len(value), self.num_samples, dtype=value.dtype)
                for name, value in state.statistics.items()
            }
        for site, value in weights.items():
            self._samples[site][:, self.stored] = value.to("cpu")
        for name, value in state.statistics.items():
            self._statistics[name][:, self.stored] = value.to("cpu")
        self.stored += 1  # last, so that an interruption never leaves half a draw counted

    def _record(self, iteration: int, state: State) -> None:
        if iteration % self._stride == 0:
            acceptance = state.statistics.get("acceptance_rate")
            column = self._trace[:, iteration // self._stride]
            column[0] = state.potential.mean()
            column[1] = torch.nan if acceptance is None else acceptance.mean()
            column[2] = state.tuning.step_size

    def _postfix(self, state: State) -> str:
        parts = [f"step {float(state.tuning.step_size):.2g}"]
        if "acceptance_rate" in state.statistics:
            parts.append(f"accept {float(state.statistics['acceptance_rate'].mean()):.2f}")
        if self.stored and "diverging" in self._statistics:
            parts.append(f"diverged {int(self._statistics['diverging'][:, : self.stored].sum())}")
        return ", ".join(parts)

    def samples(self) -> Weights:
        return {site: value[:, : self.stored] for site, value in self._samples.items()}

    def statistics(self) -> dict[str, Tensor]:
        return {name: value[:, : self.stored] for name, value in self._statistics.items()}

    def metadata(self, started: float, seed: int | None, interrupted: bool) -> dict[str, Any]:
        now = time.perf_counter()
        iterations = self.num_warmup + self.stored * self.thinning
        trace = self._trace[:, : -(-iterations // self._stride)].cpu().tolist()
        return {
            "kernel": type(self.kernel).__name__,
            "settings": self.kernel.settings(),
            "num_warmup": self.num_warmup,
            "thinning": self.thinning,
            "seed": seed,
            "device": str(self.potential.device),
            "dtype": str(self.potential.dtype).removeprefix("torch."),
            "seconds": {"warmup": self._sampling_since - started, "sampling": now - self._sampling_since},
            "interrupted": interrupted,
            "trace": {
                "iteration": list(range(0, iterations, self._stride)),
                "potential": [_number(value) for value in trace[0]],
                "acceptance_rate": [_number(value) for value in trace[1]],
                "step_size": [_number(value) for value in trace[2]],
            },
        }


def _number(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # all, since the model may choose its own
        torch.manual_seed(seed)
        yield


def _warn_of_trouble(posterior: Posterior, interrupted: bool, num_samples: int) -> None:
    if interrupted:
        warnings.warn(
            f"interrupted: the posterior holds {posterior.num_samples} of {num_samples} draws of each chain",
            RuntimeWarning,
            stacklevel=3,
        )
    share = float(posterior.divergences.sum()) / (posterior.num_chains * posterior.num_samples)
    if share > MANY_DIVERGENCES:
        warnings.warn(
            f"{share:.0%} of the draws diverged, so parts of the posterior are missed. Use a smaller step_size or a "
            "larger target_accept, a longer warm-up, dtype=torch.float64, or reparametrise the model",
            RuntimeWarning,
            stacklevel=3,
        )
