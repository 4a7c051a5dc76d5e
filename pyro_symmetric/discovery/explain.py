"""Why an axis of a parameter moves, or why it doesn't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyro_symmetric import arguments
from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.labels import Array
from pyro_symmetric.discovery.selection import named
from pyro_symmetric.discovery.structure import Structure


@dataclass(frozen=True)
class AxisExplanation:
    """The fate of one axis of one site.

    :param site: the parameter or running statistic.
    :param dim: the axis.
    :param length: its length; of an axis along which each slice has units of its own (the columns of a grouped kernel),
        their number in all slices together.
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

    def about(self, site: str | None = None, factor: str | None = None, only: str | None = None) -> Explanation:
        """The entries of one site or module, of one set of units, or of axes that move or stay.

        :param site: the name of a site or module, or a pattern such as ``"*.bias"``.
        :param factor: the name of units that lie along the axis.
        :param only: ``"pinned"``: axes of which some positions stay; ``"moved"``: axes of which some move.
        :raises ValueError: if no site or units have this name.
        """
        found = list(self)
        if site is not None:
            arguments.instance("site", site, str, "the name of a site or module")
            chosen = named("site", site, dict.fromkeys(axis.site for axis in self))
            found = [axis for axis in found if axis.site in chosen]
        if factor is not None:
            arguments.one_of("factor", factor, dict.fromkeys(name for axis in self for name in axis.units))
            found = [axis for axis in found if factor in axis.units]
        if only is not None:
            arguments.one_of("only", only, ("pinned", "moved"))
            found = [axis for axis in found if (axis.permuted < axis.length if only == "pinned" else axis.permuted)]
        return Explanation(found)

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
    every = ((leaf.site, *own) for leaf in facts.leaves.values() for own in enumerate(leaf.labels))
    for site, dim, labels in every:
        atoms = labels.reshape(-1)
        cells = structure.cell[structure.unit_class[atoms]]
        permuted = np.isin(cells, list(structure.cells))
        movers = {up for cell in np.unique(cells[permuted]).tolist() for up in (cell, *structure.cells[cell].parents)}
        own = tuple(name for mover, name in names.items() if mover in movers)
        reasons = _reasons(atoms[~permuted], facts, structure, first)
        axes.append(AxisExplanation(site, dim, len(permuted), int(permuted.sum()), own, reasons))
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
            why = facts.refinements[number].why
            why = f"pinned {why}" if why.startswith("because") else f"pinned by {why}"
        elif structure.individualised[classes[first[classes] == number]].any():
            why = "its units meet each other in a way that no product of symmetric groups describes"
        else:
            why = "each of its units plays a role of its own"
        found[why] = found.get(why, 0) + count
    return tuple(sorted(found, key=lambda why: -found[why])[:3])
