"""Do hidden units still change places along training? Kendall's tau between the orders of successive steps (figure 4 of
Laurent, Aldea & Franchi 2024, arXiv 2310.08287).

    python -m benchmarks.experiments.laurent_2024.sorting_dynamics --out figures

Perceptrons on two moons, all trained at once; after every step units are sorted by their largest incoming weight, as
trained and at unit norm. Tau near 1 and rising: the order settles, and a run stays in one copy of its mode. The last
column is the share of the steps of the second half (over all networks) in which any two units of a layer swapped.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import pyro_symmetric as ps
from benchmarks.harness import Results, new_figure, parse, parser, print_table, save_figure
from benchmarks.networks import perceptron
from pyro_symmetric.compare import SortingTracker
from pyro_symmetric.ensembles import fresh_members


def moons(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import make_moons

    x, y = make_moons(rows, noise=0.2, random_state=0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def run(seed: int, rate: float, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    x, y = moons(500)
    net = perceptron(2, options.width, options.width, 2)
    symmetry = ps.find_symmetry(net, x[:2])
    members = {name: value.requires_grad_(True) for name, value in fresh_members(net, options.networks).items()}
    optimizer = torch.optim.SGD(list(members.values()), lr=rate, momentum=0.9, weight_decay=1e-4)
    trackers = {"as trained": SortingTracker(symmetry), "at unit norm": SortingTracker(symmetry)}

    def loss(weights: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(net, weights, (x[rows],)), y[rows])

    mapped = torch.func.vmap(loss)
    for _ in tqdm(range(options.steps), desc=f"rate {rate:g}", disable=not options.progress):
        optimizer.zero_grad()
        mapped(members, torch.randint(len(x), (options.networks, 32))).sum().backward()
        optimizer.step()
        trackers["as trained"](members)
        held = {site: value.detach() for site, value in members.items()}
        trackers["at unit norm"](ps.canonicalize(held, symmetry, permutations=None))
    return {
        "tau": {name: tracker.mean.mean(1).tolist() for name, tracker in trackers.items()},
        "swaps": {
            name: float((tracker.mean[options.steps // 2 :] < 1).double().mean()) for name, tracker in trackers.items()
        },
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--networks", type=int, default=50)
    arguments.add_argument("--steps", type=int, default=1_000)
    arguments.add_argument("--width", type=int, default=32)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.01])
    options = parse(arguments, argv)
    if options.quick:
        options.networks, options.steps = 10, 100
    results = Results.of(options, "networks", "steps", "width")
    results.fill(functools.partial(run, options=options), seed=range(options.seeds), rate=options.rates)
    table, curves = [], {}
    for rate in options.rates:
        found = results.find(rate=rate)
        for name in found[0]["tau"]:
            tau = torch.tensor([row["tau"][name] for row in found]).mean(0)
            swaps = sum(row["swaps"][name] for row in found) / len(found)
            curves[rate, name] = tau
            means = (f"{float(part.mean()):.5f}" for part in tau.tensor_split(4))
            table.append((f"rate {rate:g}, {name}", *means, f"{swaps:.1%}"))
    head = ("weights", "1st quarter", "2nd", "3rd", "4th", "steps with a swap")
    count = options.networks * options.seeds
    print_table(f"mean tau between successive steps, {count} networks", head, table)
    if options.out is not None:
        picture, axes = new_figure(1, len(options.rates), size=(5 * len(options.rates), 3.5))
        for axis, rate in zip(axes[0], options.rates, strict=True):
            for (of, name), tau in curves.items():
                if of == rate:
                    axis.plot(tau, label=name, linewidth=0.8)
            axis.set(title=f"learning rate {rate:g}", xlabel="step", ylabel="Kendall's tau")
            axis.legend()
        save_figure(picture, options.out, "sorting_dynamics.png")


if __name__ == "__main__":
    main()
