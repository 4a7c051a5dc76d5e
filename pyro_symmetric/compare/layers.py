"""Weights as the comparisons see them: samples in rows, grouped into layers.

A comparison reads two collections of weights of one architecture, flattens their batch dimensions into samples, and
works layer by layer. A layer is by default what the sites' names share up to the last dot: ``0.weight`` and ``0.bias``
are the layer ``0``; a site without a dot (``noise_scale``) is a layer of its own.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.calls import described
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import (
    Shapes,
    batch_shape,
    is_running_statistic,
    require_finite,
    require_sites,
)

Layers = Mapping[str, Sequence[str]]
Samples = Mapping[str, Tensor] | Posterior


def samples_of(weights: Samples, name: str = "weights") -> Mapping[str, Tensor]:
    """Weights as they come; of a posterior, its draws, chains end to end.

    :param name: what messages call them.
    :raises TypeError: if they are neither.
    """
    if isinstance(weights, Posterior):
        return weights.get_samples()
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"{name} are {described(weights)}; they must be a Posterior, or map each site to its samples (of a guide, "
            "take draws: Predictive(model, guide=guide, num_samples=1000))"
        )
    return arguments.weights(name, weights)


def group_sites(sites: Sequence[str], layers: Layers | None = None) -> dict[str, tuple[str, ...]]:
    """Layer -> its sites: the given ``layers``, checked, or the default grouping by the names up to the last dot.

    By default running statistics are left out: they are no weights, and would outweigh them.

    :raises ValueError: if ``layers`` is empty, names an unknown site, or names a site twice.
    """
    if layers is None:
        grouped: dict[str, list[str]] = {}
        for site in itertools.filterfalse(is_running_statistic, sites):
            grouped.setdefault(site.rpartition(".")[0] or site, []).append(site)
        return {name: tuple(members) for name, members in grouped.items()}
    arguments.mapping("layers", layers, "layer -> its sites")
    named = [
        site
        for name, members in layers.items()
        for site in arguments.listed(f"layers[{name!r}]", members, str, "sites")
    ]
    if not named or not all(len(members) for members in layers.values()):
        raise ValueError(f"layers must name at least one site for each layer, but is {dict(layers)}")
    unknown = [site for site in named if site not in sites]
    if unknown:
        raise ValueError(f"layers names the sites {unknown}, which the weights lack; they have {list(sites)}")
    twice = sorted({site for site in named if named.count(site) > 1})
    if twice:
        raise ValueError(f"layers names the sites {twice} more than once; a weight may be counted only once")
    return {name: tuple(members) for name, members in layers.items()}


def require_site_shapes(weights: Mapping[str, Tensor], symmetry: Symmetry | Group, name: str) -> None:
    """:raises ValueError: if samples ``(n,) + site_shape`` of a site don't have the shape that the symmetry knows."""
    for site, shape in group_of(symmetry, "symmetry").site_shapes.items():
        if site in weights and weights[site].shape[1:] != shape:
            raise ValueError(
                f"{name}[{site!r}] has shape {tuple(weights[site].shape)}; it must be the number of samples, then "
                f"{tuple(shape)}, the site's shape in symmetry"
            )


