"""Effective draws a second on ordinary Pyro models: this library with and without compiling, NumPyro, and Pyro.

    python -m benchmarks.performance.ordinary_models [--models schools logistic counties]

Models: ``schools``, eight schools, not centred; ``logistic``, a regression of 500 rows on 24 correlated columns;
``counties``, 919 rows in 85 groups with intercepts and slopes that vary (the shape of the radon study, simulated).

Every contestant warms up and draws by its own defaults, in float32. What counts is the worst coordinate's effective
sample size (bulk, rank-normalised, of all chains), over seconds of processor time: ``draws a second`` of sampling
alone, once all is compiled; ``with warm-up`` of warm-up and sampling; ``all`` with compiling, from an empty cache for
NumPyro, which keeps none, and from PyTorch's cache on disk as it is found for this library. Times of contestants can be
compared if they ran in one process on a machine that does little else.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import pyro_symmetric as ps
from benchmarks.contestants import Problem, Run, numpyro_run, ours, pyro_run
from benchmarks.harness import Results, Row, parse, parser, print_table

Y = [28.0, 8, -3, 7, -1, 1, 18, 12]
S = [15.0, 10, 16, 11, 9, 11, 10, 18]


def logistic_data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(500, 24)) @ (np.eye(24) + 0.2 * draw.normal(size=(24, 24)))
    y = draw.random(500) < 1 / (1 + np.exp(-x @ (0.4 * draw.normal(size=24))))
    return x.astype(np.float32), y.astype(np.float32)


def county_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    county, floor = draw.integers(85, size=919), draw.integers(2, size=919).astype(np.float32)
    y = 1.5 + 0.3 * draw.normal(size=85)[county] + (-0.6 + 0.2 * draw.normal(size=85))[county] * floor
    return county, floor, (y + 0.8 * draw.normal(size=919)).astype(np.float32)


def schools(d: Any, sample: Callable[..., Any], plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    y, s = data
    mu, tau = sample("mu", d.Normal(0.0, 5.0)), sample("tau", d.HalfCauchy(5.0))
    with plate("schools", 8):
        effect = sample("effect", d.Normal(0.0, 1.0))
        sample("y", d.Normal(mu + tau * effect, s), obs=y)


def logistic(d: Any, sample: Callable[..., Any], plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    x, y = data
    bias = sample("bias", d.Normal(0.0, 2.0))
    w = sample("w", d.Normal(lib.zeros(24), 1.0).to_event(1))
    with plate("rows", len(y)):
        logits = bias + (x * w).sum(-1)
        sample("y", d.Bernoulli(logits=logits), obs=y)


def counties(d: Any, sample: Callable[..., Any], plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    county, floor, y = data
    a, b = sample("a", d.Normal(0.0, 5.0)), sample("b", d.Normal(0.0, 5.0))
    sa, sb = sample("sa", d.HalfNormal(1.0)), sample("sb", d.HalfNormal(1.0))
    noise = sample("noise", d.HalfNormal(2.0))
    with plate("counties", 85):
        da, db = sample("da", d.Normal(0.0, 1.0)), sample("db", d.Normal(0.0, 1.0))
    with plate("rows", len(y)):
        sample("y", d.Normal((a + sa * da)[county] + (b + sb * db)[county] * floor, noise), obs=y)


MODELS = {
    "schools": Problem(schools, (np.array(Y, np.float32), np.array(S, np.float32))),
    "logistic": Problem(logistic, logistic_data()),
    "counties": Problem(counties, county_data()),
}

CONTESTANTS: dict[str, Callable[[Problem, int, int], Run]] = {
    f"{kind.__name__}, {chains} chains, {engine}": partial(ours, kind=kind, chains=chains, engine=engine)
    for kind, chains, engine in (
        (ps.NUTS, 4, "torch"),
        (ps.NUTS, 4, "inductor"),
        (ps.NUTS, 64, "inductor"),
        (ps.AdaptiveHMC, 64, "torch"),
        (ps.AdaptiveHMC, 64, "inductor"),
    )
}
CONTESTANTS["as chosen"] = lambda problem, warmup, draws: ours(problem, None, draws)
if importlib.util.find_spec("numpyro"):
    for chains, dense in ((4, False), (4, True), (64, False)):
        mass = "dense" if dense else "diagonal"
        CONTESTANTS[f"NumPyro NUTS, {chains} chains, {mass}"] = partial(numpyro_run, chains=chains, dense=dense)
CONTESTANTS["Pyro NUTS, 1 chain"] = pyro_run


def row(options: argparse.Namespace, model: str, contestant: str) -> Row:
    return CONTESTANTS[contestant](MODELS[model], options.warmup, options.draws).row()


def main() -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--draws", type=int, default=1000, help="of each chain; a tenth of it by Pyro")
    arguments.add_argument("--warmup", type=int, default=500)
    options = parse(arguments)
    if options.quick:
        options.draws, options.warmup = 40, 40
    results = Results.of(options, "draws", "warmup")
    results.fill(partial(row, options), model=options.models, contestant=CONTESTANTS)
    header = ["contestant", "worst effective", "R-hat", "draws a second", "with warm-up", "all"]
    for model in options.models:
        rows = results.find(model=model)
        print_table(model, header, [[r["contestant"], *(f"{r[name]:.4g}" for name in header[1:])] for r in rows])


if __name__ == "__main__":
    main()
