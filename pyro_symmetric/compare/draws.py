"""Draws as comparisons take them: two sides layer by layer; of Markov chains as many as count as independent.

A layer is what the sites' names share up to the last dot: ``0.weight`` and ``0.bias`` are the layer ``0``; a site
without a dot (``noise_scale``) is a layer of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pyro_symmetric.posterior.posterior import Draws, Posterior, samples_of
from pyro_symmetric.posterior.statistics import chain_statistics, copied_chains, evenly_spaced
from pyro_symmetric.weights import is_running_statistic, require_finite

SIDES = ("weights_p", "weights_q")


def samples_given(draws: Draws, name: str) -> Mapping[str, Tensor]:
    """Samples ``(samples, *site_shape)``; a dictionary that looks like one of chains is refused.

    Three sites or more of few samples, all with the same longer axis next, are nearly always chains and draws. Of fewer
    (a layer's weight and bias) that can't be told.
    """
    samples = samples_of(draws, name)
    leading = {tuple(value.shape[:2]) for site, value in samples.items() if not is_running_statistic(site)}
    shape = leading.pop() if isinstance(draws, Mapping) and len(samples) > 2 and len(leading) == 1 else ()
    if len(shape) == 2 and shape[0] < shape[1]:
        raise ValueError(
            f"{name} has {shape[0]} samples, and all sites an axis of size {shape[1]} next: if these are chains and "
            "draws, pass Posterior(weights, kind='chains'), if not, Posterior.from_samples(weights, kind='independent')"
        )
    return samples


class PairedSamples:
    """Two sets of samples of one architecture, checked.

    Running statistics are left out: they are no weights, and would outweigh them.

    :param weights_p: a ``Posterior``, or site -> samples ``(samples, *site_shape)``.
    :param weights_q: the same sites; the number of samples may differ.
    :param minimum: the smallest number of samples allowed on each side.
    """

    def __init__(self, weights_p: Draws, weights_q: Draws, *, minimum: int = 1):
        p, q = self.weights = (samples_given(weights_p, SIDES[0]), samples_given(weights_q, SIDES[1]))
        sites, others = ([site for site in side if not is_running_statistic(site)] for side in self.weights)
        if odd := set(sites) ^ set(others):
            raise ValueError(f"weights_p and weights_q must have the same sites; only one has {sorted(odd)}")
        self.layers: dict[str, list[str]] = {}
        for site in sites:
            _require_alike(site, p[site], q[site])
            self.layers.setdefault(site.rpartition(".")[0] or site, []).append(site)
        self.shapes = {site: p[site].shape[1:] for site in sites}
        self.num_samples = (len(p[sites[0]]), len(q[sites[0]]))
        for name, side, count in zip(SIDES, self.weights, self.num_samples, strict=True):
            if count < minimum or any(len(side[site]) != count for site in sites):
                counts = {site: len(side[site]) for site in sites}
                raise ValueError(f"{name} holds {counts} samples; it must be as many of each site, {minimum} or more")

    def columns(self, layer: str, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The layer's samples in rows, at most ``chunk`` weights at a time; never in half precision."""
        for site in self.layers[layer]:
            p, q = (side[site].detach()[..., None].flatten(1) for side in self.weights)
            dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
            for pair in zip(p.split(chunk, 1), q.split(chunk, 1), strict=True):
                yield pair[0].to(dtype), pair[1].to(dtype)

    def require_finite(self, layer: str) -> None:
        """:raises ValueError: naming the side and the site, if a weight of the layer is NaN or infinite."""
        for name, side in zip(SIDES, self.weights, strict=True):
            require_finite({site: side[site] for site in self.layers[layer]}, name)

    def num_weights(self, layer: str) -> int:
        """The number of weights (of one sample) in a layer."""
        return sum(self.shapes[site].numel() for site in self.layers[layer])


def _require_alike(site: str, p: Tensor, q: Tensor) -> None:
    """Check the two sides of a site."""
    if p.dim() == 0 or q.dim() == 0 or q.shape[1:] != p.shape[1:]:
        raise ValueError(
            f"{site!r} has shape {tuple(p.shape)} in weights_p and {tuple(q.shape)} in weights_q; both must be samples "
            "(samples, *site_shape) of one site shape. Of chains (chains, draws, ...) pass a Posterior"
        )
    if not p.is_floating_point() or not q.is_floating_point():
        raise ValueError(f"{site!r} holds {p.dtype} and {q.dtype}; only floating-point weights have distances")


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
