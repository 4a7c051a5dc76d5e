"""Many draws of many chains, more than memory is allowed: streamed to disk, and read back.

Samples ``--draws`` x ``--chains`` into a store. Then another process opens it with ``Posterior.load`` and computes
R-hat and effective sample sizes. Each reports wall and processor time, and the largest resident memory that it ever
had, mapped files included. Of two problems:

* ``network``: 1,024 chains of 2,410 parameters (64-32-10 ReLU, the digits' size; by default 9.9 GB in float32) by
  SGHMC; some weights are diagnosed, and means taken of all.
* ``schools``: 10,000 chains of eight schools by AdaptiveHMC (0.65 GB in float32); all are diagnosed.

    python -m benchmarks.performance.streaming --out /tmp/streaming
    python -m benchmarks.performance.streaming --out /tmp/streaming --problem schools [--dtype float64]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHAINS = {"network": 1024, "schools": 10_000}
EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)


def resident() -> float:
    """The largest resident memory so far, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2**30 if sys.platform == "darwin" else peak / 2**20, 2)


def write(problem: str, store: Path, draws: int, chains: int, dtype: str) -> dict[str, Any]:
    """Sample into the store."""
    import torch

    from pyro_symmetric.mcmc import sample

    torch.set_default_dtype(getattr(torch, dtype))
    torch.manual_seed(0)
    kernel, data, num_warmup = network() if problem == "network" else schools()
    imported, began = resident(), time.perf_counter()
    posterior = sample(kernel, *data, num_samples=draws, num_chains=chains, num_warmup=num_warmup, seed=0, store=store)
    seconds = time.perf_counter() - began
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    return {
        "gigabytes on disk": round(size / 1e9, 2),
        "seconds": round(seconds, 1),
        "processor seconds": processor_seconds(),
        "megabytes a second": round(size / 1e6 / seconds),
        "engine": posterior.metadata["engine"],
        "warm-up": posterior.metadata["num_warmup"],
        "peak GiB after imports": imported,
        "peak GiB": resident(),
    }


def processor_seconds() -> float:
    """Of this process, imports included, and of the compilers that it has started."""
    return round(sum(os.times()[:4]), 1)


def network() -> tuple[Any, tuple[Any, ...], Any]:
    """A kernel, data of the digits' shape (what is measured is the way to disk), and the length of warm-up."""
    import torch
    from torch import nn

    from pyro_symmetric.mcmc import SGHMC
    from pyro_symmetric.models import BayesianModel

    x, y = torch.rand(1437, 64), torch.randint(10, (1437,))
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return SGHMC(BayesianModel(net), step_size=1e-3, batch_size=32, num_steps=1), (x, y), 5


def schools() -> tuple[Any, tuple[Any, ...], Any]:
    """Eight schools (Rubin 1981), their effects in units of their deviation."""
    import pyro
    import pyro.distributions as dist
    import torch

    from pyro_symmetric.mcmc import AdaptiveHMC

    def model(y: torch.Tensor, sigma: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", len(y)):
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(mu + tau * theta, sigma), obs=y)

    return AdaptiveHMC(model), (torch.tensor(EFFECTS), torch.tensor(ERRORS)), "auto"


def read(problem: str, store: Path) -> dict[str, Any]:
    """Open the store and look at its draws."""
    from pyro_symmetric.posterior.posterior import Posterior

    imported, began = resident(), time.perf_counter()
    posterior = Posterior.load(store)
    opened = time.perf_counter() - began
    after_opening, some = resident(), posterior
    if problem == "network":
        weights = posterior.samples["0.weight"][:, :, 0, :4]
        some = Posterior({"2.bias": posterior.samples["2.bias"], "0.weight[0]": weights}, kind="chains")
    table = some.diagnostics()
    rows = [table[site] for site in some.samples]
    means = {site: float(value[:, ::100].mean()) for site, value in posterior.samples.items()}
    return {
        "chains x draws": [posterior.num_chains, posterior.num_samples],
        "seconds to open": round(opened, 3),
        "seconds to diagnose": round(time.perf_counter() - began - opened, 1),
        "processor seconds": processor_seconds(),
        "worst R-hat": round(max(row["r_hat"] for row in rows), 4),
        "fewest effective draws": round(min(row["ess_bulk"] for row in rows)),
        "means": {site: round(value, 4) for site, value in means.items()},
        "peak GiB after imports": imported,
        "peak GiB after opening": after_opening,
        "peak GiB": resident(),
    }


def part(options: argparse.Namespace) -> dict[str, Any]:
    """One half of the benchmark, in a process of its own."""
    import torch

    torch.set_num_threads(options.threads)
    if options.part == "read":
        return read(options.problem, options.out)
    chains = options.chains or CHAINS[options.problem]
    return write(options.problem, options.out, options.draws, chains, options.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--problem", choices=tuple(CHAINS), default="network")
    parser.add_argument("--chains", type=int, help="by default 1,024 or 10,000")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the store; removed at the end")
    parser.add_argument("--keep", action="store_true", help="keep the store")
    parser.add_argument("--part", choices=("write", "read"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(part(options)))
        return
    for name in ("write", "read"):
        command = [sys.executable, "-m", "benchmarks.performance.streaming", *sys.argv[1:], "--part", name]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(name, json.dumps(json.loads(result.stdout.splitlines()[-1]), indent=2), flush=True)
    if not options.keep:
        shutil.rmtree(options.out)


if __name__ == "__main__":
    main()
