r"""Tests of whether weight samples are invariant under a permutation group.

A posterior whose prior and likelihood are invariant under a group is invariant itself: ``w`` and ``p(w)`` are
distributed alike for every element ``p``. A corollary (Laurent et al. 2024, arXiv 2310.08287, section 3.3 and appendix
B) can be seen in samples: all units of a layer have equal marginals. A chain that stays in one copy of a mode, or an
approximation of one mode, betrays itself there.

For each set of :math:`n` units that the group permutes two null hypotheses are tested, both implied by invariance:

* **index**: the unit that holds the largest weight of the layer is each unit with probability :math:`1/n`. Pearson's
  :math:`\chi^2` on its counts; by simulated multinomial counts if :math:`S/n < 5` makes the :math:`\chi^2` law
  unreliable. If the units have several copies (the rows of each attention head), each copy is tested by itself, and the
  smallest p-value counts as many times as there are copies (Bonferroni).
* **marginals**: a weight of one unit and the corresponding weight of another are distributed alike. Two-sample
  Kolmogorov-Smirnov tests of all pairs of units and positions, with exact p-values, corrected by Holm's method.

Both rest on independent draws. Weights of different units in *one* draw may depend on each other in any way: a pair's
two samples are taken from different draws (one unit's from the even ones, the other's from the odd ones), so that they
are independent, as the Kolmogorov-Smirnov law needs. Autocorrelated draws make every p-value too small: name their
effective sample size (see ``effective_size``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.chain_statistics import evenly_spaced
from pyro_symmetric.compare._results import table
from pyro_symmetric.compare._tests import chi_square_uniform, holm, holm_rejections, kolmogorov_smirnov
from pyro_symmetric.compare.independence import independent_draws, is_chain
from pyro_symmetric.compare.layers import Samples, samples_of
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import require_finite


@dataclass(frozen=True, eq=False)
class FactorInvariance:
    """The two tests of one set of units.

    :param size: the number of units ``n`` of one copy.
    :param sites: the sites whose weights were looked at.
    :param index_counts: in how many draws each unit held the largest weight of its copy, ``(n,)`` or ``(copies, n)``.
    :param index_statistic: Pearson's statistic of these counts; of several copies the largest.
    :param index_method: ``"chi-square"`` or ``"simulated multinomial"`` (expected counts under 5).
    :param index_p_value: p-value of the null hypothesis that the index is uniform in each copy.
    :param marginal_tests: number of Kolmogorov-Smirnov tests (pairs of units of one copy, times positions).
    :param marginal_p_value: p-value of the null hypothesis that all tested marginals are equal: the smallest of theirs,
        by Holm.
    :param marginal_rejected: how many of them Holm's method rejects at the level.
    :param marginal_largest: the largest Kolmogorov-Smirnov statistic.
    :param marginal_smallest_possible: the smallest ``marginal_p_value`` that so few draws can give at all.
    :param index_adjusted: ``index_p_value``, adjusted by Holm for all tests of all sets of units.
    :param marginal_adjusted: likewise.
    """

    size: int
    sites: tuple[str, ...]
    index_counts: Tensor
    index_statistic: float
    index_method: str
    index_p_value: float
    marginal_tests: int
    marginal_p_value: float
    marginal_rejected: int
    marginal_largest: float
    marginal_smallest_possible: float
    index_adjusted: float
    marginal_adjusted: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            name: value.tolist() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True, eq=False)
class InvarianceResult:
    """What the tests found; see :func:`invariance_tests`.

    :param per_factor: units -> :class:`FactorInvariance`.
    :param level: the probability that an invariant posterior's independent draws are called not invariant is at most
        this.
    :param num_draws: how many draws were used, after thinning.
    :param p_value: the smallest adjusted p-value: that of the null hypothesis of invariance.
    """

    per_factor: dict[str, FactorInvariance]
    level: float
    num_draws: int
    p_value: float

    @property
    def rejected(self) -> bool:
        """Whether invariance is rejected at the level."""
        return self.p_value <= self.level

    @property
    def verdict(self) -> str:
        """What was found, in one line."""
        count = 2 * len(self.per_factor)
        if not self.per_factor:
            return "nothing to test: the group permutes no two units"
        if not self.rejected:
            text = (
                f"no sign against invariance: none of {count} tests rejects at level {self.level:g} "
                f"(smallest adjusted p-value {_p(self.p_value)}, {self.num_draws:,} draws)"
            )
            weak = sum(f.marginal_smallest_possible * count > self.level for f in self.per_factor.values())
            return text + (f"; too few draws for the marginal tests of {weak} sets of units" if weak else "")
        failed = [name for name, f in self.per_factor.items() if self._failed(f)]
        worst = min(self.per_factor, key=lambda name: self._smallest(self.per_factor[name]))
        return (
            f"not invariant at level {self.level:g} (p-value {_p(self.p_value)}, {self.num_draws:,} draws): "
            f"{len(failed)} of {len(self.per_factor)} sets of units fail, worst {worst!r}, where "
            + self._reason(self.per_factor[worst])
        )

    def _failed(self, factor: FactorInvariance) -> bool:
        return self._smallest(factor) <= self.level

    @staticmethod
    def _smallest(factor: FactorInvariance) -> float:
        return min(factor.index_adjusted, factor.marginal_adjusted)

    def _reason(self, factor: FactorInvariance) -> str:
        reasons = []
        if factor.index_adjusted <= self.level:
            copy, unit = divmod(int(factor.index_counts.argmax()), factor.size)
            share = float(factor.index_counts.max()) / self.num_draws
            of = f" of copy {copy}" if factor.index_counts.dim() > 1 else ""
            reasons.append(
                f"unit {unit}{of} holds the largest weight in {share:.0%} of draws instead of {1 / factor.size:.1%}"
            )
        if factor.marginal_adjusted <= self.level:
            reasons.append(f"{factor.marginal_rejected:,} of {factor.marginal_tests:,} pairs of marginals differ")
        return " and ".join(reasons)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "verdict": self.verdict,
            "rejected": self.rejected,
            "p_value": self.p_value,
            "level": self.level,
            "num_draws": self.num_draws,
            "per_factor": {name: factor.to_dict() for name, factor in self.per_factor.items()},
        }

    def __repr__(self) -> str:
        rows = [("units", "number", "index p", "marginal p", "pairs that differ", "verdict")]
        rows += [
            (
                name,
                str(f.size),
                _p(f.index_adjusted),
                _p(f.marginal_adjusted),
                f"{f.marginal_rejected:,} of {f.marginal_tests:,}",
                "not invariant" if self._failed(f) else "-",
            )
            for name, f in self.per_factor.items()
        ]
        return f"Invariance: {self.verdict}\n{table(rows, left=(0, 5))}"


@torch.no_grad()
def invariance_tests(
    weights: Samples,
    group: Group | Symmetry,
    *,
    level: float = 0.05,
    effective_size: float | None = None,
    max_tests: int = 50_000,
) -> InvarianceResult:
    """Test whether samples of weights are invariant under ``group``.

    The weights of a unit are those of the sites along whose first axis it lies: for linear and convolutional layers its
    incoming weights and its bias, for normalisation its scale and shift. Units that lie along no first axis are tested
    on all their sites. Units of several blocks (gates, flattened pixels) are compared block by block. If they lie along
    a second axis of the site too (recurrent weights), unit ``i``'s weight from unit ``i + k`` is compared with unit
    ``j``'s from ``j + k`` (modulo ``n``): only those must be distributed alike. Units of different copies are not
    compared: if their parents may change places, the parents' own tests see to that.

    Holm's method over both tests of all sets of units keeps the probability of any false rejection under ``level``.

    :param weights: site -> samples ``batch_shape + site_shape``, of which batch dimensions are flattened; or a
        ``Posterior``.
    :param group: the group, or a network's symmetry, of which the permutations count; single units are passed over.
    :param level: the family-wise level of the tests.
    :param effective_size: how many draws may be taken as independent. That many, evenly spaced over the flattened
        batch, are kept, rounded down. Default: of a ``Posterior`` that a sampler drew,
        :func:`~pyro_symmetric.compare.independent_draws`; else all. Of chains in a dictionary give half of the smallest
        effective sample size over the weights, as draws thinned to all of it keep a correlation of about 0.1.
    :param max_tests: Kolmogorov-Smirnov tests of one set of units. If pairs of units times positions are more, a fixed
        pseudo-random part of the positions (and of the pairs, if needed) is tested.
    :raises ValueError: if weights don't fit the group, aren't finite, or fewer than 2 draws are left.
    """
    if effective_size is None and is_chain(weights):
        effective_size = max(2, independent_draws(weights))
    _check_arguments(level, effective_size, max_tests)
    effective_size = None if effective_size in (None, math.inf) else int(effective_size)
    weights = samples_of(weights)
    group = group_of(group).permutations
    shape = group.batch_shape(weights)
    require_finite({site: weights[site] for site in group.required_sites}, "weights")
    keep = _thinned(shape.numel(), effective_size)
    found = {}
    for name, size in group.factors.items():
        if size < 2:
            continue
        axes = _unit_axes(group, name)
        if not axes:
            continue
        units = [_unit_weights(weights, group, name, axis, keep) for axis in axes]
        found[name] = (
            tuple(dict.fromkeys(a.site for a in axes)),
            *_index_test(units),
            *_marginal_tests([part.transpose(1, 2).flatten(2) for part in units], level, max_tests),
        )
    adjusted = holm(torch.tensor([[f[4], f[6]] for f in found.values()], dtype=torch.float64).reshape(-1)).tolist()
    per_factor = {
        name: FactorInvariance(group.factors[name], *values, adjusted[2 * i], adjusted[2 * i + 1])
        for i, (name, values) in enumerate(found.items())
    }
    draws = shape.numel() if isinstance(keep, slice) else len(keep)
    return InvarianceResult(per_factor, level, draws, min(adjusted, default=1.0))


# small steps --------------------------------------------------------------------------------------------------------


def _check_arguments(level: float, effective_size: float | None, max_tests: int) -> None:
    arguments.fraction("level", level)
    arguments.number("effective_size", effective_size, least=2, none="that of the draws")
    arguments.whole("max_tests", max_tests, 1)


def _thinned(draws: int, effective_size: int | None) -> slice | Tensor:
    if draws < 2:
        raise ValueError(f"weights holds {draws} draws; the tests need at least 2")
    if effective_size is None or effective_size >= draws:
        return slice(None)  # a view, where an index would copy all weights
    return evenly_spaced(draws, effective_size)


def _unit_axes(group: Group, name: str) -> list[Axis]:
    """Where to look at units: at their rows if they have any. Axes are those of the group's view."""
    pairs = [pair for pair in zip(group[name].axes, group.axes(name), strict=True) if not pair[0].buffer]
    viewed = [axis for _, axis in pairs]
    # Units that meet themselves on one flattened axis (tied grouped convolutions) have no position of their own there.
    alone = [a for a in viewed if sum((a.site, a.dim) == (b.site, b.dim) for b in viewed) == 1]
    rows = [axis for own, axis in pairs if own.dim == 0 and own.span == 1]
    return [axis for axis in rows if any(axis is a for a in alone)] or alone


