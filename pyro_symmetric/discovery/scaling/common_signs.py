"""Signs that all units of something share, as those of a whole vector that is normalised: ``LN(-z) = -LN(z)``.

Such a sign ties all units together, so that the equations don't fall into small systems. But units that are exchanged
have the same sign then: one unknown for each set of them is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pyro_symmetric.discovery.arrays import Array, components, distinct_rows
from pyro_symmetric.discovery.cells import Cells
from pyro_symmetric.discovery.scaling.facts import Facts, Multiple


def common_signs(facts: Facts, structure: Cells, equations: Sequence[Sequence[Multiple]], zero: Array) -> list[Array]:
    """For each independent common sign, the atoms that it flips.

    :param equations: those of signs, with odd coefficients alone.
    :param zero: the atoms whose sign is known to be one.
    """
    common = np.array(facts.common, dtype=np.int64)
    if not len(common) or zero[common].all():
        return []
    alike = _alike(facts, structure)
    alike[np.isin(alike, alike[zero])] = -1
    rows: set[frozenset[int]] = set()
    for terms in equations:
        columns = [alike[atoms] for _, atoms in terms]
        first = distinct_rows(*columns)[0]
        for row in zip(*(column[first].tolist() for column in columns), strict=True):
            rows.add(frozenset(unknown for unknown in row if unknown >= 0 and row.count(unknown) % 2))
    shared = np.unique(alike[common][alike[common] >= 0])
    pairs = np.array([(min(row), unknown) for row in rows for unknown in row], dtype=np.int64).reshape(-1, 2)
    _, component = components(int(alike.max()) + 1, *pairs.T)
    near = set(component[shared].tolist())
    tied = [row for row in rows if row and component[min(row)] in near]
    # Those that are shared come first, so that all others follow from them.
    order = {unknown: i for i, unknown in enumerate(dict.fromkeys([*shared.tolist(), *sorted(set().union(*tied))]))}
    solutions = _solutions((sum(1 << order[unknown] for unknown in row) for row in tied), len(shared))
    return [
        np.flatnonzero(np.isin(alike, [unknown for unknown, i in order.items() if solution >> i & 1]))
        for solution in solutions
    ]


def _alike(facts: Facts, structure: Cells) -> Array:
    """One number for atoms that the same array holds for units that are exchanged within one larger unit."""
    owners = {parent for cell in structure.cells.values() for parent in cell.parents}
    unit, count = np.arange(len(structure.cell)), len(structure.cell)
    for number, cell in structure.cells.items():
        if number not in owners:
            where = np.flatnonzero(structure.cell == number)
            columns = [cell.parents[up][structure.place[where]] for up in cell.direct]
            unit[where] = count + (distinct_rows(*columns)[1] if columns else 0)
            count += len(where)
    array = np.searchsorted(facts.starts, np.arange(facts.size), side="right")
    columns = [unit[structure.unit], structure.colour[structure.unit], structure.atom_colour, array]
    return distinct_rows(*columns)[1]


def _solutions(rows: Iterable[int], free: int) -> list[int]:
    """Solutions of equations modulo two, as bits; one for each of the first ``free`` unknowns that may be chosen."""
    pivots: dict[int, int] = {}
    for row in rows:
        while row and row.bit_length() in pivots:
            row ^= pivots[row.bit_length()]
        if row:
            pivots[row.bit_length()] = row
    found = []
    for i in range(free):
        if i + 1 not in pivots:
            solution = 1 << i
            for last in sorted(pivots):  # what comes before is known
                solution |= ((pivots[last] & solution).bit_count() % 2) << (last - 1)
            found.append(solution)
    return found
