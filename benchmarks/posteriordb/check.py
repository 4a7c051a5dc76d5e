"""Check each model against its Stan program, at reference draws.

    python -m benchmarks.posteriordb.check [--posteriors arK-arK garch-garch11] [--root FOLDER]

For some reference draws, the model's log-density is compared with that of the Stan program, transcribed to NumPy
and SciPy (``stan_programs``): their difference must be the same for all draws, as densities are told up to a constant.
The spread of that difference is shown, in Pyro and, if it is installed, in NumPyro, all in float64. A spread of 1e-3
would change the posterior by one in a thousand.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pyro import poutine

from benchmarks.contestants import Problem
from benchmarks.harness import print_table
from benchmarks.posteriordb.catalogue import ENTRIES, gathered
from benchmarks.posteriordb.database import Database
from benchmarks.posteriordb.stan_programs import log_density

Array = NDArray[Any]
LIMITS = {"hudson_lynx_hare-lotka_volterra": 1e-3, "one_comp_mm_elim_abs-one_comp_mm_elim_abs": 1e-3}
LIMIT = 1e-6


def in_pyro(problem: Problem, sites: dict[str, Array]) -> Array:
    """Log-densities of the values ``(draws, ...)`` of all sites."""
    model = problem.in_pyro()

    def one(place: int) -> float:
        values = {name: torch.as_tensor(value[place]) for name, value in sites.items()}
        return poutine.trace(poutine.condition(model, data=values)).get_trace().log_prob_sum().item()

    return np.array([one(place) for place in range(len(next(iter(sites.values()))))])


def in_numpyro(problem: Problem, sites: dict[str, Array]) -> Array:
    import jax
    from numpyro.infer.util import log_density as numpyro_log_density

    model = problem.in_numpyro()
    return np.array(jax.vmap(lambda own: numpyro_log_density(model, (), {}, own)[0])(sites))


def spread(posterior: str, database: Database, libraries: list[Callable[..., Array]], count: int) -> list[float]:
    """Largest distance of the difference of log-densities from its median, in each library."""
    entry, data = ENTRIES[posterior], database.data(posterior)
    program = log_density(posterior.partition("-")[2])
    reference = {name: np.concatenate(value) for name, value in gathered(database.draws(posterior)).items()}
    chosen = np.linspace(0, len(next(iter(reference.values()))) - 1, count).astype(int)
    stan = {name: value[chosen] for name, value in reference.items()}
    expected = np.array([program(data, **{name: value[i] for name, value in stan.items()}) for i in range(count)])
    expected += entry.log_volume(stan)
    arrays = tuple(np.asarray(array) for array in entry.read(data))
    sites = entry.to_sites(stan)
    problem = Problem(entry.write, arrays, torch.float64)
    differences = [evaluate(problem, sites) - expected for evaluate in libraries]
    return [float(np.abs(own - np.median(own)).max()) for own in differences]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--posteriors", nargs="+", default=list(ENTRIES), choices=list(ENTRIES), metavar="NAME")
    arguments.add_argument(
        "--root", type=Path, help="folder posterior_database of a copy; by default files are fetched"
    )
    arguments.add_argument("--draws", type=int, default=20, help="at which densities are compared")
    options = arguments.parse_args()
    torch.set_default_dtype(
        torch.float64
    )  # some densities, as of Gamma(25.0, 4.0), are evaluated in that of its arguments
    libraries: list[Callable[..., Array]] = [in_pyro]
    if importlib.util.find_spec("numpyro"):
        libraries.append(in_numpyro)
    rows, failed = [], []
    for posterior in options.posteriors:
        found = spread(posterior, Database(options.root), libraries, options.draws)
        rows.append([posterior, *(f"{value:.1e}" for value in found)])
        if not max(found) < LIMITS.get(posterior, LIMIT):
            failed.append(posterior)
    header = ["posterior", *(own.__name__.removeprefix("in_") for own in libraries)]
    print_table("Spread of the difference to the Stan program's log-density", header, rows)
    print(f"\n{len(rows) - len(failed)} of {len(rows)} agree" + (f"; not {', '.join(failed)}" if failed else ""))
    return len(failed) > 0


if __name__ == "__main__":
    raise SystemExit(main())
