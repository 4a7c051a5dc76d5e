"""A Pyro model's density in JAX: NumPyro's and BlackJAX's kernels on our flat graph, beside our own kernels.

    python -m benchmarks.performance.jax_bridge [--models schools garch] [--contestants NUTS bridge] [--root FOLDER]

Needs NumPyro, BlackJAX with optax, and torchax. The unconstrained log-density of a model, traced into one flat graph of
PyTorch's operations, is interpreted by JAX's functions (:mod:`~pyro_symmetric.mcmc.density.xla`); JAX differentiates,
maps over chains and compiles. Its energies and gradients at 64 points are compared with ours first, up to 1e-10 of
their size.

``NUTS`` and ``AdaptiveHMC`` are ours with ``engine="inductor"``, and ``... by XLA`` with ``engine="jax"``.

``bridge, NumPyro NUTS`` and ``bridge, BlackJAX ...`` are the kernels of these libraries on that function: NUTS after
their window adaptation of each chain, and ChEES-HMC with its adaptation over all chains; ``NumPyro`` is its NUTS on its
own model. All chains run at once, in float64, with the same counts of warm-up and draws. Columns as those of
``ordinary_models``: the worst coordinate's effective draws over seconds of processor time, of sampling alone, with
warm-up, and with compiling. The last table has the best of the bridge over the best of ours, chains whose R-hat exceeds
1.05 left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pyro_symmetric as ps
from benchmarks.contestants import Problem, Run, coordinates, numpyro_draws, numpyro_run, ours, timed_twice
from benchmarks.harness import Results, Row, parse, parser, print_table
from benchmarks.performance import ordinary_models
from benchmarks.posteriordb.catalogue import ENTRIES
from benchmarks.posteriordb.database import Database
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.xla import FunctionalFlat, interpreted, require_jax

FROM_POSTERIORDB = {"arK": "arK-arK", "garch": "garch-garch11"}
MODELS = (*ordinary_models.MODELS, *FROM_POSTERIORDB)
COLUMNS = ("draws a second", "with warm-up", "all")
EXACT = 1e-10


def problem(model: str, root: Path | None) -> Problem:
    if model in FROM_POSTERIORDB:
        entry = ENTRIES[FROM_POSTERIORDB[model]]
        write, data = entry.write, entry.read(Database(root).data(FROM_POSTERIORDB[model]))
    else:
        write, data = ordinary_models.MODELS[model].write, ordinary_models.MODELS[model].data
    arrays = [np.asarray(array) for array in data]
    return Problem(write, tuple(a.astype(float) if a.dtype.kind == "f" else a for a in arrays), torch.float64)


# the bridge -------------------------------------------------------------------------------------------------------


def energy_in_jax(density: Density) -> Callable[[Any], Any]:
    """The energy ``()`` of a point ``(D,)``."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    flat = FunctionalFlat(lambda z: density.energy(z[None])[0], [torch.zeros(density.dim, dtype=density.dtype)])
    constants = [jnp.asarray(value.numpy()) for value in flat.constants]
    return lambda z: interpreted(flat.pure, [z, *constants])


def agree(density: Density, energy: Callable[[Any], Any]) -> float:
    """The largest difference of energies and gradients at 64 points, relative to their size.

    :raises AssertionError: if it isn't ``EXACT``.
    """
    import jax

    z = 0.5 * torch.randn(64, density.dim, dtype=density.dtype, generator=torch.Generator().manual_seed(0))
    pairs = zip(jax.vmap(jax.value_and_grad(energy))(z.numpy()), density.without_compiling(z), strict=True)
    apart = [
        np.abs(np.asarray(a) - b.numpy()) / (1 + b.abs().flatten(1 if b.ndim > 1 else 0).numpy()) for a, b in pairs
    ]
    worst = max(float(a.max()) for a in apart)
    assert worst < EXACT, worst
    return worst


def by_numpyro(problem: Problem, warmup: int, draws: int, chains: int) -> Run:
    from numpyro.infer import NUTS

    density, energy = bridged(problem)
    found, *seconds = numpyro_draws(NUTS(potential_fn=energy), warmup, draws, chains, starts(density, chains))
    return Run(constrained(density, found), *seconds)


