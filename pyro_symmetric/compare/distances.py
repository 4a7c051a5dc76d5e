r"""Distances between two sets of weight samples, and a two-sample test.

For a kernel :math:`k`, samples :math:`x_1 \dots x_m \sim p` and :math:`y_1 \dots y_n
\sim q`, the unbiased estimate of the squared maximum mean discrepancy (Gretton et al.
2012, Lemma 6) is

.. math:: \widehat{\mathrm{MMD}}^2 = \frac{1}{m(m-1)} \sum_{i \ne j} k(x_i, x_j)
    + \frac{1}{n(n-1)} \sum_{i \ne j} k(y_i, y_j)
    - \frac{2}{mn} \sum_{i, j} k(x_i, y_j).

For a fixed kernel its mean is zero if :math:`p = q`, so a small value may be negative.
As in Laurent et al. (2024, arXiv 2310.08287), it is estimated per layer with ten
Gaussian kernels :math:`\exp(-(\|x - y\|_2 / \lambda)^2)` and ten Laplace kernels
:math:`\exp(-\|x - y\|_1 / \lambda)`, whose bandwidths follow MMDAgg (Schrab et al.
2023, arXiv 2110.15073); see :func:`bandwidth_grid`. :func:`mmd` chooses them by the
distances *between* the two samples. Its smallest bandwidths are at most half of every
such distance, and the estimate under them is slightly positive on average even if
:math:`p = q`. With kernels chosen beforehand (``bandwidths=``) it is exactly unbiased.

:func:`mmd_test` permutes the pooled samples. The statistic :math:`T_k` of each layer
and kernel is standardised over the :math:`B` random permutations and the observed
order, :math:`b = 0`, and their maximum is tested:

.. math:: S_b = \max_k \frac{T_{b,k} - \bar T_k}{s_k}, \qquad
    p = \frac{\#\{b : S_b \ge S_0\}}{B + 1}.

Under the null hypothesis observed and random orders are exchangeable, and every step
treats them alike: the bandwidths, too, are those of *all* pairs. So :math:`P(p \le
\alpha) \le \alpha` exactly, for any number of samples, permutations and kernels
(Westfall & Young 1993).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from scipy.spatial.distance import squareform
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare.draws import PairedSamples, thinned
from pyro_symmetric.compare.results import DistanceResult, Parts, SignificanceTest
from pyro_symmetric.posterior.posterior import Draws
from pyro_symmetric.weights import Weights, map_values, pick, select_rows, unflatten

NUM_BANDWIDTHS = 10
FLOOR = 0.1  # of the median distance: the least that a grid covers
NORMS = (2, 1)  # of Gaussian and of Laplace kernels
LEAST_PERMUTATIONS = 19
# weights of all samples at a time, to fit into a processor's cache
_CACHE_ENTRIES = 2**19
_SORTED_ENTRIES = 2**23  # values sorted at a time
_LEAST_CHUNK = 64  # weights of one sample
BYTES = 24  # of memory for each pair of samples
MANY = 6_000  # samples of both sides, of which mmd warns


@torch.no_grad()
def mmd(
    weights_p: Draws,
    weights_q: Draws,
    *,
    bandwidths: DistanceResult | SignificanceTest | None = None,
) -> DistanceResult:
    """Estimate the squared maximum mean discrepancy, per layer and over twenty kernels,
    without bias.

    >>> result = ps.mmd(
    ...     {"0.weight": torch.randn(100, 5, 3)},
    ...     {"0.weight": torch.randn(80, 5, 3) + 1},
    ... )
    >>> result["median"] > 0.05
    True

    The totals are ``median``, ``mean`` and ``maximum`` over the kernels, averaged over
    layers by their number of weights. The parts are the same for each layer, with
    ``num_weights`` and, for each kernel, ``squared`` (the squared discrepancy) and
    ``bandwidth``: first the ten Gaussian kernels, ``exp(-(|x - y|_2 / bandwidth)**2)``,
    then the ten Laplace kernels, ``exp(-|x - y|_1 / bandwidth)``. Modulo a symmetry:
    ``mmd(*common_frame(p, q, symmetry))``.

    Time grows with samples² times weights, memory beyond the inputs with samples²
    alone, about ``24 (m + n)²`` bytes, so :meth:`~pyro_symmetric.Posterior.thin` long
    chains. Weights are read in slices, so memory-mapped
    tensors (``Posterior.load``) need not fit into memory.

    :param weights_p: a ``Posterior``, or site -> samples ``(m,) + site_shape``.
    :param weights_q: the same sites, ``n`` samples. Samples should be independent:
        autocorrelation biases the estimate.
    :param bandwidths: an earlier result, of :func:`mmd_test` too, with the same layers,
        whose bandwidths are reused, so that several comparisons share their kernels.
        Default: a grid chosen for these samples by
        :func:`bandwidth_grid`.
    :raises ValueError: if sites or shapes don't fit, a side has fewer than two samples,
        or a weight isn't finite.
    """
    samples = PairedSamples(weights_p, weights_q, minimum=2)
    m, n = samples.num_samples
    if m + n > MANY:
        warnings.warn(
            f"comparing {m:,} with {n:,} samples takes minutes, and "
            f"{BYTES * (m + n) ** 2 / 1e9:.1f} GB of memory; posterior.thin(10) has "
            "every tenth draw of each chain",
            stacklevel=3,
        )
    is_p = (torch.arange(m + n, device="cpu") < m).double()[:, None]

    def grid(distances: Tensor, layer: str, norm: int) -> Tensor:
        if bandwidths is None:
            return bandwidth_grid(distances[:m, m:])
        reused = torch.as_tensor(bandwidths.parts[layer]["bandwidth"], device="cpu")
        return reused.split(NUM_BANDWIDTHS)[NORMS.index(norm)]

    values, widths = _over_kernels(samples, is_p, grid)
    squared = values[..., 0]
    counts = [samples.num_weights(layer) for layer in samples.layers]
    by_layer = {
        "median": squared.quantile(0.5, dim=1),
        "mean": squared.mean(1),
        "maximum": squared.amax(1),
    }
    parts: Parts = {}
    for k, layer in enumerate(samples.layers):
        parts[layer] = {
            "num_weights": counts[k],
            **map_values(float, select_rows(by_layer, k)),
            "squared": squared[k].numpy(),
            "bandwidth": widths[k].numpy(),
        }
    totals = map_values(
        lambda value: float(np.average(value.numpy(), weights=counts)), by_layer
    )
    return DistanceResult(
        "Squared MMD (over 20 kernels)", samples.num_samples, totals, parts
    )


@torch.no_grad()
def mmd_test(
    weights_p: Draws,
    weights_q: Draws,
    *,
    level: float = 0.05,
    num_permutations: int = 500,
) -> SignificanceTest:
    """Test whether two sets of weights have the same distribution, by permutations,
    over twenty kernels per layer.

    >>> p, q = {"w": torch.randn(100, 3)}, {"w": torch.randn(80, 3) + 1}
    >>> ps.mmd_test(p, q, num_permutations=100).rejected
    True

    Samples must be independent: autocorrelated draws aren't exchangeable and make the
    p-value too small, so the chains of a ``Posterior`` are thinned to as many draws as
    :func:`~pyro_symmetric.compare.independent_draws` counts. A test of equality modulo
    a symmetry is ``mmd_test(*common_frame(p, q, symmetry))``: the frame doesn't depend
    on which sample a draw belongs to.

    The parts are, for each layer, its ``p_value``, adjusted for the number of layers
    and kernels, and ``largest_mmd``; and for each kernel ``squared`` (the squared
    discrepancy) and ``bandwidth``. Beyond the distances, the test takes 20 kernels ×
    layers × (m + n)² × permutations multiplications.

    :param weights_p: a ``Posterior``, or site -> ``m`` independent samples.
    :param weights_q: the same sites, ``n`` samples.
    :param level: probability of rejecting if there is no difference.
    :param num_permutations: ``B``; the smallest possible p-value is ``1 / (B + 1)``.
    :raises ValueError: if sites or shapes don't fit, a side has fewer than two samples,
        a weight isn't finite, or the permutations are too few to reject at the level.
    """
    arguments.fraction("level", level)
    arguments.whole(
        "num_permutations",
        num_permutations,
        max(LEAST_PERMUTATIONS, math.ceil(1 / level) - 1),
    )
    samples = PairedSamples(
        thinned(weights_p, "weights_p"), thinned(weights_q, "weights_q"), minimum=2
    )
    m, n = samples.num_samples
    # Permutations of the pooled samples, the observed order first; the same for every
    # layer.
    orders = torch.rand(
        num_permutations + 1, m + n, dtype=torch.float64, device="cpu"
    ).argsort(1)
    orders[0] = torch.arange(m + n, device="cpu")
    is_p = (orders < m).T.double()
    pairs = tuple(torch.triu_indices(m + n, m + n, 1, device="cpu"))
    values, widths = _over_kernels(
        samples, is_p, lambda d, *_: bandwidth_grid(d[pairs])
    )
    deviation = values.std(2, keepdim=True).clamp(min=1e-300)
    centred = values - values.mean(2, keepdim=True)
    by_layer = (centred / deviation).amax(1)  # (layers, permutations)
    statistic = by_layer.amax(0)
    p_value = float((statistic >= statistic[0]).double().mean())
    parts: Parts = {}
    for k, layer in enumerate(samples.layers):
        squared = values[k, :, 0]
        reached = statistic >= by_layer[k, 0]
        parts[layer] = {
            "p_value": float(reached.double().mean()),
            "largest_mmd": float(squared.amax()),
            "squared": squared.numpy(),
            "bandwidth": widths[k].numpy(),
        }
    against = f"{m:,} samples against {n:,}, p-value {p_value:.2g}"
    verdict = f"no difference detected at level {level:g} ({against})"
    if p_value <= level:
        p_values = map_values(lambda part: part["p_value"], parts)
        rejected = sum(p <= level for p in p_values.values())
        worst = min(p_values, key=p_values.__getitem__)
        verdict = (
            f"different at level {level:g} ({against}): {rejected} of {len(parts)} "
            f"layers, most clearly {worst!r}"
        )
    return SignificanceTest(
        "Two-sample test", samples.num_samples, p_value, level, verdict, parts
    )


@torch.no_grad()
def marginal_wasserstein(
    weights_p: Draws, weights_q: Draws, p: float = 1
) -> DistanceResult:
    r"""Compute the one-dimensional Wasserstein distance between the marginals of every
    weight, in the weights' unit.

    On the line the optimal coupling is monotone, so with the quantile functions
    :math:`F^{-1}`, :math:`G^{-1}`

    .. math:: W_p(F, G)^p = \int_0^1 |F^{-1}(u) - G^{-1}(u)|^p \, du,

    for samples a finite sum over sorted values (Peyré & Cuturi 2019, section 2.6). It
    ignores dependence between weights. If the marginals are equal, the plug-in estimate
    isn't 0 but positive, of order ``samples ** -0.5``. The totals are ``mean``,
    ``median`` and ``maximum`` over all weights; the parts are the same for each layer,
    with ``num_weights``; ``each`` is the distance of each weight, float64, on the CPU.

    >>> p = {"w": torch.randn(100, 3)}
    >>> round(ps.marginal_wasserstein(p, {"w": p["w"] + 2.0}).value, 3)
    2.0

    :param weights_p: a ``Posterior``, or site -> samples ``(m,) + site_shape``.
    :param weights_q: the same sites; the number of samples may differ.
    :param p: order of the distance, at least 1; ``math.inf`` gives the largest
        difference of quantiles.
    :raises ValueError: if sites or shapes don't fit, ``p`` is below 1, or a weight
        isn't finite.
    """
    arguments.number("p", p, least=1)
    samples = PairedSamples(weights_p, weights_q)
    step = max(1, _SORTED_ENTRIES // sum(samples.num_samples))
    by_layer = []
    by_site = Weights()
    parts: Parts = {}
    for layer, sites in samples.layers.items():
        samples.require_finite(layer)
        slices = samples.columns(layer, step)
        distances = torch.cat([_marginal_distance(x, y, p) for x, y in slices]).cpu()
        by_layer.append(distances)
        by_site |= unflatten(distances, pick(samples.shapes, sites))
        parts[layer] = {"num_weights": len(distances), **_summary(distances)}
    return DistanceResult(
        title=f"Wasserstein-{p:g} distance of marginals",
        num_samples=samples.num_samples,
        totals=_summary(torch.cat(by_layer)),
        parts=parts,
        each=by_site,
    )


def bandwidth_grid(distances: Tensor) -> Tensor:
    r"""Choose bandwidths ``(10,)``, ascending, on a geometric grid that covers the
    distances (of any shape).

    The grid runs from half the smallest distance to twice the largest. If the smallest
    is below a tenth of the median ``M`` of the positive distances, it is replaced by
    the 5 % quantile (the order statistic of rank
    :math:`\lfloor 0.05 N \rfloor`, counted from 0) or by ``M / 10``, whichever is
    larger, so that no bandwidth is below ``M / 20``. This is MMDAgg's rule (Schrab et
    al. 2023), which the paper uses, except for MMDAgg's floor of 0.1 in the data's
    unit: a tenth of ``M`` doesn't depend on the unit, and tells samples apart whose
    distances are all far below 0.1. If all distances are 0, ``M`` is 1.
    """
    distances = distances.reshape(-1).double()
    smallest, largest = torch.stack(distances.aminmax()).tolist()
    if smallest < FLOOR * largest:
        positive = distances[distances > 0]
        floor = FLOOR * float(positive.median())  # of two, the lower one
        if smallest < floor:
            rank = math.floor(0.05 * distances.numel())
            quantile = distances.kthvalue(rank + 1).values
            smallest = max(float(quantile), floor)
    if largest == 0:
        smallest = FLOOR
        largest = 1.0
    first = math.log(smallest / 2)
    last = math.log(largest * 2)
    steps = torch.linspace(
        0, 1, NUM_BANDWIDTHS, dtype=torch.float64, device=distances.device
    )
    return (first + steps * (last - first)).exp()


# small steps --------------------------------------------------------------------------


def _over_kernels(
    samples: PairedSamples, is_p: Tensor, grid_of: Callable[[Tensor, str, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Estimate the squared discrepancy for each layer, kernel and split of the pooled
    samples.

    :param is_p: the splits, ``(m + n, B)``: 1 for a sample of p, 0 for one of q.
    :param grid_of: (distances of all pairs, layer, norm) -> bandwidths.
    :returns: the discrepancies ``(layers, 20, B)`` and the bandwidths ``(layers, 20)``.
    """
    values = []
    widths = []
    for layer in samples.layers:
        for norm in NORMS:  # one at a time: only one matrix of distances is held
            distances = _distances(samples, layer, norm)
            grid = grid_of(distances, layer, norm)
            for width in grid.tolist():
                values.append(_discrepancies(distances, width, norm, is_p).cpu())
            widths.append(grid.cpu())
    shape = (len(samples.layers), 2 * NUM_BANDWIDTHS)
    return torch.stack(values).reshape(*shape, -1), torch.cat(widths).reshape(shape)


