"""How many draws of Markov chains count as independent. Tests take their samples to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from pyro_symmetric.chain_statistics import ChainStatistics, chain_statistics, evenly_spaced
from pyro_symmetric.samples import Posterior
from pyro_symmetric.weights import Weights, require_finite


def is_chain(posterior: Any) -> TypeGuard[Posterior]:
    """Whether these are a sampler's draws, of which one depends on the last; an ensemble's or a guide's don't."""
    return isinstance(posterior, Posterior) and posterior.rows == "chains"


def independent_draws(posterior: Posterior, statistics: Mapping[str, ChainStatistics] | None = None) -> int:
    """How many evenly spaced draws of chains may be taken as independent: half of the smallest bulk effective sample
    size over the weights, since draws that are thinned to all of it keep a correlation of about 0.1; but one of each
    chain, as chains know nothing of each other. Weights that never move are left out.

    :param statistics: site -> its :func:`~pyro_symmetric.chain_statistics.chain_statistics`, if they are at hand.
    """
    if statistics is None:
        statistics = {site: chain_statistics(value) for site, value in posterior.samples.items()}
    sizes = torch.cat([found.ess_bulk.reshape(-1) for found in statistics.values()])
    known = sizes[~sizes.isnan()]
    worst = float(known.min()) if len(known) else 0.0
    return min(max(posterior.num_chains, int(worst) // 2), posterior.num_chains * posterior.num_samples)


def thinned(posterior: Posterior, seen: Posterior | None = None) -> Weights:
    """As many of the draws, chains end to end and evenly spaced, as may be taken as independent. The last of each chain
    is among them, if one of each counts.

    :param seen: the same draws as they will be compared, which say how many are independent: chains in copies of a mode
        seem to stand apart until their symmetries are removed.
    :raises ValueError: if they are fewer than 2, or any of all draws isn't finite.
    """
    require_finite(posterior.samples, "posterior")
    total, count = posterior.num_chains * posterior.num_samples, independent_draws(seen or posterior)
    if count < 2:
        raise ValueError(f"of {total} draws of one chain only {count} counts as independent; take more, or more chains")
    keep = evenly_spaced(total, count)
    return {site: value[keep] for site, value in posterior.get_samples().items()}
