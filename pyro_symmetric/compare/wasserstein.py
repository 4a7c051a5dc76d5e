r"""Wasserstein distance between the marginals of single weights.

On the line the optimal coupling is monotone, so that with the quantile functions :math:`F^{-1}`, :math:`G^{-1}`

.. math:: W_p(F, G)^p = \int_0^1 |F^{-1}(u) - G^{-1}(u)|^p \, du,

which for samples is a finite sum over sorted values (Peyré & Cuturi 2019, section 2.6; Ramdas et al. 2017). It keeps
the weights' unit, and it sees marginals only: two posteriors with equal marginals and different dependence are at
distance 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._results import layer_table
from pyro_symmetric.compare.layers import AnySymmetry, Layers, PairedSamples, Samples
from pyro_symmetric.weights import Shapes

_CHUNK_ENTRIES = 2**23


@dataclass(frozen=True, eq=False)
class LayerWasserstein:
    """Distances of the marginals of one layer's weights.

    :param sites: the sites of the layer.
    :param num_weights: its number of weights.
    :param median: median over its weights.
    :param mean: mean over its weights.
    :param maximum: largest over its weights.
    """

    sites: tuple[str, ...]
    num_weights: int
    median: float
    mean: float
    maximum: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "sites": list(self.sites),
            "num_weights": self.num_weights,
            "median": self.median,
            "mean": self.mean,
            "maximum": self.maximum,
        }


@dataclass(frozen=True, eq=False)
class WassersteinResult:
    """Marginal Wasserstein distances; see :func:`marginal_wasserstein`.

    :param order: the order ``p`` of the distance.
    :param median: median over all weights.
    :param mean: mean over all weights.
    :param maximum: largest over all weights.
    :param per_layer: layer -> :class:`LayerWasserstein`.
    :param per_weight: site -> distance of each weight's marginals, of the site's shape.
    :param num_samples: the number of samples on each side.
    """

    order: float
    median: float
    mean: float
    maximum: float
    per_layer: dict[str, LayerWasserstein]
    per_weight: dict[str, Tensor]
    num_samples: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: the summaries, not the distance of every weight."""
        return {
            "order": "inf" if math.isinf(self.order) else self.order,
            "median": self.median,
            "mean": self.mean,
            "maximum": self.maximum,
            "num_samples": list(self.num_samples),
            "per_layer": {name: layer.to_dict() for name, layer in self.per_layer.items()},
        }

    def __repr__(self) -> str:
        m, n = self.num_samples
        return f"Wasserstein-{self.order:g} distance of marginals, {m:,} samples against {n:,}\n{layer_table(self)}"


@torch.no_grad()
def marginal_wasserstein(
    weights_p: Samples,
    weights_q: Samples,
    p: float = 1,
    *,
    layers: Layers | None = None,
    site_shapes: Shapes | None = None,
    symmetry: AnySymmetry | None = None,
    chunk: int | None = None,
) -> WassersteinResult:
    """One-dimensional Wasserstein distance between the marginals of every weight.

    The plain estimate from samples: of order ``samples ** -0.5`` and positive, not 0, if the marginals are equal.

    :param weights_p: site -> samples ``(m,) + site_shape``, or ``batch_shape + site_shape`` with ``site_shapes`` given;
        or a ``Posterior``, chains end to end.
    :param weights_q: the same sites; the number of samples may differ.
    :param p: order of the distance, at least 1; ``math.inf`` gives the largest difference of quantiles.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param site_shapes: the sites' shapes without batch dimensions, for more than one batch dimension.
    :param symmetry: remove it first, as :func:`~pyro_symmetric.compare.mmd` does.
    :param chunk: how many weights are sorted at a time. Default: so many that a temporary holds about 2²³ values.
    :raises ValueError: if the sites or shapes don't fit, ``p`` is under 1, or a weight isn't finite.
    """
    arguments.number("p", p, least=1)
    arguments.whole("chunk", chunk, 1, none="a number that suits")
    samples = PairedSamples(weights_p, weights_q, layers, site_shapes, symmetry)
    step = chunk or max(1, _CHUNK_ENTRIES // sum(samples.num_samples))
    per_weight: dict[str, Tensor] = {}
    for layer, sites in samples.layers.items():
        samples.require_finite(layer)
        flat = torch.cat([_distance(x, y, p) for x, y in samples.columns(layer, step)] or [torch.zeros(0)])
        pieces = flat.split([samples.shapes[site].numel() for site in sites])
        per_weight |= {site: v.reshape(samples.shapes[site]) for site, v in zip(sites, pieces, strict=True)}
    per_layer = {}
    for layer, sites in samples.layers.items():
        values = torch.cat([per_weight[site].reshape(-1) for site in sites])
        per_layer[layer] = LayerWasserstein(sites, values.numel(), *_summary(values))
    everything = torch.cat([value.reshape(-1) for value in per_weight.values()])
    return WassersteinResult(float(p), *_summary(everything), per_layer, per_weight, samples.num_samples)


# small steps --------------------------------------------------------------------------------------------------------


def _distance(x: Tensor, y: Tensor, p: float) -> Tensor:
    """Distances ``(D,)`` between the columns of samples ``(m, D)`` and ``(n, D)``."""
    cost = transport_cost(x, y, p)
    return cost if math.isinf(p) else cost ** (1 / p)


def transport_cost(x: Tensor, y: Tensor, p: float) -> Tensor:
    r""":math:`W_p^p` between the columns of samples ``(m, D)`` and ``(n, D)``, ``(D,)``; :math:`W_\infty` itself."""
    x, y = x.sort(0).values.double(), y.sort(0).values.double()
    m, n = len(x), len(y)
    # Both quantile functions are constant between the merged steps i/m and j/n; as integers, in units of 1/mn, no two
    # steps that coincide are told apart by rounding.
    steps_x, steps_y = (torch.arange(1, count + 1, device=x.device) for count in (m, n))
    ends = torch.cat([steps_x * n, steps_y * m]).unique()
    widths = torch.diff(ends, prepend=ends.new_zeros(1)).double() / (m * n)
    gaps = (x[(ends - 1) // n] - y[(ends - 1) // m]).abs()
    if math.isinf(p):
        return gaps.amax(0)
    return widths @ gaps**p


def _summary(values: Tensor) -> tuple[float, float, float]:
    if values.numel() == 0:
        raise ValueError("the sites hold no weights; there is nothing to compare")
    # numpy's median: torch.quantile refuses more than 2^24 values
    ordered = values.sort().values
    middle = (ordered[(values.numel() - 1) // 2] + ordered[values.numel() // 2]) / 2
    return float(middle), float(values.mean()), float(values.max())
