"""Processor seconds of a first call, on eleven ordinary models: this library's
``sample`` and NumPyro's NUTS, in turn.

    python -m benchmarks.performance.first_use [--model linear ...] [--json FILE]

Each library runs each model in two fresh processes, imports included, with one folder
of compiled programs: at first it is empty, as on a new machine, then it holds the
programs of the first process. The third column is a second call in the second process.
Ours is a call with nothing but the model; NumPyro runs 4 chains at once, of 1,000
iterations of warm-up and 1,000 draws, without a progress bar. Both have one thread and
compute in single precision. NumPyro takes part where it is installed.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Results, Row, parse, parser
from benchmarks.performance.eleven_models import models
from benchmarks.performance.side_by_side import (
    NUMPYRO,
    OURS,
    in_fresh_process,
    libraries,
    print_ratios,
)

# Each takes the name of the model, a seed, settings as JSON, and the file of data,
# which ours doesn't need. NumPyro's imports nothing of PyTorch.
CALLS = {
    OURS: """
import json, sys
import torch
torch.set_num_threads(1)
import pyro_symmetric as ps
from benchmarks.contestants import processor_seconds
from benchmarks.performance.eleven_models import models
name, seed, settings, _ = sys.argv[1:]
model, args = models()[name]
settings = {"progress": False, **json.loads(settings)}
ps.sample(model, *args, seed=int(seed), **settings)
first = processor_seconds()
posterior = ps.sample(model, *args, seed=int(seed) + 1, **settings)
second = processor_seconds() - first
metadata = posterior.metadata
found = {"first": first, "second": second, "warm-up": metadata["num_warmup"]}
found["engine"] = metadata["engine"]
print(json.dumps(found))
""",
    NUMPYRO: """
import json, sys, time
import numpy
from benchmarks.performance.eleven_numpyro import sampled
name, seed, settings, file = sys.argv[1:]
settings = json.loads(settings)
data = list(numpy.load(file).values())
sampled(name, data, int(seed), **settings)
first = time.process_time()
sampled(name, data, int(seed) + 1, **settings)
second = time.process_time() - first
found = {"first": first, "second": second, "warm-up": settings["num_warmup"]}
print(json.dumps(found))
""",
}
SETTINGS: dict[str, dict[str, int]] = {
    OURS: {},
    NUMPYRO: {"num_warmup": 1000, "num_samples": 1000, "num_chains": 4},
}
QUICK = {"num_samples": 10, "num_warmup": 10, "num_chains": 2}
SECONDS = ("cold", "programs on disk", "second call")


def run(model: str, seed: int, library: str, options: Any) -> Row:
    settings = QUICK if options.quick else SETTINGS[library]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "data.npz"
        np.savez(file, *models()[model][1])
        arguments = (model, str(seed), json.dumps(settings), str(file))
        cold, warm = (
            in_fresh_process(CALLS[library], folder, *arguments) for _ in range(2)
        )
    seconds = cold["first"], warm["first"], warm["second"]
    return {
        **dict(zip(SECONDS, seconds, strict=True)),
        "warm-up": warm["warm-up"],
        "engine": warm.get("engine"),
    }


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
    columns: dict[str, tuple[Any, int]] = {name: (name, 1) for name in SECONDS}
    columns["warm-up"] = ("warm-up", 0)
    results.table("processor seconds of a call", ["model", "library"], columns)
    print_ratios(results, "seconds, ours / NumPyro's", SECONDS)


if __name__ == "__main__":
    main()
