"""Predictions of many draws: ``predict`` beside ``pyro.infer.Predictive``, time and peak memory.

Each way runs in a process of its own, so that the peak of its memory is its own; all in one call, one after the other.
A network of the digits' size (64-32-10, ReLU, softmax); class probabilities, or drawn labels, of every draw and row.

    python -m benchmarks.performance.predict --draws 1000 --rows 360
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

WAYS = ("predict", "Predictive, parallel", "Predictive")


def measure(way: str, draws: int, rows: int, repeats: int) -> dict[str, float]:
    """Seconds of the fastest repeat, and the growth of the peak of memory in MiB."""
    import torch
    from pyro.infer import Predictive
    from torch import nn

    from pyro_symmetric import BayesianModel
    from pyro_symmetric.predict import predict

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BayesianModel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    weights = {name: prior.sample((draws,)) for name, prior in model.priors().items()}
    x = torch.randn(rows, 64)
    few = {name: value[:2] for name, value in weights.items()}

    def once(which: dict[str, torch.Tensor]) -> object:
        if way == "predict":
            return predict(which, model, x, kind="samples", progress=False)
        return Predictive(model, which, parallel=way.endswith("parallel"))(x)["y"]

    once(few)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        once(weights)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": min(seconds), "mebibytes": peak / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=360)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.draws, options.rows, options.repeats)))
        return
    found = {}
    for way in WAYS:
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.performance.predict", *sys.argv[1:], "--way", way],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[way] = json.loads(result.stdout.splitlines()[-1])
    own = found["predict"]
    print(f"{options.draws} draws x {options.rows} rows, one thread")
    for way, numbers in found.items():
        ratios = ", ".join(f"{numbers[k] / max(own[k], 1e-9):.1f}x" for k in ("seconds", "mebibytes"))
        print(f"  {way:<22} {numbers['seconds']:8.2f} s  {numbers['mebibytes']:8.1f} MiB  ({ratios})")


if __name__ == "__main__":
    main()
