"""Eleven ordinary models, in the words of Pyro and NumPyro: regressions, hierarchies,
time series, a Gaussian process, mixtures.

A density is a function ``(distributions, sample, plate, library, data)``, as those of
``benchmarks.posteriordb.models`` are. Neither PyTorch nor JAX is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Density = Callable[..., None]


def linear(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    x, y = data
    intercept = sample("intercept", d.Normal(0.0, 5.0))
    slope = sample("slope", d.Normal(0.0, 5.0))
    scale = sample("scale", d.HalfNormal(1.0))
    with plate("rows", len(x)):
        sample("y", d.Normal(intercept + slope * x, scale), obs=y)


def ordinal(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    x, y = data
    slope = sample("slope", d.Normal(lib.zeros(4), 2.0).to_event(1))
    first = sample("first", d.Normal(-1.5, 2.0))
    gaps = sample("gaps", d.LogNormal(lib.zeros(3), 1.0).to_event(1))
    first = first[..., None]
    cutpoints = lib.concatenate([first, first + gaps.cumsum(-1)], -1)
    with plate("rows", len(x)):
        likelihood = d.OrderedLogistic((x * slope).sum(-1), cutpoints)
        sample("y", likelihood, obs=y)


def poisson_groups(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    x, group, y = data
    mean = sample("mean", d.Normal(0.0, 3.0))
    scale = sample("scale", d.HalfNormal(1.0))
    slope = sample("slope", d.Normal(lib.zeros(2), 1.0).to_event(1))
    with plate("groups", 60):
        effect = sample("effect", d.Normal(0.0, 1.0))
    with plate("rows", len(x)):
        log_rate = mean + scale * effect[group] + (x * slope).sum(-1)
        sample("y", d.Poisson(lib.exp(log_rate)), obs=y)


def negative_binomial(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    x, y = data
    intercept = sample("intercept", d.Normal(0.0, 3.0))
    slope = sample("slope", d.Normal(lib.zeros(5), 1.0).to_event(1))
    shape = sample("shape", d.Gamma(2.0, 1.0))
    with plate("rows", len(x)):
        mean = lib.exp(intercept + (x * slope).sum(-1))
        sample("y", d.GammaPoisson(shape, shape / mean), obs=y)


def stochastic_volatility(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    (y,) = data
    step = sample("step", d.Exponential(10.0))
    freedom = sample("freedom", d.Gamma(2.0, 0.1))
    mean = sample("mean", d.Normal(0.0, 2.0))
    with plate("steps", len(y)):
        move = sample("move", d.Normal(0.0, 1.0))
    log_scale = mean + step * move.cumsum(-1)
    with plate("rows", len(y)):
        sample("y", d.StudentT(freedom, 0.0, lib.exp(log_scale)), obs=y)


def hierarchical_logistic(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    x, group, y = data
    mean = sample("mean", d.Normal(0.0, 2.0))
    scales = sample("scales", d.HalfNormal(lib.ones(2)).to_event(1))
    slope = sample("slope", d.Normal(lib.zeros(3), 1.0).to_event(1))
    with plate("groups", 200):
        level = sample("level", d.Normal(0.0, 1.0))
        tilt = sample("tilt", d.Normal(0.0, 1.0))
    with plate("rows", len(x)):
        effect = scales[0] * level[group] + scales[1] * tilt[group] * x[:, 0]
        logits = mean + effect + (x * slope).sum(-1)
        sample("y", d.Bernoulli(logits=logits), obs=y)


def gaussian_process(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    x, y = data
    variance = sample("variance", d.LogNormal(0.0, 1.0))
    length = sample("length", d.LogNormal(0.0, 1.0))
    noise = sample("noise", d.LogNormal(-1.0, 1.0))
    kernel = variance * lib.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
    covariance = kernel + (noise**2 + 1e-4) * lib.eye(len(x))
    process = d.MultivariateNormal(lib.zeros(len(x)), covariance)
    sample("y", process, obs=y)


def item_response(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    (y,) = data
    people, items = y.shape
    with plate("items", items):
        discrimination = sample("discrimination", d.LogNormal(0.0, 0.5))
        difficulty = sample("difficulty", d.Normal(0.0, 2.0))
    with plate("people", people):
        ability = sample("ability", d.Normal(0.0, 1.0))
    logits = discrimination * (ability[:, None] - difficulty)
    sample("y", d.Bernoulli(logits=logits).to_event(2), obs=y)


def horseshoe(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    x, y = data
    overall = sample("overall", d.HalfCauchy(0.1))
    scale = sample("scale", d.HalfNormal(2.0))
    with plate("inputs", x.shape[-1]):
        local = sample("local", d.HalfCauchy(1.0))
        z = sample("z", d.Normal(0.0, 1.0))
    with plate("rows", len(x)):
        mean = (x * (overall * local * z)).sum(-1)
        sample("y", d.Normal(mean, scale), obs=y)


def mixture(num_components: int) -> Density:
    """Return the density of a mixture of normal distributions."""

    def density(
        d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
    ) -> None:
        (y,) = data
        weights = sample("weights", d.Dirichlet(lib.ones(num_components)))
        with plate("components", num_components):
            mean = sample("mean", d.Normal(0.0, 5.0))
            scale = sample("scale", d.LogNormal(0.0, 0.5))
        with plate("rows", len(y)):
            components = d.Normal(mean, scale)
            likelihood = d.MixtureSameFamily(d.Categorical(weights), components)
            sample("y", likelihood, obs=y)

    return density


DENSITIES: dict[str, Density] = {
    "linear": linear,
    "ordinal": ordinal,
    "Poisson groups": poisson_groups,
    "negative binomial": negative_binomial,
    "stochastic volatility": stochastic_volatility,
    "hierarchical logistic": hierarchical_logistic,
    "Gaussian process": gaussian_process,
    "item response": item_response,
    "horseshoe": horseshoe,
    "mixture of 3": mixture(3),
    "mixture of 5": mixture(5),
}
