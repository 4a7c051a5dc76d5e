r"""Tests of whether weight samples are invariant under a permutation group.

If prior and likelihood are invariant under a group, the posterior is, too: ``w`` and
``p(w)`` have the same distribution for every element ``p``. A corollary that samples
can show (Laurent et al. 2024, arXiv 2310.08287, section 3.3 and appendix B): all units
of a layer have equal marginals. A chain that stays in one copy of a mode violates it,
and so does an approximation of a single mode.

For each set of :math:`n` units that the group permutes, two null hypotheses follow from
invariance:

* **index**: the index of the unit with the layer's largest weight is uniform. Pearson's
  :math:`\chi^2` test of its counts over :math:`S` draws, with simulated multinomial
  counts if :math:`S/n < 5` makes the :math:`\chi^2` law unreliable. If units have
  several copies (the rows of each attention head), each copy is tested, and the
  smallest p-value is multiplied by their number (Bonferroni).
* **marginals**: corresponding weights of two units have the same distribution.
  Two-sample Kolmogorov-Smirnov tests of all pairs of units and positions, with exact
  p-values, adjusted by Holm's method.

Both need independent draws: autocorrelation makes every p-value too small, so that
chains are thinned to as many draws as count as independent. The weights of different
units in *one* draw may depend on each other. The Kolmogorov-Smirnov law needs two
independent samples, so one unit's is taken from the even draws and the other's from the
odd ones.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed
from pyro_symmetric.arguments import Json
from pyro_symmetric.compare.draws import thinned
from pyro_symmetric.compare.results import Parts, SignificanceTest
from pyro_symmetric.discovery.model_carried import AUTO, Auto, required_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.axes import Axis, rows
from pyro_symmetric.groups.group import Group
from pyro_symmetric.posterior.posterior import Draws, Posterior, samples_of
from pyro_symmetric.weights import first_value, map_values, pick

# Kolmogorov-Smirnov tests of a set of units; of more, a fixed pseudo-random subset is
# made
MOST_TESTS = 50_000
SIMULATIONS = 9_999
_CHUNK_ENTRIES = 2**22


@torch.no_grad()
def invariance_tests(
    weights: Draws,
    symmetry: Group | Symmetry | Auto = AUTO,
    *,
    level: float = 0.05,
    thin: bool = True,
) -> SignificanceTest:
    """Test whether draws are invariant under the permutations of a group: both tests of
    all sets of units, adjusted by Holm's method.

    The weights of a unit are those of sites whose first axis indexes units (a layer's
    incoming weights and bias), or of all its sites if there is none. Sites with two
    axes of the same units, such as recurrent weights, are left out. The result's parts
    are the sets of units, with ``index_counts`` (copy by unit: the number of draws in
    which it has the largest weight), the p-values of both tests, raw and adjusted
    (``index_adjusted``, ``marginal_adjusted``), and the numbers of Kolmogorov-Smirnov
    tests and of their rejections.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> draws = torch.randn(200, 3, 2)
    >>> draws[:, 0] += 2.0  # the first unit differs from the others
    >>> ps.invariance_tests({"w": draws}, group, level=1e-6).rejected
    True

    :param weights: a ``Posterior``, or site -> independent samples ``(S,) +
        site_shape``. Chains are thinned to as many draws as
        :func:`~pyro_symmetric.compare.independent_draws` counts.
    :param symmetry: a network's or model's, or a group; only its permutations are
        tested. ``"auto"`` is the symmetry of the posterior's model.
    :param level: the family-wise error rate of the tests.
    :param thin: ``False`` takes all draws of chains as independent, as the paper does;
        p-values are then too small.
    :raises ValueError: if weights don't fit the group, aren't finite, or fewer than 2
        draws are left.
    """
    arguments.fraction("level", level)
    group = required_symmetry(symmetry, weights).permutations
    samples = samples_of(weights, shapes=group.site_shapes)
    group.batch_shape(samples)
    unit_axes = {}
    for name, size in group.factors.items():
        axes = _unit_axes(group, name)
        if size > 1 and axes:
            unit_axes[name] = axes
    if not unit_axes:
        draws = len(first_value(samples))
        verdict = "nothing to test: the group permutes no two units"
        return SignificanceTest("Invariance", (draws,), 1.0, level, verdict, {})
    sites = group.required_sites
    if isinstance(weights, Posterior) and thin:
        posterior = Posterior(pick(weights.samples, sites), kind=weights.kind)
    else:
        posterior = Posterior.from_samples(pick(samples, sites), kind="independent")
    draws_tested = thinned(posterior).get_samples()
    draws = len(draws_tested[group.required_sites[0]])
    parts = Parts()
    floors = []
    p_values = []
    for name, axes in unit_axes.items():
        shape = (group[name].copies, group[name].size)
        entries = []
        for axis in axes:
            value = draws_tested[axis.site].detach()
            value = value.reshape(-1, *group.view_shapes[axis.site])
            entries.append(rows(value, axis, value.dim() - 1).unflatten(1, shape))
        units = torch.cat(entries, -1)
        index = _index_test(units)
        marginal, floor = _marginal_tests(units.transpose(1, 2).flatten(2), level)
        tested = ", ".join(dict.fromkeys(axis.site for axis in axes))
        parts[name] = {"size": group[name].size, "sites": tested, **index, **marginal}
        floors.append(floor)
        p_values.append([index["index_p_value"], marginal["marginal_p_value"]])
    raw = torch.tensor(p_values, dtype=torch.float64, device="cpu")
    adjusted = holm(raw.flatten()).view_as(raw)
    for part, p_values_of_part in zip(parts.values(), adjusted.tolist(), strict=True):
        part["index_adjusted"], part["marginal_adjusted"] = p_values_of_part
    p_value = float(adjusted.min())
    weak = sum(floor * 2 * len(parts) > level for floor in floors)
    verdict = _verdict(parts, p_value, level, draws, weak)
    return SignificanceTest("Invariance", (draws,), p_value, level, verdict, parts)


def p_value_text(p_value: float) -> str:
    """Write a p-value; the digits of the smallest are those of an approximation."""
    return "< 1e-12" if p_value < 1e-12 else f"{p_value:.2g}"


def _verdict(parts: Parts, p_value: float, level: float, draws: int, weak: int) -> str:
    """State the outcome in one line."""
    basis = f"at level {level:g} (p-value {p_value_text(p_value)}, {draws:,} draws)"
    smallest = map_values(
        lambda part: min(part["index_adjusted"], part["marginal_adjusted"]), parts
    )
    if p_value <= level:
        rejected = sum(p <= level for p in smallest.values())
        worst = min(smallest, key=smallest.__getitem__)
        return (
            f"not invariant {basis}: {rejected} of {len(parts)} sets of units, most "
            f"clearly {worst!r}"
        )
    verdict = f"no evidence against invariance {basis}"
    if weak:
        verdict += (
            f"; too few draws for the marginal tests of {weak} of {len(parts)} sets of "
            "units"
        )
    return verdict


def _unit_axes(group: Group, name: str) -> list[Axis]:
    """Return the axes, in the group's view, that index the tested weights of units:
    first axes if there are any.
    """
    sites = Counter(axis.site for axis in group.axes(name) if not axis.buffer)
    single = []
    first = []
    for declared, axis in zip(group[name].axes, group.axes(name), strict=True):
        if not axis.buffer and sites[axis.site] == 1:
            single.append(axis)
            if declared.dim == 0 and declared.span == 1:
                first.append(axis)
    return first or single


def _index_test(units: Tensor) -> Json:
    """Count the draws in which each unit of each copy has the largest weight, and test
    that the counts are uniform.

    :param units: ``(draws, copies, n, positions)``.
    """
    largest = units.amax(-1)
    winners = largest == largest.amax(-1, keepdim=True)
    # Ties, as of weights that are exactly 0, are broken at random: the index stays
    # uniform under invariance.
    tied = bool((winners.sum(-1) > 1).any())
    keys = winners.long()
    if tied:
        keys = winners * torch.rand(winners.shape, device=winners.device).add_(1)
    index = keys.argmax(-1)
    copies, n = largest.shape[1:]
    numbers = index + n * torch.arange(copies, device=index.device)
    counts = torch.bincount(numbers.flatten(), minlength=copies * n)
    counts = counts.reshape(copies, n).cpu()
    p_values = chi_square_uniform(counts)
    return {
        "index_counts": counts.numpy(),
        "index_p_value": min(1.0, copies * float(p_values.min())),
    }


def _marginal_tests(units: Tensor, level: float) -> tuple[Json, float]:
    """Test pairs of units for equal marginals.

    :param units: ``(draws, n, positions)``; the positions of several copies are
        concatenated.
    :returns: the results by name, and the smallest joint p-value that so many draws can
        give.
    """
    draws, n, positions = units.shape
    first, second = torch.triu_indices(n, n, 1, device="cpu")
    # the same subset at every call; the user's stream is left alone
    fixed = torch.Generator("cpu").manual_seed(0)
    tested = max(1, min(positions, MOST_TESTS // len(first)))
    chosen = torch.randperm(positions, generator=fixed, device="cpu")[:tested]
    if len(first) > MOST_TESTS:
        subset = torch.randperm(len(first), generator=fixed, device="cpu")[:MOST_TESTS]
        first = first[subset]
        second = second[subset]
    half = draws // 2
    samples = units[: 2 * half, ..., chosen.to(units.device)].permute(2, 1, 0)
    even = samples[..., ::2].reshape(-1, half)
    odd = samples[..., 1::2].reshape(-1, half)
    # row of (position, unit) in the flattened samples
    offset = n * torch.arange(tested, device="cpu")[:, None]
    first = (offset + first).reshape(-1).to(units.device)
    second = (offset + second).reshape(-1).to(units.device)
    p_values, floor = kolmogorov_smirnov(even, odd, first, second)
    tests = p_values.numel()
    results = {
        "marginal_tests": tests,
        "marginal_p_value": min(1.0, tests * float(p_values.min())),
        "marginal_rejected": int((holm(p_values) <= level).sum()),
    }
    return results, min(1.0, tests * floor)


# classical tests, many at once --------------------------------------------------------


def chi_square_uniform(counts: Tensor) -> Tensor:
    """Test by Pearson's statistic that ``counts`` ``batch_shape + (n,)`` of equal
    totals are uniform multinomial.

    If the expected count is below 5 (Cochran's rule), the p-value is the rank of the
    statistic among those of simulated uniform multinomial counts (Davison & Hinkley
    1997, section 4.2.1), which is exact in size.

    :returns: p-values ``batch_shape``.
    """
    from scipy.stats import chisquare  # takes a quarter of a second to import

    result = chisquare(counts.double().cpu().numpy(), axis=-1)
    statistic, upper = map(np.asarray, result)
    n = counts.shape[-1]
    draws = int(counts.sum(-1).max())
    if draws >= 5 * n:
        return torch.from_numpy(upper)
    rng = np.random.default_rng(drawn_seed())
    simulated = rng.multinomial(draws, np.full(n, 1 / n), size=SIMULATIONS)
    drawn = np.sort(chisquare(simulated, axis=1).statistic)
    reached = SIMULATIONS - np.searchsorted(drawn, statistic * (1 - 1e-12))
    return torch.from_numpy(np.asarray((reached + 1) / (SIMULATIONS + 1)))


def kolmogorov_smirnov(
    x: Tensor, y: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, float]:
    """Test ``x[first[t]]`` against ``y[second[t]]`` for all ``t``: two-sample
    Kolmogorov-Smirnov, two-sided and exact. (SciPy's takes a millisecond each.)

    :param x: samples in rows, ``(rows, h)``.
    :param y: samples of the same size, ``(rows, h)``.
    :param first: row indices of ``x``, ``(T,)``.
    :param second: row indices of ``y``, ``(T,)``.
    :returns: p-values ``(T,)`` (conservative if values are tied), and the smallest
        possible one.
    """
    h = x.shape[-1]
    x = x.sort(-1).values.contiguous()
    y = y.sort(-1).values.contiguous()
    # F_x - F_y is largest at a value of x, and smallest just before one.
    upto = torch.searchsorted(x, x, right=True)
    before = torch.searchsorted(x, x, right=False)
    steps = torch.empty_like(first)
    size = max(1, _CHUNK_ENTRIES // h)
    for start in range(0, first.numel(), size):
        part = slice(start, start + size)
        a = first[part]
        second_sample = y[second[part]]
        values = x[a]
        above = upto[a] - torch.searchsorted(second_sample, values, right=True)
        below = torch.searchsorted(second_sample, values, right=False) - before[a]
        steps[part] = torch.maximum(above.amax(-1), below.amax(-1))
    table = _exact_table(h).to(x.device)
    return table[steps], float(table[-1])


def _exact_table(h: int) -> Tensor:
    r"""Tabulate P(D >= d / h), d = 0 .. h, of two samples of size h (Gnedenko &
    Korolyuk 1951: a bridge is reflected),

    .. math:: 2 \sum_{k \ge 1} (-1)^{k-1} \binom{2h}{h - kd} \Big/ \binom{2h}{h}.
    """
    top = math.lgamma(h + 1)
    shifts = torch.arange(1, h + 1, dtype=torch.float64, device="cpu")
    total = torch.zeros(h, dtype=torch.float64, device="cpu")
    # terms beyond kd = 9 sqrt(h) are below 1e-35
    for k in range(1, min(h, math.ceil(9 * math.sqrt(h))) + 1):
        shift = k * shifts[: h // k]
        log_ratio = 2 * top - torch.lgamma(h - shift + 1) - torch.lgamma(h + shift + 1)
        ratio = log_ratio.exp()
        total[: h // k] += ratio if k % 2 else -ratio
    return torch.cat([total.new_ones(1), (2 * total).clamp(0, 1)])


def holm(p_values: Tensor) -> Tensor:
    """Adjust p-values ``(T,)`` by Holm's method (1979), in the given order."""
    ordered, order = p_values.sort()
    factors = torch.arange(len(ordered), 0, -1, device=ordered.device).to(ordered)
    adjusted = torch.empty_like(p_values)
    if len(ordered):
        adjusted[order] = (ordered * factors).cummax(0).values.clamp(max=1)
    return adjusted
