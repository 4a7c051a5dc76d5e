r"""Wasserstein distances between weights: of single weights' marginals, and along random directions.

On the line the optimal coupling is monotone, so that with the quantile functions :math:`F^{-1}`, :math:`G^{-1}`

.. math:: W_p(F, G)^p = \int_0^1 |F^{-1}(u) - G^{-1}(u)|^p \, du,

which for samples is a finite sum over sorted values (Peyré & Cuturi 2019, section 2.6; Ramdas et al. 2017).

*Marginals.* The distance of each weight's marginals keeps the weights' unit, and it sees marginals only: two posteriors
with equal marginals and different dependence are at distance 0.

*Sliced.* What the weights' joint distribution looks like from random directions,

.. math:: SW_p(P, Q)^p = E_\theta\, W_p(\theta^\top \# P,\ \theta^\top \# Q)^p, \qquad \theta \sim U(S^{D-1}),

(Rabin et al. 2012; Bonneel et al. 2015) sees dependence between weights, too, and it is zero only for equal
distributions; the price is that a random direction shortens a vector: two posteriors a vector :math:`\delta` apart are
at the distance :math:`\|\delta\| / \sqrt D` for :math:`p = 2`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare.frames import AnySymmetry, FrameKind
from pyro_symmetric.compare.layers import Layers, PairedSamples, Samples
from pyro_symmetric.compare.results import DistanceResult

_CHUNK_ENTRIES = 2**23  # values sorted at a time
_CHUNK = 4096  # weights projected at a time


@torch.no_grad()
def marginal_wasserstein(
    weights_p: Samples,
    weights_q: Samples,
    p: float = 1,
    *,
    layers: Layers | None = None,
    symmetry: AnySymmetry | None = None,
    frame: FrameKind = "aligned",
) -> DistanceResult:
    """One-dimensional Wasserstein distance between the marginals of every weight.

    The plain estimate from samples: of order ``samples ** -0.5`` and positive, not 0, if the marginals are equal. The
    result's totals are ``mean``, ``median`` and ``maximum`` over all weights. Its arrays: the same over each layer's
    weights, ``num_weights``, and as ``weights/<site>`` the distance of each weight, on the axes ``<site>_0`` ...

    >>> p = {"w": torch.randn(100, 3)}
    >>> round(ps.marginal_wasserstein(p, {"w": p["w"] + 2.0}).value, 3)
    2.0

    :param weights_p: site -> samples ``(m,) + site_shape``; or a ``Posterior``, chains end to end.
    :param weights_q: the same sites; the number of samples may differ.
    :param p: order of the distance, at least 1; ``math.inf`` gives the largest difference of quantiles.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param symmetry: remove it first, as :func:`~pyro_symmetric.compare.mmd` does.
    :param frame: in the ``"aligned"`` frame of both sides together, or in ``"canonical"`` forms; see there.
    :raises ValueError: if the sites or shapes don't fit, ``p`` is under 1, or a weight isn't finite.
    """
    arguments.number("p", p, least=1)
    samples = PairedSamples(weights_p, weights_q, layers, symmetry, frame)
    step = max(1, _CHUNK_ENTRIES // sum(samples.num_samples))
    by_layer, arrays = {}, {}
    for layer, sites in samples.layers.items():
        samples.require_finite(layer)
        by_layer[layer] = torch.cat(
            [_distance(x, y, p) for x, y in samples.columns(layer, step)] or [torch.zeros(0, device="cpu")]
        )
        pieces = by_layer[layer].split([samples.shapes[site].numel() for site in sites])
        for site, values in zip(sites, pieces, strict=True):
            shape = samples.shapes[site]
            arrays[f"weights/{site}"] = (
                tuple(f"{site}_{i}" for i in range(len(shape))),
                values.reshape(shape).cpu().numpy(),
            )
    totals = _summary(torch.cat(list(by_layer.values())))
    summaries = [_summary(values) for values in by_layer.values()]
    return DistanceResult(
        title=f"Wasserstein-{p:g} distance of marginals",
        num_samples=samples.num_samples,
        labels={"layer": list(by_layer)},
        arrays={
            "num_weights": (("layer",), [values.numel() for values in by_layer.values()]),
            **{name: (("layer",), [summary[name] for summary in summaries]) for name in totals},
            **arrays,
        },
        settings={"order": float(p)},
        totals=totals,
    )


@torch.no_grad()
def sliced_wasserstein(
    weights_p: Samples,
    weights_q: Samples,
    p: float = 2,
    *,
    num_projections: int = 256,
    layers: Layers | None = None,
    symmetry: AnySymmetry | None = None,
    frame: FrameKind = "aligned",
) -> DistanceResult:
    """Sliced Wasserstein distance of all weights together and of every layer.

    >>> weights = {"w": torch.randn(500, 4)}
    >>> result = ps.sliced_wasserstein(weights, {"w": weights["w"] + 2.0})
    >>> round(result.value, 1)  # |shift| / sqrt(D) = 2
    2.0

    The plain estimate from samples: of order ``samples ** -0.5`` and positive, not 0, if the distributions are equal
    (unlike :func:`~pyro_symmetric.compare.mmd`). Directions are drawn from PyTorch's generator; the same seed gives two
    comparisons the same directions. The result's totals are ``distance``, of all weights together, and
    ``standard_error``, how far the random directions leave it uncertain, given the samples; its arrays are the same of
    each layer alone, and ``num_weights``.

    :param weights_p: site -> samples ``(m,) + site_shape``; or a ``Posterior``, chains end to end.
    :param weights_q: the same sites; the number of samples may differ.
    :param p: order of the distance, at least 1 and finite.
    :param num_projections: number of random directions.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param symmetry: remove it first, as :func:`~pyro_symmetric.compare.mmd` does.
    :param frame: in the ``"aligned"`` frame of both sides together, or in ``"canonical"`` forms; see there.
    :raises ValueError: if the sites or shapes don't fit, ``p`` or a number is out of range, or a weight isn't finite.
    """
    arguments.number("p", p, least=1, below=math.inf)
    arguments.whole("num_projections", num_projections, 1)
    samples = PairedSamples(weights_p, weights_q, layers, symmetry, frame)
    projected = {}
    for layer in samples.layers:
        samples.require_finite(layer)
        if samples.num_weights(layer) == 0:
            raise ValueError(f"layer {layer!r} holds no weights; leave it out")
        projected[layer] = _projected(samples, layer, num_projections)
    totals = _sliced(_added(projected.values()), p)
    parts = [_sliced(values, p) for values in projected.values()]
    return DistanceResult(
        title=f"Sliced Wasserstein-{p:g} distance ({num_projections:,} directions)",
        num_samples=samples.num_samples,
        labels={"layer": list(projected)},
        arrays={
            "num_weights": (("layer",), [samples.num_weights(layer) for layer in projected]),
            **{name: (("layer",), [part[name] for part in parts]) for name in totals},
        },
        settings={"order": float(p), "num_projections": num_projections},
        totals=totals,
    )


# small steps --------------------------------------------------------------------------------------------------------


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
    if math.isinf(p):
        return largest
    relative = torch.where(largest > 0, gaps / largest, gaps)  # whose powers neither overflow nor all vanish
    return largest * (widths @ relative**p) ** (1 / p)


def _summary(values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        raise ValueError("the sites hold no weights; there is nothing to compare")
    # numpy's median: torch.quantile refuses more than 2^24 values
    ordered = values.sort().values
    middle = (ordered[(values.numel() - 1) // 2] + ordered[values.numel() // 2]) / 2
    return {"mean": float(values.mean()), "median": float(middle), "maximum": float(values.max())}


def _projected(samples: PairedSamples, layer: str, num_projections: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides along Gaussian directions, ``(m, L)`` and ``(n, L)``, and the directions' squared lengths ``(L,)``.

    A Gaussian vector over its length is uniform on the sphere; over several layers these simply add.
    """
    steps = []
    for x, y in samples.columns(layer, _CHUNK):
        directions = torch.randn(x.shape[1], num_projections, dtype=torch.float64, device=x.device)
        steps.append((x.double() @ directions, y.double() @ directions, directions.square().sum(0)))
        steps = [_added(steps)]
    return steps[0]


def _added(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    x, y, squared_length = (functools.reduce(torch.add, values) for values in zip(*parts, strict=True))
    return x, y, squared_length


def _sliced(projected: tuple[Tensor, Tensor, Tensor], p: float) -> dict[str, float]:
    x, y, squared_length = projected
    distances = _distance(x, y, p) / squared_length.sqrt()
    largest = distances.max()
    costs = (distances / largest) ** p if largest > 0 else distances
    mean = float(costs.mean())
    value = float(largest) * mean ** (1 / p)
    spread = float(costs.std()) / math.sqrt(len(costs)) if len(costs) > 1 else math.nan
    # delta method for the p-th root
    return {"distance": value, "standard_error": spread * value / (p * mean) if mean > 0 else 0.0}
