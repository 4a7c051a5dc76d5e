"""Our microcanonical kernel beside sklearn-contrib-bde (MILE: microcanonical Langevin from an ensemble), on UCI data.

The model is bde's: a network of ReLU layers with two outputs, the mean and, by softplus, the noise of a row, with a
standard normal prior on every weight. Every contestant trains so many networks, warms a chain up from each, and draws.
bde runs in the interpreter that ``--bde`` names, on one core as we do.

``LPPD`` is the mean log-density of the test rows under the mean of the draws' predictive distributions, and ``RMSE``
that of the mean prediction, both of standardised targets, each with its standard error over splits. Effective draws
are those of the test rows' mean predictions: each chain's own, summed over the chains (which sit in different modes);
``worst`` and ``median`` are over rows. They are given for a second of the processor while sampling (compiling not
counted) and, of the worst row, for a second of everything, training and compiling included.

    python -m benchmarks.performance.microcanonical --root data --bde /path/to/python \
        [--data yacht energy concrete] [--splits 5] [--hidden 16 16] [--members 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import print_table
from pyro_symmetric.chain_statistics import chain_statistics
from pyro_symmetric.likelihoods import noise_of

KERNELS: dict[str, Callable[[Any, int], ps.Kernel]] = {  # of a model and the most gradients of an iteration
    "MCLMC": lambda model, most: ps.MCLMC(model, max_steps=most // 2),
    "MCLMC, 0.05": lambda model, most: ps.MCLMC(model, energy_error=0.05, max_steps=most // 2),
    "AdaptiveHMC": lambda model, most: ps.AdaptiveHMC(model, max_steps=most),
    "NUTS": lambda model, most: ps.NUTS(model, max_treedepth=int(math.log2(most))),
}
ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}


@dataclass
class Result:
    """Of one contestant on one split."""

    data: str
    split: int
    contestant: str
    lppd: float
    rmse: float
    worst: float  # effective draws
    median: float
    sampling: float  # seconds of the processor
    seconds: float


def judged(
    data: str, split: int, contestant: str, mean: Tensor, scale: Tensor, y: Tensor, sampling: float, seconds: float
) -> Result:
    """:param mean: of every draw, ``(members, draws, rows)``; likewise ``scale``."""
    log_density = torch.distributions.Normal(mean, scale).log_prob(y).flatten(0, 1)
    lppd = (log_density.logsumexp(0) - math.log(len(log_density))).mean()
    rmse = (mean.mean((0, 1)) - y).square().mean().sqrt()
    effective = torch.full_like(y, mean.shape[0])
    if mean.shape[1] > 4:
        own = torch.as_tensor(chain_statistics(mean.transpose(0, 1)[None]).ess_bulk)  # (members, rows)
        effective = own.nan_to_num(1.0).sum(0)
    worst, median = float(effective.min()), float(effective.median())
    found = Result(data, split, contestant, float(lppd), float(rmse), worst, median, sampling, seconds)
    print(f"# {found}", flush=True)
    return found


def ours(options: argparse.Namespace, data: ps.datasets.Dataset, name: str, split: int) -> list[Result]:
    sizes = [data.num_features, *options.hidden]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))
    model = ps.BayesianModel(net, 1.0, ps.HeteroscedasticLikelihood())
    began = time.process_time()
    trained = ps.ensemble(
        model, (data.train_x, data.train_y), options.members, epochs=options.epochs, seed=split, progress=False
    )
    training = time.process_time() - began

    def predicted(posterior: ps.Posterior) -> tuple[Tensor, Tensor]:
        outputs = model.outputs(posterior.samples, data.test_x, chunk_size=256).double()
        return outputs[..., 0], noise_of(outputs[..., 1])

    mean, scale = predicted(trained)
    y = data.test_y.double()
    found = [judged(name, split, "our ensemble", mean.transpose(0, 1), scale.transpose(0, 1), y, 0.0, training)]
    for contestant in options.kernels:
        began = time.process_time()
        posterior = ps.sample(
            KERNELS[contestant](model, options.most),
            data.train_x,
            data.train_y,
            initial=trained,
            num_chains=options.members,
            num_warmup=options.warmup,
            num_samples=options.draws,
            seed=split,
            progress=False,
        )
        spent, walls = time.process_time() - began, posterior.metadata["seconds"]
        sampling = spent * walls["sampling"] / sum(walls.values())
        found.append(judged(name, split, contestant, *predicted(posterior), y, sampling, training + spent))
        told = {key: f"{float(value.double().nanmean()):.3g}" for key, value in posterior.statistics.items()}
        print(f"# {name} {split} {contestant}: {told} {posterior.metadata['engine']}", flush=True)
    return found


def bde(options: argparse.Namespace, data: ps.datasets.Dataset, name: str, split: int) -> Result:
    settings = {
        "hidden_layers": options.hidden,
        "n_members": options.members,
        "seed": split,
        "epochs": options.bde_epochs,
        "patience": 20,
        "lr": 1e-3,
        "warmup_steps": options.bde_warmup,
        "n_samples": options.bde_steps,
        "n_thinning": max(1, options.bde_steps // options.bde_draws),
    }
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "data.npz"), Path(folder, "result.npz")
        np.savez(given, x=data.train_x.numpy(), y=data.train_y.numpy(), test_x=data.test_x.numpy())
        worker = Path(__file__).with_name("bde_worker.py")
        subprocess.run(
            [options.bde, str(worker), str(given), str(result), json.dumps(settings)],
            check=True,
            env={**os.environ, **ONE_CORE},
            stderr=subprocess.DEVNULL,
        )
        arrays = np.load(result)
        mean, scale = (torch.from_numpy(arrays[key]).double() for key in ("mean", "scale"))
        sampling = float(arrays["sampling"] - arrays["compiling"])
        seconds = float(arrays["all"])
    return judged(name, split, "bde", mean, scale, data.test_y.double(), sampling, seconds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--bde", metavar="PYTHON", help="an interpreter that has sklearn-contrib-bde")
    parser.add_argument("--data", nargs="+", default=["yacht", "energy", "concrete"])
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--hidden", nargs="+", type=int, default=[16, 16])
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, help="of our ensemble; by default its own")
    parser.add_argument("--warmup", type=int, default=100, help="iterations of ours")
    parser.add_argument("--draws", type=int, default=200, help="of each chain of ours")
    parser.add_argument("--most", type=int, default=128, help="gradients of an iteration of ours")
    parser.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--bde-epochs", type=int, default=1_000)
    parser.add_argument("--bde-warmup", type=int, default=3_000, help="steps of bde's warm-up")
    parser.add_argument("--bde-steps", type=int, default=3_000, help="steps of bde's chains")
    parser.add_argument("--bde-draws", type=int, default=100, help="of each chain that are kept")
    parser.add_argument("--json", type=Path, help="write all results there; what it holds is not run again")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = options.json is not None and options.json.exists()
    results = [Result(**row) for row in json.loads(options.json.read_text())] if kept else []
    done = {(result.data, result.split) for result in results}
    for name in options.data:
        for split in range(options.splits):
            if (name, split) in done:
                continue
            data = ps.datasets.load(f"uci/{name}", root=options.root, split=split)
            if options.bde:
                results.append(bde(options, data, name, split))
            results += ours(options, data, name, split)
            if options.json:
                options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
        show([result for result in results if result.data == name])


def show(results: list[Result]) -> None:
    """The table of one data set."""

    def over_splits(values: list[float]) -> str:
        found = torch.tensor(values, dtype=torch.float64)
        error = float(found.std()) / math.sqrt(len(found)) if len(found) > 1 else math.nan
        return f"{float(found.mean()):.3f} ± {error:.3f}"

    rows = []
    for contestant in dict.fromkeys(result.contestant for result in results):
        own = [result for result in results if result.contestant == contestant]
        spent, all_spent = sum(r.sampling for r in own), sum(r.seconds for r in own)
        per_second = [
            f"{sum(getattr(r, key) for r in own) / spent:.1f}" if spent else "" for key in ("worst", "median")
        ]
        rows.append(
            [
                contestant,
                over_splits([r.lppd for r in own]),
                over_splits([r.rmse for r in own]),
                *per_second,
                f"{sum(r.worst for r in own) / all_spent:.2f}" if spent else "",
                f"{spent / len(own):.1f}",
                f"{all_spent / len(own):.1f}",
            ]
        )
    head = ["contestant", "LPPD", "RMSE", "worst/s", "median/s", "worst/s of all", "sampling s", "all s"]
    print_table(results[0].data, head, rows)


if __name__ == "__main__":
    main()
