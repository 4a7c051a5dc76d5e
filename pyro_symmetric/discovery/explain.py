"""Why an axis of a parameter moves, or why it doesn't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.labels import Array
from pyro_symmetric.discovery.structure import Structure


@dataclass(frozen=True)
class AxisExplanation:
    """What happens to one axis of one site.

    :param site: the parameter or running statistic.
    :param dim: the axis.
    :param length: its length; of the columns of a grouped kernel, which each group has for its own, their number in all
        groups together.
    :param permuted: how many of its positions are permuted.
    :param units: the units that lie there.
    :param reasons: why the others stay: the operator that pinned them, and its module.
    """

    site: str
    dim: int
    length: int
    permuted: int
    units: tuple[str, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        where = f"{self.site}[{self.dim}]"
        how = (
            f"{self.permuted} of {self.length} move with {', '.join(self.units)}"
            if self.permuted
            else f"all {self.length} stay"
        )
        return f"{where}: {how}" + (f"; {'; '.join(self.reasons)}" if self.reasons else "")


class Explanation(tuple[AxisExplanation, ...]):
    """One entry for each axis of each site; prints as a list."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__

    def pinned(self) -> tuple[AxisExplanation, ...]:
        """The axes of which some positions stay."""
        return tuple(axis for axis in self if axis.permuted < axis.length)

    def to_dict(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [asdict(axis) for axis in self]

    @classmethod
    def from_dict(cls, data: list[Mapping[str, Any]]) -> Explanation:
        """From JSON."""
        tuples = ("units", "reasons")
        return cls(AxisExplanation(**{**axis, **{name: tuple(axis[name]) for name in tuples}}) for axis in data)


def explain(facts: Facts, structure: Structure, names: Mapping[int, str]) -> Explanation:
    """For every axis of every site: who moves it, or which operator pinned it.

    :param names: cell -> name of its units; cells that ride along with others have none.
    """
    first = _first_reasons(facts, structure)
    axes = []
    for leaf in facts.leaves.values():
        for dim, part in enumerate(leaf.parts):
            atoms = leaf.columns.reshape(-1) if leaf.groups > 1 and dim == 1 else part.atoms
            cells = structure.cell[structure.unit_class[atoms]]
            permuted = np.isin(cells, list(structure.cells))
            movers = {
                up for cell in np.unique(cells[permuted]).tolist() for up in (cell, *structure.cells[cell].parents)
            }
            own = tuple(name for mover, name in names.items() if mover in movers)
            reasons = _reasons(atoms[~permuted], facts, structure, first)
            axes.append(AxisExplanation(leaf.site, dim, len(permuted), int(permuted.sum()), own, reasons))
    return Explanation(axes)


def _first_reasons(facts: Facts, structure: Structure) -> Array:
    """For each class: the first refinement that gave it a colour of its own, as its number (-1: none)."""
    first = np.full(len(structure.colour), -1, dtype=np.int64)
    for number in range(len(facts.refinements) - 1, -1, -1):
        refinement = facts.refinements[number]
        classes = structure.unit_class[refinement.atoms]
        if len(np.unique(refinement.colours)) > 1 or len(classes) == 1:
            first[classes] = number
    return first


def _reasons(atoms: Array, facts: Facts, structure: Structure, first: Array) -> tuple[str, ...]:
    """Why these positions stay, the most frequent reasons first."""
    if not len(atoms):
        return ()
    classes = structure.unit_class[atoms]
    numbers, counts = np.unique(first[classes], return_counts=True)
    found: dict[str, int] = {}
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if number >= 0:
            why = f"pinned by {facts.refinements[number].why}"
        elif structure.individualised[classes[first[classes] == number]].any():
            why = "its units meet each other in a way that no product of symmetric groups describes"
        else:
            why = "each of its units plays a role of its own"
        found[why] = found.get(why, 0) + count
    return tuple(sorted(found, key=lambda why: -found[why])[:3])
