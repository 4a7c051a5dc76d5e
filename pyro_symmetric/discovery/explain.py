"""Why an axis of a parameter moves, or why it doesn't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyro_symmetric import arguments
from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.cells import Cells
from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.selection import named
from pyro_symmetric.groups import Units


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
    :param chain: how this axis comes to that: the axes that tie it to the first one along which its units lie, or to
        what pins it, each with the operator that does.
    """

    site: str
    dim: int
    length: int
    permuted: int
    units: tuple[str, ...]
    reasons: tuple[str, ...]
    chain: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.site}[{self.dim}]"
        how = (
            f"{self.permuted} of {self.length} move with {', '.join(self.units)}"
            if self.permuted
            else f"all {self.length} stay"
        )
        return "; ".join([f"{where}: {how}", *self.reasons]) + "".join(f"\n    -> {step}" for step in self.chain)


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
        tuples = ("units", "reasons", "chain")
        return cls(AxisExplanation(**{**axis, **{name: tuple(axis[name]) for name in tuples}}) for axis in data)


def explain(flow: Flow, cells: Cells, units: Mapping[int, Units]) -> Explanation:
    """For every axis of every site: who moves it, or which operator pinned it.

    :param units: cell -> its units; cells that ride along with others have none.
    """
    first, chains = _first_reasons(flow, cells), _Chains(flow)
    moves, axes = np.zeros(max([int(cells.cell.max(initial=0)), *cells.cells]) + 1, dtype=bool), []
    moves[list(cells.cells)] = True
    for leaf in flow.leaves.values():
        for dim, part in enumerate(leaf.value.parts):
            atoms = part.atoms if leaf.slices is None or dim != 1 else np.unique(part.atoms)
            own = cells.cell[cells.unit[atoms]]
            permuted = moves[own]
            movers = {up for cell in np.unique(own[permuted]).tolist() for up in (cell, *cells.cells[cell].parents)}
            names = [one.name for mover, one in units.items() if mover in movers]
            numbers, reasons = _reasons(atoms[~permuted], flow, cells, first)
            if permuted.any():
                home = units[next(mover for mover in units if mover in movers)].axes[0]
                target = [flow.leaves[home.site].value.parts[home.dim].atoms]
            else:
                target = [flow.refinements[number].one for number in numbers[:1] if number >= 0]
            chain = chains.between(atoms, target[0]) if target else ()
            axes.append(AxisExplanation(leaf.site, dim, len(atoms), int(permuted.sum()), tuple(names), reasons, chain))
    return Explanation(axes)


class _Chains:
    """Shortest chains of facts between arrays of atoms, of which each was new at once."""

    def __init__(self, flow: Flow):
        self.flow, self.starts, self.trees = flow, np.array(flow.starts), dict[int, dict[int, int]]()
        self.names = {
            self._blocks(part.atoms)[0]: f"{leaf.site}[{dim}]"
            for leaf in flow.leaves.values()
            for dim, part in enumerate(leaf.value.parts)
            if part.atoms.size
        }
        self.near = dict[int, dict[int, int]]()  # an array -> those that it is tied to, and the fact that says so
        for one, other, number in (*flow.unions, *flow.relations):
            for a, b in {*zip(self._blocks(one), self._blocks(other), strict=True)}:
                self.near.setdefault(a, {}).setdefault(b, number)
                self.near.setdefault(b, {}).setdefault(a, number)

    def _blocks(self, atoms: Array) -> list[int]:
        """The arrays in which some of these atoms were new."""
        some = atoms.reshape(-1)[:: max(1, atoms.size // 16)]
        return (np.searchsorted(self.starts, some, side="right") - 1).tolist()

    def between(self, atoms: Array, target: Array) -> tuple[str, ...]:
        """The axes on the way, each with the operator that ties it to the one before."""
        if not atoms.size or not target.size:
            return ()
        start, end = self._blocks(atoms)[0], self._blocks(target)[0]
        towards, steps = self._tree(end), list[str]()
        while start != end and start in towards:
            start, before = towards[start], start
            origin = self.flow.origins[self.near[before][start]]
            steps.append(f"{self.names[start]} by {origin}" if start in self.names else origin)
        return tuple(steps)

    def _tree(self, end: int) -> dict[int, int]:
        """An array -> the next on its way to one of them."""
        if end not in self.trees:
            tree, waiting = {end: end}, [end]
            for block in waiting:
                new = [other for other in self.near.get(block, ()) if other not in tree]
                tree |= dict.fromkeys(new, block)
                waiting += new
            self.trees[end] = tree
        return self.trees[end]


def _first_reasons(flow: Flow, cells: Cells) -> Array:
    """For each class: the first refinement that gave it a colour of its own (-1: none)."""
    first = np.full(len(cells.colour), -1, dtype=np.int64)
    for number in range(len(flow.refinements) - 1, -1, -1):
        atoms, colours, _ = flow.refinements[number]
        if len(atoms) == 1 or (colours != colours[:1]).any():
            first[cells.unit[atoms]] = number
    return first


def _reasons(atoms: Array, flow: Flow, cells: Cells, first: Array) -> tuple[list[int], tuple[str, ...]]:
    """Why these positions stay, the most frequent reasons first: the refinements, and words."""
    classes = cells.unit[atoms]
    numbers, counts = np.unique(first[classes], return_counts=True)
    found: dict[str, int] = {}
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if number >= 0:
            why = flow.origins[flow.refinements[number].number]
            why = f"pinned {why}" if why.startswith("because") else f"pinned by {why}"
        elif cells.individualised[classes[first[classes] == number]].any():
            why = "its units meet each other in a way that no product of symmetric groups describes"
        else:
            why = "each of its units plays a role of its own"
        found[why] = found.get(why, 0) + count
    return numbers[counts.argsort()[::-1]].tolist(), tuple(sorted(found, key=lambda why: -found[why])[:3])
