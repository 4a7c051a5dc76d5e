"""The leaderboard: how far approximations are from the reference posteriors.

    python -m benchmarks.references.table --json runs/leaderboard.json
    python -m benchmarks.references.table --json runs/leaderboard.json --write
    python -m benchmarks.references.table --draws mine.safetensors yacht-50

Every method is fitted to every certified reference with ``--seeds`` seeds and gives 500
draws, which :func:`pyro_symmetric.compare.against_reference` compares. ``--write`` writes
``docs/reference/leaderboard.csv``, means and standard errors over seeds, and
``docs/reference/references.csv``, what the certificates say.

A row of your own: save draws ``(S, *site_shape)`` by site as a safetensors or npz file,
from any library, and pass it by ``--draws``; add the printed row to the table with how
the draws were made.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import pyro
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser
from benchmarks.references.make import best
from pyro_symmetric.datasets import Reference
from pyro_symmetric.references import reference_names

Draws = Any
STEPS, RATE, DRAWS = 3000, 0.01, 500
PAGES = Path(__file__).parents[2] / "docs" / "reference"


def trained(make: Callable[[Any], Any]) -> Callable[[Reference], Draws]:
    """Return a method that fits a guide by SVI and draws from it."""

    def fit(reference: Reference) -> Draws:
        model, arguments = reference.problem.model, reference.problem.arguments
        guide = make(model)
        optimiser = pyro.optim.CosineAnnealingLR(
            {
                "optimizer": torch.optim.Adam,
                "optim_args": {"lr": RATE},
                "T_max": STEPS,
            }
        )
        svi = SVI(model, guide, optimiser, Trace_ELBO())
        for _ in range(STEPS):
            svi.step(*arguments)
            optimiser.step()
        draws = Predictive(model, guide=guide, num_samples=DRAWS)(*arguments)
        # Predictive keeps dimensions of plates
        return {
            site: draws[site].detach().reshape(DRAWS, *value.shape[2:])
            for site, value in reference.posterior.samples.items()
        }

    return fit


def sampled(kernel: Callable[[Any], Any], **options: Any) -> Callable[..., Draws]:
    """Return a method that runs 16 chains."""

    def fit(reference: Reference) -> Draws:
        problem = reference.problem
        return ps.sample(
            kernel(problem.model),
            *problem.arguments,
            num_chains=16,
            progress=False,
            **options,
        )

    return fit


def members(reference: Reference) -> Draws:
    """Train an ensemble of networks, each to a mode of the posterior."""
    model, arguments = reference.problem.model, reference.problem.arguments
    return ps.ensemble(model, arguments, num_members=200, progress=False)


METHODS: dict[str, Callable[[Reference], Draws]] = {
    "mean-field": trained(AutoNormal),
    "symmetrised mean-field": trained(ps.AutoSymmetrized),
    "low rank": trained(AutoLowRankMultivariateNormal),
    "ensemble of modes": members,
    "MCLMC, 16 x 100": sampled(ps.MCLMC, num_samples=100, num_warmup=200),
    "NUTS, 16 x 100": sampled(ps.NUTS, num_samples=100, num_warmup=200),
}


def measure(name: str, method: str, seed: int) -> Row:
    reference = ps.datasets.reference(name)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    began = time.process_time()
    if method == "ensemble of modes" and not hasattr(reference.problem.model, "net"):
        return {"values": {}}
    draws = METHODS[method](reference)
    seconds = time.process_time() - began
    table = ps.compare.against_reference(draws, name)
    return {
        "values": table["distance"].to_dict(),
        "floor": table["noise floor"].to_dict(),
        "seconds": seconds,
    }


def leaderboard(results: Results) -> pd.DataFrame:
    """Return a row for each reference, method and distance: mean, standard error."""
    lines = []
    keys = {(row["name"], row["method"]): None for row in results.rows}
    for name, method in keys:
        rows = [row for row in results.find(name=name, method=method) if row["values"]]
        if not rows:
            continue
        line: dict[str, Any] = {"reference": name, "method": method, "seeds": len(rows)}
        for title in rows[0]["values"]:
            values = [row["values"][title] for row in rows]
            error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            line[title] = fmean(values)
            line[f"{title}: error"] = error
            line[f"{title}: noise floor"] = rows[0]["floor"][title]
        lines.append(line)
    return pd.DataFrame(lines)


def certificates(names: Sequence[str]) -> pd.DataFrame:
    """Return a row for each reference: its size, checks and doubts."""
    lines = []
    for name in names:
        reference = ps.datasets.reference(name)
        samples, certificate = reference.posterior.samples, reference.certificate
        samplers = certificate["samplers"].values()
        predicted = [numbers["predictions"] for numbers in samplers]
        spaces = [best(numbers) for numbers in samplers]
        lines.append(
            {
                "reference": name,
                "weights": sum(value[0, 0].numel() for value in samples.values()),
                "R-hat of weights": max(space["r_hat"] for space in spaces),
                "effective draws": min(space["effective"] for space in spaces),
                "R-hat of predictions": max(space["r_hat"] for space in predicted),
                "p-value": certificate["two-sample test"]["p_value"],
                "doubts": "; ".join(certificate["doubts"]) or "none",
            }
        )
    return pd.DataFrame(lines)


def read_draws(path: Path) -> dict[str, Tensor]:
    """Read draws of another library: site -> ``(S, *site_shape)``."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:  # refuses pickles
            return {site: torch.as_tensor(arrays[site]) for site in arrays}
    from safetensors.torch import load_file

    return load_file(path)


def main(argv: list[str] | None = None) -> None:
    arguments: argparse.ArgumentParser = parser(__doc__, seeds=3)
    arguments.add_argument("--draws", nargs=2, metavar=("FILE", "REFERENCE"))
    arguments.add_argument("--write", action="store_true")
    options = parse(arguments, argv)
    if options.draws:
        file, name = options.draws
        print(ps.compare.against_reference(read_draws(Path(file)), name))
        return
    results = Results(options.json, {}, options.progress)
    names = reference_names()
    if not options.write:
        certified = [
            name
            for name in names
            if not ps.datasets.reference(name).certificate["doubts"]
        ]
        results.fill(measure, name=certified, method=METHODS, seed=range(options.seeds))
    table = leaderboard(results)
    print(table.to_string(index=False, float_format="{:.3f}".format))
    if options.write:
        table.to_csv(PAGES / "leaderboard.csv", index=False, float_format="%.4g")
        listed = certificates(names)
        listed.to_csv(PAGES / "references.csv", index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
