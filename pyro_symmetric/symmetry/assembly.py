"""From solved structure to the factors of a permutation group: their axes, index maps, nesting and names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from pyro_symmetric.symmetry.facts import Facts, Leaf
from pyro_symmetric.symmetry.forest import rank_within
from pyro_symmetric.symmetry.labels import Array, distinct_rows
from pyro_symmetric.symmetry.permutation import Axis, Factor
from pyro_symmetric.symmetry.structure import Structure

Instance = tuple[int, int]  # a cell, and which of its owners
Place = tuple[str, int, int, bool]  # site, axis, how many axes it spans, whether the site is a buffer
Units = dict[int, Array]  # cell -> for each position, the unit of this cell that it belongs to, or -1


def factors_of(facts: Facts, structure: Structure) -> list[Factor]:
    """One factor for each free cell, and one inside each owner of each nested cell; in order of first use.

    Owners come before what lies inside them.
    """
    assembly = _Assembly(structure)
    for leaf in facts.leaves.values():
        image = len(leaf.shape) > 2
        for dim, part in enumerate(leaf.parts):
            if leaf.groups == 1 or dim > 1:
                assembly.add((leaf.site, dim, 1, leaf.buffer), part.atoms, image)
        if leaf.groups > 1:
            assembly.add_kernel(leaf, image)
    return assembly.factors()


class _Assembly:
    def __init__(self, structure: Structure):
        self.structure = structure
        self.cells = structure.cells
        self.rows: dict[Instance, dict[Place, list[Array]]] = {}
        self.of_images: set[int] = set()
        self.owner: dict[int, Array] = {}
        self.rank: dict[int, Array] = {}
        for number, cell in self.cells.items():
            if len(cell.direct) < 2:
                self.owner[number] = (
                    cell.parents[cell.direct[0]] if cell.direct else np.zeros(cell.size, dtype=np.int64)
                )
                self.rank[number] = rank_within(self.owner[number])

    def add(self, place: Place, atoms: Array, image: bool) -> None:
        """Note where the units of all factors lie along one axis."""
        units = self._units(atoms, image)
        for mover, own in units.items():
            self._add_blocks(mover, own, self._key(atoms, units, mover), place)

    def add_kernel(self, leaf: Leaf, image: bool) -> None:
        """Note where units lie in a grouped kernel: its rows, and columns that span rows of one group only.

        Rows take whole groups along, column by column. Where groups that are exchanged have their columns in different
        orders that isn't enough: then rows, too, are moved entry by entry.
        """
        rows, columns = leaf.parts[0].atoms, leaf.columns.reshape(-1)
        by_row, by_column = self._units(rows, image), self._units(columns, image)
        shape = leaf.columns.shape
        whole, inside = {}, {}  # who moves a group with all of its columns, who moves columns within their group
        for mover, units in by_column.items():
            same = (units.reshape(shape) == units.reshape(shape)[:, :1]).all(1)
            whole[mover] = np.where(same, units.reshape(shape)[:, 0], -1)
            if not same.all():
                inside[mover] = np.where(same.repeat(shape[1]), -1, units)
        aligned = all(self._aligned(units, inside, shape) for units in whole.values())
        if aligned:
            self.add((leaf.site, 0, 1, leaf.buffer), rows, image)
        # From here on positions are entries (row, column), flattened.
        entry_row, entry = np.divmod(np.arange(len(rows) * shape[1]), shape[1])
        entry_column = entry_row * shape[0] // len(rows) * shape[1] + entry
        place = leaf.site, 0, 2, leaf.buffer
        for mover, units in {} if aligned else by_row.items():
            keys = self._key(rows, by_row, mover)[entry_row], self._key(columns, inside)[entry_column]
            self._add_blocks(mover, units[entry_row], _paired(*keys), place)
        for mover, units in inside.items():
            keys = self._key(rows, by_row)[entry_row], self._key(columns, inside, mover)[entry_column]
            self._add_blocks(mover, units[entry_column], _paired(*keys), place)

    def _aligned(self, group: Array, inside: Units, shape: tuple[int, ...]) -> bool:
        """Whether groups that move, with these units, have the units inside them in the same order of columns."""
        for mover, units in inside.items():
            rank = np.where(units < 0, -1, self.rank[mover][units]).reshape(shape)[group >= 0]
            if (rank != rank[:1]).any():
                return False
        return True

    def _units(self, atoms: Array, image: bool) -> Units:
        """Who moves the positions along an axis."""
        classes = self.structure.unit_class[atoms]
        cells = self.structure.cell[classes]
        found: Units = {}
        for number in np.unique(cells).tolist():
            if number not in self.cells:
                continue
            where = np.flatnonzero(cells == number)
            units = self.structure.place[classes[where]]
            for mover, own in [(number, units), *((up, f[units]) for up, f in self.cells[number].parents.items())]:
                if mover in self.rank:
                    found.setdefault(mover, np.full(len(atoms), -1))[where] = own
        self.of_images.update(found if image else ())
        return found

    def _key(self, atoms: Array, units: Units, without: int | None = None) -> Array:
        """Equal for positions that are alike in all but the unit of one cell, and perhaps in who owns this unit."""
        classes = self.structure.unit_class[atoms]
        ranks = [np.where(u < 0, -1, self.rank[m][u]) for m, u in units.items() if m != without]
        numbers = _numbered(self.structure.atom_colour[atoms], classes)
        return distinct_rows(self.structure.colour[classes], numbers, *ranks)[1]

    def _add_blocks(self, mover: int, units: Array, key: Array, place: Place) -> None:
        """Group positions into blocks: within a block all but the unit is equal."""
        where = np.flatnonzero(units >= 0)
        owner, rank = self.owner[mover][units[where]], self.rank[mover][units[where]]
        order = np.lexsort([rank, key[where], owner])
        size = int(self.rank[mover].max()) + 1
        blocks, ranks = where[order].reshape(-1, size), rank[order].reshape(-1, size)
        if (ranks != np.arange(size)).any():
            raise RuntimeError(f"units of one factor lie unevenly along axis {place[1]} of {place[0]!r}")
        owners = owner[order].reshape(-1, size)[:, 0]
        for instance in np.unique(owners).tolist():
            self.rows.setdefault((mover, instance), {}).setdefault(place, []).append(blocks[owners == instance])

    def factors(self) -> list[Factor]:
        names = self._names()
        built = []
        for instance in self._order():
            axes = tuple(
                Axis(site, dim, torch.from_numpy(_in_order(np.concatenate(rows))), buffer, span)
                for (site, dim, span, buffer), rows in self.rows[instance].items()
            )
            parent = self._parent(instance)
            size = int(self.rank[instance[0]].max()) + 1
            slot = None if parent is None else int(self.rank[parent[0]][instance[1]])
            built.append(Factor(names[instance], size, axes, None if parent is None else names[parent], slot))
        return built

    def _parent(self, instance: Instance) -> Instance | None:
        """The factor whose unit this one lies in."""
        cell = self.cells[instance[0]]
        if not cell.direct:
            return None
        above = cell.direct[0]
        return above, int(self.owner[above][instance[1]])

    def _order(self) -> list[Instance]:
        """Families in order of first use, owners first."""
        first: dict[int, int] = {}
        for position, (mover, _) in enumerate(self.rows):
            first.setdefault(mover, position)
        done: list[int] = []

        def visit(mover: int) -> None:
            if mover not in done:
                for above in self.cells[mover].direct:
                    visit(above)
                done.append(mover)

        for mover in sorted(first, key=first.__getitem__):
            visit(mover)
        return [instance for mover in done for instance in sorted(i for i in self.rows if i[0] == mover)]

    def _names(self) -> dict[Instance, str]:
        """After the module whose outputs are permuted: that of the first site in which the units lie."""
        has_inner = {cell.direct[0] for cell in self.cells.values() if len(cell.direct) == 1}
        names: dict[Instance, str] = {}
        families: dict[int, str] = {}
        for mover, instance in self._order():
            if mover not in families:
                site = next(site for site, *_ in self.rows[mover, instance])
                base = module_name(site) + (self._whole(mover) if mover in has_inner else "")
                families[mover] = _unused(base, families.values())
            names[mover, instance] = families[mover] + self._path((mover, instance))
        return names

    def _whole(self, mover: int) -> str:
        """What units with an inner life are called: heads of attention, groups of channels."""
        return ".groups" if mover in self.of_images else ".heads"

    def _path(self, instance: Instance) -> str:
        parent = self._parent(instance)
        if parent is None:
            return ""
        return f"{self._path(parent)}[{int(self.rank[parent[0]][instance[1]])}]"


def module_name(site: str) -> str:
    """``layer.conv.weight`` -> ``layer.conv``; a site that isn't simply a weight or bias keeps its own name, too."""
    module, _, own = site.partition(".parametrizations.")[0].rpartition(".")
    if ".parametrizations." in site:
        return site.partition(".parametrizations.")[0]
    for recurrent in ("weight_ih_", "weight_hh_", "bias_ih_", "bias_hh_"):
        own = own.removeprefix(recurrent)
    plain = own in ("weight", "bias", "in_proj_weight", "in_proj_bias", "weight_g", "weight_v")
    return module if plain and module else f"{module}.{own}" if module else own


def _in_order(blocks: Array) -> Array:
    """Blocks by their first position."""
    return blocks[blocks[:, 0].argsort()]


def _unused(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}~{number}"
    return candidate


def _paired(one: Array, other: Array) -> Array:
    """One number for each pair of small numbers."""
    return one * (int(other.max(initial=0)) + 1) + other


def _numbered(colours: Array, classes: Array) -> Array:
    """Among the positions of each class: the rank of its atom's colour (0 where a class has one position)."""
    _, where = np.unique(colours, return_inverse=True)
    order = np.lexsort([where, classes])
    sorted_classes = classes[order]
    starts = np.r_[True, sorted_classes[1:] != sorted_classes[:-1]]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - first
    return rank
