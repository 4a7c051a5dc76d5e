r"""Maximum mean discrepancy between two sets of weight samples.

For a kernel :math:`k`, samples :math:`x_1 \dots x_m \sim p` and :math:`y_1 \dots y_n \sim q`, the unbiased estimate of
the squared discrepancy (Gretton et al. 2012, Lemma 6) is

.. math:: \widehat{\mathrm{MMD}}^2 = \frac{1}{m(m-1)} \sum_{i \ne j} k(x_i, x_j)
    + \frac{1}{n(n-1)} \sum_{i \ne j} k(y_i, y_j) - \frac{2}{mn} \sum_{i, j} k(x_i, y_j).

Under a fixed kernel it is zero on average if :math:`p = q`, so that a small value may well be negative. As in
Laurent et al. (2024, arXiv 2310.08287) it is taken layer by layer under ten Gaussian kernels :math:`\exp(-(\|x - y\|_2
/ \lambda)^2)` and ten Laplace kernels :math:`\exp(-\|x - y\|_1 / \lambda)`, with the bandwidths of MMDAgg (Schrab et
al. 2023, arXiv 2110.15073): see :func:`bandwidth_grid`. That grid is chosen by the distances *between* the samples
only, so that under its smallest bandwidths, no larger than half of any such distance, the estimate is slightly positive
on average even where
:math:`p = q`. Kernels chosen beforehand (``bandwidths=``) leave it exactly unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._pairs import Pairs
from pyro_symmetric.compare._results import layer_table
from pyro_symmetric.compare.layers import AnySymmetry, Layers, PairedSamples, Samples
from pyro_symmetric.weights import Shapes

NUM_BANDWIDTHS = 10


@dataclass(frozen=True, eq=False)
class LayerMMD:
    """Squared MMD of one layer under every kernel.

    :param sites: the sites of the layer.
    :param num_weights: number of weights of one sample in this layer.
    :param gaussian: squared MMD under the Gaussian kernels, ``(10,)``, float64.
    :param laplace: squared MMD under the Laplace kernels, ``(10,)``, float64.
    :param gaussian_bandwidths: their :math:`\\lambda`, ascending, ``(10,)``.
    :param laplace_bandwidths: likewise.
    """

    sites: tuple[str, ...]
    num_weights: int
    gaussian: Tensor
    laplace: Tensor
    gaussian_bandwidths: Tensor
    laplace_bandwidths: Tensor

    @property
    def median(self) -> float:
        """Median of the squared MMD over the twenty kernels (the mean of the middle two)."""
        return float(torch.cat([self.gaussian, self.laplace]).quantile(0.5))

    @property
    def mean(self) -> float:
        """Mean of the squared MMD over the twenty kernels."""
        return float(torch.cat([self.gaussian, self.laplace]).mean())

    @property
    def maximum(self) -> float:
        """Maximum of the squared MMD over the twenty kernels."""
        return float(torch.cat([self.gaussian, self.laplace]).max())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "sites": list(self.sites),
            "num_weights": self.num_weights,
            "median": self.median,
            "mean": self.mean,
            "maximum": self.maximum,
            "gaussian": self.gaussian.tolist(),
            "laplace": self.laplace.tolist(),
            "gaussian_bandwidths": self.gaussian_bandwidths.tolist(),
            "laplace_bandwidths": self.laplace_bandwidths.tolist(),
        }


@dataclass(frozen=True, eq=False)
class MMDResult:
    """Squared MMD between two sets of weights; see :func:`mmd`.

    :param median: mean over layers, weighted by their number of weights, of the median over kernels.
    :param mean: the same of the mean over kernels.
    :param maximum: the same of the maximum over kernels.
    :param per_layer: layer -> :class:`LayerMMD`.
    :param num_samples: the number of samples on each side.
    """

    median: float
    mean: float
    maximum: float
    per_layer: dict[str, LayerMMD]
    num_samples: tuple[int, int]

    @property
    def median_root(self) -> float:
        """Signed root of :attr:`median`: :math:`\\mathrm{sign}(v) \\sqrt{|v|}`."""
        return _signed_root(self.median)

    @property
    def mean_root(self) -> float:
        """Signed root of :attr:`mean`."""
        return _signed_root(self.mean)

    @property
    def maximum_root(self) -> float:
        """Signed root of :attr:`maximum`."""
        return _signed_root(self.maximum)

    def kernels(self, layers: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> the bandwidths of its Gaussian and of its Laplace kernels, to be used again.

        :raises ValueError: if ``layers`` are not those of this result.
        """
        if set(layers) != set(self.per_layer):
            raise ValueError(
                f"bandwidths has the layers {sorted(self.per_layer)}, but the weights have {sorted(layers)}"
            )
        return {name: (layer.gaussian_bandwidths, layer.laplace_bandwidths) for name, layer in self.per_layer.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "median": self.median,
            "mean": self.mean,
            "maximum": self.maximum,
            "median_root": self.median_root,
            "mean_root": self.mean_root,
            "maximum_root": self.maximum_root,
            "num_samples": list(self.num_samples),
            "per_layer": {name: layer.to_dict() for name, layer in self.per_layer.items()},
        }

    def __repr__(self) -> str:
        m, n = self.num_samples
        return f"Squared MMD, {m:,} samples against {n:,} (over 20 kernels)\n{layer_table(self)}"


