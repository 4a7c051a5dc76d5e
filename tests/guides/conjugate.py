"""A mixture whose evidence is a sum over allocations, and whose posterior can be drawn
from without a chain.
"""

import itertools
import math
from typing import Any

import pyro
import pyro.distributions as dist
import torch

import pyro_symmetric as ps

SPREAD = 2.0  # of the locations; rows have a deviation of one
DATA = torch.tensor([-2.6, -1.9, -2.2, 0.4, 1.8, 2.5, 2.1])


def mixture(components: int) -> Any:
    def model(data: torch.Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(components)))
        locs = pyro.sample(
            "locs", dist.Normal(0.0, SPREAD).expand([components]).to_event(1)
        )
        with pyro.plate("data", len(data)):
            pyro.sample(
                "x",
                dist.MixtureSameFamily(
                    dist.Categorical(weights), dist.Normal(locs, 1.0)
                ),
                obs=data,
            )

    return model


def relabellings(components: int) -> ps.Group:
    shape = torch.Size([components])
    return ps.Group.declare(
        {"weights": ("k",), "locs": ("k",)}, {"weights": shape, "locs": shape}
    )


def allocations(
    components: int, data: torch.Tensor = DATA
) -> tuple[torch.Tensor, torch.Tensor]:
    """All allocations as indicators, ``(A, rows, components)``, and the log of the
    joint probability of each.
    """
    chosen = torch.tensor(list(itertools.product(range(components), repeat=len(data))))
    member = torch.nn.functional.one_hot(chosen, components).double()
    count, total, square = (
        member.sum(1),
        (member.mT @ data.double()),
        member.mT @ data.double().square(),
    )
    precision = count + 1 / SPREAD**2
    rows = -0.5 * (square - total**2 / precision) - 0.5 * (precision * SPREAD**2).log()
    rows = rows - 0.5 * count * math.log(2 * math.pi)
    shares = (
        (count + 1).lgamma().sum(-1)
        + math.lgamma(components)
        - math.lgamma(components + len(data))
    )
    return member, rows.sum(-1) + shares


def log_evidence(components: int, data: torch.Tensor = DATA) -> float:
    return float(allocations(components, data)[1].logsumexp(0))


def exact_draws(
    components: int, shape: tuple[int, int], data: torch.Tensor = DATA
) -> ps.Posterior:
    """Independent draws of the posterior: an allocation, then weights and locations
    given it.
    """
    member, joint = allocations(components, data)
    chosen = member[
        torch.multinomial(joint.softmax(0), math.prod(shape), replacement=True)
    ]
    count, total = chosen.sum(1), chosen.mT @ data.double()
    precision = count + 1 / SPREAD**2
    locs = total / precision + torch.randn_like(total) / precision.sqrt()
    weights = torch.distributions.Dirichlet(count + 1).sample()
    draws = {"weights": weights.float(), "locs": locs.float()}
    return ps.Posterior.from_samples(
        draws, kind="independent", num_chains=shape[0]
    ).attach(mixture(components), data)