class PairedSamples:
    """Two collections of weights of one architecture, checked, with their samples in rows.

    :param weights_p: site -> tensor ``(samples,) + site_shape``; or a ``Posterior``, chains end to end.
    :param weights_q: the same sites; the number of samples may differ.
    :param layers: layer -> its sites; sites that are not named are left out. Default: all but running statistics, see
        :func:`group_sites`.
    :param minimum: the smallest number of samples allowed on each side.
    :raises ValueError: if sites, shapes, dtypes or devices don't fit, or samples are missing.
    """

    def __init__(
        self,
        weights_p: Samples,
        weights_q: Samples,
        layers: Layers | None = None,
        *,
        minimum: int = 1,
    ):
        weights_p, weights_q = samples_of(weights_p, "weights_p"), samples_of(weights_q, "weights_q")
        here, there = (
            {site for site in weights if not is_running_statistic(site)} for weights in (weights_p, weights_q)
        )
        if layers is None and here != there:
            raise ValueError(
                "weights_p and weights_q must have the same sites (or layers must name those to compare); only in "
                f"weights_p: {sorted(here - there)}, only in weights_q: {sorted(there - here)}"
            )
        self.layers = group_sites(list(weights_p), layers)
        self.sites = tuple(site for members in self.layers.values() for site in members)
        if not self.sites:
            raise ValueError("weights_p and weights_q hold running statistics only; there is nothing to compare")
        require_sites(weights_q, self.sites, "weights_q")
        self.shapes = _common_shapes(weights_p, weights_q, self.sites)
        self.weights = (weights_p, weights_q)
        self.num_samples = (
            _num_samples(weights_p, self.shapes, "weights_p", minimum),
            _num_samples(weights_q, self.shapes, "weights_q", minimum),
        )

    def matrices(self, site: str) -> tuple[Tensor, Tensor]:
        """The site's samples: two matrices ``(num_samples, number of weights)``."""
        p, q = (
            weights[site].detach().reshape(rows, -1)
            for weights, rows in zip(self.weights, self.num_samples, strict=True)
        )
        for name, value in (("weights_p", p), ("weights_q", q)):
            if not value.is_floating_point():
                raise ValueError(
                    f"{name}[{site!r}] has dtype {value.dtype}; only floating-point weights have distances"
                )
        if p.device != q.device:
            raise ValueError(f"{site!r} lies on {p.device} in weights_p and on {q.device} in weights_q; move one")
        return p, q

    def columns(self, layer: str, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The layer's samples, at most ``chunk`` weights at a time; never in half precision."""
        for site in self.layers[layer]:
            p, q = self.matrices(site)
            dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
            for start in range(0, p.shape[1], chunk):
                yield p[:, start : start + chunk].to(dtype), q[:, start : start + chunk].to(dtype)

    def require_finite(self, layer: str) -> None:
        """:raises ValueError: naming the side and the site, if a weight of the layer is NaN or infinite."""
        for name, weights in zip(("weights_p", "weights_q"), self.weights, strict=True):
            require_finite({site: weights[site] for site in self.layers[layer]}, name)

    def num_weights(self, layer: str) -> int:
        """The number of weights (of one sample) in a layer."""
        return sum(self.shapes[site].numel() for site in self.layers[layer])


def _common_shapes(p: Mapping[str, Tensor], q: Mapping[str, Tensor], sites: Sequence[str]) -> dict[str, torch.Size]:
    """The sites' shapes: everything after the first dimension."""
    for site in sites:
        if p[site].dim() == 0 or q[site].shape[1:] != p[site].shape[1:]:
            raise ValueError(
                f"{site!r} has shape {tuple(p[site].shape)} in weights_p and {tuple(q[site].shape)} in weights_q; both "
                "must be (samples,) + the same site shape. Of (chains, draws) pass a Posterior"
            )
    _warn_of_chains(p)
    return {site: p[site].shape[1:] for site in sites}


def _warn_of_chains(weights: Mapping[str, Tensor]) -> None:
    """Draws ``(chains, draws, ...)`` look like few samples of large sites, all of which have an axis in common.

    A linear layer's weight and bias have one, too, so that a network of one layer can't be told from draws.
    """
    leading = {tuple(value.shape[:2]) for value in weights.values()}
    if len(weights) < 3 or len(leading) > 1:
        return
    shape = leading.pop()
    if len(shape) == 2 and shape[0] < shape[1] and len({value.dim() for value in weights.values()}) > 1:
        warnings.warn(
            f"weights have {shape[0]} samples, and all sites an axis of size {shape[1]} next; if these are chains and "
            "draws, pass a Posterior",
            UserWarning,
            stacklevel=5,
        )


def _num_samples(weights: Mapping[str, Tensor], shapes: Shapes, name: str, minimum: int) -> int:
    try:
        rows = batch_shape(weights, shapes).numel()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if rows < minimum:
        raise ValueError(f"{name} holds {rows} samples; at least {minimum} are needed")
    return rows
