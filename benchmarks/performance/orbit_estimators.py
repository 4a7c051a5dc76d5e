"""The distance of estimators of the symmetrised log-density from the exact one, from
overlapping to separated units.

    python -m benchmarks.performance.orbit_estimators --draws 300

Networks of one hidden layer (10 inputs, a bias, one output) and of two; means are
normal with the stated deviation, in units of about a posterior's standard deviation
(deviations are uniform in 0.3 .. 1.3, so that also units of equal means differ). For
every case: the mean over draws of estimate minus exact value, in nats, its mean and
deviation over bases. Upper bounds lie above zero up to the error of that. The last
table is of gains, the base's log-density less the symmetrised one's, at a width at
which nothing can be enumerated.
"""

from __future__ import annotations

import functools
from typing import Any

import pyro.distributions as dist
import torch

from benchmarks.harness import Results, Row, parse, parser
from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance
from pyro_symmetric.groups import Action, Group

SEPARATIONS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
ESTIMATORS: dict[str, Any] = {
    "InfoNCE(255)": InfoNCE(255),
    "SinkhornImportance(16)": SinkhornImportance(16),
}
BOUNDS: dict[str, Any] = {
    f"SinkhornImportance({k})": SinkhornImportance(k) for k in (1, 4, 16, 64)
}
BOUNDS["InfoNCE(255)"] = InfoNCE(255)


def network(*widths: int, inputs: int = 10) -> Group:
    """Weights and biases of hidden layers of these widths, and one output."""
    axes: dict[str, tuple[str | None, ...]] = {}
    shapes: dict[str, torch.Size] = {}
    before, name_before = inputs, None
    for layer, width in enumerate(widths):
        name = f"hidden.{layer}"
        axes |= {f"{layer}.weight": (name, name_before), f"{layer}.bias": (name,)}
        shapes |= {
            f"{layer}.weight": torch.Size([width, before]),
            f"{layer}.bias": torch.Size([width]),
        }
        before, name_before = width, name
    axes["last.weight"] = (None, name_before)
    shapes["last.weight"] = torch.Size([1, before])
    return Group.declare(axes, shapes)


def run(widths: str, separation: float, seed: int, draws: int, exact: bool) -> Row:
    """Mean gains of the base's density over the estimates, or of the exact density over
    them.
    """
    torch.manual_seed(seed)
    group = network(*map(int, widths.split("-")))
    action = Action(group, list(group.site_shapes))
    loc = separation * torch.randn(action.dim, dtype=torch.float64)
    q: Any = dist.Normal(
        loc, 0.3 + torch.rand(action.dim, dtype=torch.float64)
    ).to_event(1)
    w = q.sample((draws,))
    own = q.log_prob(w)
    found: Row = {"log |G|": group.log_order()}
    if exact:
        truth = ExactOrbit().log_prob(q, action, w)
        found["information"] = float((own - truth).mean())
        return found | {
            n: float((one.log_prob(q, action, w) - truth).mean())
            for n, one in ESTIMATORS.items()
        }
    return found | {
        name: float((own - one.log_prob(q, action, w)).mean())
        for name, one in BOUNDS.items()
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument(
        "--draws", type=int, default=300, help="draws of each base (default 300)"
    )
    options = parse(arguments, argv)
    exact, wide = ("4", "8", "12", "4-3", "5-4", "7-5"), ("64",)
    separations = SEPARATIONS
    if options.quick:
        options.draws, exact, wide, separations = 20, ("4", "4-3"), ("16",), (0.3, 5.0)
    results = Results.of(options, "draws")
    for title, names, columns in (
        ("estimate - exact, nats", exact, ["log |G|", "information", *ESTIMATORS]),
        ("log q - log qbar, nats", wide, ["log |G|", *BOUNDS]),
    ):
        one = functools.partial(run, draws=options.draws, exact=names is exact)
        results.fill(
            one, widths=names, separation=separations, seed=range(options.seeds)
        )
        for name in names:
            shown = {column: (column, 3) for column in columns}
            results.table(
                f"hidden widths {name}: {title}", ["separation"], shown, widths=name
            )


if __name__ == "__main__":
    main()