def _unit_weights(weights: Mapping[str, Tensor], group: Group, name: str, axis: Axis, keep: slice | Tensor) -> Tensor:
    """Each unit's weights in one site, ``(draws, copies, n, positions)``; invariance makes those of one copy and
    position alike."""
    value = weights[axis.site].detach().reshape(-1, *group.view_shapes[axis.site])
    value = value[keep].movedim(1 + axis.dim, 1)
    plain, units = group.is_plain(axis), group[name]
    value = value.unsqueeze(2) if plain else value[:, axis.index.T.to(value.device)]
    value = value.unflatten(1, (units.copies, units.size))  # (draws, copies, n, blocks, other axes)
    for dim, members in group.members(axis.site).items():
        if dim == axis.dim or all(owner != name for owner, _ in members):
            continue
        # They lie along another axis as well: for unit i of each copy, rotate that axis so that its own place comes
        # first.
        places = torch.arange(units.size)
        turned = (places[:, None] + places) % units.size
        turned = turned.reshape(units.size, *[1] * (len(units.shape) - 1), units.size).expand(-1, *units.shape)
        index = group.element({name: turned}).axis_index(axis.site, dim).to(value.device)
        place = 4 + dim - (dim > axis.dim)
        view = [1] * value.dim()
        view[2], view[place] = index.shape
        value = value.take_along_dim(index.reshape(view), dim=place)
    return value.reshape(len(value), units.copies, units.size, -1)


