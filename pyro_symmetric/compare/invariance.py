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
are independent, as the Kolmogorov-Smirnov law needs. Autocorrelated draws would make every p-value too
small, so that of chains only as many draws are taken as count as independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._tests import chi_square_uniform, holm, kolmogorov_smirnov
from pyro_symmetric.compare.independence import thinned
from pyro_symmetric.compare.results import SignificanceTest
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.samples import Draws, samples_of

P_VALUES = ("index_p_value", "marginal_p_value")


@torch.no_grad()
def invariance_tests(
    weights: Draws, group: Group | Symmetry, *, level: float = 0.05, max_tests: int = 50_000, thin: bool = True
) -> SignificanceTest:
    """Test whether a posterior's draws are invariant under ``group``, by Holm's method over both tests of all sets.

    The weights of a unit are those of the sites along whose first axis it lies (of a layer its incoming weights and its
    bias); units that lie along no first axis are tested on all their sites. Of recurrent weights, unit ``i``'s weight
    from unit ``i + k`` is compared with unit ``j``'s from ``j + k``. The result's numbers, for each set of units:
    ``index_counts``, in how many draws each unit of each copy held the largest weight, ``index_statistic``,
    ``index_method`` and ``index_p_value``; of the Kolmogorov-Smirnov tests of pairs of units their number, smallest
    p-value, rejections, largest statistic and smallest possible p-value (``marginal_tests`` ...); both adjusted.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> draws = torch.randn(200, 3, 2)
    >>> draws[:, 0] += 2.0  # the first unit differs from the others
    >>> ps.invariance_tests({"w": draws}, group, level=1e-6).rejected
    True

    :param weights: a ``Posterior``, or site -> independent samples ``(S,) + site_shape``. Of chains as many draws are
        used, evenly spaced, as :func:`~pyro_symmetric.compare.independent_draws` counts.
    :param group: the group, or a network's symmetry, of which the permutations count; single units are passed over.
    :param level: the family-wise level of the tests.
    :param max_tests: Kolmogorov-Smirnov tests of one set of units; of more a fixed pseudo-random part is made.
    :param thin: ``False`` takes all draws of chains as independent, as the paper does; p-values are then too small.
    :raises ValueError: if weights don't fit the group, aren't finite, or fewer than 2 draws are left.
    """
    arguments.fraction("level", level)
    arguments.whole("max_tests", max_tests, 1)
    group = group_of(group).permutations
    samples = samples_of(weights, shapes=group.site_shapes)
    group.batch_shape(samples)
    sites = group.required_sites
    kept: Mapping[str, Tensor] = {}
    if sites and thin and isinstance(weights, Posterior):
        kept = thinned(Posterior({site: weights.samples[site] for site in sites}, kind=weights.kind)).get_samples()
    elif sites:
        known = {site: samples[site] for site in sites}
        kept = thinned(Posterior.from_samples(known, kind="independent")).get_samples()
    draws = len(next(iter(kept.values()))) if kept else 0
    found: list[dict[str, Any]] = []
    for name, size in group.factors.items():
        if size > 1 and (axes := _unit_axes(group, name)):
            parts = [_unit_weights(kept, group, name, axis) for axis in axes]
            names = ", ".join(dict.fromkeys(axis.site for axis in axes))
            marginals = [part.transpose(1, 2).flatten(2) for part in parts]
            tests = _index_test(parts) | _marginal_tests(marginals, level, max_tests)
            found.append({"name": name, "size": size, "sites": names, **tests})
    p_values = torch.tensor([[units[key] for key in P_VALUES] for units in found], dtype=torch.float64, device="cpu")
    adjusted = holm(p_values.reshape(-1)).reshape(-1, 2)
    smallest = adjusted.amin(1)
    p_value = float(smallest.min()) if found else 1.0
    own: dict[str, list[Any]] = {"p_value": smallest.tolist()}
    own |= {"index_adjusted": adjusted[:, 0].tolist(), "marginal_adjusted": adjusted[:, 1].tolist()}
    own |= {key: [units[key] for units in found] for key in (found[0] if found else {})}
    counts = _padded(own.pop("index_counts", []))
    return SignificanceTest(
        title="Invariance",
        num_samples=(draws,),
        axis="units",
        parts=tuple(own.pop("name", [])),
        numbers={**own, "index_counts": counts.numpy()},
        shown=("size", "index_adjusted", "marginal_adjusted", "marginal_rejected", "marginal_tests"),
        verdict=_verdict(found, adjusted, level, draws),
        p_value=p_value,
        level=level,
    )


# small steps --------------------------------------------------------------------------------------------------------


def _padded(counts: list[Tensor]) -> Tensor:
    """Counts ``(copies, n)`` of sets of several sizes, NaN if there is no unit."""
    copies, size = (max((count.shape[dim] for count in counts), default=0) for dim in (0, 1))
    result = torch.full((len(counts), copies, size), torch.nan, dtype=torch.float64, device="cpu")
    for row, count in zip(result, counts, strict=True):
        row[: count.shape[0], : count.shape[1]] = count
    return result


def _verdict(found: list[dict[str, Any]], adjusted: Tensor, level: float, draws: int) -> str:
    """The finding, in one line."""
    if not found:
        return "nothing to test: the group permutes no two units"
    smallest = adjusted.amin(1)
    p_value = float(smallest.min())
    known = f"at level {level:g} (p-value {'< 1e-12' if p_value < 1e-12 else f'{p_value:.2g}'}, {draws:,} draws)"
    if p_value <= level:
        failed, place = int((smallest <= level).sum()), int(smallest.argmin())
        what = " and ".join(
            name for name, own in zip(("index", "marginals"), adjusted[place].tolist(), strict=True) if own <= level
        )
        return f"not invariant {known}: {failed} of {len(found)} sets of units, first {found[place]['name']!r}: {what}"
    weak = sum(units["marginal_smallest_possible"] * 2 * len(found) > level for units in found)
    few = f"; too few draws for the marginal tests of {weak} sets of units" if weak else ""
    return f"no sign against invariance {known}{few}"


