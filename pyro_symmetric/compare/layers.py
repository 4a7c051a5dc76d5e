"""Two sets of samples of one architecture, taken layer by layer.

A layer is by default what the sites' names share up to the last dot: ``0.weight`` and ``0.bias`` are the layer ``0``; a
site without a dot (``noise_scale``) is a layer of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from pyro_symmetric.posterior.posterior import Draws, samples_of
from pyro_symmetric.weights import is_running_statistic, require_finite

SIDES = ("weights_p", "weights_q")


def group_sites(sites: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Layer -> its sites, without running statistics: they are no weights, and would outweigh them."""
    grouped: dict[str, tuple[str, ...]] = {}
    for site in itertools.filterfalse(is_running_statistic, sites):
        name = site.rpartition(".")[0] or site
        grouped[name] = (*grouped.get(name, ()), site)
    return grouped


def samples_given(draws: Draws, name: str) -> Mapping[str, Tensor]:
    """Samples ``(samples, *site_shape)``; a dictionary that looks like one of chains is refused.

    Three sites or more of few samples, all with the same longer axis next, are nearly always chains and draws. Of fewer
    (a layer's weight and bias) that can't be told.
    """
    samples = samples_of(draws, name)
    leading = {tuple(value.shape[:2]) for site, value in samples.items() if not is_running_statistic(site)}
    shape = next(iter(leading), ())
    if (
        isinstance(draws, Mapping)
        and len(samples) > 2
        and len(leading) == 1
        and len(shape) == 2
        and shape[0] < shape[1]
    ):
        raise ValueError(
            f"{name} has {shape[0]} samples, and all sites an axis of size {shape[1]} next: if these are chains and "
            "draws, pass Posterior(weights, kind='chains'), if not, Posterior.from_samples(weights, kind='independent')"
        )
    return samples


class PairedSamples:
    """Two sets of samples, checked.

    :param weights_p: a ``Posterior``, or site -> samples ``(samples, *site_shape)``.
    :param weights_q: the same sites; the number of samples may differ.
    :param minimum: the smallest number of samples allowed on each side.
    """

    def __init__(self, weights_p: Draws, weights_q: Draws, *, minimum: int = 1):
        p, q = self.weights = (samples_given(weights_p, SIDES[0]), samples_given(weights_q, SIDES[1]))
        self.layers = group_sites(p)
        sites = [site for members in self.layers.values() for site in members]
        if odd := set(sites) ^ {site for site in q if not is_running_statistic(site)}:
            raise ValueError(f"weights_p and weights_q must have the same sites; only one has {sorted(odd)}")
        for site in sites:
            _require_alike(site, p[site], q[site])
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