def _index_test(units: list[Tensor]) -> tuple[Tensor, float, str, float]:
    """Counts of the unit with the largest weight of each copy, Pearson's statistic, the method and the p-value."""
    largest = torch.stack([part.amax(-1) for part in units]).amax(0)  # (draws, copies, n)
    winners = largest == largest.amax(-1, keepdim=True)
    if bool((winners.sum(-1) > 1).any()):
        # ties, as of weights that are exactly 0: drawn, so that the index stays uniform under invariance
        index = (winners * torch.rand(winners.shape, device=winners.device).add_(1)).argmax(-1)
    else:
        index = winners.long().argmax(-1)
    copies, n = largest.shape[1:]
    counts = torch.bincount((index + n * torch.arange(copies, device=index.device)).flatten(), minlength=copies * n)
    counts = counts.reshape(copies, n).cpu()
    statistic, method, p_values = chi_square_uniform(counts)
    p_value = min(1.0, copies * float(p_values.min()))
    return counts if copies > 1 else counts[0], float(statistic.max()), method, p_value


def _marginal_tests(units: list[Tensor], level: float, max_tests: int) -> tuple[int, float, int, float, float]:
    """Number of tests, adjusted smallest p-value, rejections, largest statistic, smallest possible p-value.

    :param units: each site's weights, ``(draws, n, positions)``; units of several copies are compared copy by copy, a
        copy's positions beside the next one's.
    """
    draws, n, _ = units[0].shape
    positions = sum(part.shape[-1] for part in units)
    first, second = torch.triu_indices(n, n, 1)
    fixed = torch.Generator().manual_seed(0)  # the same part at every call, and the user's stream left alone
    kept = max(1, min(positions, max_tests // len(first)))
    chosen = torch.zeros(positions, dtype=torch.bool)
    chosen[torch.randperm(positions, generator=fixed)[:kept]] = True
    if len(first) > max_tests:
        subset = torch.randperm(len(first), generator=fixed)[:max_tests]
        first, second = first[subset], second[subset]
    columns = chosen.split([part.shape[-1] for part in units])
    samples = torch.cat([part[..., c.to(part.device)] for part, c in zip(units, columns, strict=True)], dim=-1)
    half = draws // 2
    even, odd = (samples[start : 2 * half : 2].permute(2, 1, 0).reshape(-1, half) for start in (0, 1))
    offset = n * torch.arange(kept)[:, None]  # row of (position, unit) in the flattened samples
    statistics, p_values, floor = kolmogorov_smirnov(
        even, odd, (offset + first).reshape(-1).to(samples.device), (offset + second).reshape(-1).to(samples.device)
    )
    tests = p_values.numel()
    smallest = min(1.0, tests * float(p_values.min()))
    return tests, smallest, holm_rejections(p_values, level), float(statistics.max()), min(1.0, tests * floor)


def _p(value: float) -> str:
    return "< 1e-12" if value < 1e-12 else f"{value:.2g}" if math.isfinite(value) else str(value)