def _distances(samples: PairedSamples, layer: str, norm: int) -> Tensor:
    """Compute the L1 or L2 distances of all pairs of the pooled samples, ``(m + n, m +
    n)`` in float64.
    """
    total = sum(samples.num_samples)
    result = torch.zeros((), device="cpu")
    for pair in samples.columns(layer, max(_LEAST_CHUNK, _CACHE_ENTRIES // total)):
        pooled = torch.cat(pair)
        if norm == 1:
            part = torch.pdist(pooled, p=1.0).double()
        else:  # |x - y|² = |x|² + |y|² - 2 xy; centred, so that little cancels
            centred = pooled.double() - pooled.double().mean(0)
            part = centred @ centred.T
        result = result + part
    if norm == 1:
        square = squareform(result.cpu().numpy(), checks=False)
        result = torch.from_numpy(square).to(result.device)
    else:
        squares = result.diagonal()
        result = squares[:, None] + squares - 2 * result
        result.clamp_(min=0).sqrt_().fill_diagonal_(0)
    if not result.isfinite().all():
        samples.require_finite(layer)
        raise ValueError(
            f"the distances between samples of layer {layer!r} overflow; its weights "
            "are too large"
        )
    return result


def _discrepancies(
    distances: Tensor, bandwidth: float, norm: int, is_p: Tensor
) -> Tensor:
    """Estimate the squared discrepancy ``(B,)`` for each split ``(m + n, B)`` of the
    pooled samples, without bias.
    """
    kernel = distances / bandwidth
    kernel.pow_(norm).neg_().exp_().fill_diagonal_(0)
    is_p = is_p.to(kernel.device)
    m = int(is_p[:, 0].sum())
    n = len(is_p) - m
    from_p = kernel @ is_p
    within_p = (is_p * from_p).sum(0)
    across = from_p.sum(0) - within_p
    within_q = kernel.sum() - within_p - 2 * across
    return within_p / (m * (m - 1)) + within_q / (n * (n - 1)) - 2 * across / (m * n)


def _marginal_distance(x: Tensor, y: Tensor, p: float) -> Tensor:
    r"""Compute :math:`W_p` ``(D,)`` between the columns of samples ``(m, D)`` and ``(n,
    D)``.
    """
    x = x.sort(0).values.double()
    y = y.sort(0).values.double()
    m = len(x)
    n = len(y)
    # Both quantile functions are constant between the merged steps i/m and j/n. In
    # integers, as multiples of 1/mn, rounding can't separate steps that coincide.
    steps_x = torch.arange(1, m + 1, device=x.device)
    steps_y = torch.arange(1, n + 1, device=x.device)
    ends = torch.cat([steps_x * n, steps_y * m]).unique()
    widths = torch.diff(ends, prepend=ends.new_zeros(1)).double() / (m * n)
    gaps = (x[(ends - 1) // n] - y[(ends - 1) // m]).abs()
    largest = gaps.amax(0)
    # so that powers neither overflow nor all vanish
    relative = torch.where(largest > 0, gaps / largest, gaps)
    return largest * (widths @ relative**p) ** (1 / p)


def _summary(values: Tensor) -> dict[str, float]:
    # torch.quantile refuses more than 2^24 values
    median = float(np.median(values.numpy()))
    return {
        "mean": float(values.mean()),
        "median": median,
        "maximum": float(values.max()),
    }
