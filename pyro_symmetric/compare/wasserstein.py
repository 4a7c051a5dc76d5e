r"""Wasserstein distances between the marginals of single weights.

On the line the optimal coupling is monotone, so that with the quantile functions :math:`F^{-1}`, :math:`G^{-1}`

.. math:: W_p(F, G)^p = \int_0^1 |F^{-1}(u) - G^{-1}(u)|^p \, du,

which for samples is a finite sum over sorted values (Peyré & Cuturi 2019, section 2.6; Ramdas et al. 2017).

The distance of each weight's marginals keeps the weights' unit, and it sees marginals only: two posteriors with equal
marginals and different dependence are at distance 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare.layers import PairedSamples
from pyro_symmetric.compare.results import DistanceResult
from pyro_symmetric.posterior.posterior import Draws
from pyro_symmetric.weights import Weights, unflatten

_CHUNK_ENTRIES = 2**23  # values sorted at a time


@torch.no_grad()
def marginal_wasserstein(weights_p: Draws, weights_q: Draws, p: float = 1) -> DistanceResult:
    """One-dimensional Wasserstein distance between the marginals of every weight.

    The plain estimate from samples: of order ``samples ** -0.5`` and positive, not 0, if the marginals are equal. The
    result's totals are ``mean``, ``median`` and ``maximum`` over all weights; its parts the same over each layer's
    weights, and ``num_weights``; ``each`` the distance of each weight, float64, on the CPU.

    >>> p = {"w": torch.randn(100, 3)}
    >>> round(ps.marginal_wasserstein(p, {"w": p["w"] + 2.0}).value, 3)
    2.0

    :param weights_p: a ``Posterior``, or site -> samples ``(m,) + site_shape``.
    :param weights_q: the same sites; the number of samples may differ.
    :param p: order of the distance, at least 1; ``math.inf`` gives the largest difference of quantiles.
    :raises ValueError: if the sites or shapes don't fit, ``p`` is under 1, or a weight isn't finite.
    """
    arguments.number("p", p, least=1)
    samples = PairedSamples(weights_p, weights_q)
    step = max(1, _CHUNK_ENTRIES // sum(samples.num_samples))
    by_layer, each = {}, Weights()
    for layer, sites in samples.layers.items():
        samples.require_finite(layer)
        by_layer[layer] = torch.cat([_distance(x, y, p) for x, y in samples.columns(layer, step)]).cpu()
        each |= unflatten(by_layer[layer], {site: samples.shapes[site] for site in sites})
    return DistanceResult(
        title=f"Wasserstein-{p:g} distance of marginals",
        num_samples=samples.num_samples,
        totals=_summary(torch.cat(list(by_layer.values()))),
        parts={layer: {"num_weights": len(values), **_summary(values)} for layer, values in by_layer.items()},
        each=each,
    )


def _distance(x: Tensor, y: Tensor, p: float) -> Tensor:
    r""":math:`W_p` between the columns of samples ``(m, D)`` and ``(n, D)``, ``(D,)``."""
    x, y = x.sort(0).values.double(), y.sort(0).values.double()
    m, n = len(x), len(y)
    # Both quantile functions are constant between the merged steps i/m and j/n; as integers, in units of 1/mn, no two
    # steps that coincide are told apart by rounding.
    steps_x, steps_y = (torch.arange(1, count + 1, device=x.device) for count in (m, n))
    ends = torch.cat([steps_x * n, steps_y * m]).unique()
    widths = torch.diff(ends, prepend=ends.new_zeros(1)).double() / (m * n)
    gaps = (x[(ends - 1) // n] - y[(ends - 1) // m]).abs()
    largest = gaps.amax(0)
    relative = torch.where(largest > 0, gaps / largest, gaps)  # whose powers neither overflow nor all vanish
    return largest * (widths @ relative**p) ** (1 / p)


def _summary(values: Tensor) -> dict[str, float]:
    middle = float(np.median(values.numpy()))  # torch.quantile refuses more than 2^24 values
    return {"mean": float(values.mean()), "median": middle, "maximum": float(values.max())}
