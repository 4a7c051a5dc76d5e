r"""Sliced Wasserstein distance: what the weights' joint distribution looks like from random directions.

.. math:: SW_p(P, Q)^p = E_\theta\, W_p(\theta^\top \# P,\ \theta^\top \# Q)^p, \qquad \theta \sim U(S^{D-1}),

(Rabin et al. 2012; Bonneel et al. 2015). Unlike the distance of marginals it sees dependence between weights, and it is
zero only for equal distributions; the price is that a random direction shortens a vector: two posteriors a vector
:math:`\delta` apart are at the distance :math:`\|\delta\| / \sqrt D` for :math:`p = 2`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._results import table
from pyro_symmetric.compare.layers import AnySymmetry, Layers, PairedSamples, Samples
from pyro_symmetric.compare.wasserstein import transport_cost
from pyro_symmetric.weights import Shapes

_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class SlicedDistance:
    """A sliced Wasserstein distance and how far the random directions leave it uncertain.

    :param value: the distance, in the unit of the weights.
    :param standard_error: of ``value``, given the samples: from the spread over directions.
    :param num_weights: ``D``.
    """

    value: float
    standard_error: float
    num_weights: int


@dataclass(frozen=True, eq=False)
class SlicedResult:
    """Sliced Wasserstein distances; see :func:`sliced_wasserstein`.

    :param order: the order ``p``.
    :param joint: of all weights together.
    :param per_layer: layer -> of its weights alone.
    :param num_projections: number of directions.
    :param num_samples: the number of samples on each side.
    """

    order: float
    joint: SlicedDistance
    per_layer: dict[str, SlicedDistance]
    num_projections: int
    num_samples: tuple[int, int]

    @property
    def value(self) -> float:
        """The distance of all weights together."""
        return self.joint.value

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "order": self.order,
            "joint": dict(vars(self.joint)),
            "per_layer": {name: dict(vars(layer)) for name, layer in self.per_layer.items()},
            "num_projections": self.num_projections,
            "num_samples": list(self.num_samples),
        }

    def __repr__(self) -> str:
        m, n = self.num_samples
        rows = [("layer", "weights", "distance", "standard error")]
        for name, layer in [*self.per_layer.items(), ("all", self.joint)]:
            rows.append((name, f"{layer.num_weights:,}", f"{layer.value:.3g}", f"{layer.standard_error:.1g}"))
        head = f"Sliced Wasserstein-{self.order:g} distance, {m:,} samples against {n:,}"
        return f"{head}, {self.num_projections:,} directions\n{table(rows)}"


@torch.no_grad()
def sliced_wasserstein(
    weights_p: Samples,
    weights_q: Samples,
    p: float = 2,
    *,
    num_projections: int = 256,
    layers: Layers | None = None,
    site_shapes: Shapes | None = None,
    symmetry: AnySymmetry | None = None,
    chunk: int = _CHUNK,
) -> SlicedResult:
    """Sliced Wasserstein distance of all weights together and of every layer.

    >>> weights = {"w": torch.randn(500, 4)}
    >>> result = sliced_wasserstein(weights, {"w": weights["w"] + 2.0})
    >>> round(result.value, 1)  # |shift| / sqrt(D) = 2
    2.0

    The plain estimate from samples: of order ``samples ** -0.5`` and positive, not 0, if the distributions are equal
    (unlike :func:`~pyro_symmetric.compare.mmd`). Directions are drawn from PyTorch's generator; the same seed gives two
    comparisons the same directions.

    :param weights_p: site -> samples ``(m,) + site_shape``, or ``batch_shape + site_shape`` with ``site_shapes`` given;
        or a ``Posterior``, chains end to end.
    :param weights_q: the same sites; the number of samples may differ.
    :param p: order of the distance, at least 1 and finite.
    :param num_projections: number of random directions.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param site_shapes: the sites' shapes without batch dimensions, for more than one batch dimension.
    :param symmetry: remove it first, as :func:`~pyro_symmetric.compare.mmd` does.
    :param chunk: how many weights are projected at a time.
    :raises ValueError: if the sites or shapes don't fit, ``p`` or a number is out of range, or a weight isn't finite.
    """
    arguments.number("p", p, least=1, below=math.inf)
    arguments.whole("num_projections", num_projections, 1)
    arguments.whole("chunk", chunk, 1)
    samples = PairedSamples(weights_p, weights_q, layers, site_shapes, symmetry)
    projected, per_layer = {}, {}
    for layer in samples.layers:
        samples.require_finite(layer)
        if samples.num_weights(layer) == 0:
            raise ValueError(f"layer {layer!r} holds no weights; leave it out")
        projected[layer] = _projected(samples, layer, num_projections, chunk)
        per_layer[layer] = _distance(projected[layer], p, samples.num_weights(layer))
    joint = _distance(_added(projected.values()), p, sum(layer.num_weights for layer in per_layer.values()))
    return SlicedResult(float(p), joint, per_layer, num_projections, samples.num_samples)


# small steps --------------------------------------------------------------------------------------------------------


def _projected(samples: PairedSamples, layer: str, num_projections: int, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides along Gaussian directions, ``(m, L)`` and ``(n, L)``, and the directions' squared lengths ``(L,)``.

    A Gaussian vector over its length is uniform on the sphere; over several layers these simply add.
    """
    steps = []
    for x, y in samples.columns(layer, chunk):
        directions = torch.randn(x.shape[1], num_projections, dtype=torch.float64, device=x.device)
        steps.append((x.double() @ directions, y.double() @ directions, directions.square().sum(0)))
        steps = [_added(steps)]
    return steps[0]


def _added(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    x, y, squared_length = (functools.reduce(torch.add, values) for values in zip(*parts, strict=True))
    return x, y, squared_length


def _distance(projected: tuple[Tensor, Tensor, Tensor], p: float, num_weights: int) -> SlicedDistance:
    x, y, squared_length = projected
    costs = transport_cost(x, y, p) / squared_length ** (p / 2)
    mean = float(costs.mean())
    value = mean ** (1 / p)
    spread = float(costs.std()) / math.sqrt(len(costs)) if len(costs) > 1 else math.nan
    # delta method for the p-th root
    error = spread * value / (p * mean) if mean > 0 else 0.0
    return SlicedDistance(value, error, num_weights)
