"""The models of ``eleven_models`` for NumPyro, as people write them there."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpy.typing import ArrayLike


def linear(x: Array, y: Array) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(intercept + slope * x, scale), obs=y)


def ordinal(x: Array, y: Array) -> None:
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(4), 2.0).to_event(1))
    first = numpyro.sample("first", dist.Normal(-1.5, 2.0))
    gaps = numpyro.sample("gaps", dist.LogNormal(jnp.zeros(3), 1.0).to_event(1))
    cutpoints = jnp.append(first, first + gaps.cumsum())
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.OrderedLogistic(x @ slope, cutpoints), obs=y)


def poisson_groups(x: Array, group: Array, y: Array) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("groups", 60):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        log_rate = mean + scale * effect[group] + x @ slope
        numpyro.sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y)


def negative_binomial(x: Array, y: Array) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 3.0))
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(5), 1.0).to_event(1))
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", len(x)):
        mean = jnp.exp(intercept + x @ slope)
        numpyro.sample("y", dist.GammaPoisson(shape, shape / mean), obs=y)


def stochastic_volatility(y: Array) -> None:
    step = numpyro.sample("step", dist.Exponential(10.0))
    freedom = numpyro.sample("freedom", dist.Gamma(2.0, 0.1))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("steps", len(y)):
        move = numpyro.sample("move", dist.Normal(0.0, 1.0))
    log_scale = mean + step * move.cumsum()
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.StudentT(freedom, 0.0, jnp.exp(log_scale)), obs=y)


def hierarchical_logistic(x: Array, group: Array, y: Array) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    scales = numpyro.sample("scales", dist.HalfNormal(jnp.ones(2)).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    with numpyro.plate("groups", 200):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        tilt = numpyro.sample("tilt", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        effect = scales[0] * level[group] + scales[1] * tilt[group] * x[:, 0]
        logits = mean + effect + x @ slope
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def gaussian_process(x: Array, y: Array) -> None:
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = variance * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
    covariance = kernel + (noise**2 + 1e-4) * jnp.eye(len(x))
    process = dist.MultivariateNormal(jnp.zeros(len(x)), covariance)
    numpyro.sample("y", process, obs=y)


def item_response(y: Array) -> None:
    people, items = y.shape
    with numpyro.plate("items", items):
        prior = dist.LogNormal(0.0, 0.5)
        discrimination = numpyro.sample("discrimination", prior)
        difficulty = numpyro.sample("difficulty", dist.Normal(0.0, 2.0))
    with numpyro.plate("people", people):
        ability = numpyro.sample("ability", dist.Normal(0.0, 1.0))
    logits = discrimination * (ability[:, None] - difficulty)
    numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y)


def horseshoe(x: Array, y: Array) -> None:
    overall = numpyro.sample("overall", dist.HalfCauchy(0.1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("inputs", x.shape[-1]):
        local = numpyro.sample("local", dist.HalfCauchy(1.0))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        mean = x @ (overall * local * z)
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def mixture(num_components: int, y: Array) -> None:
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(num_components)))
    with numpyro.plate("components", num_components):
        mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("rows", len(y)):
        components = dist.Normal(mean, scale)
        likelihood = dist.MixtureSameFamily(dist.Categorical(weights), components)
        numpyro.sample("y", likelihood, obs=y)


MODELS: dict[str, Callable[..., None]] = {
    "linear": linear,
    "ordinal": ordinal,
    "Poisson groups": poisson_groups,
    "negative binomial": negative_binomial,
    "stochastic volatility": stochastic_volatility,
    "hierarchical logistic": hierarchical_logistic,
    "Gaussian process": gaussian_process,
    "item response": item_response,
    "horseshoe": horseshoe,
    "mixture of 3": mixture,
    "mixture of 5": mixture,
}


def argument(value: ArrayLike) -> Array | int:
    """Return an argument of a model: an array for JAX, or a number of components."""
    array = np.asarray(value)
    return jnp.asarray(array) if array.ndim else int(array)


def sampled(name: str, data: list[ArrayLike], seed: int, **settings: int) -> object:
    """Return the draws of NumPyro's NUTS, all chains at once, when they are there.

    A call builds its own ``MCMC``: one that is run again fails in NumPyro 0.22.
    """
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(MODELS[name]),
        chain_method="vectorized",
        progress_bar=False,
        **settings,
    )
    mcmc.run(jax.random.PRNGKey(seed), *map(argument, data))
    return jax.block_until_ready(mcmc.get_samples())
