r"""The energy of a posterior's draws: their temperature, and the scale of mini-batches.

*Temperature.* Integration by parts gives :math:`\mathbb E[(z - a) \cdot \nabla U(z)] = D` for every posterior over
:math:`z \in \mathbb R^D` whose density vanishes at infinity, and every point :math:`a` that doesn't depend on
:math:`z` (the virial theorem); here it is the mean of the other chains, from which draws aren't far, so that little is
left to chance. Its average over :math:`D` is the configurational temperature of the draws: above 1 they spread too
widely, as those of a stochastic-gradient sampler whose step is too large, or of chains on their way in; below 1 too
little. It holds for the coordinates of each site by themselves, too, and the worst site is named.

*Mini-batch scale.* The mean energy over the mini-batches of one pass through the data equals the energy of all data, if
each mini-batch's likelihood counts ``N / B`` times. A model that forgets the factor samples a posterior of ``B``
observations, silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric._process import without_warnings
from pyro_symmetric.chain_findings import Finding, temperature
from pyro_symmetric.mcmc.density import Density
from pyro_symmetric.posterior import Posterior

MOST_BATCHES, MOST_CHAINS = 64, 8
CHUNK = 32


def energy_findings(posterior: Posterior, num_draws: int, subsampled: bool, arrived: bool) -> Iterator[Finding]:
    """The temperature of the draws, and the scale of mini-batches; nothing if the posterior doesn't know its model.

    :param num_draws: at how many draws of all chains together the gradient is evaluated.
    :param subsampled: whether the sampler is a stochastic-gradient sampler.
    :param arrived: whether chains agree.
    """
    if not posterior.is_attached:
        return
    origin = posterior.model, posterior._args, posterior._kwargs
    dtype = next(iter(posterior.samples.values())).dtype
    options: dict[str, Any] = {"device": posterior.origin_device, "dtype": dtype, "chain_chunk": CHUNK}
    options["subsampled"] = True
    with without_warnings(UserWarning):  # of a mini-batch's scale: that is looked at here
        full = Density(*origin, **options)
    if full.row_counts:
        return  # the model draws its own mini-batches, which Pyro's plates scale themselves
    per_chain = max(1, min(posterior.num_samples, num_draws // posterior.num_chains))
    draws = posterior.thin(max(1, posterior.num_samples // per_chain))
    z = full.unconstrain({site: draws.samples[site] for site in full.layout.site_shapes})
    _, gradient = full.energy_and_gradient(z.flatten(0, 1))
    own = (_from_other_chains(z) * gradient.reshape(z.shape)).detach().double().cpu()
    sizes = [shape.numel() for shape in full.layout.unconstrained_shapes.values()]
    sites = dict(zip(full.layout.unconstrained_shapes, own.split(sizes, dim=-1), strict=True))
    yield _coldest_or_hottest(own, sites, subsampled, arrived)
    if (batch_size := getattr(posterior.kernel, "batch_size", None)) is not None:
        with without_warnings(UserWarning):
            parts = Density(*origin, batch_size=batch_size, **options)
        if parts.row_counts:
            yield _batch_scale(full, parts, z[:MOST_CHAINS, -1])


def _from_other_chains(z: Tensor) -> Tensor:
    """Draws ``(C, S, D)`` from the mean of the other chains; those of a single chain from the origin."""
    if len(z) == 1:
        return z
    means = z.mean(1, keepdim=True)
    return z - (means.sum(0) - means) / (len(z) - 1)


def _coldest_or_hottest(own: Tensor, sites: dict[str, Tensor], subsampled: bool, arrived: bool) -> Finding:
    """The temperature of all coordinates, or of a site that is worse; of products ``(C, S, D)``."""
    overall = temperature("temperature", own.mean(-1), subsampled, arrived)
    by_site = [
        temperature("temperature", value.mean(-1), subsampled, arrived, site)
        for site, value in sites.items()
        if len(sites) > 1 and value.shape[-1] > 0
    ]
    grave = [found for found in by_site if found.status in ("warn", "fail")]
    worst = max(grave, key=lambda found: (found.status == "fail", abs(found.value - 1)), default=overall)
    return overall if overall.status == "fail" or overall.status == worst.status else worst


@torch.no_grad()
def _batch_scale(full: Density, parts: Density, z: Tensor) -> Finding:
    """Mini-batches of one pass through the data, in an order of its own for each of a few chains' last draws."""
    ((name, (total, size)),) = parts.row_counts.items()
    orders = torch.rand(len(z), total, device=z.device).argsort(-1)
    batches = orders.split(size, dim=1)[: min(MOST_BATCHES, total // size)]
    by_batch = torch.stack([parts.energy(z, {name: rows}).double() for rows in batches])
    whole = full.energy(z).double()
    gap, scale = float((by_batch.mean(0) - whole).mean()), float(whole.abs().mean())
    spread = float(by_batch.std(0).mean()) if len(batches) > 1 else scale
    if abs(gap) <= 5 * spread / math.sqrt(by_batch.numel()) + 0.01 * scale:
        words = f"mini-batches' mean energy is within {abs(gap):.2g} nats of all data's"
        return Finding("mini-batch scale", "pass", words, gap)
    words = (
        f"mini-batches of {size} of {total} rows have an energy {gap:+.4g} nats off that of all data ({scale:.4g}): "
        f"the likelihood must count N / B times; use pyro.plate(name, {total}, subsample=...)"
    )
    return Finding("mini-batch scale", "fail", words, gap)
