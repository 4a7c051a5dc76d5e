"""The cost of symmetrisation: one SVI step of a symmetrised guide against one of a
stock guide, in one run.

    python -m benchmarks.performance.symmetrized_cost --widths 32 128 512 1024

ReLU networks of one and of three hidden layers, 784 and 8 inputs, ten classes, a batch
of 100, Pyro's stock SVI, Adam and Trace_ELBO. Steps of all guides take turns, so that a
busy machine slows all alike; times are those of the process, the lower quartile over
the rounds, as ratios to the stock guide's; seeds repeat it all. Beside them, the nats that symmetrising
finds of log |G|, and the most memory that a step takes beyond parameters, as PyTorch's
allocator tells.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.optim import Adam
from torch.profiler import ProfilerActivity, profile

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser
from benchmarks.networks import perceptron


def step_of(
    seed: int, inputs: int, widths: list[int], estimator: Any
) -> tuple[Any, float]:
    """A function that takes one step with a symmetrised guide, or with the stock one,
    and the nats that it finds.
    """
    pyro.set_rng_seed(seed)
    net = perceptron(inputs, *widths, 10)
    model = ps.BayesianModel(
        net, ps.GaussianPrior(), ps.CategoricalLikelihood(), 60_000
    )
    x, y = torch.randn(100, inputs), torch.randint(0, 10, (100,))
    pyro.clear_param_store()
    if estimator is None:
        guide, nats = AutoDiagonalNormal(model, init_scale=0.02), 0.0
    else:
        group = ps.find_symmetry(net, x[:2]).permutations
        guide = ps.AutoSymmetrized(
            model, group, estimator=estimator, init_scale=0.02
        ).setup(x, y)
        nats = float(guide.get_posterior().mutual_information(2).value)
    svi = SVI(model, guide, Adam({"lr": 1e-4}), loss=Trace_ELBO())
    svi.step(x, y)
    return lambda: svi.step(x, y), nats


def peak_of(step: Any) -> float:
    """The most memory that a step takes, in MiB: allocations and their ends, summed
    up.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [
        event
        for event in found.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = itertools.accumulate(
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    )
    return max(held) / 2**20


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--widths", type=int, nargs="+", default=[32, 128, 512])
    arguments.add_argument(
        "--proposals", type=int, default=4, help="K of matched units (default 4)"
    )
    arguments.add_argument("--rounds", type=int, default=10)
    options = parse(arguments, argv)
    if options.quick:
        options.widths, options.rounds = [8], 2
    estimators = {
        "stock": None,
        "matched": ps.SinkhornImportance(options.proposals),
        "uniform": ps.InfoNCE(15),
    }
    results = Results.of(options, "proposals", "rounds", "threads")

    def run(seed: int, inputs: int, width: int, depth: int) -> Row:
        steps = {
            name: step_of(seed, inputs, depth * [width], estimator)
            for name, estimator in estimators.items()
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, (step, _) in steps.items():
                start = time.process_time()
                step()
                times[name].append(time.process_time() - start)
        quartiles = {
            name: statistics.quantiles(values, n=4)[0] for name, values in times.items()
        }
        row = {
            "stock, ms": 1e3 * quartiles["stock"],
            "stock, MiB": peak_of(steps["stock"][0]),
        }
        for name in ("matched", "uniform"):
            row |= {
                f"{name}, times": quartiles[name] / quartiles["stock"],
                f"{name}, MiB": peak_of(steps[name][0]),
            }
            row[f"{name}, nats"] = steps[name][1]
        return {**row, "log |G|": depth * math.lgamma(width + 1)}

    results.fill(
        run,
        inputs=[784, 8],
        width=options.widths,
        depth=[1, 3],
        seed=range(options.seeds),
    )
    columns: dict[str, tuple[Any, int]] = {
        name: (name, 1) for name in list(results.rows[0])[4:]
    }
    results.table("an SVI step", ["inputs", "depth", "width"], columns)


if __name__ == "__main__":
    main()
