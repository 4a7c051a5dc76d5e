"""The eleven ordinary models of ``eleven_densities`` for Pyro, with simulated data."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.performance.eleven_densities import DENSITIES, Density

Model = Callable[..., None]
Data = tuple[Tensor, ...]


def normals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _mixed(means: list[float], scales: list[float], parts: list[float]) -> Tensor:
    chances = torch.tensor(parts)
    label = torch.multinomial(chances, 500, replacement=True)
    return torch.tensor(means)[label] + torch.tensor(scales)[label] * normals(500)


def in_pyro(density: Density) -> Model:
    """Return the Pyro model of a density, a function of data."""

    def model(*data: Tensor) -> None:
        density(dist, pyro.sample, pyro.plate, torch, data)

    return model


def models() -> dict[str, tuple[Model, Data]]:
    """Each model with its data, by name."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        data = _simulated()
    return {name: (in_pyro(DENSITIES[name]), data[name]) for name in DENSITIES}


def _simulated() -> dict[str, Data]:
    x = normals(100)
    found: dict[str, Data] = {"linear": (x, 1 + 2 * x + 0.5 * torch.randn(100))}
    x = normals(400, 4)
    score = x @ torch.tensor([1.0, -0.5, 0.3, 0.0]) + torch.randn(400) * 1.8
    edges = torch.tensor([-2.0, -0.5, 0.5, 2.0])
    found["ordinal"] = (x, torch.bucketize(score, edges))
    x, group = normals(900, 2), torch.randint(60, (900,))
    log_rate = 0.8 + 0.7 * torch.randn(60)[group] + x @ torch.tensor([0.4, -0.3])
    found["Poisson groups"] = (x, group, torch.poisson(log_rate.exp()))
    x = normals(300, 5)
    mean = (1 + x @ torch.tensor([0.5, -0.4, 0.2, 0.0, 0.0])).exp()
    spread = dist.Gamma(2.0, 2.0).sample((300,))
    found["negative binomial"] = (x, torch.poisson(mean * spread))
    log_scale = (0.1 * torch.randn(500)).cumsum(0) - 1
    returns = log_scale.exp() * dist.StudentT(8.0).sample((500,))
    found["stochastic volatility"] = (returns,)
    x, group = normals(2000, 3), torch.randint(200, (2000,))
    level = 0.2 + 0.9 * torch.randn(200)[group]
    tilt = (0.5 + 0.4 * torch.randn(200))[group] * x[:, 0]
    chance = (level + tilt + x[:, 1:] @ torch.tensor([-1.0, 0.3])).sigmoid()
    found["hierarchical logistic"] = (x, group, torch.bernoulli(chance))
    x = (10 * torch.rand(100)).sort().values
    found["Gaussian process"] = (x, x.sin() + 0.3 * normals(100))
    ability, difficulty = torch.randn(200, 1), torch.randn(50)
    chance = ((0.3 * torch.randn(50)).exp() * (ability - difficulty)).sigmoid()
    found["item response"] = (torch.bernoulli(chance),)
    x, slope = normals(200, 100), torch.zeros(100)
    slope[:6] = torch.tensor([2.0, -2.0, 1.5, 1.0, -1.0, 0.7])
    found["horseshoe"] = (x, x @ slope + torch.randn(200))
    y = _mixed([-4.0, 0.0, 5.0], [1.0, 0.7, 1.2], [0.4, 0.35, 0.25])
    found["mixture of 3"] = (y,)
    means, scales = [-6.0, -3.0, 0.0, 3.0, 7.0], [0.7, 0.5, 0.6, 0.8, 1.0]
    y = _mixed(means, scales, [0.3, 0.2, 0.2, 0.2, 0.1])
    found["mixture of 5"] = (y,)
    return found
