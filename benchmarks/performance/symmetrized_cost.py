"""The cost of symmetrisation: one SVI step of a symmetrised guide against one of a stock guide, in one run.

    python -m benchmarks.performance.symmetrized_cost --widths 128,512

Classifier 784-width-10, batch of 500, Pyro's stock SVI, Adam and Trace_ELBO, K = 4. Three states of the guide: units
far apart, all units alike (deviations of one around small means: every proposal moves every unit), and half of the
units alike. Steps of all guides take turns, so that a busy machine slows all alike; times are those of the process,
the lower quartile over the rounds.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.optim import Adam
from torch import nn

import pyro_symmetric as ps


def step_of(width: int, state: str | None, estimator: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A function that takes one step with a guide in the given state; the stock guide for ``None``."""
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    model = ps.BayesianModel(net, ps.GaussianPrior(), ps.CategoricalLikelihood(), 60_000)
    if state is None:
        pyro.clear_param_store()
        guide = AutoDiagonalNormal(model, init_scale=0.02)
    else:
        group = ps.find_symmetry(net, x[:2]).permutations
        guide = ps.AutoSymmetrized(model, group, estimator=estimator, init_scale=0.02)
    svi = SVI(model, guide, Adam({"lr": 1e-4}), loss=Trace_ELBO())
    svi.step(x, y)
    alike = {None: 0, "separated": 0, "half alike": width // 2, "all alike": width}[state]
    with torch.no_grad():
        base = guide if state is None else guide.base
        loc, scale = base.loc.clone(), base.scale.clone()
        for values, at in ((loc, 0.0), (scale, 1.0)):
            values[: 784 * width].view(width, 784)[:alike] = at
            values[784 * width : 785 * width][:alike] = at
            values[785 * width : 795 * width].view(10, width)[:, :alike] = at
        base.loc.copy_(loc)
        base.scale = scale
    return lambda: svi.step(x, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="128,512")
    parser.add_argument("--proposals", type=int, default=4, help="K of SinkhornImportance (default 4)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, y = torch.randn(500, 784), torch.randint(0, 10, (500,))
    results = {}
    for width in map(int, options.widths.split(",")):
        ours, theirs = ps.SinkhornImportance(options.proposals), ps.InfoNCE(options.proposals)
        steps = {"stock AutoDiagonalNormal": step_of(width, None, None, x, y)}
        for state in ("separated", "half alike", "all alike"):
            steps[f"{ours}, {state}"] = step_of(width, state, ours, x, y)
        steps[f"{theirs}"] = step_of(width, "separated", theirs, x, y)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                start = time.process_time()
                step()
                times[name].append(time.process_time() - start)
        quartiles = {name: statistics.quantiles(values, n=4)[0] for name, values in times.items()}
        results[width] = quartiles
        print(f"784-{width}-10, batch 500, {options.threads} thread(s)")
        for name, seconds in quartiles.items():
            print(f"  {name:<38} {1e3 * seconds:7.1f} ms  {seconds / quartiles['stock AutoDiagonalNormal']:5.2f} times")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
