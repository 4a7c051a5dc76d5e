"""OptuNet, the 392 parameters of Laurent, Aldea & Franchi 2024 (arXiv 2310.08287), trained on MNIST.

    python -m benchmarks.experiments.laurent_2024.optunet --root data

Independent networks are trained at once on images of the training set (8,000 of ``mnist-10k`` by default) and scored on
its test images, one by one and averaged.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import pyro_symmetric as ps
from benchmarks.harness import Results, parse, parser, print_table
from pyro_symmetric.ensembles import ensemble
from pyro_symmetric.networks import optunet


def run(seed: int, data: Any, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = optunet(tuple(data.input_shape), data.num_outputs)
    posterior = ensemble(
        net,
        (data.train_x, data.train_y),
        options.networks,
        epochs=options.epochs,
        batch_size=64,
        optimizer=functools.partial(torch.optim.Adam, lr=options.lr),
        progress=options.progress,
    )
    probabilities = ps.predict(posterior, net, data.test_x, progress=False).softmax(-1)
    return {
        "single": (probabilities.argmax(-1) == data.test_y).double().mean(-1).tolist(),
        "together": float((probabilities.mean(0).argmax(-1) == data.test_y).double().mean()),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--root", type=Path, default=Path("data"), help="folder of data sets")
    arguments.add_argument("--data", default="mnist")
    arguments.add_argument("--networks", type=int, default=4)
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--rows", type=int, default=8_000, help="training images")
    arguments.add_argument("--test-rows", type=int, default=2_000)
    arguments.add_argument("--lr", type=float, default=0.02)
    options = parse(arguments, argv)
    if options.quick:
        options.networks, options.epochs, options.rows, options.test_rows = 2, 1, 200, 200
    data = ps.datasets.load(
        options.data, root=options.root, max_train=options.rows, max_test=options.test_rows, dtype=torch.float32
    )
    results = Results.of(options, "data", "networks", "epochs", "rows", "test_rows", "lr")
    results.fill(functools.partial(run, data=data, options=options), seed=range(options.seeds))
    rows = []
    for row in results.rows:
        single = torch.tensor(row["single"])
        spread = f"{float(single.mean()):.3f} ({float(single.min()):.3f} to {float(single.max()):.3f})"
        rows.append((str(row["seed"]), spread, f"{row['together']:.3f}"))
    title = f"test accuracy of {options.networks} OptuNets, {len(data.train_x):,} images, {options.epochs} epochs"
    print_table(title, ("seed", "one network (least to most)", "averaged"), rows)


if __name__ == "__main__":
    main()