@torch.no_grad()
def mmd(
    weights_p: Samples,
    weights_q: Samples,
    *,
    layers: Layers | None = None,
    site_shapes: Shapes | None = None,
    symmetry: AnySymmetry | None = None,
    bandwidths: MMDResult | None = None,
    chunk: int | None = None,
) -> MMDResult:
    """Squared maximum mean discrepancy, unbiased, per layer and over twenty kernels.

    >>> result = mmd({"0.weight": torch.randn(100, 5, 3)}, {"0.weight": torch.randn(80, 5, 3) + 1})
    >>> result.median > 0.05
    True

    Time grows with samples² times weights (the city-block distances of the Laplace kernels take most of it), memory
    beyond the inputs with samples² alone: ``8 (m + n)²`` bytes and the temporaries of one chunk. Distances are summed
    over chunks in float64. Weights are read in slices, so memory-mapped tensors (``Posterior.load``) need not fit into
    memory; a symmetry that is removed needs them there.

    :param weights_p: site -> samples ``(m,) + site_shape``, or ``batch_shape + site_shape`` with ``site_shapes`` given;
        batch dimensions are flattened. Or a ``Posterior``, chains end to end.
    :param weights_q: the same sites, ``n`` samples. Samples are taken as independent; autocorrelated ones leave the
        estimate unbiased only up to their autocorrelation.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param site_shapes: the sites' shapes without batch dimensions, for more than one batch dimension.
    :param symmetry: remove it first: both sides are brought to their canonical forms, by the default rules of
        :func:`~pyro_symmetric.canonical.forms.canonicalize`; or by a function of weights, such as
        ``lambda w: canonicalize(w, symmetry, scalings="minimal_mass")``, which ``pyro-symmetric compare`` uses: at unit
        norm nearly dead units have biases so large that they decide the distance. If a prior sees the scales (a
        Gaussian one does), they are no symmetry of the posterior: ``symmetry.finite`` removes permutations and signs
        only.
    :param bandwidths: an earlier result whose bandwidths are used again, so that several comparisons use the same
        kernels. Default: a grid chosen for these samples by :func:`bandwidth_grid`.
    :param chunk: how many weights are taken at a time; by default as many as stay in the cache.
    :raises ValueError: if the sites or shapes don't fit, a side has fewer than two samples, or a weight isn't finite.
    """
    arguments.whole("chunk", chunk, 1, none="as many as stay in the cache")
    if bandwidths is not None:
        arguments.instance("bandwidths", bandwidths, MMDResult, "an earlier result of mmd")
    samples = PairedSamples(weights_p, weights_q, layers, site_shapes, symmetry, minimum=2)
    grids = {} if bandwidths is None else bandwidths.kernels(samples.layers)
    per_layer = {layer: _layer_mmd(samples, layer, grids.get(layer), chunk) for layer in samples.layers}
    return MMDResult(*over_layers(per_layer), per_layer, samples.num_samples)


def over_layers(per_layer: Mapping[str, LayerMMD]) -> tuple[float, float, float]:
    """Median, mean and maximum over kernels, each averaged over layers by their number of weights."""
    total = sum(layer.num_weights for layer in per_layer.values())
    if total == 0:
        raise ValueError("the sites hold no weights; there is nothing to compare")

    def averaged(statistic: str) -> float:
        return sum(layer.num_weights / total * getattr(layer, statistic) for layer in per_layer.values())

    return averaged("median"), averaged("mean"), averaged("maximum")


def bandwidth_grid(cross_distances: Tensor, num_bandwidths: int = NUM_BANDWIDTHS) -> Tensor:
    r"""Bandwidths on a geometric grid that covers the distances between two samples.

    The grid runs from half the smallest to twice the largest distance between a point of one sample and a point of the
    other. If the smallest is under 0.1, the 5 % quantile (the order statistic of rank :math:`\lfloor 0.05 N
    \rfloor`, counted from 0) stands in its place. Two floors keep the grid sane for samples that coincide: the lower
    distance is never taken under 0.1 and the upper never under 0.3, *before* they are halved and doubled, so that no
    bandwidth is under 0.05. This is MMDAgg's rule (Schrab et al. 2023), which the paper uses, applied to all
    cross-sample distances.

    :param cross_distances: the distances, of any shape.
    :returns: ascending bandwidths ``(num_bandwidths,)`` in float64.
    """
    distances = cross_distances.reshape(-1).double()
    smallest = float(distances.min())
    if smallest < 0.1:
        rank = math.floor(0.05 * distances.numel())
        smallest = max(float(distances.kthvalue(rank + 1).values), 0.1)
    largest = max(float(distances.max()), 0.3)
    ends = torch.tensor([smallest / 2, largest * 2], dtype=torch.float64).log()
    steps = torch.linspace(0, 1, num_bandwidths, dtype=torch.float64)
    return (ends[0] + steps * (ends[1] - ends[0])).exp().to(distances.device)


# small steps --------------------------------------------------------------------------------------------------------


def _signed_root(value: float) -> float:
    return math.copysign(math.sqrt(abs(value)), value)


def _layer_mmd(samples: PairedSamples, layer: str, given: tuple[Tensor, Tensor] | None, chunk: int | None) -> LayerMMD:
    pairs = Pairs(*samples.num_samples)
    values, grids = [], []
    for i, norm in enumerate((2, 1)):  # one after the other, so that only one set of distances is held
        distances = pairs.distances(samples, layer, norm, chunk)
        bandwidths = bandwidth_grid(pairs.cross(distances)) if given is None else given[i].to(distances.device)
        values.append(pairs.discrepancies(distances, bandwidths, norm).cpu())
        grids.append(bandwidths.cpu())
        del distances
    return LayerMMD(samples.layers[layer], samples.num_weights(layer), *values, *grids)
