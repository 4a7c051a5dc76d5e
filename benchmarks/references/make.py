"""Make a reference posterior by two samplers, and certify it; or check one by a seed.

    python -m benchmarks.references.make moons-10 --draws 500
    python -m benchmarks.references.make moons-10 --draws 500 --seed 1 --check

NUTS and adaptive HMC of 64 chains each sample the model of the folder, from starts of
their own. A reference is certified if, for both, R-hat is at most 1.01 and the
effective sample size at least 1,000, of predictions and of the weights (as drawn, or
modulo symmetry), at most one draw of a thousand diverges, and a two-sample test
(maximum mean discrepancies modulo symmetry) finds no difference between them. What
fails is written down as a doubt. Its draws are 1,000 of NUTS's, evenly spaced, in one
frame.

``--check`` samples by NUTS with another seed, and compares the expectations of the
predictions with those on file, in units of their Monte Carlo errors.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.record import surroundings
from pyro_symmetric.compare.frames import frame_of_orbits
from pyro_symmetric.posterior.statistics import chain_statistics, evenly_spaced
from pyro_symmetric.references import (
    CERTIFICATE,
    CHECKOUT,
    digest_of,
    digest_of_draws,
    load_problem,
)
from pyro_symmetric.weights import first_value, map_values, select_rows

KERNELS = {"NUTS": ps.NUTS, "adaptive HMC": ps.AdaptiveHMC}
CHAINS, DRAWS = 64, 1000
EXPECTATIONS, TESTED = 20, 500
# half as many draws are tested as are effective, and may count as independent
R_HAT, EFFECTIVE, DIVERGING, LEVEL = 1.01, 2 * TESTED, 1e-3, 0.01


def draw(problem: ModuleType, kernel: str, options: Any) -> ps.Posterior:
    return ps.sample(
        KERNELS[kernel](problem.model),
        *problem.arguments,
        num_samples=options.draws,
        num_warmup=options.warmup,
        num_chains=CHAINS,
        seed=options.seed + 1000 * list(KERNELS).index(kernel),
        progress=False,
    )


def predictions(problem: ModuleType, posterior: ps.Posterior) -> Tensor:
    """Return the predictions of some test rows, or classes, along the chains."""
    predicted = problem.predict(dict(posterior.get_samples()))
    means = predicted[0] if isinstance(predicted, tuple) else predicted
    columns = (means if means.shape[1] == 1 else means[..., -1]).flatten(1)
    columns = columns[:, evenly_spaced(columns.shape[1], EXPECTATIONS)]
    return columns.unflatten(0, (posterior.num_chains, posterior.num_samples))


def worst(statistics: Any) -> dict[str, float]:
    """Return the largest R-hat and the least effective sample size of some sites."""
    r_hats, sizes = [], []
    for numbers in statistics:
        summary = numbers.summary()
        r_hats.append(summary["r_hat"])
        sizes += [summary["ess_bulk"], summary["ess_tail"]]
    if not np.isfinite([*r_hats, *sizes]).all():
        return {"r_hat": math.inf, "effective": 0.0}
    return {"r_hat": max(r_hats), "effective": min(sizes)}


def examined(problem: ModuleType, posterior: ps.Posterior) -> dict[str, Any]:
    """Measure what a certificate states of one sampler."""
    diagnosis = ps.diagnose(posterior)
    spaces = map_values(lambda sites: worst(sites.values()), diagnosis.statistics)
    spaces["predictions"] = worst([chain_statistics(predictions(problem, posterior))])
    spaces.pop("log density", None)
    diverging = posterior.statistics["diverging"].double().mean()
    return {
        "chains": posterior.num_chains,
        "draws": posterior.num_samples,
        **spaces,
        "diverging": float(diverging),
    }


def passes(space: dict[str, float]) -> bool:
    return space["r_hat"] <= R_HAT and space["effective"] >= EFFECTIVE


def best(numbers: dict[str, Any]) -> dict[str, float]:
    """Return the statistics of weights as drawn or modulo symmetry, those that agree
    better.
    """
    spaces = [numbers[s] for s in ("weights", "modulo symmetry") if s in numbers]
    passing = [space for space in spaces if passes(space)]
    unknown = {"r_hat": math.inf, "effective": 0.0}  # draws that can't be judged
    return min(passing or spaces, key=lambda space: space["r_hat"], default=unknown)


def doubts_of(name: str, numbers: dict[str, Any]) -> list[str]:
    """Return what speaks against the chains of a sampler."""
    doubts = []
    if not passes(best(numbers)):
        doubts.append(f"{name}: weights have {in_words(best(numbers))}")
    if not passes(numbers["predictions"]):
        doubts.append(f"{name}: predictions have {in_words(numbers['predictions'])}")
    if numbers["diverging"] > DIVERGING:
        doubts.append(f"{name}: {numbers['diverging']:.2%} of the draws diverge")
    return doubts


def in_words(space: dict[str, float]) -> str:
    return f"R-hat {space['r_hat']:.3f}, {space['effective']:,.0f} effective draws"


def tested(posterior: ps.Posterior, numbers: dict[str, Any]) -> dict[str, Tensor]:
    """Return the draws that are tested: evenly spaced, at most half as many as are
    effective, so that they may count as independent.
    """
    draws = dict(posterior.get_samples())
    count = min(TESTED, int(best(numbers)["effective"]) // 2)
    return select_rows(draws, evenly_spaced(len(first_value(draws)), count))


def expectations(problem: ModuleType, posterior: ps.Posterior) -> dict[str, Any]:
    """Return the means of predictions, with their Monte Carlo errors."""
    values = predictions(problem, posterior)
    effective = torch.as_tensor(chain_statistics(values).ess_bulk)
    deviations = values.double().std((0, 1))
    return {
        "mean": values.double().mean((0, 1)).tolist(),
        "error": (deviations / effective.sqrt()).tolist(),
    }


def make(folder: Path, options: Any) -> None:
    problem = load_problem(folder)
    numbers, posteriors, doubts = {}, {}, []
    for kernel in KERNELS:
        began = time.perf_counter()
        posteriors[kernel] = draw(problem, kernel, options)
        numbers[kernel] = examined(problem, posteriors[kernel])
        numbers[kernel]["seconds"] = time.perf_counter() - began
        doubts += doubts_of(kernel, numbers[kernel])
        print(folder.name, kernel, numbers[kernel], flush=True)
    nuts = posteriors["NUTS"]
    symmetry = nuts.symmetry
    test = ps.mmd_test(
        *ps.common_frame(
            *(tested(posteriors[kernel], numbers[kernel]) for kernel in KERNELS),
            symmetry,
        ),
        level=LEVEL,
    )
    if not test:
        doubts.append(f"the samplers differ: {test.verdict}")
    samples = nuts.get_samples()
    rows = evenly_spaced(CHAINS * options.draws, DRAWS)
    framed = frame_of_orbits(select_rows(dict(samples), rows), symmetry)
    posterior = ps.Posterior.from_samples(framed, kind="independent")
    certificate = {
        "doubts": doubts,
        "symmetry": str(symmetry).splitlines()[0],
        "samplers": numbers,
        "two-sample test": {"p_value": test.p_value, "draws": test.num_samples},
        "expectations": expectations(problem, nuts),
        "digests": {
            "model.py": digest_of(folder / "model.py"),
            "data.csv": digest_of(folder / "data.csv"),
            "draws": digest_of_draws(posterior),
        },
        "settings": {key: vars(options)[key] for key in ("draws", "warmup", "seed")},
        **surroundings(),
    }
    # draws without their certificate are refused
    (folder / CERTIFICATE).unlink(missing_ok=True)
    posterior.attach(problem.model, *problem.arguments).save(folder / "draws")
    (folder / CERTIFICATE).write_text(json.dumps(certificate, indent=1) + "\n")
    print(folder.name, doubts or "certified", test)


def check(folder: Path, options: Any) -> None:
    """Compare the expectations of other chains with those on file."""
    problem = load_problem(folder)
    on_file = json.loads((folder / CERTIFICATE).read_text())["expectations"]
    again = expectations(problem, draw(problem, "NUTS", options))
    first, second = (
        (torch.tensor(side["mean"]), torch.tensor(side["error"]))
        for side in (on_file, again)
    )
    scores = (first[0] - second[0]) / (first[1].square() + second[1].square()).sqrt()
    print(
        f"{folder.name}, seed {options.seed}: {len(scores)} expectations differ by "
        f"{scores.square().mean().sqrt():.2f} errors (root mean square), at most "
        f"{scores.abs().max():.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--draws", type=int, default=500, help="of each chain")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        (check if options.check else make)(CHECKOUT / name, options)


if __name__ == "__main__":
    main()
