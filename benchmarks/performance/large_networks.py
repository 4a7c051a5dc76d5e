"""Waiting times of large networks: ``find_symmetry`` beside ``torch.export.export``,
and ``align`` beside rebasin.

    python -m benchmarks.performance.large_networks  # some minutes
    python -m benchmarks.performance.large_networks --task find --only ViT-B/16 --seeds 1
    python -m benchmarks.performance.large_networks --task align

Processor seconds of one thread; weights are random, and a seed gives others. In each
round all contestants run in turn, and each counts with the least of ``--rounds``.

*find*: an export is the least that any search does, as it begins by one. *align*: two
networks are aligned in their weights. rebasin 0.0.47 is measured if it is installed
(``pip install rebasin``); costs are squared distances of parameters, relative to those
before.
"""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Results, Row, parse, parser
from benchmarks.networks import perceptron
from pyro_symmetric.alignment import align
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.networks import import_torchvision

Network = Callable[[], tuple[nn.Module, Tensor]]


def of_layers(depth: int, width: int) -> tuple[nn.Module, Tensor]:
    """Return a ReLU network for MNIST, and two rows."""
    return perceptron(784, *[width] * depth, 10), torch.randn(2, 784)


def of_torchvision(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network of torchvision by its name, and an image."""
    net = getattr(import_torchvision().models, name)(weights=None)
    return net, torch.randn(1, 3, 224, 224)


FIND: dict[str, Network] = {
    "ResNet-18": lambda: of_torchvision("resnet18"),
    "ViT-B/16": lambda: of_torchvision("vit_b_16"),
    "MLP 2 x 4096": lambda: of_layers(2, 4096),
}
ALIGN: dict[str, Network] = {
    "MLP 3 x 512": lambda: of_layers(3, 512),
    "ResNet-18": lambda: of_torchvision("resnet18"),
}
KEYS = ("task", "network", "seed")
TITLES = {
    "find": "find_symmetry and torch.export, processor seconds and ratios",
    "align": "align and rebasin, processor seconds, relative costs and ratios",
}


def least_seconds(rounds: int, **contestants: Callable[[], Any]) -> dict[str, float]:
    """Return the least processor seconds of each contestant, which take turns."""
    seconds = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def time_discovery(network: str, seed: int, rounds: int) -> Row:
    """Time a search, without verification and with it, and an export."""
    torch.manual_seed(seed)
    net, example = FIND[network]()
    net.eval()
    seconds = least_seconds(
        rounds,
        export=lambda: torch.export.export(net, (example,), strict=False),
        proposed=lambda: find_symmetry(net, example, verify=False),
        verified=lambda: find_symmetry(net, example),
    )
    export = seconds["export"]
    ratios = {
        f"{search} over export": seconds[search] / export
        for search in ("proposed", "verified")
    }
    return {**seconds, **ratios}


def squared_distance(net: nn.Module, reference: nn.Module) -> float:
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    return sum(float((a - b).detach().square().sum()) for a, b in pairs)


def time_alignment(network: str, seed: int, rounds: int) -> Row:
    """Time and judge an alignment of two networks, by this library and by rebasin."""
    torch.manual_seed(seed)
    reference, example = ALIGN[network]()
    net, _ = ALIGN[network]()
    reference.eval()
    net.eval()
    before = squared_distance(net, reference)
    weights, reference_weights = (
        {name: value.detach() for name, value in each.named_parameters()}
        for each in (net, reference)
    )
    permutations = find_symmetry(net, example, verify=False).permutations
    costs = dict[str, float]()

    def ours() -> None:
        alignment = align(
            weights, reference_weights, permutations, cost="l2", progress=False
        )
        costs["our cost"] = float(alignment.cost) / before

    def theirs() -> None:
        from rebasin import PermutationCoordinateDescent

        moved = copy.deepcopy(net)
        PermutationCoordinateDescent(reference, moved, example).rebasin()
        costs["their cost"] = squared_distance(moved, reference) / before

    contestants: dict[str, Callable[[], Any]] = {
        "search": lambda: find_symmetry(net, example, verify=False),
        "align": ours,
    }
    if importlib.util.find_spec("rebasin"):
        contestants["rebasin"] = theirs
    seconds = least_seconds(rounds, **contestants)
    row: Row = {**seconds, **costs}
    if "rebasin" in seconds:
        aligned = seconds["align"]
        row["rebasin over align"] = seconds["rebasin"] / aligned
        row["with the search"] = seconds["rebasin"] / (aligned + seconds["search"])
    return row


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--task", nargs="*", choices=TITLES, default=list(TITLES))
    names = sorted({*FIND, *ALIGN})
    arguments.add_argument("--only", nargs="*", choices=names, default=names)
    arguments.add_argument("--rounds", type=int, default=3)
    options = parse(arguments, argv)
    if options.quick:
        options.only, options.rounds = ["MLP 3 x 512", "ResNet-18"], 1
    warnings.simplefilter("ignore")
    find_symmetry(nn.Linear(2, 2), torch.randn(4, 2))  # imports, once for all
    if "align" in options.task and not importlib.util.find_spec("rebasin"):
        print("rebasin is missing: pip install rebasin==0.0.47 to measure it, too")
    results = Results.of(options, "rounds")
    tasks = {"find": (FIND, time_discovery), "align": (ALIGN, time_alignment)}
    for task in options.task:
        networks, measure = tasks[task]
        results.fill(
            lambda task, network, seed, measure=measure: measure(
                network, seed, options.rounds
            ),
            task=[task],
            network=[name for name in networks if name in options.only],
            seed=range(options.seeds),
        )
        rows = results.find(task=task)
        columns = {name: (name, 2) for name in rows[0] if name not in KEYS}
        results.table(TITLES[task], ["network"], columns, task=task)


if __name__ == "__main__":
    main()
