r"""The distance of a network's weights from their nearest equivalent mode, against
width.

    python -m benchmarks.experiments.gelberg_2024.mode_proximity --json proximity.json

Swapping two hidden units gives another mode that computes the same function. The wider
the network, the closer the closest two of its units: equivalent modes crowd together
(Gelberg et al. 2024, arXiv 2408.05496, section 3). For one hidden layer of ``n`` units,
``u_i`` all weights of unit ``i`` (incoming, bias, outgoing):

* the **nearest** equivalent mode is the swap of the closest pair, ``sqrt(2) min |u_i -
  u_j|`` away: an element that moves units moves at least two, and each by no less than
  to its nearest neighbour.
* for any weights whatever it is at most ``2 / sqrt(n - 1)`` times the norm of the
  units' weights away, because the mean of ``|u_i - u_j|^2`` over pairs is at most
  ``2/(n-1) sum |u_i|^2``: the **bound** that the table shows, of slope -1/2.
* the nearest mode that moves **all** units is a linear assignment with a forbidden
  diagonal.
* **any**: the root mean square distance of a random equivalent mode, in closed form.

Units that training has shrunk to nothing coincide, which makes the nearest mode
trivial; so the nearest swap of **working** units (norm at least a tenth of the largest
unit's) is shown, too, with their number.

Shown for prior draws and for networks trained to the posterior's mode (MAP) on
scikit-learn's digits, one and two hidden layers (of which each is moved by itself: an
upper bound of the nearest), as a share of the norm of the layer's units. A second table
has what matters to a guide: distances in posterior standard deviations, for mean-field
guides trained by SVI. ``mixture_target.py`` finds that a mean-field guide sits between
two modes that are closer than 2.92 to 3.74 standard deviations.
"""

from __future__ import annotations

import functools
import math
from statistics import fmean
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser
from benchmarks.networks import perceptron
from pyro_symmetric.groups.axes import rows

THRESHOLD = 2.92  # standard deviations; see the docstring
NAMES = ("nearest", "nearest_working", "all", "any", "bound")
# of the largest unit's norm: training to the posterior's mode shrinks units without a
# use to nothing
WORKING = 0.1


def units_of(weights: dict[str, Tensor], group: ps.Group, name: str) -> Tensor:
    """One row for each unit: all weights that move with it."""
    parts = [
        rows(weights[axis.site], axis, weights[axis.site].dim())
        for axis in group[name].axes
    ]
    return torch.cat(parts, 1).double()


def squared_distances(units: Tensor) -> Tensor:
    """Between all pairs, by differences in chunks: a Gram matrix would lose the small
    ones.
    """
    return torch.stack([(units - row).square().sum(-1) for row in units])


def distances(
    weights: dict[str, Tensor], group: ps.Group, name: str
) -> dict[str, float]:
    """Distances to equivalent modes that permute some units, as shares of their
    norm.
    """
    units = units_of(weights, group, name)
    n, norm = len(units), float(units.norm())
    squares = squared_distances(units)
    forbidden = squares.clone().fill_diagonal_(math.inf).numpy()
    rows, columns = linear_sum_assignment(
        np.where(np.isinf(forbidden), 1e6 * (1 + squares.max().item()), forbidden)
    )
    norms = units.norm(dim=1)
    alive = (norms >= WORKING * norms.max()).numpy()
    spread_of_units = float(units.square().sum() - n * units.mean(0).square().sum())
    return {
        "nearest": math.sqrt(2 * forbidden.min()) / norm,
        "nearest_working": math.sqrt(2 * forbidden[alive][:, alive].min()) / norm
        if alive.sum() > 1
        else math.nan,
        "working": int(alive.sum()),
        "all": math.sqrt(forbidden[rows, columns].sum()) / norm,
        "any": math.sqrt(2 * max(spread_of_units, 0.0)) / norm,
        "bound": 2 / math.sqrt(n - 1),
        "norm": norm,
    }


