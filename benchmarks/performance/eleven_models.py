"""Eleven ordinary models with simulated data, as people write them: regressions,
hierarchies, time series, a Gaussian process, mixtures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

Model = Callable[..., None]


def normals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear(x: Tensor, y: Tensor) -> None:
    intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 5.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(intercept + slope * x, scale), obs=y)


def ordinal(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    first = pyro.sample("first", dist.Normal(-1.5, 2.0))
    gaps = pyro.sample("gaps", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    first = first[..., None]
    cutpoints = torch.cat([first, first + gaps.cumsum(-1)], -1)
    with pyro.plate("rows", len(x)):
        likelihood = dist.OrderedLogistic((x * slope).sum(-1), cutpoints)
        pyro.sample("y", likelihood, obs=y)


def poisson_groups(x: Tensor, group: Tensor, y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", 60):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        log_rate = mean + scale * effect[group] + (x * slope).sum(-1)
        pyro.sample("y", dist.Poisson(log_rate.exp()), obs=y)


def negative_binomial(x: Tensor, y: Tensor) -> None:
    intercept = pyro.sample("intercept", dist.Normal(0.0, 3.0))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(x)):
        mean = (intercept + (x * slope).sum(-1)).exp()
        pyro.sample("y", dist.GammaPoisson(shape, shape / mean), obs=y)


def stochastic_volatility(y: Tensor) -> None:
    step = pyro.sample("step", dist.Exponential(10.0))
    freedom = pyro.sample("freedom", dist.Gamma(2.0, 0.1))
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("steps", len(y)):
        move = pyro.sample("move", dist.Normal(0.0, 1.0))
    log_scale = mean + step * move.cumsum(-1)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.StudentT(freedom, 0.0, log_scale.exp()), obs=y)


def hierarchical_logistic(x: Tensor, group: Tensor, y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    scales = pyro.sample("scales", dist.HalfNormal(torch.ones(2)).to_event(1))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("groups", 200):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        tilt = pyro.sample("tilt", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        effect = scales[0] * level[group] + scales[1] * tilt[group] * x[:, 0]
        logits = mean + effect + (x * slope).sum(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def gaussian_process(x: Tensor, y: Tensor) -> None:
    variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = variance * (-0.5 * ((x[:, None] - x) / length) ** 2).exp()
    covariance = kernel + (noise**2 + 1e-4) * torch.eye(len(x))
    process = dist.MultivariateNormal(torch.zeros(len(x)), covariance)
    pyro.sample("y", process, obs=y)


def item_response(y: Tensor) -> None:
    people, items = y.shape
    with pyro.plate("items", items):
        discrimination = pyro.sample("discrimination", dist.LogNormal(0.0, 0.5))
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 2.0))
    with pyro.plate("people", people):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
    logits = discrimination * (ability[:, None] - difficulty)
    pyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y)


def horseshoe(x: Tensor, y: Tensor) -> None:
    overall = pyro.sample("overall", dist.HalfCauchy(0.1))
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("inputs", x.shape[-1]):
        local = pyro.sample("local", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        mean = (x * (overall * local * z)).sum(-1)
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


def mixture(num_components: int, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(num_components)))
    with pyro.plate("components", num_components):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("rows", len(y)):
        components = dist.Normal(mean, scale)
        likelihood = dist.MixtureSameFamily(dist.Categorical(weights), components)
        pyro.sample("y", likelihood, obs=y)


def _mixed(means: list[float], scales: list[float], parts: list[float]) -> Tensor:
    chances = torch.tensor(parts)
    label = torch.multinomial(chances, 500, replacement=True)
    return torch.tensor(means)[label] + torch.tensor(scales)[label] * normals(500)


def models() -> dict[str, tuple[Model, tuple[Any, ...]]]:
    """Each model with its arguments, by name."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return _models()


def _models() -> dict[str, tuple[Model, tuple[Any, ...]]]:
    x = normals(100)
    found: dict[str, tuple[Model, tuple[Any, ...]]] = {
        "linear": (linear, (x, 1 + 2 * x + 0.5 * torch.randn(100)))
    }
    x = normals(400, 4)
    score = x @ torch.tensor([1.0, -0.5, 0.3, 0.0]) + torch.randn(400) * 1.8
    edges = torch.tensor([-2.0, -0.5, 0.5, 2.0])
    found["ordinal"] = ordinal, (x, torch.bucketize(score, edges))
    x, group = normals(900, 2), torch.randint(60, (900,))
    log_rate = 0.8 + 0.7 * torch.randn(60)[group] + x @ torch.tensor([0.4, -0.3])
    found["Poisson groups"] = poisson_groups, (x, group, torch.poisson(log_rate.exp()))
    x = normals(300, 5)
    mean = (1 + x @ torch.tensor([0.5, -0.4, 0.2, 0.0, 0.0])).exp()
    spread = dist.Gamma(2.0, 2.0).sample((300,))
    found["negative binomial"] = negative_binomial, (x, torch.poisson(mean * spread))
    log_scale = (0.1 * torch.randn(500)).cumsum(0) - 1
    returns = log_scale.exp() * dist.StudentT(8.0).sample((500,))
    found["stochastic volatility"] = stochastic_volatility, (returns,)
    x, group = normals(2000, 3), torch.randint(200, (2000,))
    level = 0.2 + 0.9 * torch.randn(200)[group]
    tilt = (0.5 + 0.4 * torch.randn(200))[group] * x[:, 0]
    chance = (level + tilt + x[:, 1:] @ torch.tensor([-1.0, 0.3])).sigmoid()
    found["hierarchical logistic"] = (
        hierarchical_logistic,
        (x, group, torch.bernoulli(chance)),
    )
    x = (10 * torch.rand(100)).sort().values
    found["Gaussian process"] = gaussian_process, (x, x.sin() + 0.3 * normals(100))
    ability, difficulty = torch.randn(200, 1), torch.randn(50)
    chance = ((0.3 * torch.randn(50)).exp() * (ability - difficulty)).sigmoid()
    found["item response"] = item_response, (torch.bernoulli(chance),)
    x, slope = normals(200, 100), torch.zeros(100)
    slope[:6] = torch.tensor([2.0, -2.0, 1.5, 1.0, -1.0, 0.7])
    found["horseshoe"] = horseshoe, (x, x @ slope + torch.randn(200))
    y = _mixed([-4.0, 0.0, 5.0], [1.0, 0.7, 1.2], [0.4, 0.35, 0.25])
    found["mixture of 3"] = mixture, (3, y)
    means, scales = [-6.0, -3.0, 0.0, 3.0, 7.0], [0.7, 0.5, 0.6, 0.8, 1.0]
    found["mixture of 5"] = (
        mixture,
        (5, _mixed(means, scales, [0.3, 0.2, 0.2, 0.2, 0.1])),
    )
    return found
