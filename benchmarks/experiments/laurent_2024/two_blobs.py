"""Ten thousand perceptrons with two hidden units on two Gaussian blobs: the copies of a mode, and one mode after the
symmetries are gone (figure 1 of Laurent, Aldea & Franchi 2024, arXiv 2310.08287).

    python -m benchmarks.experiments.laurent_2024.two_blobs --out figures

Trains the networks at once and some of them in a plain PyTorch loop, and compares the time per network. Then looks at
the joint law of the two output weights, three times: as trained, without scalings, and without scalings and
permutations. Exchanging the two hidden units mirrors that plane at its diagonal, so that a mode off the diagonal comes
twice. Half of the networks end in worse minima, with a unit that is dead or does what the other does; they are counted,
and the mode that is looked at is the best one: objectives within 2 % of the least.

A mixture of two normals is fitted to it: how it is shared between the components, how far apart they are (Euclid's
distance, and Mahalanobis' under their mean covariance), and how well one is the other's mirror image, as a share of
their distance. If there are two copies, the components are these: alike in share, mirror images. If there is one,
they split its inside, which holds minima of nearly equal objective, as the kinks of ReLU make them. Mean shift
(Comaniciu & Meer 2002), which isn't told how many modes there are, counts them: those with a twentieth of the networks.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, new_figure, parse, parser, print_table, save_figure
from pyro_symmetric.compare import invariance_tests, mmd
from pyro_symmetric.ensembles import ensemble

WEIGHT_DECAY = 5e-3


def independent(weights: dict[str, Tensor]) -> ps.Posterior:
    """Networks that know nothing of each other."""
    return ps.Posterior.from_samples(weights, kind="independent")


def blobs(rows: int) -> tuple[Tensor, Tensor]:
    """Two normals of equal size at (-1, -1) and (1, 1)."""
    y = torch.arange(rows) % 2
    return torch.randn(rows, 2) + (2 * y[:, None] - 1), y


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(-1), y.to(outputs.dtype))


def in_a_loop(x: Tensor, y: Tensor, networks: int, epochs: int, batch_size: int, optimizer: Any) -> tuple[float, float]:
    """Seconds, of the clock and of the processor, for one network and one epoch, trained one after the other."""
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(networks):
        net = perceptron()
        optimiser = optimizer(list(net.parameters()))
        for _ in range(epochs):
            order = torch.randperm(len(x))
            for start in range(0, len(x) - batch_size + 1, batch_size):
                rows = order[start : start + batch_size]
                optimiser.zero_grad()
                loss(net(x[rows]), y[rows]).backward()
                optimiser.step()
    runs = networks * epochs
    return (time.perf_counter() - began) / runs, (time.process_time() - began_cpu) / runs


def mixture(points: Tensor) -> dict[str, float]:
    """Two normals fitted to points ``(S, 2)``: shares, distance, and how closely they mirror each other."""
    from sklearn.mixture import GaussianMixture

    data = points.double().numpy()
    one, two = (GaussianMixture(k, n_init=5, random_state=0).fit(data) for k in (1, 2))
    first, second = two.means_
    pooled = two.covariances_.mean(0)
    gap = first - second
    return {
        "smaller_share": float(two.weights_.min()),
        "gap": float(np.linalg.norm(gap)),
        "distance": float(np.sqrt(gap @ np.linalg.solve(pooled, gap))),
        "mirror_error": float(np.linalg.norm(first[::-1] - second) / np.linalg.norm(gap)),
        "gain": float(two.score(data) - one.score(data)),
        "above_diagonal": float((points[:, 1] > points[:, 0]).double().mean()),
        "modes": modes(data),
    }


def modes(data: Any) -> int:
    """The number of modes that mean shift finds in up to a thousand points, with scikit-learn's bandwidth."""
    from sklearn.cluster import MeanShift, estimate_bandwidth

    data = data[:1000]
    labels = MeanShift(bandwidth=estimate_bandwidth(data), bin_seeding=True).fit_predict(data)
    return int((np.bincount(labels) >= len(data) / 20).sum())


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--networks", type=int, default=10_000)
    arguments.add_argument("--epochs", type=int, default=100)
    arguments.add_argument("--rows", type=int, default=200)
    arguments.add_argument("--batch-size", type=int, default=20)
    arguments.add_argument("--loop-networks", type=int, default=10, help="networks of the plain loop")
    arguments.add_argument("--loop-epochs", type=int, default=10, help="epochs of the plain loop")
    options = parse(arguments, argv)
    if options.quick:
        options.networks, options.epochs = 1_000, 20
    results = Results.of(options, "networks", "epochs", "rows", "batch_size", "threads")
    results.fill(functools.partial(run, options=options), seed=range(options.seeds))
    for row in results.rows:
        report(row)


