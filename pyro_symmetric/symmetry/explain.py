"""Why an axis of a parameter moves, or why it doesn't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyro_symmetric.symmetry.factor import Axis
from pyro_symmetric.symmetry.facts import Facts, Leaf
from pyro_symmetric.symmetry.labels import Array
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.structure import Structure


@dataclass(frozen=True)
class AxisExplanation:
    """What happens to one axis of one site.

    :param site: the parameter or running statistic.
    :param dim: the axis.
    :param length: its length; of the columns of a grouped kernel, which each group has for its own, their number in all
        groups together.
    :param moved: how many of its positions some factor moves.
    :param factors: the factors that move them (of nested ones, the first of each kind).
    :param reasons: why the others stay: the operator that pinned them, and its module.
    """

    site: str
    dim: int
    length: int
    moved: int
    factors: tuple[str, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        where = f"{self.site}[{self.dim}]"
        how = (
            f"{self.moved} of {self.length} move with {', '.join(self.factors)}"
            if self.moved
            else f"all {self.length} stay"
        )
        return f"{where}: {how}" + (f"; {'; '.join(self.reasons)}" if self.reasons else "")


@dataclass(frozen=True)
class Explanation:
    """One entry for each axis of each site; prints as a list."""

    axes: tuple[AxisExplanation, ...] = ()

    def __str__(self) -> str:
        return "\n".join(str(axis) for axis in self.axes)

    __repr__ = __str__

    def pinned(self) -> tuple[AxisExplanation, ...]:
        """The axes of which some positions stay."""
        return tuple(axis for axis in self.axes if axis.moved < axis.length)

    def to_dict(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [asdict(axis) for axis in self.axes]

    @classmethod
    def from_dict(cls, data: list[Mapping[str, Any]]) -> Explanation:
        """From JSON."""
        return cls(
            tuple(
                AxisExplanation(**{**a, "factors": tuple(a["factors"]), "reasons": tuple(a["reasons"])}) for a in data
            )
        )


def explain(facts: Facts, structure: Structure, group: PermutationGroup) -> Explanation:
    """For every axis of every site: who moves it, or which operator pinned it."""
    first = _first_reasons(facts, structure)
    movers: dict[str, list[tuple[str, Axis]]] = {}
    for name in group.factors:
        for axis in group.factor(name).axes:
            movers.setdefault(axis.site, []).append((name.partition("[")[0], axis))
    axes = []
    for leaf in facts.leaves.values():
        for dim, part in enumerate(leaf.parts):
            atoms = leaf.columns.reshape(-1) if leaf.groups > 1 and dim == 1 else part.atoms
            moved = np.zeros(len(atoms), dtype=bool)
            names: dict[str, None] = {}
            for name, axis in movers.get(leaf.site, []):
                positions = _moved(axis, leaf, dim)
                moved[positions] = True
                if len(positions):
                    names.setdefault(name)
            reasons = _reasons(atoms[~moved], facts, structure, first)
            axes.append(AxisExplanation(leaf.site, dim, len(moved), int(moved.sum()), tuple(names), reasons))
    return Explanation(tuple(axes))


def _moved(axis: Axis, leaf: Leaf, dim: int) -> Array:
    """The positions of a leaf's axis (of columns: counted through all groups) that a factor's axis moves."""
    index = axis.index.numpy()
    if axis.span == 1:
        return index.reshape(-1) if axis.dim == dim else index[:0, 0]
    if dim > 1:
        return index[:0, 0]
    rows, columns = np.divmod(index, leaf.shape[1])
    found = rows if dim == 0 else rows * leaf.groups // leaf.shape[0] * leaf.shape[1] + columns
    return np.unique(found[(found != found[:, :1]).any(1)])


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
