"""Each process of the data-parallel test runs this: PyTorch's own DistributedDataParallel around a stock objective."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.distributions import SinkhornImportance
from pyro_symmetric.guides import AutoSymmetrized
from pyro_symmetric.models import BayesianModel

ROWS = 12  # of a mini-batch, the same number on every rank


def train(rank: int | None, ranks: int, analytic: bool) -> dict[str, Any]:
    """Losses, the last gradients and the parameters. ``rank=None``: one process with all rows."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)  # all ranks start from the same guide
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(40, 2, dtype=torch.float64), torch.randint(3, (40,))
    model = BayesianModel(net, num_data=40)
    guide = AutoSymmetrized(model, find_symmetry(net, x), estimator=SinkhornImportance(4)).setup(x, y)
    elbo: Any = (TraceMeanField_ELBO() if analytic else Trace_ELBO())(model, guide)
    loss_of = elbo if rank is None else DistributedDataParallel(elbo)
    optimizer = torch.optim.SGD(guide.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        rows = torch.arange(ROWS * step, ROWS * (step + 1))
        part = rows if rank is None else rows.tensor_split(ranks)[rank]
        pyro.set_rng_seed(1 + step)  # all ranks draw the same weights
        optimizer.zero_grad()
        loss = loss_of(x[part], y[part])
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        if rank is not None:
            torch.distributed.all_reduce(mean)
            mean = mean / ranks
        losses.append(mean.item())
    return {
        "losses": losses,
        "gradients": torch.cat([p.grad.flatten() for p in guide.parameters()]).tolist(),
        "parameters": torch.cat([p.detach().flatten() for p in guide.parameters()]).tolist(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=100))  # if the other is gone, end too
    own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {name: train(own, world, name == "analytic") for name in ("sampled", "analytic")}
    Path(sys.argv[1], f"{own}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
