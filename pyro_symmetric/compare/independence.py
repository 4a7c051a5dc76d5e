"""How many draws of Markov chains count as independent. Tests take their samples to be."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from pyro_symmetric.chain_statistics import chain_statistics
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.weights import Weights


def is_chain(posterior: Any) -> TypeGuard[Posterior]:
    """Whether these are a sampler's draws, of which one depends on the last; an ensemble's or a guide's don't."""
    return isinstance(posterior, Posterior) and posterior.metadata.get("kernel") not in (None, "ensemble")


def independent_draws(posterior: Posterior) -> int:
    """How many evenly spaced draws of chains may be taken as independent: half of the smallest bulk effective sample
    size over the weights, since draws that are thinned to all of it keep a correlation of about 0.1; but one of each
    chain, as chains know nothing of each other. Weights that never move are left out.
    """
    sizes = torch.cat([chain_statistics(value).ess_bulk.reshape(-1) for value in posterior.samples.values()])
    known = sizes[~sizes.isnan()]
    worst = float(known.min()) if len(known) else 0.0
    return min(max(posterior.num_chains, int(worst) // 2), posterior.num_chains * posterior.num_samples)


def evenly_spaced(count: int, most: int) -> Tensor:
    """The places of at most so many of ``count``."""
    return torch.arange(min(count, most)) * count // min(count, most)


def thinned(posterior: Posterior) -> Weights:
    """Those of the draws, chains end to end, that may be taken as independent.

    :raises ValueError: if they are fewer than 2.
    """
    total, count = posterior.num_chains * posterior.num_samples, independent_draws(posterior)
    if count < 2:
        raise ValueError(f"of {total} draws of one chain only {count} counts as independent; take more, or more chains")
    keep = evenly_spaced(total, count)
    return {site: value[keep] for site, value in posterior.get_samples().items()}
