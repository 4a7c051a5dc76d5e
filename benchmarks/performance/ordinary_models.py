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
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.chain_statistics import chain_statistics

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


MODELS: dict[str, tuple[Callable[..., None], tuple[np.ndarray, ...]]] = {
    "schools": (schools, (np.array(Y, np.float32), np.array(S, np.float32))),
    "logistic": (logistic, logistic_data()),
    "counties": (counties, county_data()),
}


@dataclass
class Run:
    """Draws ``(C, S, K)`` of all coordinates, and seconds of processor time."""

    draws: Tensor
    sampling: float
    warmup: float
    everything: float


def ours(name: str, options: argparse.Namespace, kind: type[Any], chains: int, engine: str) -> Run:
    write, arrays = MODELS[name]
    data = tuple(torch.as_tensor(a) for a in arrays)

    def model() -> None:
        write(dist, pyro.sample, pyro.plate, torch, data)

    def timed(warm: int, keep: int) -> tuple[ps.Posterior, float]:
        begun = time.process_time()
        found = ps.sample(
            kind(model), num_samples=keep, num_warmup=warm, num_chains=chains, engine=engine, seed=0, progress=False
        )
        return found, time.process_time() - begun

    _, first = timed(25, 2)  # compiles
    _, again = timed(25, 2)
    posterior, whole = timed(options.warmup, options.draws)
    seconds = posterior.metadata["seconds"]
    share = seconds["sampling"] / (seconds["sampling"] + seconds["warmup"])
    values = torch.cat([v.reshape(*v.shape[:2], -1) for v in posterior.samples.values()], -1)
    return Run(values, whole * share, whole * (1 - share), whole + first - again)


def numpyro_run(name: str, options: argparse.Namespace, chains: int, dense: bool) -> Run:
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as npd
    from numpyro.infer import MCMC, NUTS

    write, arrays = MODELS[name]
    data = tuple(jnp.asarray(a) for a in arrays)

    def model() -> None:
        write(npd, numpyro.sample, numpyro.plate, jnp, data)

    mcmc = MCMC(
        NUTS(model, dense_mass=dense),
        num_warmup=options.warmup,
        num_samples=options.draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    begun = time.process_time()
    mcmc.warmup(jax.random.PRNGKey(0))
    mcmc.run(jax.random.PRNGKey(1))
    jax.block_until_ready(mcmc.get_samples())
    everything = time.process_time() - begun
    begun = time.process_time()
    mcmc.warmup(jax.random.PRNGKey(0))
    middle = time.process_time()
    mcmc.run(jax.random.PRNGKey(1))
    jax.block_until_ready(mcmc.get_samples())
    end = time.process_time()
    found = mcmc.get_samples(group_by_chain=True)
    values = torch.cat([torch.as_tensor(np.array(v)).reshape(*v.shape[:2], -1) for v in found.values()], -1)
    return Run(values, end - middle, middle - begun, everything)


def pyro_run(name: str, options: argparse.Namespace) -> Run:
    from pyro.infer import MCMC, NUTS

    write, arrays = MODELS[name]
    data = tuple(torch.as_tensor(a) for a in arrays)

    def model() -> None:
        write(dist, pyro.sample, pyro.plate, torch, data)

    pyro.set_rng_seed(0)
    draws, warmup = max(10, options.draws // 10), max(10, options.warmup // 10)
    mcmc = MCMC(NUTS(model), num_samples=draws, warmup_steps=warmup, disable_progbar=True)
    begun = time.process_time()
    mcmc.run()
    whole = time.process_time() - begun
    values = torch.cat([v.reshape(1, len(v), -1) for v in mcmc.get_samples().values()], -1)
    share = draws / (draws + warmup)
    return Run(values, whole * share, whole * (1 - share), whole)


CONTESTANTS: dict[str, Callable[[str, argparse.Namespace], Run]] = {
    f"{kind.__name__}, {chains} chains, {engine}": partial(ours, kind=kind, chains=chains, engine=engine)
    for kind, chains, engine in (
        (ps.NUTS, 4, "torch"),
        (ps.NUTS, 4, "inductor"),
        (ps.NUTS, 64, "inductor"),
        (ps.AdaptiveHMC, 64, "torch"),
        (ps.AdaptiveHMC, 64, "inductor"),
    )
}
if importlib.util.find_spec("numpyro"):
    for chains, dense in ((4, False), (4, True), (64, False)):
        mass = "dense" if dense else "diagonal"
        CONTESTANTS[f"NumPyro NUTS, {chains} chains, {mass}"] = partial(numpyro_run, chains=chains, dense=dense)
CONTESTANTS["Pyro NUTS, 1 chain"] = pyro_run


def row(options: argparse.Namespace, model: str, contestant: str) -> Row:
    run = CONTESTANTS[contestant](model, options)
    found = chain_statistics(run.draws.double())
    worst = found.ess_bulk.min().item()
    return {
        "worst effective": worst,
        "R-hat": found.r_hat.max().item(),
        "draws a second": worst / run.sampling,
        "with warm-up": worst / (run.sampling + run.warmup),
        "all": worst / run.everything,
    }


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