def _unit_axes(group: Group, name: str) -> list[Axis]:
    """The axes at which to look at units: their rows if they have any. Axes are those of the group's view."""
    pairs = [pair for pair in zip(group[name].axes, group.axes(name), strict=True) if not pair[0].buffer]
    viewed = [axis for _, axis in pairs]
    # Units that meet themselves on one flattened axis (tied grouped convolutions) have no position of their own there.
    alone = [a for a in viewed if sum((a.site, a.dim) == (b.site, b.dim) for b in viewed) == 1]
    rows = [axis for own, axis in pairs if own.dim == 0 and own.span == 1]
    return [axis for axis in rows if any(axis is a for a in alone)] or alone


def _unit_weights(weights: Mapping[str, Tensor], group: Group, name: str, axis: Axis) -> Tensor:
    """Each unit's weights in one site, ``(draws, copies, n, positions)``; invariance makes those of one copy and
    position alike."""
    value = weights[axis.site].detach().reshape(-1, *group.view_shapes[axis.site])
    value = value.movedim(1 + axis.dim, 1)
    plain, units = axis.fills(group.view_shapes[axis.site][axis.dim]), group[name]
    value = value.unsqueeze(2) if plain else value[:, axis.index.T.to(value.device)]
    value = value.unflatten(1, (units.copies, units.size))  # (draws, copies, n, blocks, other axes)
    for dim, members in group.members(axis.site).items():
        if dim == axis.dim or all(owner != name for owner, _ in members):
            continue
        # They lie along another axis as well: for unit i of each copy, rotate that axis so that its own place comes
        # first.
        places = torch.arange(units.size, device="cpu")
        turned = (places[:, None] + places) % units.size
        turned = turned.reshape(units.size, *[1] * (len(units.shape) - 1), units.size).expand(-1, *units.shape)
        index = group.element({name: turned}).axis_index(axis.site, dim).to(value.device)
        place = 4 + dim - (dim > axis.dim)
        view = [1] * value.dim()
        view[2], view[place] = index.shape
        value = value.take_along_dim(index.reshape(view), dim=place)
    return value.reshape(len(value), units.copies, units.size, -1)


def _index_test(units: list[Tensor]) -> dict[str, Any]:
    """In how many draws each unit of each copy holds the largest weight, and Pearson's test that it is any unit's."""
    largest = torch.stack([part.amax(-1) for part in units]).amax(0)  # (draws, copies, n)
    winners = largest == largest.amax(-1, keepdim=True)
    # ties, as of weights that are exactly 0: drawn, so that the index stays uniform under invariance
    tied = bool((winners.sum(-1) > 1).any())
    index = (winners * torch.rand(winners.shape, device=winners.device).add_(1) if tied else winners.long()).argmax(-1)
    copies, n = largest.shape[1:]
    counts = torch.bincount((index + n * torch.arange(copies, device=index.device)).flatten(), minlength=copies * n)
    counts = counts.reshape(copies, n).cpu()
    statistic, method, p_values = chi_square_uniform(counts)
    return {
        "index_counts": counts,
        "index_statistic": float(statistic.max()),
        "index_method": method,
        "index_p_value": min(1.0, copies * float(p_values.min())),
    }


def _marginal_tests(units: list[Tensor], level: float, max_tests: int) -> dict[str, Any]:
    """Kolmogorov-Smirnov tests of pairs of units.

    :param units: each site's weights, ``(draws, n, positions)``; units of several copies are compared copy by copy, a
        copy's positions beside the next one's.
    """
    draws, n, _ = units[0].shape
    positions = sum(part.shape[-1] for part in units)
    first, second = torch.triu_indices(n, n, 1, device="cpu")
    fixed = torch.Generator("cpu").manual_seed(0)  # the same part at every call, and the user's stream left alone
    kept = max(1, min(positions, max_tests // len(first)))
    chosen = torch.zeros(positions, dtype=torch.bool, device="cpu")
    chosen[torch.randperm(positions, generator=fixed, device="cpu")[:kept]] = True
    if len(first) > max_tests:
        subset = torch.randperm(len(first), generator=fixed, device="cpu")[:max_tests]
        first, second = first[subset], second[subset]
    columns = chosen.split([part.shape[-1] for part in units])
    samples = torch.cat([part[..., c.to(part.device)] for part, c in zip(units, columns, strict=True)], dim=-1)
    half = draws // 2
    even, odd = (samples[start : 2 * half : 2].permute(2, 1, 0).reshape(-1, half) for start in (0, 1))
    offset = n * torch.arange(kept, device="cpu")[:, None]  # row of (position, unit) in the flattened samples
    statistics, p_values, floor = kolmogorov_smirnov(
        even, odd, (offset + first).reshape(-1).to(samples.device), (offset + second).reshape(-1).to(samples.device)
    )
    tests = p_values.numel()
    return {
        "marginal_tests": tests,
        "marginal_p_value": min(1.0, tests * float(p_values.min())),
        "marginal_rejected": int((holm(p_values) <= level).sum()),
        "marginal_largest": float(statistics.max()),
        "marginal_smallest_possible": min(1.0, tests * floor),
    }
