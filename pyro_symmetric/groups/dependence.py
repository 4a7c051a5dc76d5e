r"""The multipliers of a group that are independent: some may do together what others do.

In ``einsum("b,hk,kh->b", x, w, v)`` each row of ``w`` can be flipped with its column of ``v``, and so can each column;
but flipping all rows is flipping all columns. A unit's multiplier :math:`f_u` enters an entry of a site with the power
that its axes add up to, so that the group acts through the linear forms :math:`\sum_u e_u \log f_u`, one for each entry
(for signs: modulo two), and the multipliers that act alike are the common zeros of these forms. There are as many
independent ones as the forms' rank: the units of its pivots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, vstack
from torch import Tensor

from pyro_symmetric.groups.arrangement import Arrangement
from pyro_symmetric.groups.units import Move


def independent_units(group: Arrangement, move: Move) -> dict[str, Tensor]:
    """Name -> bool ``units.shape``: units whose multipliers are independent and together do what all units' do.

    :param move: ``"flip"``, of which only odd powers count, or ``"scale"``.
    """
    sizes = {name: group[name].count for name in group.names(move)}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    forms = vstack([_forms_of_site(group, site, starts, sum(sizes.values())) for site in group.sites], "csr")
    independent = torch.zeros(sum(sizes.values()), dtype=torch.bool, device="cpu")
    independent[_pivots(forms, move == "flip")] = True
    pieces = independent.split(list(sizes.values()))
    return {name: piece.reshape(group[name].shape) for name, piece in zip(sizes, pieces, strict=True)}


# small steps --------------------------------------------------------------------------------------------------------


def _forms_of_site(group: Arrangement, site: str, starts: Mapping[str, int], size: int) -> Any:
    """Forms that span those of all entries of a site: integers ``(forms, size)``.

    An entry's form is the sum of one from each axis. These sums span what one entry's own form and, along each axis,
    the differences from that entry's place span.
    """
    own, differences = csr_array((1, size), dtype=np.int64), []
    for dim, members in group.members(site).items():
        shape, parts = (group.view_shapes[site][dim], size), []
        for name, axis in members:
            if name in starts and axis.exponent:
                place = axis.index.cpu().numpy()
                unit = np.broadcast_to(np.arange(place.shape[1]) + starts[name], place.shape)
                power = np.full(place.size, axis.exponent)
                parts.append(csr_array((power, (place.reshape(-1), unit.reshape(-1))), shape))
        if not parts:
            continue
        along = sum(parts[1:], parts[0])
        # The place that the fewest units multiply: if there is one without any, differences are single units.
        origin = along[[int(np.diff(along.indptr).argmin())]]
        own += origin
        differences.append(along - csr_array(np.ones((shape[0], 1), dtype=np.int64)) @ origin)
    return vstack([own, *differences], "csr")


def _pivots(forms: Any, signs: bool) -> list[int]:
    """The columns that no columns before them span: in rational numbers, or modulo two."""
    fixed, alone = np.zeros(forms.shape[1], dtype=bool), np.ones(1, dtype=bool)
    while alone.any():  # a form of one unit makes that unit a pivot, whatever other forms it occurs in
        forms = forms.multiply(~fixed).tocsr()
        forms.data = forms.data % 2 if signs else forms.data
        forms.eliminate_zeros()
        alone = np.diff(forms.indptr) == 1
        fixed[forms[alone].indices] = True
    ends = itertools.pairwise(forms.indptr.tolist())
    rows = {tuple(zip(forms.indices[i:j].tolist(), forms.data[i:j].tolist(), strict=True)) for i, j in ends} - {()}
    return [*np.flatnonzero(fixed).tolist(), *(_pivots_of_rows(rows, forms.shape[1], signs) if rows else ())]


def _pivots_of_rows(rows: Iterable[Sequence[tuple[int, int]]], size: int, signs: bool) -> tuple[int, ...]:
    """The same of rows ``(column, number), ..``, by exact elimination."""
    from sympy import GF, QQ  # takes a third of a second, which only those wait for who need it
    from sympy.polys.matrices import DomainMatrix

    field = GF(2) if signs else QQ
    matrix = {i: {column: field(number) for column, number in row} for i, row in enumerate(rows)}
    _, pivots = DomainMatrix(matrix, (len(matrix), size), field).rref()
    return tuple(pivots)
