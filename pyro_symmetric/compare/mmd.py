r"""Maximum mean discrepancy between two sets of weight samples.

For a kernel :math:`k`, samples :math:`x_1 \dots x_m \sim p` and :math:`y_1 \dots y_n \sim q`, the unbiased estimate of
the squared discrepancy (Gretton et al. 2012, Lemma 6) is

.. math:: \widehat{\mathrm{MMD}}^2 = \frac{1}{m(m-1)} \sum_{i \ne j} k(x_i, x_j)
    + \frac{1}{n(n-1)} \sum_{i \ne j} k(y_i, y_j) - \frac{2}{mn} \sum_{i, j} k(x_i, y_j).

Under a fixed kernel it is zero on average if :math:`p = q`, so that a small value may well be negative. As in
Laurent et al. (2024, arXiv 2310.08287) it is taken layer by layer under ten Gaussian kernels :math:`\exp(-(\|x - y\|_2
/ \lambda)^2)` and ten Laplace kernels :math:`\exp(-\|x - y\|_1 / \lambda)`, with bandwidths as MMDAgg has them (Schrab
et al. 2023, arXiv 2110.15073): see :func:`bandwidth_grid`. That grid is chosen by the distances *between* the samples
only, so that under its smallest bandwidths, no larger than half of any such distance, the estimate is slightly positive
on average even if
:math:`p = q`. Kernels chosen beforehand (``bandwidths=``) leave it exactly unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._pairs import Pairs
from pyro_symmetric.compare.frames import AnySymmetry, FrameKind
from pyro_symmetric.compare.layers import Layers, PairedSamples, Samples
from pyro_symmetric.compare.results import DistanceResult

NUM_BANDWIDTHS = 10
FLOOR = 0.1  # of the median distance
KERNELS = ("gaussian",) * NUM_BANDWIDTHS + ("laplace",) * NUM_BANDWIDTHS

Kernels = tuple[Tensor, Tensor]  # bandwidths of the Gaussian and of the Laplace kernels


@torch.no_grad()
def mmd(
    weights_p: Samples,
    weights_q: Samples,
    *,
    layers: Layers | None = None,
    symmetry: AnySymmetry | None = None,
    frame: FrameKind = "aligned",
    bandwidths: DistanceResult | None = None,
) -> DistanceResult:
    """Squared maximum mean discrepancy, unbiased, per layer and over twenty kernels.

    >>> result = ps.mmd({"0.weight": torch.randn(100, 5, 3)}, {"0.weight": torch.randn(80, 5, 3) + 1})
    >>> result["median"] > 0.05
    True

    The result's totals are ``median``, ``mean`` and ``maximum`` over the kernels, averaged over layers by their number
    of weights. Its arrays: the same of each layer, ``num_weights``, and of each layer and kernel ``squared`` (the
    squared discrepancy) and ``bandwidth``.

    Time grows with samples² times weights (the city-block distances of the Laplace kernels take most of it), memory
    beyond the inputs with samples² alone: ``8 (m + n)²`` bytes and the temporaries of one chunk. Distances are summed
    over chunks in float64. Weights are read in slices, so memory-mapped tensors (``Posterior.load``) need not fit into
    memory; a symmetry that is removed needs them there.

    :param weights_p: site -> samples ``(m,) + site_shape``; or a ``Posterior``, chains end to end.
    :param weights_q: the same sites, ``n`` samples. Samples are taken as independent; autocorrelated ones leave the
        estimate unbiased only up to their autocorrelation.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param symmetry: remove it first: a symmetry or a group; or a function of weights, which is applied to both sides as
        it is. If a prior sees the scales (a Gaussian one does), they are no symmetry of the posterior:
        ``symmetry.finite`` removes permutations and signs only.
    :param frame: how a symmetry or a group is removed. Scales become those of the least norm of all parameters, and
        then ``"aligned"`` moves units and signs to where the draws of both sides together lie closest to their mean
        (see :func:`~pyro_symmetric.alignment.align_many`): it tells units apart by all that they have, and sees most.
        It doesn't look at whose draw is whose, so that the estimate is still zero on average if there is no difference.
        ``"canonical"`` sorts the units of each draw by their largest incoming weight: a frame that no other draw
        decides, so that one sample's distances to several others are taken in the same frame, and which takes less
        time; but where units' largest weights overlap it mixes them, and differences between them fade.
    :param bandwidths: an earlier result whose bandwidths are used again, so that several comparisons use the same
        kernels. Default: a grid chosen for these samples by :func:`bandwidth_grid`.
    :raises ValueError: if the sites or shapes don't fit, a side has fewer than two samples, or a weight isn't finite.
    """
    samples = PairedSamples(weights_p, weights_q, layers, symmetry, frame, minimum=2)
    given = kernels_of(bandwidths, samples.layers)
    squared, chosen = {}, {}
    pairs = Pairs(*samples.num_samples)
    for layer in samples.layers:
        values, grids = [], []
        for i, norm in enumerate((2, 1)):  # one after the other, so that only one set of distances is held
            distances = pairs.distances(samples, layer, norm)
            grid = given[layer][i].to(distances.device) if given else bandwidth_grid(pairs.cross(distances))
            values.append(pairs.discrepancies(distances, grid, norm))
            grids.append(grid)
            del distances
        squared[layer], chosen[layer] = torch.cat(values), torch.cat(grids)
    return over_kernels("Squared MMD (over 20 kernels)", samples, squared, chosen)


def kernels_of(earlier: DistanceResult | None, layers: Iterable[str]) -> dict[str, Kernels]:
    """Layer -> the kernels of an earlier result; empty without one.

    :raises ValueError: if ``layers`` are not those of the result.
    """
    if earlier is None:
        return {}
    arguments.instance("bandwidths", earlier, DistanceResult, "an earlier result of mmd")
    if "bandwidth" not in earlier.arrays:
        raise ValueError(f"bandwidths is a result of another distance ({earlier.title}); it must be one of mmd")
    if set(layers) != set(earlier.parts):
        raise ValueError(f"bandwidths has the layers {sorted(earlier.parts)}, but the weights have {sorted(layers)}")
    held = {name: torch.from_numpy(earlier.of(name)["bandwidth"]) for name in layers}
    return {name: (both[:NUM_BANDWIDTHS], both[NUM_BANDWIDTHS:]) for name, both in held.items()}


def over_kernels(
    title: str,
    samples: PairedSamples,
    squared: Mapping[str, Tensor],
    bandwidths: Mapping[str, Tensor],
    further: Mapping[str, Tensor] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> DistanceResult:
    """Median, mean and maximum over kernels, each averaged over layers by their number of weights.

    :param squared: layer -> squared discrepancies ``(20,)``, Gaussian kernels first.
    :param bandwidths: likewise.
    :param further: name -> other numbers of each layer and kernel, ``(layers, 20)``.
    """
    values = torch.stack(list(squared.values())).cpu()
    counts = torch.tensor([samples.num_weights(layer) for layer in squared], device="cpu")
    by_layer = {"median": values.quantile(0.5, dim=1), "mean": values.mean(1), "maximum": values.amax(1)}
    share = counts / counts.sum()
    arrays: dict[str, tuple[tuple[str, ...], Any]] = {"num_weights": (("layer",), counts.numpy())}
    arrays |= {name: (("layer",), value.numpy()) for name, value in by_layer.items()}
    by_kernel = {"squared": values, "bandwidth": torch.stack(list(bandwidths.values())).cpu(), **(further or {})}
    arrays |= {name: (("layer", "kernel"), value.numpy()) for name, value in by_kernel.items()}
    return DistanceResult(
        title=title,
        num_samples=samples.num_samples,
        labels={"layer": list(squared), "kernel": KERNELS},
        arrays=arrays,
        settings=settings or {},
        totals={name: float(value @ share.double()) for name, value in by_layer.items()},
    )


def bandwidth_grid(cross_distances: Tensor, num_bandwidths: int = NUM_BANDWIDTHS) -> Tensor:
    r"""Bandwidths on a geometric grid that covers the distances between two samples.

    The grid runs from half the smallest to twice the largest distance between a point of one sample and a point of the
    other. If the smallest is under a tenth of the median ``M`` of the distances above 0, the 5 % quantile (the order
    statistic of rank :math:`\lfloor 0.05 N \rfloor`, counted from 0) stands in its place, but never less than that
    tenth, so that no bandwidth is under ``M / 20``. This is MMDAgg's rule (Schrab et al. 2023), which the paper uses,
    applied to all cross-sample distances, but for one thing: MMDAgg's floor is 0.1 in the data's unit, here it is a
    tenth of ``M``. So the discrepancy doesn't depend on the unit, and samples whose distances are all far under 0.1
    aren't taken for equal. If all distances are 0, ``M`` is 1.

    :param cross_distances: the distances, of any shape.
    :returns: ascending bandwidths ``(num_bandwidths,)`` in float64.
    """
    distances = cross_distances.reshape(-1).double()
    smallest, largest = torch.stack(distances.aminmax()).tolist()
    if smallest < FLOOR * largest and smallest < FLOOR * (median := _positive_median(distances)):
        rank = math.floor(0.05 * distances.numel())
        smallest = max(float(distances.kthvalue(rank + 1).values), FLOOR * median)
    if largest == 0:
        smallest, largest = FLOOR, 1.0
    first, last = math.log(smallest / 2), math.log(largest * 2)
    steps = torch.linspace(0, 1, num_bandwidths, dtype=torch.float64, device=distances.device)
    return (first + steps * (last - first)).exp()


def _positive_median(distances: Tensor) -> float:
    """The (lower) median of the distances above 0, of which there is one at least."""
    zeros = int((distances == 0).sum())
    return float(distances.kthvalue(zeros + (distances.numel() - zeros + 1) // 2).values)
