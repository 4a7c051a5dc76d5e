"""Processor seconds of a first call of ``sample``, on eleven ordinary models.

    python -m benchmarks.performance.first_use [--model linear ...] [--json FILE]

Each model runs in two fresh processes, imports included, with one folder of compiled
programs: at first it is empty, as on a new machine, then it holds the programs of the
first process. The last columns are the seconds and the iterations of warm-up of a
second call in the second process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.harness import Results, parse, parser
from benchmarks.performance.eleven_models import models

CALLS = """
import json, sys
import torch
torch.set_num_threads(1)
import pyro_symmetric as ps
from benchmarks.contestants import processor_seconds
from benchmarks.performance.eleven_models import models
model, args = models()[sys.argv[1]]
settings = json.loads(sys.argv[2])
ps.sample(model, *args, seed=0, progress=False, **settings)
first = processor_seconds()
posterior = ps.sample(model, *args, seed=1, progress=False, **settings)
second = processor_seconds() - first
metadata = posterior.metadata
warmup = metadata["num_warmup"]
found = {"first": first, "second": second, "warm-up": warmup}
found["engine"] = metadata["engine"]
print(json.dumps(found))
"""


def run(model: str, seed: int, options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if options.quick:
        settings = {"num_samples": 10, "num_warmup": 10, "num_chains": 2}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        for _ in range(2):
            output = subprocess.run(
                [sys.executable, "-c", CALLS, model, json.dumps(settings)],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            found.append(json.loads(output.splitlines()[-1]))
    cold, warm = found
    return {
        "cold": cold["first"],
        "programs on disk": warm["first"],
        "second call": warm["second"],
        "warm-up": warm["warm-up"],
        "engine": warm["engine"],
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    names = list(models())
    arguments.add_argument("--model", nargs="+", choices=names, default=names)
    options = parse(arguments, argv)
    results = Results.of(options, "quick")
    grid = {"model": options.model, "seed": range(options.seeds)}
    results.fill(functools.partial(run, options=options), **grid)
    columns: dict[str, tuple[Any, int]] = {
        "cold": ("cold", 1),
        "programs on disk": ("programs on disk", 1),
        "second call": ("second call", 1),
        "warm-up": ("warm-up", 0),
    }
    results.table("processor seconds of a call of sample", ["model"], columns)


if __name__ == "__main__":
    main()
