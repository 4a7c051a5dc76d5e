"""Why an axis of a parameter moves, or why it doesn't."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from pyro_symmetric import arguments
from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.cells import Cells
from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.groups import Units


class AxisExplanation(NamedTuple):
    """The fate of one axis of one site.

    :param site: the parameter or running statistic.
    :param dim: the axis.
    :param length: its length; of an axis along which each slice has units of its own (the columns of a grouped kernel),
        their number in all slices together.
    :param permuted: how many of its positions are permuted.
    :param units: the units that lie there.
    :param reasons: why the others stay, the most frequent reasons first: the operator that pinned them, and its module.
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
        moved = f"{self.permuted} of {self.length} move with {', '.join(self.units)}"
        fate = moved if self.permuted else f"all {self.length} stay"
        head = "; ".join([f"{self.site}[{self.dim}]: {fate}", *self.reasons])
        return "\n    -> ".join([head, *self.chain])


class Explanation(tuple[AxisExplanation, ...]):
    """One entry for each axis of each site; prints as a list."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__

    def about(self, site: str) -> Explanation:
        """The entries of a site or module, by its name or a pattern such as ``"*.bias"``.

        :raises ValueError: if no site has this name.
        """
        arguments.instance("site", site, str, "the name of a site or module")
        chosen = named("site", site, dict.fromkeys(axis.site for axis in self))
        return Explanation(axis for axis in self if axis.site in chosen)

    def to_dict(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [axis._asdict() for axis in self]

    @classmethod
    def from_dict(cls, data: list[Mapping[str, Any]]) -> Explanation:
        """From JSON."""
        tuples = ("units", "reasons", "chain")
        return cls(AxisExplanation(**{**axis, **{name: tuple(axis[name]) for name in tuples}}) for axis in data)


Names = str | Iterable[str]
NO_PRODUCT = "no product of permutations was found for them"


def named(argument: str, names: Names, sites: Iterable[str]) -> set[str]:
    """Those of some sites that are named: by their own name, by that of a module, or by a pattern such as ``*.bias``.

    :param argument: the name of the argument that holds the names.
    :raises ValueError: if a name fits no site.
    """
    sites, found = list(sites), set()
    for name in [names] if isinstance(names, str) else arguments.listed(argument, names, str, "names"):
        own = {site for site in sites if site == name or site.startswith(f"{name}.") or fnmatchcase(site, name)}
        if not own:
            raise ValueError(
                f"{argument} names {name!r}, which is no module, parameter or buffer of the network; its sites are "
                f"{sites[:6]}{' and others' if len(sites) > 6 else ''}, and '*' stands for any text"
            )
        found |= own
    return found


def explain(flow: Flow, cells: Cells, units: Mapping[int, Units]) -> Explanation:
    """For every axis of every site: who moves it, or which operator pinned it.

    :param units: cell -> its units; cells that ride along with others have none.
    """
    first, chains, axes = _first_refinements(flow, cells), _Chains(flow), list[AxisExplanation]()
    for leaf in flow.leaves.values():
        for dim, part in enumerate(leaf.value.parts):
            atoms = np.unique(part.atoms)
            own = cells.cell[cells.unit[atoms]]
            moves = np.isin(own, list(cells.cells))
            movers = {up for cell in np.unique(own[moves]).tolist() for up in (cell, *cells.cells[cell].parents)}
            lying = [one for mover, one in units.items() if mover in movers]
            numbers, counts = np.unique(first[cells.unit[atoms[~moves]]], return_counts=True)
            numbers, chain = numbers[counts.argsort()[::-1]].tolist(), tuple[str, ...]()
            if lying:
                home = lying[0].axes[0]
                chain = chains.between(atoms, flow.leaves[home.site].value.parts[home.dim].atoms)
            elif numbers and numbers[0] >= 0:
                chain = chains.between(atoms, flow.refinements[numbers[0]].one)
            reasons = tuple(dict.fromkeys(_reason(flow, cells, number) for number in numbers))
            names = tuple(one.name for one in lying)
            axes.append(AxisExplanation(leaf.site, dim, len(atoms), int(moves.sum()), names, reasons[:3], chain))
    return Explanation(axes)


# small steps --------------------------------------------------------------------------------------------------------


def _first_refinements(flow: Flow, cells: Cells) -> Array:
    """For each class: the first refinement that gave it a colour of its own (-1: none)."""
    first = np.full(len(cells.colour), -1, dtype=np.int64)
    for number in range(len(flow.refinements) - 1, -1, -1):
        atoms, colours, _ = flow.refinements[number]
        if len(atoms) == 1 or (colours != colours[:1]).any():
            first[cells.unit[atoms]] = number
    return first


def _reason(flow: Flow, cells: Cells, number: int) -> str:
    """Why units stay, by the refinement that gave them a colour of their own."""
    if number < 0:
        return NO_PRODUCT if cells.apart else "each of its units plays a role of its own"
    why = flow.origins[flow.refinements[number].number]
    return f"pinned {why}" if why.startswith("because") else f"pinned by {why}"


class _Chains:
    """Shortest chains of facts between arrays of atoms, of which each was new at once."""

    def __init__(self, flow: Flow):
        self.flow, self.starts, self.trees = flow, np.array(flow.starts), dict[int, dict[int, int]]()
        leaves = [(leaf.site, dim, part) for leaf in flow.leaves.values() for dim, part in enumerate(leaf.value.parts)]
        self.names = {self._blocks(part.atoms)[0]: f"{site}[{dim}]" for site, dim, part in leaves if part.atoms.size}
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
        block, end, steps = self._blocks(atoms)[0], self._blocks(target)[0], list[str]()
        if end not in self.trees:
            self.trees[end], waiting = {end: end}, [end]  # an array -> the next on its way to the end
            for at in waiting:
                new = [other for other in self.near.get(at, ()) if other not in self.trees[end]]
                self.trees[end] |= dict.fromkeys(new, at)
                waiting += new
        while block != end and block in self.trees[end]:
            block, before = self.trees[end][block], block
            origin = self.flow.origins[self.near[before][block]]
            steps.append(f"{self.names[block]} by {origin}" if block in self.names else origin)
        return tuple(steps)
