"""How many draws of Markov chains count as independent. Tests take their samples to be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.weights import Weights


def is_chain(posterior: Any) -> TypeGuard[Posterior]:
    """Whether these are a sampler's draws, of which one depends on the last; an ensemble's or a guide's don't."""
    return isinstance(posterior, Posterior) and posterior.metadata.get("kernel") not in (None, "ensemble")


def independent_draws(posterior: Posterior, diagnostics: Mapping[str, Mapping[str, Any]] | None = None) -> int:
    """How many evenly spaced draws of chains may be taken as independent: half of the smallest bulk effective sample
    size over the weights, since draws that are thinned to all of it keep a correlation of about 0.1; but one of each
    chain, as chains know nothing of each other.

    :param diagnostics: ``posterior.diagnostics()``, if it is at hand.
    """
    table = posterior.diagnostics() if diagnostics is None else diagnostics
    sizes = [entry["ess_bulk"] for site, entry in table.items() if site in posterior.site_shapes]
    worst = min((size for size in sizes if not math.isnan(size)), default=0.0)
    return min(max(posterior.num_chains, int(worst) // 2), posterior.num_chains * posterior.num_samples)


def evenly_spaced(count: int, most: int) -> Tensor:
    """The places of at most so many of ``count``."""
    return torch.arange(min(count, most)) * count // min(count, most)


def thinned(posterior: Posterior) -> Weights:
    """Those of the draws, chains end to end, that may be taken as independent."""
    draws = posterior.get_samples()
    keep = evenly_spaced(posterior.num_chains * posterior.num_samples, independent_draws(posterior))
    return {site: value[keep] for site, value in draws.items()}
