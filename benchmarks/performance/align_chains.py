r"""R-hat over the weights of Hamiltonian chains that sit in different copies of one mode, before and after alignment.

    python -m benchmarks.performance.align_chains  # a tanh network with one hidden layer
    python -m benchmarks.performance.align_chains --hidden 4 4  # with two

A small tanh network is fitted to data of a network of its own kind, the best of several fits is moved by a random
element of the symmetry (permutations and signs of the hidden units) for every chain, and HMC resumes from there. All
chains then see the same posterior of functions, each in a frame of its own: R-hat of predictions is 1, that of the
weights is far from it and says nothing. The table has R-hat over all weights, median and worst, and the share above
1.05:

* **weights**: as they were drawn;
* **canonical**: every draw by itself in canonical form (units sorted, signs fixed), ``canonicalize``;
* **aligned draws**: ``align_many(posterior, symmetry)``, an element for every draw;
* **aligned chains**: ``align_many(posterior, symmetry, each="chain")``, one for every chain, by its moments;
* **predictions**: of the network's function, which no frame changes.

It is printed for all draws, and for 100 of them, 25 of each of four chains (100 networks in one frame). Below it: the
share of draws whose element is exactly the one that undoes the planted one, up to one common element; the mean squared
distance of draws to their barycentre; and seconds.
"""

from __future__ import annotations

import time
from argparse import Namespace
from itertools import pairwise

import pyro
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table, spread
from pyro_symmetric.diagnostics import R_HAT

Weights = dict[str, Tensor]
INPUTS, NOISE = 4, 0.2
FRAMES = ("weights", "canonical", "aligned draws", "aligned chains", "predictions")


def network(hidden: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([INPUTS, *hidden]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 1)).double()


def problem(options: Namespace) -> tuple[ps.BayesianModel, Tensor, Tensor]:
    """A model, and data from a network of its kind whose units are far apart: orthogonal, with gains of their own."""
    net = network(options.hidden)
    model = ps.BayesianModel(net, prior=1.0, likelihood=ps.GaussianLikelihood(scale=NOISE))
    x = 2 * torch.randn(options.rows, INPUTS, dtype=torch.float64)
    teacher = {}
    for site, shape in model.site_shapes.items():
        value = torch.empty(shape, dtype=torch.float64)
        teacher[site] = nn.init.orthogonal_(value, 1.5) if len(shape) == 2 else nn.init.uniform_(value, -1.0, 1.0)
    last = list(teacher)[-2]
    teacher[last] = torch.linspace(0.5, 1.5, teacher[last].numel(), dtype=torch.float64).reshape(teacher[last].shape)
    y = model.outputs(teacher, x).squeeze(-1)
    return model, x, y + NOISE * torch.randn_like(y)


