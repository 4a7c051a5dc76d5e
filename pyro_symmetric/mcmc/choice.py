"""The sampler for a model that comes without one: kernel, mass matrix and number of chains, and why.

By rules of counts and not by timing, so that every run of a model decides alike and a stored one resumes. What they
rest on is measured by ``benchmarks/performance/ordinary_models.py``: effective draws of the worst quantity for a second
of the processor's time, warm-up included.

* **Many chains**, as long as the largest intermediate result stays in the cache and the draws in memory: there an
  evaluation for 64 chains costs little more than one for 4, and warm-up learns from all of them. Compiled networks go
  chain by chain, so that only warm-up gains by many: 16.
* **AdaptiveHMC** for many chains, which it moves in step; those of NUTS wait for the longest tree of any. **NUTS** for
  few, which can't tell each other how long a trajectory should be.
* **A dense mass matrix** for few coordinates, where it costs ``D ** 2`` operations a step and spares many steps. Not
  for a network, whose modes each have correlations of their own.
"""

from __future__ import annotations

from dataclasses import replace

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptive_hmc import AdaptiveHMC
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.mcmc.settings import Settings

MOST_CHAINS, MOST_NETWORKS, FEWEST_CHAINS = 64, 16, 4
MANY_CHAINS = 8  # from which on they find the length of a trajectory better together than each by itself
MOST_NUMBERS = 2**19  # of the coordinates of all chains: a thousand draws of them take two gigabytes
DENSE = 200  # coordinates


def chosen(settings: Settings, num_chains: int | None) -> tuple[Settings, Density]:
    """Settings whose kernel and number of chains suit their model, and which say why; and the model's density.

    :param num_chains: ``None``: to be chosen, too.
    """
    density = settings.density()
    chains, why = (num_chains, "as asked") if num_chains is not None else _number_of_chains(density)
    dense = density.dim <= DENSE and not density.is_network
    mass = "dense" if dense else "diagonal"
    kind = AdaptiveHMC if chains >= MANY_CHAINS else NUTS
    coordinates = "1 coordinate" if density.dim == 1 else f"{density.dim:,} coordinates"
    counted = "1 chain" if chains == 1 else f"{chains} chains"
    words = f"{kind.__name__} with {counted} ({why}), mass={mass!r} ({coordinates})"
    if settings.store is None or not settings.store.exists():  # a run that resumes keeps its engine
        words += f", engine {density.engine!r}"
    kernel = kind(settings.kernel.model, mass=mass)
    return replace(settings, kernel=kernel, num_chains=chains, chosen=words), density


# small steps --------------------------------------------------------------------------------------------------------


def _number_of_chains(density: Density) -> tuple[int, str]:
    """A power of two, and what limits it."""
    if density.target.one_by_one:
        return FEWEST_CHAINS, "few, as they are evaluated one after another"
    limits = {
        "as many as pay": MOST_NETWORKS if density.is_network else MOST_CHAINS,
        "as many as the cache holds": density.chain_chunk or MOST_CHAINS,
        "as many as leave room for their draws": MOST_NUMBERS // density.dim,
    }
    why = min(limits, key=lambda name: limits[name])
    if limits[why] <= FEWEST_CHAINS:
        return FEWEST_CHAINS, "as few as can be compared"
    return 1 << (limits[why].bit_length() - 1), why
