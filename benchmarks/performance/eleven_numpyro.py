"""The eleven ordinary models of ``eleven_densities`` for NumPyro."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpy.typing import ArrayLike

from benchmarks.performance.eleven_densities import DENSITIES, Density


def in_numpyro(density: Density) -> Callable[..., None]:
    """Return the NumPyro model of a density, a function of data."""

    def model(*data: Array) -> None:
        density(dist, numpyro.sample, numpyro.plate, jnp, data)

    return model


def sampled(name: str, data: list[ArrayLike], seed: int, **settings: int) -> object:
    """Return the draws of NumPyro's NUTS, all chains at once, when they are there.

    A call builds its own ``MCMC``: one that is run again fails in NumPyro 0.22.
    """
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(in_numpyro(DENSITIES[name])),
        chain_method="vectorized",
        progress_bar=False,
        **settings,
    )
    mcmc.run(jax.random.PRNGKey(seed), *map(jnp.asarray, data))
    return jax.block_until_ready(mcmc.get_samples())