def solution(model: ps.BayesianModel, x: Tensor, y: Tensor, options: Namespace) -> Weights:
    """The best of several fits, all made at once."""
    weights = {site: prior.sample((options.fits,)).requires_grad_() for site, prior in model.priors().items()}
    optimiser = torch.optim.Adam(weights.values(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.steps)
    for _ in range(options.steps):
        optimiser.zero_grad()
        (-model.log_joint(weights, x, y).sum() / len(x)).backward()
        optimiser.step()
        schedule.step()
    best = int(model.log_joint(weights, x, y).argmax())
    return {site: value.detach()[best] for site, value in weights.items()}


def one_run(seed: int, options: Namespace) -> list[Row]:
    pyro.set_rng_seed(seed)
    model, x, y = problem(options)
    symmetry = ps.find_symmetry(model.net, x[:4])
    starts = symmetry.sample((options.chains,))(solution(model, x, y, options))
    posterior = ps.sample(
        ps.HMC(model),
        x,
        y,
        num_samples=options.draws,
        num_warmup=options.warmup,
        num_chains=options.chains,
        initial=starts,
        dtype=torch.float64,
        progress=options.progress,
    )
    hundred = ps.Posterior(
        {site: value[:4, :: max(1, options.draws // 25)][:, :25] for site, value in posterior.samples.items()},
        rows="chains",
    )
    return [
        row
        for name, draws in (("all draws", posterior), ("100 networks", hundred))
        for row in compared(
            name,
            draws,
            symmetry,
            {site: value[: draws.num_chains] for site, value in starts.items()},
            model,
            x,
            options,
        )
    ]


def compared(
    name: str,
    posterior: ps.Posterior,
    symmetry: ps.Symmetry,
    starts: Weights,
    model: ps.BayesianModel,
    x: Tensor,
    options: Namespace,
) -> list[Row]:
    """R-hat in every frame."""
    rows: list[Row] = []
    before = ps.diagnose(posterior, symmetry, model, x=x).statistics
    spaces = {"weights": before["weights"], "aligned draws of canonical forms": before["modulo symmetry"]}
    for each in ("draw", "chain"):
        start = time.perf_counter()
        frame = ps.align_many(posterior, symmetry, each=each, progress=options.progress)
        seconds = time.perf_counter() - start
        spaces[f"aligned {each}s"] = ps.diagnose(frame.posterior, None, model, x=x).statistics["weights"]
        same = one_frame(frame.element, starts, posterior.num_samples)
        row: Row = {"kind": "frame", "draws": name, "each": each, "seconds": seconds, "undone": same}
        row |= {"first": frame.history[0], "last": frame.history[-1]}
        rows.append(row | {"change": change(posterior, frame.posterior, model, x)})
    spaces["predictions"] = before["predictions"]
    for key, by_site in spaces.items():
        r_hat = torch.cat([found.r_hat.flatten() for found in by_site.values()])
        r_hat = r_hat[~r_hat.isnan()]
        above = float((r_hat > R_HAT[1]).double().mean())
        row = {"kind": "r_hat", "draws": name, "space": key, "share_above": above}
        rows.append(row | {"median": float(r_hat.median()), "worst": float(r_hat.max())})
    return rows


def one_frame(element: object, starts: Weights, draws: int) -> float:
    """The share of draws whose element brings their chain's start to where most elements bring theirs."""
    moved = element({site: value[:, None] for site, value in starts.items()})  # type: ignore[operator]
    rows = torch.cat(
        [value.expand(-1, draws, *value.shape[2:]).flatten(0, 1).flatten(1) for value in moved.values()], 1
    )
    return float(rows.unique(dim=0, return_counts=True)[1].max()) / len(rows)


def change(one: ps.Posterior, other: ps.Posterior, model: ps.BayesianModel, x: Tensor) -> float:
    """The largest change of a prediction: zero to rounding, as elements keep the function."""
    outputs = [model.outputs(posterior.thin(10).samples, x[:50]) for posterior in (one, other)]
    return float((outputs[0] - outputs[1]).abs().max())


def report(results: Results, options: Namespace) -> None:
    for draws in ("all draws", "100 networks"):
        shape = f"{options.chains} chains of {options.draws}" if draws == "all draws" else "4 chains of 25"
        table = []
        for space in FRAMES:
            rows = results.find(kind="r_hat", draws=draws, space=space)
            columns = [spread((row[name] for row in rows), 3) for name in ("median", "worst", "share_above")]
            table.append([space, *columns])
        print_table(f"R-hat over {draws} ({shape})", ["", "median", "worst", "share above 1.05"], table)
        table = []
        for each in ("draw", "chain"):
            rows = results.find(kind="frame", draws=draws, each=each)
            table.append(
                [
                    f"each {each}",
                    spread((row["undone"] for row in rows), 4),
                    spread((row["first"] for row in rows), 2),
                    spread((row["last"] for row in rows), 2),
                    f"{max(row['change'] for row in rows):.0e}",
                    spread((row["seconds"] for row in rows), 2),
                ]
            )
        header = [
            "",
            "planted undone",
            "distance, first round",
            "last",
            "function changed by",
            "seconds",
        ]
        print_table("Alignment", header, table)


def main() -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--hidden", type=int, nargs="+", default=[4], help="widths of the hidden layers")
    arguments.add_argument("--rows", type=int, default=1000, help="of the data")
    arguments.add_argument("--chains", type=int, default=8)
    arguments.add_argument("--draws", type=int, default=500, help="of each chain")
    arguments.add_argument("--warmup", type=int, default=500)
    arguments.add_argument("--fits", type=int, default=32)
    arguments.add_argument("--steps", type=int, default=2000, help="of each fit")
    options = parse(arguments)
    if options.quick:
        options.rows, options.draws, options.warmup, options.fits, options.steps = 300, 100, 100, 8, 300
    names = ("hidden", "rows", "chains", "draws", "warmup", "fits", "steps")
    results = Results.of(options, *names)
    for seed in range(options.seeds):
        if not results.find(seed=seed):
            for row in one_run(seed, options):
                results.add({"seed": seed, **row})
    report(results, options)


if __name__ == "__main__":
    main()
