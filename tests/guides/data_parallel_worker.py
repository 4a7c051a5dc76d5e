"""What each process of the data-parallel test runs: a few steps of SVI on its part of every mini-batch."""

import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

from pyro_symmetric.distributions import SinkhornImportance
from pyro_symmetric.guides import AutoSymmetrized, SymmetrizedMeanField_ELBO
from pyro_symmetric.guides.data_parallel import DataParallel_ELBO, average_gradients
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.symmetry import find_symmetry

PARTS = (7, 5)  # of a mini-batch of 12, unequal


class Recording(pyro.optim.PyroOptim):
    """Writes down the gradients that it is given, all of them in one list."""

    gradients: list[float]

    def __call__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        params = list(params)
        names = {id(p): name for name, p in pyro.get_param_store().named_parameters()}
        ordered = sorted(params, key=lambda p: names[id(p)])
        self.gradients = torch.cat([p.grad.flatten() for p in ordered]).tolist()
        super().__call__(params, *args, **kwargs)


def train(rank: int | None, analytic: bool, parallel: bool = True) -> dict[str, Any]:
    """Losses, the last gradients and the parameters. ``rank=None``: one process with all rows."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(40, 2, dtype=torch.float64), torch.randint(3, (40,))
    guide = AutoSymmetrized(BayesianModel(net, num_data=40), find_symmetry(net, x), estimator=SinkhornImportance(4))
    inner = SymmetrizedMeanField_ELBO() if analytic else Trace_ELBO()
    optim = Recording(torch.optim.SGD, {"lr": 0.01})
    svi = SVI(guide._given_model[0], guide, optim, loss=DataParallel_ELBO(inner) if parallel else inner)
    guide.setup(x, y)
    pyro.set_rng_seed(1 if rank is None else 1 + rank)  # ranks' own generators differ: rank 0's counts
    losses = []
    for start in (0, 12, 24):
        rows = torch.arange(start, start + 12)
        part = rows if rank is None else rows.split(list(PARTS))[rank]
        losses.append(svi.step(x[part], y[part]))
    losses.append(svi.evaluate_loss(x[part], y[part]))
    return {
        "losses": losses,
        "gradients": optim.gradients,
        "parameters": torch.cat([p.detach().flatten() for _, p in sorted(guide.named_parameters())]).tolist(),
        "next": torch.rand(1).item(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=100))  # if the other is gone, end too
    own = int(os.environ["RANK"])
    results: dict[str, Any] = {name: train(own, name == "analytic") for name in ("sampled", "analytic")}
    try:
        DataParallel_ELBO(Trace_ELBO()).loss(
            lambda *_: None, lambda *_: None, torch.empty(own, 3)
        )  # rank 0 has no rows
    except ValueError as error:
        results["without rows"] = str(error)
    idle = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    idle.grad = torch.tensor([2.0 if own else torch.nan], dtype=torch.float64)
    results["averaged"] = [average_gradients([idle], own, 3.0 if own else torch.nan), float(idle.grad)]
    Path(sys.argv[1], f"{own}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
