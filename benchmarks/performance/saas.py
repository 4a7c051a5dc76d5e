"""BoTorch's fully Bayesian Gaussian process (SAAS): effective draws a second of this
library, NumPyro and Pyro.

    python -m benchmarks.performance.saas [--contestants "NUTS, dense, 16 chains"
    "Pyro"] [--rows 30] [--columns 20]

The model of BoTorch 0.16.1's ``SaasPyroModel`` (Eriksson & Jankowiak 2021, arXiv
2103.00349), written so that Pyro and NumPyro run it: a Matérn-5/2 kernel whose inverse
squared lengthscales have half-Cauchy priors, in float64. Pyro runs with
``jit_compile=True`` and a dense mass matrix, as BoTorch asks for with ``jit_compile``,
one chain of as many iterations as asked. Columns as those here: the worst coordinate's
effective draws over seconds of processor time, of sampling alone, with warm-up, and
with compiling.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from numpy.typing import NDArray

import pyro_symmetric as ps
from benchmarks.contestants import Problem, Run, coordinates, numpyro_run, ours
from benchmarks.harness import Results, Row, parse, parser

LEAST_NOISE, LEAST_SQUARE = 1e-4, 1e-30


def data(rows: int, columns: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A function of two of the columns, standardised."""
    draw = np.random.default_rng(0)
    x = draw.random((rows, columns))
    y = np.sin(6 * x[:, 0]) + x[:, 1] ** 2 + 0.05 * draw.normal(size=rows)
    return x, (y - y.mean()) / y.std(ddof=1)


def saas(
    d: Any, sample: Callable[..., Any], plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    x, y = data
    scale = sample("outputscale", d.Gamma(lib.asarray(2.0), lib.asarray(0.15)))
    mean, noise = (
        sample("mean", d.Normal(0.0, 1.0)),
        LEAST_NOISE + sample("noise", d.Gamma(0.9, 10.0)),
    )
    shrinkage = sample("kernel_tausq", d.HalfCauchy(0.1))
    inverse = sample(
        "_kernel_inv_length_sq", d.HalfCauchy(lib.ones(x.shape[-1])).to_event(1)
    )
    scaled = x * lib.sqrt(shrinkage * inverse)
    squares = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
    distance = math.sqrt(5) * lib.sqrt(lib.clip(squares, LEAST_SQUARE))
    kernel = (1 + distance + distance**2 / 3) * lib.exp(-distance)
    covariance = scale * kernel + noise * lib.eye(len(y))
    sample(
        "Y",
        d.MultivariateNormal(mean * lib.ones(len(y)), covariance_matrix=covariance),
        obs=y,
    )


def pyro_jit(problem: Problem, warmup: int, draws: int) -> Run:
    from pyro.infer import MCMC, NUTS

    pyro.set_rng_seed(0)
    kernel = NUTS(
        problem.in_pyro(), full_mass=True, jit_compile=True, ignore_jit_warnings=True
    )
    seen: list[float] = []
    hook = lambda kernel, values, stage, i: seen.append(time.process_time())  # noqa: E731
    begun = time.process_time()
    mcmc = MCMC(kernel, draws, warmup, hook_fn=hook, disable_progbar=True)
    mcmc.run()
    found = {site: value[None] for site, value in mcmc.get_samples().items()}
    return Run(
        coordinates(found),
        seen[-1] - seen[warmup - 1],
        seen[warmup - 1] - begun,
        seen[-1] - begun,
    )


MASSES = ("diagonal", "dense")
CONTESTANTS: dict[str, Callable[[Problem, int, int], Run]] = {
    f"{kind.__name__}, {mass}, {chains} chain{'s' * (chains > 1)}": partial(
        ours, kind=partial(kind, full_mass=mass == "dense"), chains=chains
    )
    for kind, mass, chains in (
        *((ps.NUTS, "dense", chains) for chains in (1, 4, 16, 64)),
        *((ps.AdaptiveHMC, "dense", chains) for chains in (16, 64)),
    )
}
CONTESTANTS["chosen by the library"] = lambda problem, warmup, draws: ours(
    problem, None, draws
)
if importlib.util.find_spec("numpyro"):
    for mass in MASSES:
        CONTESTANTS[f"NumPyro, {mass}, 4 chains"] = partial(
            numpyro_run, chains=4, dense=mass == "dense"
        )
CONTESTANTS["Pyro, dense, 1 chain"] = pyro_jit


def main() -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument(
        "--contestants", nargs="+", default=list(CONTESTANTS), metavar="NAME"
    )
    arguments.add_argument("--rows", type=int, default=30)
    arguments.add_argument("--columns", type=int, default=20)
    arguments.add_argument("--draws", type=int, default=256, help="of each chain")
    arguments.add_argument("--warmup", type=int, default=256)
    options: argparse.Namespace = parse(arguments)
    if options.quick:
        options.rows, options.columns, options.draws, options.warmup = 8, 3, 20, 20
    arrays = data(options.rows, options.columns)

    def row(contestant: str) -> Row:
        problem = Problem(saas, arrays, torch.float64)
        return CONTESTANTS[contestant](problem, options.warmup, options.draws).row()

    results = Results.of(options, "rows", "columns", "draws", "warmup")
    chosen = [
        name
        for name in CONTESTANTS
        if any(name.startswith(wanted) for wanted in options.contestants)
    ]
    results.fill(row, contestant=chosen)
    results.table("SAAS", ["contestant"], {name: (name, 2) for name in Run.COLUMNS})


if __name__ == "__main__":
    main()
