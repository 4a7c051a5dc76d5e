r"""A two-sample test of whether two sets of weights come from one distribution.

The test is aggregated over kernels as MMDAgg is (Schrab et al. 2023, arXiv 2110.15073), so that no bandwidth has to be
chosen: the statistics are the unbiased :math:`\widehat{\mathrm{MMD}}^2_k` of :func:`~pyro_symmetric.compare.mmd` for
ten Gaussian and ten Laplace kernels of every layer, and the null distribution is that of the pooled samples in random
order. With :math:`B` permutations, and the observed order as the 0-th,

.. math:: \hat p_{b,k} = \frac{\#\{b' : T_{b',k} \ge T_{b,k}\}}{B + 1}, \qquad
    p = \frac{\#\{b : \min_k \hat p_{b,k} \le \min_k \hat p_{0,k}\}}{B + 1}.

The observed order and the random ones are exchangeable under the null hypothesis and every step treats them alike, so
that :math:`P(p \le \alpha) \le \alpha` exactly, for any number of samples, permutations and kernels (Westfall & Young
1993; MMDAgg with equal weights, its two sets of permutations made one). For that the bandwidths may not look at who
belongs to whom either: they come from the distances between *all* pairs of the pooled sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._pairs import Pairs, kernel_values, unbiased
from pyro_symmetric.compare._results import table
from pyro_symmetric.compare.frames import canonical_frame, one_frame
from pyro_symmetric.compare.independence import is_chain, thinned
from pyro_symmetric.compare.layers import AnySymmetry, Layers, PairedSamples, Samples, is_group, removal
from pyro_symmetric.compare.mmd import bandwidth_grid
from pyro_symmetric.generators import turn
from pyro_symmetric.samples import Posterior
from pyro_symmetric.weights import Shapes

_LEAST_PERMUTATIONS = 19


@dataclass(frozen=True, eq=False)
class MMDTest:
    """What the test found; see :func:`mmd_test`.

    :param p_value: of the null hypothesis that both sets of weights come from one distribution.
    :param layer_p_values: layer -> its p-value, adjusted for the number of layers and kernels.
    :param statistics: layer -> the twenty squared discrepancies, Gaussian kernels first, ``(20,)``.
    :param bandwidths: layer -> the kernels' bandwidths, ``(20,)``.
    :param kernel_p_values: layer -> each kernel's own p-value, unadjusted, ``(20,)``.
    :param level: the probability of rejecting a true null hypothesis is at most this.
    :param num_permutations: how many random orders were looked at.
    :param num_samples: the number of samples on each side.
    """

    p_value: float
    layer_p_values: dict[str, float]
    statistics: dict[str, Tensor]
    bandwidths: dict[str, Tensor]
    kernel_p_values: dict[str, Tensor]
    level: float
    num_permutations: int
    num_samples: tuple[int, int]

    @property
    def rejected(self) -> bool:
        """Whether the null hypothesis is rejected at the level."""
        return self.p_value <= self.level

    @property
    def verdict(self) -> str:
        """What was found, in one line."""
        m, n = self.num_samples
        against = f"{m:,} samples against {n:,}, p-value {self.p_value:.2g}"
        if not self.rejected:
            return f"no difference seen at level {self.level:g} ({against})"
        worst = min(self.layer_p_values, key=lambda name: self.layer_p_values[name])
        failed = sum(p <= self.level for p in self.layer_p_values.values())
        return (
            f"different at level {self.level:g} ({against}): "
            f"{failed} of {len(self.layer_p_values)} layers differ, first of all {worst!r}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "verdict": self.verdict,
            "p_value": self.p_value,
            "rejected": self.rejected,
            "level": self.level,
            "num_permutations": self.num_permutations,
            "num_samples": list(self.num_samples),
            "layer_p_values": dict(self.layer_p_values),
            "statistics": {layer: value.tolist() for layer, value in self.statistics.items()},
            "bandwidths": {layer: value.tolist() for layer, value in self.bandwidths.items()},
            "kernel_p_values": {layer: value.tolist() for layer, value in self.kernel_p_values.items()},
        }

    def __repr__(self) -> str:
        rows = [("layer", "p-value", "largest MMD²")]
        rows += [(name, f"{p:.2g}", f"{float(self.statistics[name].max()):.3g}") for name, p in self._layers()]
        return f"Two-sample test: {self.verdict}\n{table(rows)}"

    def _layers(self) -> list[tuple[str, float]]:
        return list(self.layer_p_values.items())


@torch.no_grad()
@turn()
def mmd_test(
    weights_p: Samples,
    weights_q: Samples,
    *,
    level: float = 0.05,
    num_permutations: int = 500,
    layers: Layers | None = None,
    site_shapes: Shapes | None = None,
    symmetry: AnySymmetry | None = None,
    chunk: int | None = None,
) -> MMDTest:
    """Test whether two sets of weights come from one distribution, by permutations, over twenty kernels a layer.

    >>> mmd_test({"w": torch.randn(100, 3)}, {"w": torch.randn(80, 3) + 1}).rejected
    True

    Samples must be independent: autocorrelated draws of a chain are not exchangeable, and make the p-value too small.
    Of a ``Posterior`` whose rows are chains only as many, evenly spaced, are taken as count as independent (see
    :func:`~pyro_symmetric.compare.independent_draws`) once the symmetry is removed. A plain dictionary says nothing of
    chains: its draws are taken for independent, so wrap chains as ``Posterior(weights, rows="chains")``.

    Time beyond the distances: 20 kernels × layers × (m + n)² × permutations multiplications.

    :param weights_p: site -> samples ``(m,) + site_shape``, or ``batch_shape + site_shape`` with ``site_shapes`` given;
        or a ``Posterior``, chains end to end.
    :param weights_q: the same sites, ``n`` samples.
    :param level: probability of rejecting if there is no difference.
    :param num_permutations: ``B``; the smallest possible p-value is ``1 / (B + 1)``.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param site_shapes: the sites' shapes without batch dimensions, for more than one batch dimension.
    :param symmetry: remove it first: the test is then one of equality modulo symmetry. Canonical forms, as of
        :func:`~pyro_symmetric.compare.mmd`, are moved by permutations and signs to where they lie closest to the mean
        of both samples together (see :func:`~pyro_symmetric.alignment.align_many`). This doesn't look at which sample
        a draw belongs to, so the test keeps its level, and it sees differences that canonical forms blur if units'
        keys overlap. A function of weights is applied as it is.
    :param chunk: how many weights are taken at a time; by default as many as stay in the cache.
    :raises ValueError: if the sites or shapes don't fit, a side has fewer than two samples, a weight isn't finite, or
        so few permutations can't reject at the level.
    """
    arguments.fraction("level", level)
    arguments.whole("num_permutations", num_permutations, 1)
    arguments.whole("chunk", chunk, 1, none="as many as stay in the cache")
    if num_permutations < _LEAST_PERMUTATIONS or level * (num_permutations + 1) < 1:
        raise ValueError(
            f"num_permutations is {num_permutations}; at level {level} at least "
            f"{max(_LEAST_PERMUTATIONS, round(1 / level))} are needed"
        )
    weights_p, weights_q = (
        thinned(side, _seen(side, symmetry)) if is_chain(side) else side for side in (weights_p, weights_q)
    )
    samples = PairedSamples(weights_p, weights_q, layers, site_shapes, symmetry, minimum=2)
    if is_group(symmetry):
        samples.align(symmetry)
    pairs = Pairs(*samples.num_samples)
    # orders of the pooled sample, the observed one first, the same for every layer
    orders = torch.rand(num_permutations + 1, pairs.total, dtype=torch.float64).argsort(1)
    orders[0] = torch.arange(pairs.total)
    first = (orders < pairs.m).T.double()
    values, bandwidths = {}, {}
    for layer in samples.layers:
        parts, grids = [], []
        for norm in (2, 1):
            distances = pairs.distances(samples, layer, norm, chunk)
            grids.append(bandwidth_grid(distances))
            parts += [_statistics(pairs, distances, bandwidth, norm, first) for bandwidth in grids[-1]]
        values[layer] = torch.stack(parts, 1).cpu()
        bandwidths[layer] = torch.cat(grids).cpu()
    own = {layer: _upper_ranks(value) for layer, value in values.items()}
    scores = {layer: _score(own[layer], values[layer]) for layer in values}
    overall = _smallest(scores)
    return MMDTest(
        p_value=_share(overall, overall[0]),
        layer_p_values={layer: _share(overall, score[0]) for layer, score in scores.items()},
        statistics={layer: value[0] for layer, value in values.items()},
        bandwidths=bandwidths,
        kernel_p_values={layer: value[0] for layer, value in own.items()},
        level=level,
        num_permutations=num_permutations,
        num_samples=samples.num_samples,
    )


# small steps --------------------------------------------------------------------------------------------------------


def _seen(posterior: Posterior, symmetry: AnySymmetry | None) -> Posterior:
    """The draws of chains as the test looks at them."""
    if symmetry is None:
        return posterior
    if is_group(symmetry):
        return one_frame(canonical_frame(posterior, symmetry), symmetry)
    weights = removal(symmetry)(posterior.get_samples())
    return Posterior.from_samples(weights, rows=posterior.rows, num_chains=posterior.num_chains)


def _statistics(pairs: Pairs, distances: Tensor, bandwidth: Tensor, norm: int, first: Tensor) -> Tensor:
    """The unbiased squared discrepancy ``(B + 1,)`` for each choice ``(m + n, B + 1)`` of p's samples."""
    kernel = pairs.square(kernel_values(distances, bandwidth, norm))
    first = first.to(kernel.device)
    from_first = kernel @ first
    within_p = (first * from_first).sum(0)
    across = from_first.sum(0) - within_p
    within_q = kernel.sum() - within_p - 2 * across
    return unbiased(within_p, within_q, across, pairs.m, pairs.n)


def _upper_ranks(values: Tensor) -> Tensor:
    """The share of orders whose statistic is at least this one's, ``(B + 1, kernels)``."""
    ordered = values.T.contiguous().sort(-1).values
    below = torch.searchsorted(ordered, values.T.contiguous(), right=False).T
    return 1 - below.double() / len(values)


def _score(ranks: Tensor, values: Tensor) -> Tensor:
    """One number for each order, small if some kernel sees a difference: the smallest rank. If these tie, which
    they often do among so few orders, the largest standardised statistic decides; it adds less than a rank's step."""
    standardised = ((values - values.mean(0)) / values.std(0).clamp(min=1e-300)).amax(1)
    tie_breaker = torch.sigmoid(-standardised) / (len(values) + 1)
    return ranks.amin(1) + tie_breaker


def _smallest(scores: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(scores.values())).amin(0)


def _share(scores: Tensor, observed: Tensor) -> float:
    return float((scores <= observed).double().mean())
