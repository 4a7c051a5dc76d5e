"""A mixture of three Gaussians on the line, all of whose parameters are unknown.

Sixty rows were drawn from components at -2, 0.5 and 3 with deviations 0.7, 0.5 and 0.8
and weights 0.3, 0.3 and 0.4.
"""

from pathlib import Path

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

table = pd.read_csv(Path(__file__).with_name("data.csv"), dtype="float32")
y = torch.tensor(table["y"].values)
edges = torch.linspace(-5, 6, 23)


def model(y: Tensor) -> None:
    shares = pyro.sample("shares", dist.Dirichlet(2.0 * torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
        scales = pyro.sample("scales", dist.LogNormal(-0.5, 0.5))
    mixture = dist.MixtureSameFamily(
        dist.Categorical(shares), dist.Normal(locs, scales)
    )
    with pyro.plate("rows", len(y)):
        pyro.sample("y", mixture, obs=y)


arguments = (y,)


def predict(weights: dict[str, Tensor]) -> Tensor:
    """Return the mass of 24 intervals of the line, ``(draws, 1, 24)``."""
    components = dist.Normal(weights["locs"][..., None], weights["scales"][..., None])
    below = (weights["shares"][..., None] * components.cdf(edges)).sum(-2)
    ends = torch.zeros(len(below), 1), torch.ones(len(below), 1)
    return torch.cat([ends[0], below, ends[1]], -1).diff().unsqueeze(1)
