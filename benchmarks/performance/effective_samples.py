"""Effective draws a processor second on eleven ordinary models: this library's
``sample`` and NumPyro's NUTS, in turn.

    python -m benchmarks.performance.effective_samples [--model linear ...]
    [--json FILE]

What counts is the worst coordinate's effective sample size (bulk, of all chains, as
ArviZ computes it). Components of a mixture may exchange their labels, so those of each
draw are ordered by their means first. Each library runs each model in a fresh process,
twice: ``cold`` are effective draws over the seconds of a first call, with compiling but
without imports; ``warm`` over those of the second call, with warm-up; ``sampling``
without it. Ours is a call with nothing but the model, which ends at 1,000 effective
draws; NumPyro runs 4 chains at once, of 1,000 iterations of warm-up and 1,000 draws,
and compiles both once for both calls. Both have one thread and compute in single
precision. NumPyro takes part where it is installed.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import Problem, numpyro_run, ours
from benchmarks.harness import Results, Row, parse, parser
from benchmarks.performance.eleven_densities import DENSITIES
from benchmarks.performance.eleven_models import models
from benchmarks.performance.side_by_side import (
    OURS,
    in_fresh_process,
    libraries,
    print_ratios,
)

CALL = """
import json, sys
from benchmarks.performance.effective_samples import measured
name, seed, library, quick = sys.argv[1:]
print(json.dumps(measured(name, int(seed), library, quick == "True")))
"""
RATES = ("cold", "warm", "sampling")


def problem(name: str) -> Problem:
    """Return both libraries' versions of a model."""
    _, data = models()[name]
    return Problem(DENSITIES[name], tuple(value.numpy() for value in data))


def ordered(draws: Tensor) -> Tensor:
    """Order the components of a mixture by their means.

    :param draws: ``(C, S, 3 * K)``: weights, means and scales.
    """
    sites = draws.unflatten(-1, (3, -1))
    by_mean = sites[..., 1:2, :].argsort(-1).expand_as(sites)
    return sites.gather(-1, by_mean).flatten(-2)


def measured(name: str, seed: int, library: str, quick: bool) -> Row:
    """Return effective draws, seconds, and rates of both calls of one library."""
    torch.set_num_threads(1)
    if library == OURS:
        model, args = models()[name]
        length: tuple[int | None, int | None, int | None] = (None, None, None)
        warmup, draws, chains = (20, 20, 2) if quick else length
        found = ours(
            problem(name),
            warmup,
            draws,
            lambda _: model,
            chains,
            args=args,
            seed=seed,
        )
    else:
        warmup, draws, chains = (20, 20, 2) if quick else (1000, 1000, 4)
        found = numpyro_run(
            problem(name), warmup, draws, chains, dense=False, seed=seed
        )
    function = ordered if name.startswith("mixture") else Tensor.double
    row = found.row(function)
    return {
        "draws": found.draws.shape[:2].numel(),
        "effective": row["worst effective"],
        "R-hat": row["R-hat"],
        "first call, s": found.everything,
        "warm-up, s": found.warmup,
        "sampling, s": found.sampling,
        "cold": row["all"],
        "warm": row["with warm-up"],
        "sampling": row["draws a second"],
    }


def run(model: str, seed: int, library: str, options: Any) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (model, str(seed), library, str(options.quick))
        return in_fresh_process(CALL, Path(folder), *arguments)


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    names = list(models())
    arguments.add_argument("--model", nargs="+", choices=names, default=names)
    options = parse(arguments, argv)
    results = Results.of(options, "quick")
    grid = {
        "model": options.model,
        "seed": range(options.seeds),
        "library": libraries(),
    }
    results.fill(functools.partial(run, options=options), **grid)
    columns: dict[str, tuple[Any, int]] = {
        "draws": ("draws", 0),
        "effective": ("effective", 0),
        "R-hat": ("R-hat", 3),
        **{f"{name}, s": (f"{name}, s", 1) for name in ("first call", "warm-up")},
        "sampling, s": ("sampling, s", 1),
        **{name: (name, 1) for name in RATES},
    }
    results.table(
        "effective draws of the worst coordinate, and how many a processor second",
        ["model", "library"],
        columns,
    )
    print_ratios(results, "effective draws a second, ours / NumPyro's", RATES)


if __name__ == "__main__":
    main()