def run(seed: int, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    x, y = blobs(options.rows)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=WEIGHT_DECAY)
    in_a_loop(x, y, 1, 1, options.batch_size, optimizer)  # once to warm up
    loop, loop_cpu = in_a_loop(x, y, options.loop_networks, options.loop_epochs, options.batch_size, optimizer)
    began, began_cpu = time.perf_counter(), time.process_time()
    posterior = ensemble(
        perceptron(),
        (x, y),
        options.networks,
        loss=loss,
        epochs=options.epochs,
        batch_size=options.batch_size,
        optimizer=optimizer,
        progress=options.progress,
    )
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    at_once = seconds / (options.networks * options.epochs)
    everything = posterior.get_samples()
    penalty = sum(value.flatten(1).square().sum(1) for value in everything.values()) * WEIGHT_DECAY / 2
    objective = posterior.statistics["loss"][0] + penalty
    best = objective < 1.02 * objective.min()
    weights = {site: value[best] for site, value in everything.items()}
    symmetry = ps.find_symmetry(perceptron(), x[:2])
    stages = {
        "as trained": weights,
        "without scalings": ps.canonicalize(weights, symmetry, permutations=None),
        "without scalings and permutations": ps.canonicalize(weights, symmetry, permutations="first"),
    }
    rows = {name: mixture(stage["2.weight"][:, 0]) for name, stage in stages.items()}
    half = int(best.sum()) // 2
    size = min(500, half)
    moved = symmetry.permutations.element({name: [1, 0] for name in symmetry.permutations.factors})
    distances = {}
    for name, stage in stages.items():
        sample, other = (
            {site: value[part] for site, value in stage.items()} for part in (slice(size), slice(half, half + size))
        )
        distances[name] = {"itself": mmd(sample, other)["mean"], "exchanged": mmd(sample, moved(other))["mean"]}
    figure(stages, options.out, seed)
    return {
        "seconds": seconds,
        "per_network": at_once * options.epochs,
        "loop_per_network": loop * options.epochs,
        "ratio": loop / at_once,
        "cpu_seconds": cpu,
        "cpu_ratio": loop_cpu * options.networks * options.epochs / cpu,
        "loss": float(posterior.statistics["loss"].mean()),
        "stopped": posterior.metadata["diverged"],
        "in_best_mode": float(best.double().mean()),
        "mixtures": rows,
        "distances": distances,
        "verdicts": {
            name: invariance_tests(independent(stage), symmetry.permutations).verdict for name, stage in stages.items()
        },
    }


def report(row: dict[str, Any]) -> None:
    once, loop = 1000 * row["per_network"], 1000 * row["loop_per_network"]
    print(
        f"\nseed {row['seed']}: trained in {row['seconds']:.1f} s, {once:.2f} ms a network; a plain loop takes "
        f"{loop:.0f} ms, {row['ratio']:.0f} times as long (in processor time: {row['cpu_seconds']:.1f} s, "
        f"{row['cpu_ratio']:.0f} times). {row['stopped']} stopped; {row['in_best_mode']:.1%} in the best mode"
    )
    print_table(
        "two normals fitted to the output weights of the best mode",
        (
            "weights",
            "smaller share",
            "distance",
            "Mahalanobis",
            "mirror error",
            "gain in nats",
            "above the diagonal",
            "modes by mean shift",
        ),
        [
            (
                name,
                *(
                    f"{m[k]:.3f}"
                    for k in ("smaller_share", "gap", "distance", "mirror_error", "gain", "above_diagonal")
                ),
                str(m["modes"]),
            )
            for name, m in row["mixtures"].items()
        ],
    )
    print_table(
        "mean squared MMD to other networks of that mode",
        ("weights", "as they are", "with units exchanged"),
        [(name, f"{v['itself']:.5f}", f"{v['exchanged']:.5f}") for name, v in row["distances"].items()],
    )
    print("\nare units exchangeable?")
    for name, verdict in row["verdicts"].items():
        print(f"  {name}: {verdict}")


def figure(stages: dict[str, dict[str, Tensor]], folder: Path | None, seed: int) -> None:
    if folder is None:
        return
    picture, axes = new_figure(1, len(stages), size=(4 * len(stages), 4))
    for axis, (name, stage) in zip(axes[0], stages.items(), strict=True):
        first, second = stage["2.weight"][:, 0].T.numpy()
        low, high = np.quantile(np.concatenate([first, second]), [0.001, 0.999])
        low, high = low - 0.15 * (high - low), high + 0.15 * (high - low)
        axis.hist2d(first, second, bins=120, range=[[low, high]] * 2, cmap="Blues", norm="log")
        axis.plot([low, high], [low, high], color="0.6", linewidth=0.8)
        axis.set(title=name, xlabel="output weight of the first unit", ylabel="of the second", aspect="equal")
    save_figure(picture, folder, f"two_blobs_{seed}.png")


if __name__ == "__main__":
    main()
