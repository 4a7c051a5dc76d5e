r"""Label switching undone by alignment and by the methods of R's ``label.switching``, against known allocations.

    python -m benchmarks.performance.relabelling

Data come from a normal mixture, so that each observation's component is known. The posterior of weights, locations and
scales is drawn by NUTS, and every draw is relabelled at random. The *oracle* knows the components: it gives each draw
the labels under which the true allocations are most probable. Each method is judged by

* ``labels``: the share of draws to which it gives the oracle's labels, up to one relabelling of all;
* ``off``: how far its posterior means of locations and log scales lie from the oracle's, in the oracle's posterior
  deviations, root mean square;
* ``seconds``: of the relabelling. Stephens' method and ECR are given the probabilities of allocations, which takes
  ``observations x draws`` densities more.

``canonical`` sorts the components of each draw by itself; ``align_many`` brings all draws into one frame by their
weights; ``stephens`` (Stephens 2000) and ``ecr`` (Papastamoulis & Iliopoulos 2010) look at allocations alone.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table, spread

# name -> weights, locations and scales of the mixture that data come from
MIXTURES = {
    "3 apart": ([0.3, 0.3, 0.4], [-4.0, 0.0, 4.0], [0.7, 0.7, 0.7]),
    "3 overlapping": ([0.3, 0.3, 0.4], [-1.5, 0.0, 1.5], [0.7, 0.7, 0.7]),
    "3 scales at one place": ([0.3, 0.3, 0.4], [0.0, 0.0, 0.0], [0.2, 1.0, 5.0]),
    "5, two of them close": ([0.2] * 5, [-6.0, -3.0, 0.0, 1.2, 5.0], [0.6] * 5),
}
METHODS = ("canonical", "align_many", "stephens", "ecr")


def model(x: Tensor, count: int) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.full((count,), 2.0)))
    locs = pyro.sample("locs", dist.Normal(0.0, 4.0).expand([count]).to_event(1))
    scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0).expand([count]).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scales)), obs=x)


def allocations(samples: dict[str, Tensor], x: Tensor) -> Tensor:
    """Probabilities of each observation's component under each draw, ``(chains, draws, observations, components)``."""
    locs, scales, weights = (samples[site].unsqueeze(-2) for site in ("locs", "scales", "weights"))
    return (weights.log() + dist.Normal(locs, scales).log_prob(x.unsqueeze(-1))).softmax(-1)


def one_run(name: str, seed: int, options: Namespace) -> list[Row]:
    pyro.set_rng_seed(seed)
    weights, locs, scales = (torch.tensor(part) for part in MIXTURES[name])
    count = len(weights)
    known = torch.multinomial(weights, options.rows, replacement=True)
    x = dist.Normal(locs[known], scales[known]).sample()
    example = {"weights": weights, "locs": locs, "scales": scales}
    group = ps.Group.declare(dict.fromkeys(example, ("k",)), example)
    posterior = ps.sample(
        ps.NUTS(model),
        x,
        count,
        num_samples=options.draws,
        num_warmup=options.draws,
        num_chains=4,
        seed=seed,
        progress=options.progress,
    )
    mixed = posterior.map(group.sample((4, options.draws)))
    oracle = by_allocations(mixed, group, x, known)
    rows: list[Row] = []
    for method in METHODS:
        began = time.perf_counter()
        found = relabelled(mixed, group, x, method)
        seconds = time.perf_counter() - began
        rows.append({"mixture": name, "method": method, "seconds": seconds, **compared(found, oracle)})
    return rows


def relabelled(posterior: ps.Posterior, group: ps.Group, x: Tensor, method: str) -> ps.Posterior:
    if method == "canonical":
        return ps.Posterior(ps.canonicalize(posterior.samples, group, warn=False), rows="chains")
    if method == "align_many":
        return ps.align_many(posterior, group, progress=False).posterior
    return ps.relabel(posterior, group, allocations(posterior.samples, x), method=method)  # type: ignore[arg-type]


def by_allocations(posterior: ps.Posterior, group: ps.Group, x: Tensor, known: Tensor) -> ps.Posterior:
    """The oracle: labels under which the true components of all observations are most probable."""
    log_probs = allocations(posterior.samples, x).clamp(min=1e-30).log()
    orders = group.enumerate().permutations["k"]  # (K!, K): the unit that comes to each place
    fits = torch.stack(
        [
            log_probs[..., order].gather(-1, known.expand(log_probs.shape[:-1]).unsqueeze(-1)).sum((-1, -2))
            for order in orders
        ]
    )
    return posterior.map(group.element({"k": orders[fits.argmax(0)]}))


def compared(found: ps.Posterior, oracle: ps.Posterior) -> Row:
    """Under the one relabelling of all draws that fits best."""
    ours, theirs = (torch.stack([p.samples["locs"], p.samples["scales"].log()]).flatten(1, 2) for p in (found, oracle))
    best = max(
        (list(order) for order in itertools.permutations(range(ours.shape[-1]))),
        key=lambda order: int((ours[..., order] == theirs).all(-1).all(0).sum()),
    )
    ours = ours[..., best]
    off = (ours.mean(1) - theirs.mean(1)) / theirs.std(1)
    return {"labels": float((ours == theirs).all(-1).all(0).float().mean()), "off": float(off.square().mean().sqrt())}


def report(results: Results, options: Namespace) -> None:
    for name in options.mixtures:
        table = []
        for method in METHODS:
            rows = results.find(mixture=name, method=method)
            columns = [spread((row[column] for row in rows), 3) for column in ("labels", "off", "seconds")]
            table.append([method, *columns])
        print_table(name, ["", "labels", "off", "seconds"], table)


def main() -> None:
    arguments = parser(__doc__, seeds=5)
    arguments.add_argument("--mixtures", nargs="+", choices=list(MIXTURES), default=list(MIXTURES), metavar="NAME")
    arguments.add_argument("--rows", type=int, default=200, help="of the data")
    arguments.add_argument("--draws", type=int, default=500, help="of each of four chains")
    options = parse(arguments)
    if options.quick:
        options.draws, options.rows, options.mixtures = 50, 60, options.mixtures[:1]
    results = Results.of(options, "rows", "draws")
    for name in options.mixtures:
        for seed in range(options.seeds):
            if not results.find(mixture=name, seed=seed):
                for row in one_run(name, seed, options):
                    results.add({"seed": seed, **row})
    report(results, options)


if __name__ == "__main__":
    main()
