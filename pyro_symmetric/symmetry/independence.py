r"""Which multipliers of a group are independent: some may do together what others do.

In ``einsum("b,hk,kh->b", x, w, v)`` each row of ``w`` can be flipped with its column of ``v``, and so can each column;
but flipping all rows is flipping all columns. A unit's multiplier :math:`f_u` enters an entry of a site with the power
that its axes add up to, so that the group acts through the linear forms :math:`\sum_u e_u \log f_u`, one for each entry
(for signs: modulo two), and the multipliers that act alike are the common zeros of these forms. There are as many
independent ones as the forms' rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.symmetry.elimination import eliminated, eliminated_signs
from pyro_symmetric.symmetry.factored import FactoredGroup
from pyro_symmetric.symmetry.labels import Array

# Sparse forms, entry by entry: which form, which unit, with which power.
Forms = tuple[Array, Array, Array]


def independent_units(group: FactoredGroup[Any, Any], signs: bool) -> dict[str, Tensor]:
    """Factor -> bool ``(n,)``: units whose multipliers are independent and together do what all units' do.

    :param signs: whether multipliers are signs, so that only odd powers count; else they are positive numbers.
    """
    sizes = list(group.factors.values())
    starts = dict(zip(group.factors, np.cumsum([0, *sizes[:-1]]), strict=False))
    parts = [_forms_of_site(group, site, starts) for site in group.sites]
    independent = torch.ones(sum(sizes), dtype=torch.bool)
    independent[_free(_stacked(parts), sum(sizes), signs)] = False
    return dict(zip(group.factors, independent.split(sizes) if sizes else (), strict=True))


# small steps --------------------------------------------------------------------------------------------------------


def _forms_of_site(group: FactoredGroup[Any, Any], site: str, starts: dict[str, Any]) -> Forms:
    """Forms that span those of all entries of a site.

    An entry's form is the sum of one from each axis. These sums span what one entry's own form and, along each axis,
    the differences from that entry's place span.
    """
    first, differences = [], []
    for dim, members in group.members(site).items():
        length = group.view_shapes[site][dim]
        pieces = [
            (axis.index.cpu().numpy(), np.arange(axis.index.shape[1]) + starts[name], axis.exponent)
            for name, axis in members
        ]
        place = np.concatenate([index.reshape(-1) for index, _, _ in pieces])
        unit = np.concatenate([np.broadcast_to(units, index.shape).reshape(-1) for index, units, _ in pieces])
        power = np.concatenate([np.full(index.size, exponent) for index, _, exponent in pieces])
        # The place that the fewest units multiply: where there is one without any, differences are single units.
        origin = int(np.bincount(place, minlength=length).argmin())
        own = place == origin
        others = np.flatnonzero(np.arange(length) != origin)
        first.append((np.zeros(own.sum(), dtype=np.int64), unit[own], power[own]))
        repeated = np.repeat(others, own.sum())
        differences.append(
            (
                np.r_[place[~own], repeated],
                np.r_[unit[~own], np.tile(unit[own], len(others))],
                np.r_[power[~own], -np.tile(power[own], len(others))],
            )
        )
    return _stacked([_stacked(first, shared=True), *differences])


def _stacked(parts: Sequence[Forms], shared: bool = False) -> Forms:
    """Forms of several parts, numbered through; or, if they are parts of the same form, under one number."""
    start, rows = 0, []
    for row, _, _ in parts:
        rows.append(row + start)
        start += 0 if shared or not len(row) else int(row.max()) + 1
    empty = np.empty(0, dtype=np.int64)
    columns = zip(*parts, strict=True) if parts else ([], [], [])
    _, unit, power = (np.concatenate([empty, *column]) for column in columns)
    return np.concatenate([empty, *rows]), unit, power


def _free(forms: Forms, size: int, signs: bool) -> list[int]:
    """Units that may stay at one: what they do, others do as well."""
    row, unit, power = forms
    keys, where = np.unique(row * size + unit, return_inverse=True)  # a unit may lie along two axes of one entry
    power = np.bincount(where, weights=power).astype(np.int64) % 2 if signs else np.bincount(where, weights=power)
    row, unit = np.divmod(keys[power != 0], size) if size else (row, unit)
    power = power[power != 0].astype(np.int64)
    fixed = np.zeros(size, dtype=bool)
    while len(row):  # a form of one unit: only that unit's multiplier one leaves it as it is
        alone = np.bincount(row)[row] == 1
        if not alone.any():
            break
        fixed[unit[alone]] = True
        left = ~fixed[unit]
        row, unit, power = row[left], unit[left], power[left]
    equations: dict[int, dict[int, Fraction]] = {}
    for form, number, coefficient in zip(row.tolist(), unit.tolist(), power.tolist(), strict=True):
        equations.setdefault(form, {})[size - 1 - number] = Fraction(coefficient)  # the last units are the free ones
    different = list({tuple(sorted(terms.items())): terms for terms in equations.values()}.values())
    solved = eliminated_signs(different) if signs else eliminated(different)
    return [u for u in range(size) if not fixed[u] and size - 1 - u not in solved]
