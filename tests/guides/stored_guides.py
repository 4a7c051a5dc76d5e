"""A process of its own for tests of Pyro's parameter store: ``save DIR``, ``load DIR``.

Prints the ELBOs of guides, those of one seed, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)

import pyro_symmetric as ps

GROUP = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "diagonal": (AutoDiagonalNormal, {}),
    "full rank": (AutoMultivariateNormal, {}),
    "low rank": (AutoLowRankMultivariateNormal, {"rank": 2}),
    "blocks": (ps.AutoUnitBlocks, {}),
    "flow": (AutoIAFNormal, {"hidden_dim": [8]}),
}


def model() -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    total = w.square().sum(-1)
    pyro.sample("y", dist.Normal(total, 0.5), obs=torch.tensor(4.0))


def symmetrised(base: str) -> ps.AutoSymmetrized:
    kind, options = BASES[base]
    pyro.set_rng_seed(2)  # a flow has random buffers, which aren't parameters
    return ps.AutoSymmetrized(model, GROUP, base=kind, **options)


def train(guide: Any, steps: int = 12, rate: float = 0.15) -> None:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": rate}), Trace_ELBO())
    for _ in range(steps):
        svi.step()


def elbo(guide: Any) -> float:
    if isinstance(guide, ps.AutoSymmetrized):
        guide.setup()
    pyro.set_rng_seed(0)
    return -SVI(
        model, guide, pyro.optim.Adam({}), Trace_ELBO(num_particles=10)
    ).evaluate_loss()


def save(folder: Path) -> dict[str, float]:
    found = {}
    store = pyro.get_param_store()
    for base in BASES:
        pyro.clear_param_store()
        guide = symmetrised(base)
        train(guide)
        found[base] = elbo(guide)
        store.save(str(folder / base))
    return found


def load(folder: Path) -> dict[str, float]:
    found = {}
    store = pyro.get_param_store()
    for base in BASES:
        for order in ("then made", "made before", "set up before"):
            pyro.clear_param_store()
            if order == "then made":
                store.load(str(folder / base))
            # of which nothing was saved: numbers are others than in the other process
            other = symmetrised(base)
            guide = symmetrised(base)
            if order == "set up before":
                guide.setup()
            if order != "then made":
                store.load(str(folder / base))
            found[f"{base}, {order}"] = elbo(guide)
            found[f"the other {base}, {order}"] = elbo(other)
    return found


def load_two(folder: Path) -> dict[str, float]:
    pyro.clear_param_store()
    pyro.get_param_store().load(str(folder / "two"))
    first, second = symmetrised("diagonal"), symmetrised("diagonal")
    medians = {"median": float(first.setup().median()["w"].sum())}
    return {"second": elbo(second), "first": elbo(first), **medians}


def save_two(folder: Path) -> dict[str, float]:
    """Two guides, the first made first, the second trained first."""
    pyro.clear_param_store()
    first, second = symmetrised("diagonal"), symmetrised("diagonal")
    train(second, 10)
    train(first)
    pyro.get_param_store().save(str(folder / "two"))
    medians = {"median": float(first.median()["w"].sum())}
    return {"first": elbo(first), "second": elbo(second), **medians}


JOBS = {"save": (save, save_two), "load": (load, load_two)}

if __name__ == "__main__":
    pyro.set_rng_seed(1)
    pyro.clear_param_store()
    folder = Path(sys.argv[2])
    print(json.dumps([job(folder) for job in JOBS[sys.argv[1]]]))
