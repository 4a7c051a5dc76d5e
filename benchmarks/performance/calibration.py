r"""Simulation-based calibration of the samplers (Talts, Betancourt, Simpson, Vehtari &
Gelman 2018, arXiv 1804.06788).

    python -m benchmarks.performance.calibration --replications 2000 --draws 127

Parameters are drawn from the prior and data from the model. Among independent draws of
the posterior of these data, the rank of the true parameter is uniform. Every chain is a
replication with data of its own, so one run of a kernel gives as many ranks as it has
chains: the chains share step size and mass matrix, which may be anything, but nothing
else.

The model is a regression of 12 rows with logistic noise, whose coefficients have a
common scale to infer. The ranks are those of the scale, of the coefficients and of the
log density, which sees errors that leave marginals as they are (Modrák et al. 2023,
arXiv 2211.02383). Chains start at other draws from the prior. Draws are thinned until
they hardly depend on each other; the column ``lag`` is the largest correlation of
successive ones.

The p-values are those of chi-square tests of uniform ranks in 16 bins; the smallest
over the quantities, times their number. The last rows are samplers that are wrong on
purpose: Hamiltonian trajectories that are accepted twice as often as they should be, or
always; Langevin steps that are too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from scipy import stats
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.density.eager import ROWS
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.kernels import hmc, nuts

NUM_ROWS, NUM_FEATURES, BATCH, BINS = 12, 3, 4, 16
PRIOR = torch.distributions.LogNormal(0.0, 0.5)


def model(x: Tensor, y: Tensor, size: int) -> None:
    """A regression with a scale to infer, of the rows of all replications: each takes
    ``size`` of its own.
    """
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("features", NUM_FEATURES):
        b = pyro.sample("b", dist.Normal(0.0, scale))
    with (
        pyro.plate(ROWS, len(y), subsample_size=size) as rows,
        poutine.scale(scale=NUM_ROWS / len(y)),
    ):
        pyro.sample("y", dist.Logistic(x[rows] @ b, 1.0), obs=y[rows])


@dataclass
class Replications:
    """Parameters, data and the density of each chain's own posterior, in the shape of a
    ``Density``.

    :param truth: unconstrained parameters, ``(R, D)``.
    :param batch: rows of a mini-batch; ``None``: all.
    """

    truth: Tensor
    density: Density
    parts: Density
    batch: int | None = None

    @classmethod
    def draw(cls, count: int, batch: int | None = None) -> Replications:
        scale = PRIOR.sample((count,))
        b = scale[:, None] * torch.randn(count, NUM_FEATURES)
        x = torch.randn(NUM_ROWS, NUM_FEATURES)
        y = dist.Logistic((b @ x.T), 1.0).sample()
        whole, parts = (
            Density(
                model,
                (x.repeat(count, 1), y.flatten(), size),
                subsampled=True,
                engine="eager",
            )
            for size in (NUM_ROWS, batch or NUM_ROWS)
        )
        return cls(
            whole.layout.unconstrain({"scale": scale, "b": b}), whole, parts, batch
        )

    @property
    def row_counts(self) -> dict[str, tuple[int, int]]:
        return {} if self.batch is None else {ROWS: (NUM_ROWS, self.batch)}

    def energy_and_gradient(self, z: Tensor, rows: Any = None) -> tuple[Tensor, Tensor]:
        density = self.density if rows is None else self.parts
        return density.energy_and_gradient(z, self._own(z, rows))

    def energy(self, z: Tensor, rows: Any = None) -> Tensor:
        return self.energy_and_gradient(z, rows)[0]

    def _own(self, z: Tensor, rows: Any) -> dict[str, Tensor]:
        """Rows of each replication's own data."""
        own = torch.arange(NUM_ROWS).expand(len(z), -1) if rows is None else rows[ROWS]
        replication = torch.arange(len(z)) % len(self.truth)
        return {ROWS: replication[:, None] * NUM_ROWS + own}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.density, name)

    def quantities(self, z: Tensor) -> Tensor:
        """The quantities that ranks are taken of, ``(R, D)`` -> ``(R, D + 1)``."""
        return torch.cat([z, self.energy_and_gradient(z)[0][:, None]], 1)


def ranks(
    kernel: ps.mcmc.Kernel,
    replications: Replications,
    draws: int,
    thinning: int,
    num_warmup: int,
) -> tuple[Any, ...]:
    """Ranks ``(R, D + 1)`` of the truth in ``0 ... draws``, and the correlation of
    successive draws.
    """
    generator = torch.Generator(replications.truth.device).manual_seed(
        int(torch.randint(2**62, ()))
    )
    start = Replications.draw(len(replications.truth)).truth
    state = kernel.init(replications, start, num_warmup, generator)  # type: ignore[arg-type]
    for iteration in range(num_warmup):
        state = kernel.step(replications, state)  # type: ignore[arg-type]
        state = kernel.adapt(replications, state, iteration, num_warmup)  # type: ignore[arg-type]
    kept = []
    for _ in range(draws):
        for _ in range(thinning):
            state = kernel.step(replications, state)  # type: ignore[arg-type]
        kept.append(replications.quantities(state.z))
    drawn = torch.stack(kept)
    centred = drawn - drawn.mean(0)
    lag = (centred[1:] * centred[:-1]).sum((0, 1)) / centred.square().sum((0, 1))
    return (drawn < replications.quantities(replications.truth)).sum(0), float(
        lag.max()
    )


