"""The number of draws of Markov chains that count as independent, as tests take their samples to be."""

from __future__ import annotations

import itertools

import torch

from pyro_symmetric.compare.layers import samples_given
from pyro_symmetric.posterior.posterior import Draws, Posterior
from pyro_symmetric.posterior.statistics import chain_statistics, copied_chains, evenly_spaced
from pyro_symmetric.weights import require_finite


def independent_draws(posterior: Posterior) -> int:
    """Number of evenly spaced draws that may be taken as independent.

    Of independent rows all; of chains half of the smallest effective sample size over the weights, since draws that are
    thinned to all of it keep a correlation of about 0.1; but one of each chain, as chains know nothing of each other.
    The smallest is that of bulk and tails, of each weight and of its distance from its mean, and the number of draws:
    a test sees more than means, and a weight whose sign alternates may keep its size for long. Weights that never move
    are left out.
    """
    total = posterior.num_chains * posterior.num_samples
    if posterior.kind == "independent":
        return total
    values = list(posterior.samples.values())
    distances = ((v - v.mean((0, 1), keepdim=True, dtype=torch.float64)).abs() for v in values)
    found = map(chain_statistics, itertools.chain(values, distances))
    sizes = torch.cat([size.reshape(-1) for numbers in found for size in (numbers.ess_bulk, numbers.ess_tail)])
    worst = min(sizes[~sizes.isnan()].tolist(), default=0.0)
    return min(max(posterior.num_chains, int(worst) // 2), total)


def thinned(weights: Draws, name: str = "weights") -> Posterior:
    """As many draws, chains end to end and evenly spaced, as may be taken as independent. The last of each chain is
    among them, if one of each counts. If all do, they are views.

    :param weights: a ``Posterior``; or site -> independent samples, all of which count.
    :raises ValueError: if they are fewer than 2, any of all draws isn't finite, or chains are copies of each other.
    """
    if not isinstance(weights, Posterior):
        weights = Posterior.from_samples(samples_given(weights, name), kind="independent")
    require_finite(weights.samples, name)
    if weights.kind == "chains" and (copies := copied_chains(weights.samples)):
        raise ValueError(f"the chains {copies} are copies of others, as of runs with the same seed; leave them out")
    total, count = weights.num_chains * weights.num_samples, independent_draws(weights)
    if count < 2:
        raise ValueError(
            f"of {total} draws only {count} may be taken as independent; a test needs at least 2. Take more draws, or "
            "more chains"
        )
    keep = slice(None) if count == total else evenly_spaced(total, count)
    kept = {site: value[keep] for site, value in weights.get_samples().items()}
    return Posterior.from_samples(kept, kind="independent")
