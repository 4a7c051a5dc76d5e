"""The excess over the least mass of its orbit at which training ends (figure 2 of Laurent, Aldea & Franchi 2024, arXiv
2310.08287)

    python -m benchmarks.experiments.laurent_2024.mass_at_convergence --out figures

A ReLU network's function doesn't change when units are rescaled, and of all rescalings one has the least squared norm.
Weight decay pulls there. For several strengths of it, networks on two moons are trained to the end; reported are their
mass, the least mass of the same function, and the share that scalings alone could take away; and by layer, the mass as
trained beside that of the same layer at the minimum: scalings carry mass from layer to layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import pyro_symmetric as ps
from benchmarks.experiments.laurent_2024.sorting_dynamics import moons
from benchmarks.harness import Results, mean_over, new_figure, parse, parser, print_table, save_figure
from benchmarks.networks import perceptron
from pyro_symmetric.compare import excess_mass
from pyro_symmetric.ensembles import ensemble


def run(seed: int, decay: float, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    x, y = moons(500)
    net = perceptron(2, options.width, options.width, 2)
    symmetry = ps.find_symmetry(net, x[:2])
    posterior = ensemble(
        net,
        (x, y),
        options.networks,
        epochs=options.epochs,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=decay),
        progress=options.progress,
    )
    weights = posterior.get_samples()
    minimum = ps.minimal_mass(weights, symmetry)
    least = minimum.mass
    layers = {
        site: [float(w[site].square().flatten(1).sum(1).mean()) for w in (weights, minimum.weights)]
        for site in symmetry.scalings.weight_sites
    }
    share = excess_mass(weights, symmetry)
    return {
        "mass": (least / (1 - share)).tolist(),
        "least": least.tolist(),
        "share": share.tolist(),
        "layers": layers,
        "loss": float(posterior.statistics["loss"].mean()),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--networks", type=int, default=100)
    arguments.add_argument("--epochs", type=int, default=100)
    arguments.add_argument("--width", type=int, default=16)
    arguments.add_argument("--decays", type=float, nargs="+", default=[0.0, 1e-4, 1e-3, 5e-3])
    options = parse(arguments, argv)
    if options.quick:
        options.networks, options.epochs = 20, 10
    results = Results.of(options, "networks", "epochs", "width")
    results.fill(functools.partial(run, options=options), seed=range(options.seeds), decay=options.decays)
    rows, points = [], {}
    for decay in options.decays:
        found = results.find(decay=decay)
        mass, least, share = (
            torch.tensor([v for row in found for v in row[name]]) for name in ("mass", "least", "share")
        )
        points[decay] = least, mass
        cells = (f"{float(v.mean()):.2f} ± {float(v.std()):.2f}" for v in (mass, least))
        spread = f"{float(share.mean()):.2%} ({float(share.min()):.2%} to {float(share.max()):.2%})"
        rows.append((f"{decay:g}", *cells, spread, f"{mean_over(found, 'loss'):.3f}"))
    head = ("weight decay", "mass", "least mass", "share above the least", "loss")
    count = options.networks * options.seeds
    print_table(f"mass where training ended, {count} networks, {options.epochs} epochs", head, rows)
    lines = []
    for decay in options.decays:
        found = [row["layers"] for row in results.find(decay=decay)]
        means = {site: torch.tensor([layers[site] for layers in found]).mean(0).tolist() for site in found[0]}
        lines.append([f"{decay:g}", *(f"{mass:.2f} / {least:.2f}" for mass, least in means.values())])
    print_table("by layer: mass as trained / at the minimum", ["weight decay", *means], lines)
    if options.out is not None:
        picture, axes = new_figure(1, 1, size=(4.5, 4.5))
        for decay, (least, mass) in points.items():
            axes[0, 0].scatter(least, mass, s=8, label=f"weight decay {decay:g}")
        axes[0, 0].axline((0, 0), slope=1, color="0.6", linewidth=0.8)
        axes[0, 0].set(xlabel="least mass of the orbit", ylabel="mass where training ended")
        axes[0, 0].legend()
        save_figure(picture, options.out, "mass_at_convergence.png")


if __name__ == "__main__":
    main()
