"""The distance of estimators of the symmetrised log-density from the exact one, from overlapping to separated units.

    python -m benchmarks.performance.orbit_estimators --draws 300

Networks of one hidden layer (10 inputs, a bias, one output) and of two; means are normal with the stated deviation, in
units of about a posterior's standard deviation (deviations are uniform in 0.3 .. 1.3, so that also units of equal means
differ). For every case: the mean of estimate minus exact value, in nats, over draws and bases, and its standard error.
Upper bounds lie above zero up to that error. The last table is for a width at which nothing can be enumerated.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch

from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance
from pyro_symmetric.groups import Action, Group

SEPARATIONS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


def network(*widths: int, inputs: int = 10) -> Group:
    """Weights and biases of hidden layers of these widths, and one output."""
    axes: dict[str, tuple[str | None, ...]] = {}
    shapes: dict[str, torch.Size] = {}
    before, name_before = inputs, None
    for layer, width in enumerate(widths):
        name = f"hidden.{layer}"
        axes |= {f"{layer}.weight": (name, name_before), f"{layer}.bias": (name,)}
        shapes |= {f"{layer}.weight": torch.Size([width, before]), f"{layer}.bias": torch.Size([width])}
        before, name_before = width, name
    axes["last.weight"] = (None, name_before)
    shapes["last.weight"] = torch.Size([1, before])
    return Group.declare(axes, shapes)


def base(dim: int, separation: float) -> Any:
    loc = separation * torch.randn(dim, dtype=torch.float64)
    return dist.Normal(loc, 0.3 + torch.rand(dim, dtype=torch.float64)).to_event(1)


def compare(group: Group, estimators: dict[str, Any], draws: int, seeds: int) -> list[dict[str, Any]]:
    action = Action(group, list(group.site_shapes))
    rows = []
    for separation in SEPARATIONS:
        gaps: dict[str, list[torch.Tensor]] = {name: [] for name in estimators}
        information = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            q = base(action.dim, separation)
            w = q.sample((draws,))
            exact = ExactOrbit().log_prob(q, action, w)
            information.append(float((q.log_prob(w) - exact).mean()))
            for name, estimator in estimators.items():
                gaps[name].append(estimator.log_prob(q, action, w) - exact)
        row: dict[str, Any] = {"separation": separation, "information": statistics.mean(information)}
        for name, parts in gaps.items():
            gap = torch.cat(parts)
            row[name] = [float(gap.mean()), float(gap.std()) / math.sqrt(len(gap))]
            row[f"{name}, worst base"] = max(float(part.mean()) for part in parts)
        rows.append(row)
    return rows


def wide(width: int, draws: int) -> list[dict[str, Any]]:
    """Gains ``log q - log qbar`` where only bounds can tell."""
    group = network(width)
    action = Action(group, list(group.site_shapes))
    rows = []
    for separation in (0.3, 5.0):
        torch.manual_seed(0)
        q = base(action.dim, separation)
        w = q.sample((draws,))
        own = q.log_prob(w)
        row: dict[str, Any] = {"separation": separation, "log n!": math.lgamma(width + 1)}
        for k in (1, 4, 16, 64):
            row[f"SinkhornImportance({k})"] = float((own - SinkhornImportance(k).log_prob(q, action, w)).mean())
        row["InfoNCE(255)"] = float((own - InfoNCE(255).log_prob(q, action, w)).mean())
        rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for row in rows:
        cells = [f"{k} {v[0]:+.3f} ± {v[1]:.3f}" if isinstance(v, list) else f"{k} {v:.3f}" for k, v in row.items()]
        print("  " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300, help="draws of each base (default 300)")
    parser.add_argument("--seeds", type=int, default=3, help="bases of each case (default 3)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    estimators = {"InfoNCE(255)": InfoNCE(255), "SinkhornImportance(16)": SinkhornImportance(16)}
    results = {}
    for widths in ((4,), (8,), (12,), (4, 3), (5, 4), (7, 5)):
        name = "-".join(map(str, widths))
        results[name] = compare(network(*widths), estimators, options.draws, options.seeds)
        show(f"hidden widths {name}: estimate - exact, nats", results[name])
    results["64, wide"] = wide(64, options.draws)
    show("width 64: log q - log qbar, nats", results["64, wide"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
