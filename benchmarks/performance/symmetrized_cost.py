"""The cost of symmetrisation: one SVI step of a symmetrised guide against one of a stock guide, in one run.

    python -m benchmarks.performance.symmetrized_cost --widths 32,128,512,1024

ReLU networks of one and of three hidden layers, 784 and 8 inputs, ten classes, a batch of 100, Pyro's stock SVI, Adam
and Trace_ELBO. Steps of all guides take turns, so that a busy machine slows all alike; times are those of the process,
the lower quartile over the rounds, as ratios to the stock guide's. Beside them, the nats that symmetrising finds of
log |G|, and the most memory that a step takes beyond parameters, as PyTorch's allocator tells.
"""

import argparse
import itertools
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
from torch.profiler import ProfilerActivity, profile

import pyro_symmetric as ps


def step_of(inputs: int, widths: list[int], estimator: Any) -> tuple[Any, str]:
    """A function that takes one step with a symmetrised guide, or with the stock one, and the nats that it finds."""
    pyro.set_rng_seed(0)
    layers: list[nn.Module] = []
    for before, after in zip([inputs, *widths], widths, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(widths[-1], 10))
    model = ps.BayesianModel(net, ps.GaussianPrior(), ps.CategoricalLikelihood(), 60_000)
    x, y = torch.randn(100, inputs), torch.randint(0, 10, (100,))
    pyro.clear_param_store()
    if estimator is None:
        guide, found = AutoDiagonalNormal(model, init_scale=0.02), ""
    else:
        group = ps.find_symmetry(net, x[:2]).permutations
        guide = ps.AutoSymmetrized(model, group, estimator=estimator, init_scale=0.02).setup(x, y)
        nats = float(guide.get_posterior().mutual_information(2).value)
        found = f" {nats:.0f} of {group.log_order():.0f} nats"
    svi = SVI(model, guide, Adam({"lr": 1e-4}), loss=Trace_ELBO())
    svi.step(x, y)
    return lambda: svi.step(x, y), found


def peak_of(step: Any) -> float:
    """The most memory that a step takes, in MiB: allocations and their ends, summed up."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="32,128,512")
    parser.add_argument("--proposals", type=int, default=4, help="K of matched units (default 4)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    estimators = {"stock": None, "matched": ps.SinkhornImportance(options.proposals)}
    estimators["uniform"] = ps.InfoNCE(15)
    results: dict[str, dict[str, float]] = {}
    for inputs in (784, 8):
        for width, depth in ((int(width), depth) for width in options.widths.split(",") for depth in (1, 3)):
            steps = {name: step_of(inputs, depth * [width], estimator) for name, estimator in estimators.items()}
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(options.rounds):
                for name, (step, _) in steps.items():
                    start = time.process_time()
                    step()
                    times[name].append(time.process_time() - start)
            quartiles = {name: statistics.quantiles(values, n=4)[0] for name, values in times.items()}
            title, peaks = f"{inputs}, {depth} of {width}", {name: peak_of(step) for name, (step, _) in steps.items()}
            results[title] = {**quartiles, **{f"{name}, MiB": peak for name, peak in peaks.items()}}
            told = [f"{n} {t / quartiles['stock']:.1f},{steps[n][1]}, {peaks[n]:.0f} MiB" for n, t in quartiles.items()]
            print(f"{title}: {1e3 * quartiles['stock']:.1f} ms; {'; '.join(told)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