def trained(
    model: ps.BayesianModel, x: Tensor, y: Tensor, steps: int, rate: float = 0.01
) -> dict[str, Tensor]:
    """The posterior's mode, by Adam on the log-joint of all data from the network's own
    start.
    """
    weights = {
        k: v[0].requires_grad_()
        for k, v in ps.ensembles.fresh_members(model.net, 1).items()
    }
    optimiser = torch.optim.Adam(weights.values(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        (-model.log_joint(weights, x, y) / len(x)).backward()
        optimiser.step()
        schedule.step()
    return {k: v.detach() for k, v in weights.items()}


def in_deviations(
    model: ps.BayesianModel, group: ps.Group, x: Tensor, y: Tensor, steps: int
) -> dict[str, Any]:
    """The distance of a mean-field guide's mean from its swaps, in the guide's own
    standard deviations.
    """
    pyro.clear_param_store()
    guide = ps.AutoSymmetrized(
        model, group, estimator=ps.InfoNCE(0), init_scale=0.02
    ).setup(x[:2], y[:2])
    optimiser = pyro.optim.ClippedAdam(
        {"lr": 0.03, "lrd": 0.03 ** (1 / steps), "clip_norm": math.inf}
    )
    svi = SVI(model, guide, optimiser, Trace_ELBO())
    for _ in range(steps):
        svi.step(x, y)
    base = guide.base.get_posterior()
    (name,) = group.factors
    mean = units_of(guide.unpack(base.mean.detach()), group, name)
    precision = units_of(guide.unpack(base.variance.detach()), group, name).reciprocal()
    squares = torch.stack(
        [
            ((mean - m).square() * (precision + p)).sum(-1)
            for m, p in zip(mean, precision, strict=True)
        ]
    )
    nearest = squares.fill_diagonal_(math.inf).min(1).values.sqrt()
    # root mean square signal over noise of each unit's weights
    own = (mean.square() * precision).mean(1).sqrt()
    return {
        "closest": float(nearest.min()),
        "median": float(nearest.median()),
        "within": float((nearest < THRESHOLD).double().mean()),
        "active": int((own > 0.5).sum()),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument(
        "--widths", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512]
    )
    arguments.add_argument("--steps", type=int, default=400)
    options = parse(arguments, argv)
    if options.quick:
        options.widths, options.steps = [8, 16], 20
    data = ps.datasets.load("digits", dtype=torch.float32)
    x, y = data.train_x.flatten(1), data.train_y

    def run(seed: int, depth: int, width: int) -> Row:
        pyro.set_rng_seed(seed)
        net = perceptron(x.shape[1], *[width] * depth, 10).eval()
        model = ps.BayesianModel(
            net, ps.GaussianPrior(1.0, fan_in=True), "categorical", num_data=len(x)
        )
        group = ps.find_symmetry(net, x[:2]).permutations
        states = {"prior": {k: p.sample() for k, p in model.priors().items()}}
        states["trained"] = trained(model, x, y, options.steps)
        found = {
            s: [distances(weights, group, name) for name in group.factors]
            for s, weights in states.items()
        }
        return {
            **found,
            "guide": in_deviations(model, group, x, y, 2 * options.steps)
            if depth == 1
            else None,
        }

    results = Results.of(options, "steps")
    results.fill(run, seed=range(options.seeds), depth=(1, 2), width=options.widths)
    report(results, options)


def slope(widths: list[int], values: list[float]) -> float:
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


def report(results: Results, options: Any) -> None:
    def entry(row: Row, state: str, layer: int, name: str) -> float:
        return row[state][layer][name]

    for depth, layer in ((1, 0), (2, 0), (2, 1)):
        for state in ("prior", "trained"):
            get = {
                name: functools.partial(entry, state=state, layer=layer, name=name)
                for name in (*NAMES, "working")
            }
            columns: dict[str, tuple[Any, int]] = {
                name: (get[name], 4) for name in NAMES
            }
            title = f"{state}, hidden layer {layer + 1} of {depth}: distance / norm"
            results.table(
                title,
                ["width"],
                {**columns, "working units": (get["working"], 1)},
                depth=depth,
            )
            rows = [results.find(width=width, depth=depth) for width in options.widths]
            slopes = {
                name: slope(
                    options.widths, [fmean(map(get[name], own)) for own in rows]
                )
                for name in NAMES
            }
            print(
                "  slopes: "
                + ", ".join(f"{name} {value:.3f}" for name, value in slopes.items())
            )
    results.table(
        "Mean-field guides: distance to a unit's nearest swap in standard deviations",
        ["width"],
        {
            "closest pair": (lambda row: row["guide"]["closest"], 2),
            "median unit": (lambda row: row["guide"]["median"], 2),
            f"share within {THRESHOLD}": (lambda row: row["guide"]["within"], 3),
            "active units": (lambda row: row["guide"]["active"], 1),
        },
        depth=1,
    )


if __name__ == "__main__":
    main()
