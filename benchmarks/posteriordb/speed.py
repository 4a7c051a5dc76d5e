"""Effective draws a second on posteriordb: this library beside the NUTS of NumPyro and
of BlackJAX, at their best, and of Pyro.

    python -m benchmarks.posteriordb.speed [--posteriors arK-arK garch-garch11] [--root
    FOLDER] [--json FILE]

Ours are ``chosen``, a call of ``sample`` with the model and the number of draws, and
two kernels with all else by default and as many warm-up iterations as NumPyro,
compiled. What counts is the worst coordinate's effective sample size (bulk, of all chains) over
seconds of processor time: ``sampling`` alone; ``warm`` with warm-up, all being
compiled; ``cold`` with compiling, which NumPyro does in every process and this library
once (its programs are kept on disk: empty PyTorch's cache for a first run's figures).
NumPyro runs 4 chains one after another and at once, and 64 at once, each with a
diagonal and with a dense mass matrix; BlackJAX 4 and 64 chains at once, each with a
diagonal matrix of its own. The best of a library counts, for each column apart. Pyro
runs one chain, of a tenth of the iterations or of all. Chains whose R-hat exceeds 1.05
sampled something else and count as no draws; where a peer has none, there is no ratio.
All figures of a posterior come from one process of one thread: compare ratios, not
seconds, if the machine has other work. Seeds after the first find all compiled, and
have no ``cold``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import pyro_symmetric as ps
from benchmarks.contestants import (
    Problem,
    Run,
    blackjax_run,
    numpyro_run,
    ours,
    pyro_run,
)
from benchmarks.harness import Results, Row, parse, parser, print_table
from benchmarks.performance.side_by_side import ONE_THREAD
from benchmarks.posteriordb.catalogue import ENTRIES
from benchmarks.posteriordb.database import Database

R_HAT = 1.05
OURS: dict[str, Callable[..., Run]] = {
    "chosen": lambda problem, warmup, draws, seed: ours(
        problem, None, draws, seed=seed
    ),
    **{
        f"{kind.__name__}, {chains} chains": partial(
            ours, kind=kind, chains=chains, engine="compiled"
        )
        for kind, chains in ((ps.NUTS, 4), (ps.AdaptiveHMC, 16))
    },
}
NUMPYRO: dict[str, Callable[..., Run]] = {
    f"NumPyro, {chains} {method}, {'dense' if dense else 'diagonal'}": partial(
        numpyro_run, chains=chains, dense=dense, method=method
    )
    for chains, method in ((4, "vectorized"), (4, "sequential"), (64, "vectorized"))
    for dense in (False, True)
}
BLACKJAX: dict[str, Callable[..., Run]] = {
    f"BlackJAX, {chains} vectorized": partial(blackjax_run, chains=chains)
    for chains in (4, 64)
}
PYRO: dict[str, Callable[..., Run]] = {
    "Pyro": pyro_run,
    "Pyro, all iterations": partial(pyro_run, part=1.0),
}
COLUMNS = {"sampling": "draws a second", "warm": "with warm-up", "cold": "all"}


def row(options: argparse.Namespace, posterior: str, contestant: str, seed: int) -> Row:
    entry = ENTRIES[posterior]
    arrays = tuple(
        np.asarray(array)
        for array in entry.read(Database(options.root).data(posterior))
    )
    problem = Problem(entry.write, arrays, getattr(torch, options.dtype))
    run = {**OURS, **NUMPYRO, **BLACKJAX, **PYRO}[contestant]
    numbers = run(problem, options.warmup, options.draws, seed=seed).row()
    if seed:
        numbers["all"] = math.nan
    return numbers


def best(rows: list[Row], column: str) -> float:
    """Return the most effective draws a second of any row; chains that disagree have
    none.
    """
    agreeing = [row for row in rows if row["R-hat"] < R_HAT]
    return max((row[column] for row in agreeing), default=0.0)


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
        "--contestants",
        nargs="+",
        default=[*OURS, *NUMPYRO, *BLACKJAX, *PYRO],
        metavar="NAME",
    )
    arguments.add_argument("--dtype", default="float64", choices=["float32", "float64"])
    arguments.add_argument(
        "--root",
        type=Path,
        help="folder posterior_database of a copy; by default files are fetched",
    )
    arguments.add_argument(
        "--draws", type=int, default=1000, help="of each chain; a tenth of it by Pyro"
    )
    arguments.add_argument("--warmup", type=int, default=500)
    options = parse(arguments)
    if options.quick:
        options.draws, options.warmup = 40, 40
    known = [*OURS, *PYRO]
    os.environ.update(ONE_THREAD)  # read when JAX is imported
    peers = ["jax"]
    if importlib.util.find_spec("numpyro"):
        known += NUMPYRO
        peers.append("numpyro")
        if importlib.util.find_spec("blackjax"):  # takes NumPyro's densities
            known += BLACKJAX
            peers.append("blackjax")
        print(", ".join(f"{name} {version(name)}" for name in peers))
    chosen = [name for name in known if name in options.contestants]
    results = Results.of(options, "draws", "warmup", "dtype")
    results.fill(
        partial(row, options),
        posterior=options.posteriors,
        seed=range(options.seeds),
        contestant=chosen,
    )
    for posterior in options.posteriors:
        lines = []
        for contestant in chosen:
            rows = results.find(posterior=posterior, contestant=contestant)
            lines.append([contestant])
            for name in ("worst effective", "R-hat", *COLUMNS.values()):
                lines[-1].append(told([found[name] for found in rows]))
        heads = ["contestant", "worst effective", "R-hat", *COLUMNS]
        print_table(f"{posterior}; over {options.seeds} seeds", heads, lines)
    ratios(results, options, [name for name in chosen if name in OURS])


def told(values: list[float]) -> str:
    """Return the mean of values that are known, with its standard error."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    mean = f"{statistics.fmean(known):.4g}"
    if len(known) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(known) / math.sqrt(len(known)):.2g}"


def ratios(results: Results, options: argparse.Namespace, names: list[str]) -> None:
    """Print each of our samplers' effective draws a second over those of NumPyro's and
    of BlackJAX's best and of Pyro's, seed by seed.
    """
    for title, peers in (
        ("NumPyro's best", NUMPYRO),
        ("BlackJAX's best", BLACKJAX),
        ("Pyro", PYRO),
    ):
        for column, key in COLUMNS.items():
            means: dict[str, list[float]] = {name: [] for name in names}
            lines = []
            for posterior in options.posteriors:
                lines.append([posterior])
                for name in names:
                    found = [
                        ratio(
                            results.find(posterior=posterior, seed=seed),
                            name,
                            peers,
                            key,
                        )
                        for seed in range(options.seeds)
                    ]
                    lines[-1].append(told(found))
                    means[name] += [v for v in found if not math.isnan(v)]
            if len(options.posteriors) > 1:
                for label, summary in (("median", statistics.median), ("least", min)):
                    lines.append([label])
                    for known in means.values():
                        lines[-1].append(f"{summary(known):.3g}" if known else "-")
            print_table(f"Against {title}, {column}", ["posterior", *names], lines)


def ratio(rows: list[Row], name: str, peers: Iterable[str], column: str) -> float:
    """Return how many times the effective draws a second of the best peer a contestant
    has; NaN if no peer has any.
    """
    ours = best([row for row in rows if row["contestant"] == name], column)
    theirs = best([row for row in rows if row["contestant"] in peers], column)
    return ours / theirs if theirs else math.nan


if __name__ == "__main__":
    main()
