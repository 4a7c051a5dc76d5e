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

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._pairs import Pairs, kernel_values, unbiased
from pyro_symmetric.compare.frames import AnySymmetry, FrameKind, canonical_frame, is_group, one_frame, removal
from pyro_symmetric.compare.independence import require_posterior, thinned
from pyro_symmetric.compare.layers import Layers, PairedSamples, require_site_shapes
from pyro_symmetric.compare.mmd import KERNELS, bandwidth_grid
from pyro_symmetric.compare.results import SignificanceTest
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import Weights

_LEAST_PERMUTATIONS = 19


@torch.no_grad()
def mmd_test(
    posterior_p: Posterior,
    posterior_q: Posterior,
    *,
    level: float = 0.05,
    num_permutations: int = 500,
    layers: Layers | None = None,
    symmetry: AnySymmetry | None = None,
    frame: FrameKind = "aligned",
) -> SignificanceTest:
    """Test whether two sets of weights come from one distribution, by permutations, over twenty kernels a layer.

    >>> p = ps.Posterior.from_samples({"w": torch.randn(100, 3)}, rows="independent")
    >>> q = ps.Posterior.from_samples({"w": torch.randn(80, 3) + 1}, rows="independent")
    >>> ps.mmd_test(p, q, num_permutations=100).rejected
    True

    Samples must be independent: autocorrelated draws of a chain are not exchangeable, and make the p-value too small.
    Of a ``Posterior`` whose rows are chains only as many, evenly spaced, are taken as count as independent (see
    :func:`~pyro_symmetric.compare.independent_draws`) once the symmetry is removed.

    The result's arrays: of each layer its ``p_value``, adjusted for the number of layers and kernels; of each layer and
    kernel ``squared`` (the squared discrepancy), ``bandwidth``, and ``kernel_p_value``, unadjusted.

    Time beyond the distances: 20 kernels × layers × (m + n)² × permutations multiplications.

    :param posterior_p: ``m`` draws; of plain weights make one, ``Posterior.from_samples(weights, rows=...)``.
    :param posterior_q: ``n`` draws of the same sites.
    :param level: probability of rejecting if there is no difference.
    :param num_permutations: ``B``; the smallest possible p-value is ``1 / (B + 1)``.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param symmetry: remove it first, as :func:`~pyro_symmetric.compare.mmd` does: the test is then one of equality
        modulo symmetry.
    :param frame: in the ``"aligned"`` frame of both sides together, or in ``"canonical"`` forms; see there. Neither
        looks at which sample a draw belongs to, so the test keeps its level in both; alignment sees differences that
        canonical forms blur if units' keys overlap.
    :raises ValueError: if the sites or shapes don't fit, a side has fewer than two samples, a weight isn't finite, or
        so few permutations can't reject at the level.
    """
    arguments.fraction("level", level)
    arguments.whole("num_permutations", num_permutations, 1)
    if num_permutations < _LEAST_PERMUTATIONS or level * (num_permutations + 1) < 1:
        raise ValueError(
            f"num_permutations is {num_permutations}; at level {level} at least "
            f"{max(_LEAST_PERMUTATIONS, round(1 / level))} are needed"
        )
    sides = {"posterior_p": posterior_p, "posterior_q": posterior_q}
    p, q = (_independent(name, side, symmetry, frame) for name, side in sides.items())
    samples = PairedSamples(p, q, layers, symmetry, frame, minimum=2)
    pairs = Pairs(*samples.num_samples)
    # orders of the pooled sample, the observed one first, the same for every layer
    orders = torch.rand(num_permutations + 1, pairs.total, dtype=torch.float64, device="cpu").argsort(1)
    orders[0] = torch.arange(pairs.total, device="cpu")
    first = (orders < pairs.m).T.double()
    values, bandwidths = {}, []
    for layer in samples.layers:
        parts, grids = [], []
        for norm in (2, 1):
            distances = pairs.distances(samples, layer, norm)
            grids.append(bandwidth_grid(distances))
            parts += [_statistics(pairs, kernel_values(distances, width, norm), first) for width in grids[-1]]
        values[layer] = torch.stack(parts, 1).cpu()
        bandwidths.append(torch.cat(grids).cpu())
    ranks = {layer: _upper_ranks(value) for layer, value in values.items()}
    scores = {layer: _score(ranks[layer], values[layer]) for layer in values}
    overall = torch.stack(list(scores.values())).amin(0)
    p_values = {layer: _share(overall, score[0]) for layer, score in scores.items()}
    by_kernel = {
        "squared": [value[0] for value in values.values()],
        "bandwidth": bandwidths,
        "kernel_p_value": [rank[0] for rank in ranks.values()],
    }
    return SignificanceTest(
        title="Two-sample test",
        num_samples=samples.num_samples,
        labels={"layer": list(values), "kernel": KERNELS},
        arrays={
            "p_value": (("layer",), list(p_values.values())),
            "largest_mmd": (("layer",), [float(value[0].max()) for value in values.values()]),
            **{name: (("layer", "kernel"), torch.stack(rows).numpy()) for name, rows in by_kernel.items()},
        },
        settings={"num_permutations": num_permutations},
        verdict=_verdict(_share(overall, overall[0]), p_values, level, samples.num_samples),
        p_value=_share(overall, overall[0]),
        level=level,
    )


# small steps --------------------------------------------------------------------------------------------------------


def _independent(name: str, posterior: Posterior, symmetry: AnySymmetry | None, frame: FrameKind) -> Weights:
    """Draws that may be taken as independent once the symmetry is removed."""
    require_posterior(name, posterior)
    require_of_posterior(symmetry, posterior)
    if symmetry is None or posterior.rows == "independent":
        return thinned(posterior)
    if is_group(symmetry):
        require_site_shapes(posterior.get_samples(), symmetry, name)
        canonical = canonical_frame(posterior, symmetry)
        return thinned(posterior, one_frame(canonical, symmetry) if frame == "aligned" else canonical)
    weights = removal(symmetry)(posterior.get_samples())
    return thinned(posterior, Posterior.from_samples(weights, rows="chains", num_chains=posterior.num_chains))


def _statistics(pairs: Pairs, values: Tensor, first: Tensor) -> Tensor:
    """The unbiased squared discrepancy ``(B + 1,)`` for each choice ``(m + n, B + 1)`` of p's samples.

    :param values: of the kernel, for all pairs.
    """
    kernel = pairs.square(values)
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


def _verdict(p_value: float, by_layer: Mapping[str, float], level: float, num_samples: tuple[int, int]) -> str:
    m, n = num_samples
    against = f"{m:,} samples against {n:,}, p-value {p_value:.2g}"
    if p_value > level:
        return f"no difference seen at level {level:g} ({against})"
    failed, worst = sum(p <= level for p in by_layer.values()), min(by_layer, key=by_layer.__getitem__)
    return (
        f"different at level {level:g} ({against}): {failed} of {len(by_layer)} layers differ, first of all {worst!r}"
    )


def _share(scores: Tensor, observed: Tensor) -> float:
    return float((scores <= observed).double().mean())
