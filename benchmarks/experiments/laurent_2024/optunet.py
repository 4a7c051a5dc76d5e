"""OptuNets trained as Laurent, Aldea & Franchi 2024 (arXiv 2310.08287) train them:
figures 2, 4 and 12.

    python -m benchmarks.experiments.laurent_2024.optunet --data-dir data

The recipe is that of appendix C.2: stochastic gradient descent in batches of 64, a rate
of 0.04, halved after a quarter and a half of 60 epochs, weight decay 2e-4, and random
crops of images padded by four pixels. All networks are trained at once, on all rows
that ``--data-dir`` holds of ``--data``, once with weight decay and once without.

* Figure 2: the mass at the end of training beside the least mass of the same function,
  and the largest weight of each layer as trained and there.
* Figure 4: Kendall's tau between the orders of units at successive steps, by the phases
  of the schedule.
* Figure 12: after five epochs with weight decay 1e-4, the mass on the way to the
  minimum, every unit's log-scale growing evenly; and the product of a mini-batch's
  gradient with the unit vector to the minimum, beside its norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, load_images, parse, parser
from pyro_symmetric.compare import SortingTracker
from pyro_symmetric.ensembles import fresh_members

Weights = dict[str, Tensor]
# the last: mini-batches of which figure 12 takes the gradient
BATCH, RATE, PAD, DRAWS = 64, 0.04, 4, 50


class Training:
    """OptuNets on one data set, all at once."""

    def __init__(self, data: ps.datasets.Dataset, networks: int, progress: bool):
        self.x, self.y, self.networks, self.progress = (
            data.train_x,
            data.train_y,
            networks,
            progress,
        )
        self.net = ps.networks.optunet(tuple(data.input_shape), data.num_outputs)
        self.padded = torch.nn.functional.pad(
            self.x, [PAD] * 4, value=float(self.x.min())
        )
        self.symmetry = ps.find_symmetry(self.net, self.x[:2])

    def loss(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            functional_call(self.net, weights, (x,)), y
        )

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``(networks, batch)``, each image cropped at a place of its own."""
        side = torch.arange(self.x.shape[-1])
        down, right = torch.randint(2 * PAD + 1, (2, *rows.shape, 1))
        images = self.padded[
            rows[..., None, None],
            0,
            (down + side)[..., :, None],
            (right + side)[..., None, :],
        ]
        return images.unsqueeze(2), self.y[rows]

    def run(
        self,
        epochs: int,
        decay: float,
        watch: Callable[[Weights], None] = lambda _: None,
    ) -> Weights:
        """The trained weights."""
        members = {
            name: value.requires_grad_()
            for name, value in fresh_members(self.net, self.networks).items()
        }
        optimizer = torch.optim.SGD(list(members.values()), lr=RATE, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [max(1, epochs // 4), max(1, epochs // 2)], 0.5
        )
        for _ in tqdm(
            range(epochs), desc=f"weight decay {decay:g}", disable=not self.progress
        ):
            orders = torch.rand(self.networks, len(self.x)).argsort(1)
            for rows in orders[:, : len(self.x) // BATCH * BATCH].split(BATCH, 1):
                optimizer.zero_grad()
                vmap(self.loss)(members, *self.batch(rows)).sum().backward()
                optimizer.step()
                watch(members)
            schedule.step()
        return {name: value.detach() for name, value in members.items()}

    def on_the_way(self, weights: Weights, decay: float) -> dict[str, Any]:
        """Figure 12: masses on the way to the minimum, the gradient's norm, and its
        part towards the minimum.
        """
        least = ps.minimal_mass(weights, self.symmetry)
        path = torch.linspace(0, 1, 11)
        scales = [
            {name: s * value for name, value in least.log_scales.items()}
            for s in path.tolist()
        ]
        moved = [
            self.symmetry.scalings.element(log_scales=own)(weights) for own in scales
        ]
        sites = [
            site for site in self.symmetry.scalings.weight_sites if site in weights
        ]
        masses = torch.stack(
            [flat({site: w[site] for site in sites}).square().sum(1) for w in moved]
        )
        towards = torch.nn.functional.normalize(
            flat(least.weights) - flat(weights), dim=1
        )
        products, norms = [], []
        for _ in range(DRAWS):
            batch = self.batch(torch.randint(len(self.x), (self.networks, BATCH)))
            gradient = flat(vmap(grad(self.loss))(weights, *batch)) + decay * flat(
                weights
            )
            products.append((gradient * towards).sum(1))
            norms.append(gradient.norm(dim=1))
        return {
            "path": (masses / masses[0]).mean(1).tolist(),
            "rises": int((masses.diff(dim=0) > 1e-6 * masses[:-1]).any(0).sum()),
            "product": float(torch.stack(products).mean()),
            "norm": float(torch.stack(norms).mean()),
        }


def flat(weights: Weights) -> Tensor:
    return torch.cat([value.flatten(1) for value in weights.values()], 1)


def run(seed: int, decay: float, data: Any, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    training = Training(data, options.networks, options.progress)
    tracker = SortingTracker(training.symmetry)
    weights = training.run(options.epochs, decay, tracker)
    least = ps.minimal_mass(weights, training.symmetry)
    probabilities = ps.predict(
        weights, training.net, data.test_x, progress=False
    ).softmax(-1)
    tau = tracker.mean.mean(1)
    steps = len(tau) // options.epochs
    first, second = (max(1, options.epochs // part) * steps for part in (4, 2))
    sites = training.symmetry.scalings.weight_sites
    return {
        "single": (probabilities.argmax(-1) == data.test_y).double().mean(-1).tolist(),
        "together": float(
            (probabilities.mean(0).argmax(-1) == data.test_y).double().mean()
        ),
        "mass": least.given.tolist(),
        "least": least.mass.tolist(),
        "largest": {
            site: [
                float(w[site].abs().flatten(1).amax(1).mean())
                for w in (weights, least.weights)
            ]
            for site in sites
        },
        "tau": [
            float(part.mean())
            for part in (tau[:first], tau[first:second], tau[second:])
        ],
        "way": training.on_the_way(training.run(min(5, options.epochs), 1e-4), 1e-4),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument(
        "--data-dir", type=Path, default=Path("data"), help="folder of data sets"
    )
    arguments.add_argument("--data", default="mnist")
    arguments.add_argument("--networks", type=int, default=20)
    arguments.add_argument("--epochs", type=int, default=60)
    arguments.add_argument("--train", type=int, help="training images (default: all)")
    arguments.set_defaults(test=None, pool=1, download=False, device="cpu")
    arguments.add_argument("--decays", type=float, nargs="+", default=[2e-4, 0.0])
    options = parse(arguments, argv)
    if options.quick:
        options.networks, options.epochs, options.train = 3, 4, 200
    data = load_images(options.data, options)
    results = Results.of(options, "data", "networks", "epochs", "train")
    results.fill(
        functools.partial(run, data=data, options=options),
        seed=range(options.seeds),
        decay=options.decays,
    )
    report(results, data, options)


def report(results: Results, data: ps.datasets.Dataset, options: Any) -> None:
    def largest(row: Row, site: str, place: int) -> float:
        return row["largest"][site][place]

    tables: dict[str, dict[str, tuple[Any, int]]] = {
        "accuracy": {
            "one network": (lambda row: fmean(row["single"]), 3),
            "averaged": ("together", 3),
        },
        "mass (fig. 2)": {
            "as trained": (lambda row: fmean(row["mass"]), 2),
            "least": (lambda row: fmean(row["least"]), 2),
            "excess": (
                lambda row: fmean(
                    1 - b / a for a, b in zip(row["mass"], row["least"], strict=True)
                ),
                3,
            ),
        },
        "largest weights (fig. 2)": {
            f"{site}{at}": (functools.partial(largest, site=site, place=place), 2)
            for place, at in enumerate(("", ", least mass"))
            for site in results.rows[0]["largest"]
        },
        "tau by phase (fig. 4)": {
            f"rate {rate}": (lambda row, k=k: row["tau"][k], 4)
            for k, rate in enumerate((0.04, 0.02, 0.01))
        },
        "way to the least mass (fig. 12)": {
            "mass left": (lambda row: row["way"]["path"][-1], 3),
            "rising": (lambda row: row["way"]["rises"], 0),
            "product": (lambda row: row["way"]["product"], 4),
            "gradient": (lambda row: row["way"]["norm"], 4),
        },
    }
    size = f"{options.networks} OptuNets, {len(data.train_x):,} images of {data.name}, {options.epochs} epochs"
    for name, columns in tables.items():
        results.table(f"{name}: {size}", ["decay"], columns)


if __name__ == "__main__":
    main()