def by_blackjax(problem: Problem, warmup: int, draws: int, chains: int, chees: bool) -> Run:
    import blackjax
    import jax
    import optax

    density, energy = bridged(problem)
    log_density = lambda z: -energy(z)  # noqa: E731
    functions: dict[str, Any] = {}  # among the parameters that ChEES's adaptation returns

    @jax.jit
    def warmed_up(key: Any) -> Any:
        if chees:
            adaptation = blackjax.chees_adaptation(log_density, chains, mass_matrix_estimation="diagonal")
            (states, parameters), _ = adaptation.run(key, starts(density, chains), 0.1, optax.adam(0.05), warmup)
            functions.update({name: value for name, value in parameters.items() if callable(value)})
            return states, {name: value for name, value in parameters.items() if name not in functions}
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        run = lambda key, z: adaptation.run(key, z, num_steps=warmup)[0]  # noqa: E731
        return tuple(jax.vmap(run)(jax.random.split(key, chains), starts(density, chains)))

    @jax.jit
    def drawn(found: Any, key: Any) -> Any:
        def one(key: Any, state: Any, parameters: Any) -> Any:
            kernel = blackjax.dynamic_hmc if chees else blackjax.nuts
            return kernel(log_density, **parameters, **functions).step(key, state)[0]

        def step(states: Any, key: Any) -> Any:
            moved = jax.vmap(one, (0, 0, None if chees else 0))(jax.random.split(key, chains), states, found[1])
            return moved, moved.position

        return jax.lax.scan(step, found[0], jax.random.split(key, draws))[1].swapaxes(0, 1)

    drawn_z, *seconds = timed_twice(warmed_up, drawn)
    return Run(constrained(density, drawn_z), *seconds)


def bridged(problem: Problem) -> tuple[Density, Callable[[Any], Any]]:
    require_jax()
    density = Density(problem.in_pyro(), dtype=problem.dtype, engine="torch")
    energy = energy_in_jax(density)
    print(f"  energies and gradients differ by {agree(density, energy):.1e}")
    return density, energy


def starts(density: Density, chains: int) -> Any:
    """Uniform in (-2, 2), as NumPyro starts chains."""
    return np.random.default_rng(0).uniform(-2, 2, (chains, density.dim))


def constrained(density: Density, z: Any) -> torch.Tensor:
    z = torch.as_tensor(np.array(z))
    found = density.layout.constrain(z.flatten(0, 1))
    return coordinates({site: value.unflatten(0, z.shape[:2]) for site, value in found.items()})


# the table ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., Run]] = {
    "NUTS": partial(ours, kind=ps.NUTS, engine="inductor"),
    "NUTS by XLA": partial(ours, kind=ps.NUTS, engine="jax"),
    "AdaptiveHMC": partial(ours, kind=ps.AdaptiveHMC, engine="inductor"),
    "AdaptiveHMC by XLA": partial(ours, kind=ps.AdaptiveHMC, engine="jax"),
    "NumPyro": partial(numpyro_run, dense=False),
    "bridge, NumPyro NUTS": by_numpyro,
    "bridge, BlackJAX NUTS": partial(by_blackjax, chees=False),
    "bridge, BlackJAX ChEES": partial(by_blackjax, chees=True),
}
CONTESTANTS = {
    f"{name}, {chains} chains": partial(kind, chains=chains) for chains in (16, 64) for name, kind in KINDS.items()
}


def best(rows: list[Row], column: str) -> float:
    return max((row[column] for row in rows if row["R-hat"] < 1.05), default=math.nan)


def main() -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments.add_argument("--contestants", nargs="+", default=[""], metavar="NAME", help="those that start alike")
    arguments.add_argument("--root", type=Path, help="folder posterior_database of a copy; else files are fetched")
    arguments.add_argument("--draws", type=int, default=1000, help="of each chain")
    arguments.add_argument("--warmup", type=int, default=500)
    options: argparse.Namespace = parse(arguments)
    if options.quick:
        options.draws, options.warmup = 40, 40

    def row(model: str, contestant: str) -> Row:
        print(f"{model}: {contestant}")
        return CONTESTANTS[contestant](problem(model, options.root), options.warmup, options.draws).row()

    results = Results.of(options, "draws", "warmup")
    chosen = [name for name in CONTESTANTS if name.startswith(tuple(options.contestants))]
    results.fill(row, model=options.models, contestant=chosen)
    header = ["contestant", "worst effective", "R-hat", *COLUMNS]
    for model in options.models:
        rows = results.find(model=model)
        print_table(model, header, [[r["contestant"], *(f"{r[name]:.4g}" for name in header[1:])] for r in rows])
    lines = []
    for model in options.models:
        rows = results.find(model=model)
        bridge = [row for row in rows if row["contestant"].startswith("bridge")]
        own = [row for row in rows if row["contestant"].startswith(("NUTS", "AdaptiveHMC"))]
        lines.append([model, *(best(bridge, column) / best(own, column) for column in COLUMNS)])
    lines.append(["median", *(statistics.median(column) for column in list(zip(*lines, strict=True))[1:])])
    print_table("Bridge over ours", ["model", *COLUMNS], [[line[0], *(f"{v:.3g}" for v in line[1:])] for line in lines])


if __name__ == "__main__":
    main()
