"""Means and deviations of posteriordb's posteriors beside its reference draws, at this
library's defaults.

    python -m benchmarks.posteriordb.accuracy [--posteriors arK-arK garch-garch11]
        [--kernels NUTS] [--dtypes float32 float64] [--root FOLDER] [--json FILE]

``chosen`` is a call of ``sample`` with nothing but the model; NUTS runs 4 chains,
AdaptiveHMC 16, all else by default.

Each of Stan's parameters has two numbers, its mean and its standard deviation, of our
draws and of the reference's. The distance of the two is told in standard errors, which
are those of both, combined: of a mean the deviation over the root of the effective
sample size, of a deviation likewise from the squared distances to the mean (by the
delta method). Effective sizes are those of the values themselves, not of their ranks.
The reference's 10,000 draws are nearly independent, so its errors are a hundredth of
the deviation; ours must be small enough to be a test, and are shown, too.

Of this many numbers some are far off by chance. The limit is that which the largest of
all numbers of the run exceeds with probability 0.01 if all are right (Bonferroni), and
at least 4. A posterior ``fails`` beyond it, or with an R-hat of 1.01 or more.
Parameters of infinite variance (``K_m`` and ``V_m`` of the drug) are compared by their
logarithms.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

import pyro_symmetric as ps
from benchmarks.contestants import Problem
from benchmarks.harness import Results, Row, parse, parser, print_table
from benchmarks.posteriordb.catalogue import ENTRIES, Draws, Entry, gathered, named
from benchmarks.posteriordb.database import Database
from pyro_symmetric.posterior.statistics import chain_statistics, effective_size

Array = NDArray[np.float64]
KERNELS: dict[str, Callable[..., ps.Posterior]] = {
    "chosen": lambda model, **own: ps.sample(model, **own),
    "NUTS": lambda model, **own: ps.sample(ps.NUTS(model), **own),
    "AdaptiveHMC": lambda model, **own: ps.sample(
        ps.AdaptiveHMC(model), num_chains=16, **own
    ),
}
FALSE_ALARMS = 0.01  # of a run in which all is right
R_HAT = 1.01


@dataclass(frozen=True)
class Moments:
    """Means and deviations ``(K,)`` of draws, and their standard errors."""

    mean: Array
    mean_error: Array
    deviation: Array
    deviation_error: Array

    @classmethod
    def of(cls, draws: Array) -> Moments:
        """Of draws ``(K, chains, draws)``."""
        mean, deviation = draws.mean((1, 2)), draws.std((1, 2), ddof=1)
        squares = (draws - mean[:, None, None]) ** 2
        error = (
            squares.std((1, 2), ddof=1) / np.sqrt(_effective(squares)) / (2 * deviation)
        )
        return cls(mean, deviation / np.sqrt(_effective(draws)), deviation, error)


def _effective(draws: Array) -> Array:
    half = draws.shape[-1] // 2
    return effective_size(np.concatenate([draws[..., :half], draws[..., -half:]], 1))


def distances(found: Moments, reference: Moments) -> tuple[Array, Array]:
    """Distances of means and of deviations, ``(K,)`` each, in combined standard
    errors.
    """
    means = (found.mean - reference.mean) / np.hypot(
        found.mean_error, reference.mean_error
    )
    spread = (found.deviation - reference.deviation) / np.hypot(
        found.deviation_error, reference.deviation_error
    )
    return means, spread


def limit(count: int) -> float:
    """A bound that the largest of so many normal numbers exceeds with probability
    ``FALSE_ALARMS``, at least 4.
    """
    return max(4.0, float(stats.norm.isf(FALSE_ALARMS / (2 * count))))


def numbers(entry: Entry, parameters: Draws) -> dict[str, Array]:
    """All numbers that are compared, ``(chains, draws)``, by name."""
    found = named(parameters)
    return {
        name: np.log(value) if name in entry.logarithms else value
        for name, value in found.items()
    }


def row(options: argparse.Namespace, posterior: str, kernel: str, dtype: str) -> Row:
    database, entry = Database(options.root), ENTRIES[posterior]
    arrays = tuple(np.asarray(array) for array in entry.read(database.data(posterior)))
    precision = getattr(torch, dtype)
    model = Problem(entry.write, arrays, precision).in_pyro()
    settings = {"num_samples": 1000}
    if options.quick:
        settings = {"num_samples": 40, "num_warmup": 40}
    begun = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            drawn = KERNELS[kernel](
                model, dtype=precision, seed=0, progress=False, **settings
            )
        # of the model itself, as a covariance that isn't positive definite in float32
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
    seconds = time.process_time() - begun
    ours = numbers(
        entry,
        entry.to_stan({name: v.double().numpy() for name, v in drawn.samples.items()}),
    )
    theirs = numbers(entry, gathered(database.draws(posterior)))
    names = list(theirs)
    found = chain_statistics(
        torch.stack([torch.as_tensor(ours[name]) for name in names], -1)
    )
    with np.errstate(all="ignore"):
        apart = distances(
            *(
                Moments.of(np.stack([draws[name] for name in names]))
                for draws in (ours, theirs)
            )
        )
    means, spread = (
        {name: round(float(z), 2) for name, z in zip(names, own, strict=True)}
        for own in apart
    )
    return {
        "means": means,
        "deviations": spread,
        "r_hat": found.r_hat.max().item(),
        "effective": found.ess_bulk.min().item(),
        "diverging": drawn.statistics["diverging"].double().mean().item(),
        "seconds": seconds,
        "warm-up": drawn.metadata.get("num_warmup"),
        "run": drawn.metadata.get("chosen") or f"{drawn.num_chains} chains",
        "warnings": [
            str(own.message)
            for own in caught
            if issubclass(own.category, RuntimeWarning)
        ],
    }


def _worst(values: dict[str, float]) -> tuple[str, float]:
    """The name and size of the number that lies farthest off; NaN, if any, counts as
    that.
    """
    name = max(
        values, key=lambda own: np.inf if np.isnan(values[own]) else abs(values[own])
    )
    return name, values[name]


def passes(row: Row, largest: float) -> bool:
    worst = [abs(_worst(row[kind])[1]) for kind in ("means", "deviations")]
    return max(worst) < largest and not np.isnan(worst).any() and row["r_hat"] < R_HAT


def main() -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument(
        "--posteriors",
        nargs="+",
        default=list(ENTRIES),
        choices=list(ENTRIES),
        metavar="NAME",
    )
    arguments.add_argument(
        "--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS)
    )
    arguments.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "float64"],
        choices=["float32", "float64"],
    )
    arguments.add_argument(
        "--root",
        type=Path,
        help="folder posterior_database of a copy; by default files are fetched",
    )
    options = parse(arguments)
    results = Results.of(options, "quick")
    results.fill(
        partial(row, options),
        posterior=options.posteriors,
        kernel=options.kernels,
        dtype=options.dtypes,
    )
    rows = [
        own
        for own in results.rows
        if own["posterior"] in options.posteriors and own["kernel"] in options.kernels
    ]
    rows = [own for own in rows if own["dtype"] in options.dtypes]
    failed, rows = (
        [own for own in rows if "error" in own],
        [own for own in rows if "error" not in own],
    )
    largest = limit(sum(len(own["means"]) + len(own["deviations"]) for own in rows))
    header = [
        "posterior",
        "kernel",
        "dtype",
        "mean",
        "",
        "deviation",
        "",
        "R-hat",
        "effective",
        "diverging",
        "s",
        "",
    ]
    lines = []
    for own in rows:
        (mean, z), (deviation, w) = _worst(own["means"]), _worst(own["deviations"])
        numbers = [
            f"{own['r_hat']:.3f}",
            f"{own['effective']:.0f}",
            f"{own['diverging']:.2%}",
            f"{own['seconds']:.0f}",
        ]
        verdict = "" if passes(own, largest) else "fails"
        key = [own["posterior"], own["kernel"], own["dtype"]]
        lines.append([*key, f"{z:.1f}", mean, f"{w:.1f}", deviation, *numbers, verdict])
    print_table(
        "Largest distances from the reference, in standard errors", header, lines
    )
    for own in failed:
        print(f"  {own['posterior']}, {own['kernel']}, {own['dtype']}: {own['error']}")
    good = sum(passes(own, largest) for own in rows)
    print(
        f"\n{good} of {len(rows) + len(failed)} within {largest:.2f} standard errors "
        f"and with an R-hat under {R_HAT}"
    )


if __name__ == "__main__":
    main()