def p_value(ranks: Tensor, draws: int) -> float:
    """Of uniform ranks ``(R, Q)``: the smallest of a chi-square test for each quantity,
    times their number.
    """
    bins = ranks * BINS // (draws + 1)
    counts = [torch.bincount(own, minlength=BINS).numpy() for own in bins.T]
    return min(
        1.0, len(counts) * min(float(stats.chisquare(own).pvalue) for own in counts)
    )


def calibration(
    kernel: ps.mcmc.Kernel,
    replications: int,
    draws: int,
    thinning: int,
    num_warmup: int = 150,
    batch: int | None = None,
) -> tuple[float, float]:
    """The p-value, and the correlation of successive draws. ``draws + 1`` must be a
    multiple of 16.
    """
    with all_chains_in_every_batch():
        found, lag = ranks(
            kernel, Replications.draw(replications, batch), draws, thinning, num_warmup
        )
    return p_value(found, draws), lag


# samplers -----------------------------------------------------------------------------

DEPTH = 5  # of NUTS's trees, all of which wait for the deepest
STOCHASTIC: dict[str, Any] = {"tolerance": 0.02}
# kernel, thinning, mini-batch
SAMPLERS: dict[str, tuple[ps.mcmc.Kernel, int, int | None]] = {
    "HMC": (ps.HMC(model), 3, None),
    "NUTS": (ps.NUTS(model, max_tree_depth=DEPTH), 2, None),
    "AdaptiveHMC": (ps.AdaptiveHMC(model), 3, None),
    "MCLMC": (ps.MCLMC(model), 20, None),
    "SGHMC, all rows": (ps.SGHMC(model, **STOCHASTIC), 3, None),
    "SGLD, all rows": (ps.SGLD(model, num_steps=40, **STOCHASTIC), 4, None),
    "SGHMC": (ps.SGHMC(model, **STOCHASTIC), 6, BATCH),
    "SGLD": (ps.SGLD(model, num_steps=40, **STOCHASTIC), 6, BATCH),
    "pSGLD": (ps.pSGLD(model, num_steps=40, **STOCHASTIC), 6, BATCH),
}


def right(
    name: str, replications: int, draws: int, **options: int
) -> tuple[float, float]:
    kernel, thinning, batch = SAMPLERS[name]
    return calibration(kernel, replications, draws, thinning, batch=batch, **options)


def accepting(
    change: Callable[[Tensor], Tensor],
    kernel: ps.HMC,
    replications: int,
    draws: int,
    **options: int,
) -> tuple[float, float]:
    """Hamiltonian Monte Carlo with another energy error."""
    own = hmc.energy_error
    with mock.patch.object(hmc, "energy_error", lambda *args: change(own(*args))):
        return calibration(kernel, replications, draws, 3, **options)


def too_long(replications: int, draws: int, **options: int) -> tuple[float, float]:
    return calibration(
        ps.SGLD(model, tolerance=0.8, num_steps=20), replications, draws, 3, **options
    )


@contextmanager
def all_chains_in_every_batch() -> Iterator[None]:
    """NUTS takes no chains that have finished out of a batch, as where leaves are
    programs: a chain's place there says whose data it has."""
    with mock.patch.object(nuts, "compiles", return_value=True):
        yield


# Name -> replications, draws and, by its name, num_warmup -> p-value and lag.
CONTESTANTS: dict[str, Callable[..., tuple[float, float]]] = {
    **{name: partial(right, name) for name in SAMPLERS},
    "accepts twice as often": partial(
        accepting, lambda error: error - 0.7, ps.HMC(model, target_accept_prob=0.6)
    ),
    "accepts always": partial(
        accepting,
        lambda error: error.clamp(max=0),
        ps.HMC(model, step_size=1.2, adapt_step_size=False),
    ),
    "Langevin steps too long": too_long,
}


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--replications", type=int, default=2000)
    arguments.add_argument(
        "--draws",
        type=int,
        default=127,
        help="thinned, of each chain; one less than 16 k",
    )
    arguments.add_argument(
        "--only", nargs="*", help="of the samplers, those whose names start so"
    )
    options = parse(arguments, argv)
    if options.quick:
        options.replications, options.draws = 200, 15
    results = Results.of(options, "replications", "draws")
    names = [
        name
        for name in CONTESTANTS
        if not options.only or name.startswith(tuple(options.only))
    ]

    def one(sampler: str, seed: int) -> Row:
        torch.manual_seed(seed)
        value, lag = CONTESTANTS[sampler](options.replications, options.draws)
        return {"p_value": value, "lag": lag}

    results.fill(one, sampler=names, seed=range(options.seeds))
    rows = [
        (row["sampler"], str(row["seed"]), f"{row['p_value']:.2g}", f"{row['lag']:.2f}")
        for row in results.find()
    ]
    print_table("Uniform ranks", ("sampler", "seed", "p-value", "lag"), rows)


if __name__ == "__main__":
    main()
