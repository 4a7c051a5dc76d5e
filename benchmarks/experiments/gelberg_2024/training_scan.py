"""Predictions after symmetrised training that is shorter, colder, or starts wider.

    python -m benchmarks.experiments.gelberg_2024.training_scan --data-dir data

Table 1 of Gelberg et al. 2024 (arXiv 2408.05496) reports a higher test accuracy after
symmetrised training; the text doesn't give the number of permutations, the learning
rate and the number of epochs. Here the training of ``width_study`` is scanned: its
steps, the power of the likelihood (10: as if every row had been observed ten times),
and the standard deviations of the weights that the guide starts from (1: those of the
prior, where copies overlap). Test accuracy and NLL of the average over draws of the
guide are compared with those after plain training in the same setting, paired by seed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pyro
import torch

import pyro_symmetric as ps
from benchmarks.experiments.gelberg_2024.width_study import train
from benchmarks.harness import Results, Row, load_images, parse, parser
from benchmarks.networks import perceptron

PLAIN = "mean-field"
METHODS = (PLAIN, "infonce-15", "sinkhorn-4")


def measured(
    options: Any, seed: int, start: float, power: int, steps: int, method: str
) -> dict[str, float]:
    """Train a guide, and score the average over its draws on the test rows."""
    rows = load_images(options.data, options)
    x, test_x = rows.train_x.flatten(1), rows.test_x.flatten(1)
    torch.manual_seed(seed)
    net = perceptron(x.shape[1], options.width, rows.num_outputs).to(x.device)
    group = ps.find_symmetry(net.eval(), x[:2]).permutations
    model = ps.BayesianModel(
        net,
        ps.GaussianPrior(1.0, fan_in=False),
        "categorical",
        num_data=power * len(x),
    )
    options.steps, options.init_scale = steps, start
    guide, _ = train(model, group, method, x, rows.train_y, seed, options)
    pyro.set_rng_seed(99)
    with torch.no_grad():
        weights = guide.sample_posterior((options.draws,))
        probabilities = model.outputs(weights, test_x, chunk_size=8).softmax(-1)
    scores = ps.scores.classification(probabilities, rows.test_y)
    return {"accuracy": scores.accuracy, "nll": scores.nll}


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--data", default="mnist", help="that datasets.load knows")
    arguments.add_argument("--data-dir", type=Path, default=Path("data"))
    arguments.add_argument("--download", action="store_true")
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--powers", type=int, nargs="+", default=[1, 10])
    arguments.add_argument(
        "--scan", type=int, nargs="+", default=[25, 100, 400], metavar="STEPS"
    )
    arguments.add_argument("--train", type=int, default=8000)
    arguments.add_argument("--test", type=int, default=2000)
    arguments.add_argument("--pool", type=int, default=4)
    arguments.add_argument("--batch", type=int, default=500)
    arguments.add_argument("--lr", type=float, default=0.03)
    arguments.add_argument("--starts", type=float, nargs="+", default=[0.02, 1.0])
    arguments.add_argument("--draws", type=int, default=64)
    arguments.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parse(arguments, argv)
    if options.quick:
        options.data, options.width, options.train, options.test = "digits", 8, 300, 200
        options.powers, options.scan, options.pool, options.draws = [1], [10, 20], 1, 8
    results = Results.of(
        options,
        *("data", "width", "train", "test", "pool", "batch", "lr"),
        *("draws", "device"),
    )
    results.fill(
        functools.partial(measured, options),
        seed=range(options.seeds),
        start=options.starts,
        power=options.powers,
        steps=options.scan,
        method=METHODS,
    )

    def gained(row: Row, measure: str) -> float | None:
        """Return a measure less that of the plain guide of the same seed."""
        if row["method"] == PLAIN:
            return None
        key = {name: row[name] for name in ("seed", "start", "power", "steps")}
        (plain,) = results.find(**key, method=PLAIN)
        return float(row[measure] - plain[measure])

    results.table(
        f"{options.train} training rows of {options.data}, inputs pooled "
        f"{options.pool} x {options.pool}, {options.width} units, batches of "
        f"{options.batch} rows",
        ["start", "power", "steps", "method"],
        {
            "accuracy": ("accuracy", 4),
            "test NLL": ("nll", 4),
            "accuracy gained": (functools.partial(gained, measure="accuracy"), 4),
            "NLL gained": (functools.partial(gained, measure="nll"), 4),
        },
    )


if __name__ == "__main__":
    main()
