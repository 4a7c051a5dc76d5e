"""Many draws of many chains of a network, far more than memory is allowed: streamed to disk, and read back.

Samples ``--draws`` x ``--chains`` x 2,410 parameters (64-32-10 ReLU, the digits' size; by default 9.9 GB in float32) by
SGHMC into a store. Then another process opens it with ``Posterior.load`` and computes R-hat and effective sample sizes
of some weights and means of all. Each reports the largest resident memory that it ever had, mapped files included.

    python -m benchmarks.performance.streaming --out /tmp/streaming
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def resident() -> float:
    """The largest resident memory so far, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2**30 if sys.platform == "darwin" else peak / 2**20, 2)


def write(store: Path, draws: int, chains: int) -> dict[str, Any]:
    """Sample into the store."""
    import torch
    from torch import nn

    from pyro_symmetric.mcmc import SGHMC, sample
    from pyro_symmetric.models import BayesianModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.rand(1437, 64), torch.randint(10, (1437,))  # of the digits' shape: what is measured is the way to disk
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    kernel = SGHMC(BayesianModel(net), step_size=1e-3, batch_size=32, num_steps=1)
    imported, began = resident(), time.perf_counter()
    sample(kernel, x, y, num_samples=draws, num_chains=chains, num_warmup=5, seed=0, store=store)
    seconds = time.perf_counter() - began
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    return {
        "gigabytes on disk": round(size / 1e9, 2),
        "seconds": round(seconds, 1),
        "megabytes a second": round(size / 1e6 / seconds),
        "peak GiB after imports": imported,
        "peak GiB": resident(),
    }


def read(store: Path) -> dict[str, Any]:
    """Open the store and look at its draws."""
    import torch

    from pyro_symmetric.posterior import Posterior

    torch.set_num_threads(1)
    imported, began = resident(), time.perf_counter()
    posterior = Posterior.load(store)
    opened = time.perf_counter() - began
    after_opening = resident()
    some = Posterior(
        {"2.bias": posterior.samples["2.bias"], "0.weight[0]": posterior.samples["0.weight"][:, :, 0, :4]},
        rows="chains",
    )
    table = some.diagnostics()
    means = {site: float(value[:, ::100].mean()) for site, value in posterior.samples.items()}
    return {
        "chains x draws": [posterior.num_chains, posterior.num_samples],
        "seconds to open": round(opened, 3),
        "seconds to diagnose": round(time.perf_counter() - began - opened, 1),
        "R-hat of 2.bias": round(table["2.bias"]["r_hat"], 3),
        "means": {site: round(value, 4) for site, value in means.items()},
        "peak GiB after imports": imported,
        "peak GiB after opening": after_opening,
        "peak GiB": resident(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True, help="new folder for the store; removed at the end")
    parser.add_argument("--keep", action="store_true", help="keep the store")
    parser.add_argument("--part", choices=("write", "read"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        done = write(options.out, options.draws, options.chains) if options.part == "write" else read(options.out)
        print(json.dumps(done))
        return
    for part in ("write", "read"):
        command = [sys.executable, "-m", "benchmarks.performance.streaming", *sys.argv[1:], "--part", part]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(part, json.dumps(json.loads(result.stdout.splitlines()[-1]), indent=2), flush=True)
    if not options.keep:
        shutil.rmtree(options.out)


if __name__ == "__main__":
    main()
