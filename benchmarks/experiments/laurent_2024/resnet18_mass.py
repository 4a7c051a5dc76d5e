"""The least mass of trained ResNet-18s beside their mass as trained (figure 11 and
appendix D.3 of Laurent, Aldea & Franchi 2024, arXiv 2310.08287).

    python -m benchmarks.experiments.laurent_2024.resnet18_mass

The paper trains on CIFAR-100; here the networks, of full width, learn scikit-learn's
digits of 8 x 8 pixels, so that two cores train them: stochastic gradient descent with
Nesterov's momentum and weight decay 5e-4 as in appendix C.2, the rate falling along a
cosine. Batch normalisation follows every convolution, whose weights may then shrink for
nothing: they are left out of the least mass, which is what their infimum of zero comes
to.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

import pyro_symmetric as ps
from benchmarks.harness import Results, mini_batches, parse, parser


def run(seed: int, data: Any, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = ps.networks.resnet18(tuple(data.input_shape), data.num_outputs)
    steps = options.epochs * (len(data.train_x) // 128)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=options.rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for rows in mini_batches(len(data.train_x), 128, steps, seed):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            net(data.train_x[rows]), data.train_y[rows]
        ).backward()
        optimizer.step()
        schedule.step()
    net.eval()
    symmetry = ps.find_symmetry(net, data.test_x[:2])
    began = time.perf_counter()
    least = ps.minimal_mass(net, symmetry)
    seconds = time.perf_counter() - began
    with torch.no_grad():
        before, after = (one(data.test_x) for one in (net, least.weights))
    sites = [
        site
        for site in symmetry.group.weight_sites
        if site in dict(net.named_parameters())
    ]
    return {
        "scalings": sum(own.numel() for own in least.log_scales.values()),
        "accuracy": float((before.argmax(-1) == data.test_y).double().mean()),
        "mass": sum(
            float(net.get_parameter(site).detach().square().sum()) for site in sites
        ),
        "least": float(least.mass),
        "change": float((after - before).abs().max()),
        "seconds": seconds,
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=5)
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--rate", type=float, default=0.1)
    options = parse(arguments, argv)
    if options.quick:
        options.epochs = 1
    data = ps.datasets.load("digits", hold_out=None, dtype=torch.float32)
    results = Results.of(options, "epochs", "rate")
    results.fill(
        functools.partial(run, data=data, options=options), seed=range(options.seeds)
    )
    columns: dict[str, tuple[Any, int]] = {
        "accuracy": ("accuracy", 3),
        "mass": ("mass", 0),
        "least mass": ("least", 1),
        "ratio": (lambda row: row["mass"] / row["least"], 1),
        "outputs change": ("change", 6),
        "seconds": ("seconds", 1),
    }
    results.table(
        f"ResNet-18 on digits, {options.epochs} epochs", ["scalings"], columns
    )


if __name__ == "__main__":
    main()
