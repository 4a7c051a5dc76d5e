"""From solved structure to units that permute: their axes, index maps, nesting and names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pyro_symmetric.discovery.facts import Facts, Leaf
from pyro_symmetric.discovery.labels import Array, distinct_rows, rank_within
from pyro_symmetric.discovery.slices import Run, Slices, narrowed
from pyro_symmetric.discovery.structure import Structure
from pyro_symmetric.groups import Axis, Units

Place = tuple[str, int, int, bool]  # site, axis, how many axes it spans, whether the site is a buffer
Lying = dict[int, Array]  # cell -> for each position, the unit of this cell that it belongs to, or -1


def permuted_units(facts: Facts, structure: Structure) -> dict[int, Units]:
    """Cell -> its units, if they move, in order of first use; owners come before what lies inside them."""
    assembly = _Assembly(structure)
    for leaf in facts.leaves.values():
        image = leaf.site in facts.kernels and len(leaf.shape) > 2
        for dim, atoms in leaf.plain:
            if leaf.slices is None or dim != leaf.slices.axis:
                assembly.add((leaf.site, dim, 1, leaf.buffer), atoms, image)
        if leaf.slices is not None:
            assembly.add_sliced(leaf, leaf.slices, image)
    return assembly.units({leaf.site: leaf.shape for leaf in facts.leaves.values()})


class _Columns(NamedTuple):
    """Columns of slices, one slice after the other: their atoms; who moves them within their slice; and whether slices
    that are exchanged have them in the same order.
    """

    atoms: Array
    inside: Lying
    aligned: bool


class _Assembly:
    def __init__(self, structure: Structure):
        self.structure = structure
        self.cells = structure.cells
        self.blocks: dict[int, dict[Place, list[Array]]] = {}
        self.of_images: set[int] = set()
        self.rank: dict[int, Array] = {}  # of each unit among those of its owner
        self.number: dict[int, Array] = {}  # of each unit through all owners, in the order of these
        for cell in sorted(self.cells, key=lambda number: len(self.cells[number].parents)):  # owners first
            own = self.cells[cell]
            if len(own.direct) > 1:  # rides along with two others
                continue
            owner = np.zeros(own.size, dtype=np.int64)
            if own.direct:
                owner = self.number[own.direct[0]][own.parents[own.direct[0]]]
            self.rank[cell] = rank_within(owner)
            self.number[cell] = owner * (int(self.rank[cell].max()) + 1) + self.rank[cell]

    def add(self, place: Place, atoms: Array, image: bool) -> None:
        """Note where the units of all cells lie along one axis."""
        lying = self._lying(atoms, image)
        for mover, units in lying.items():
            self._add_blocks(mover, units, self._key(atoms, lying, {mover, *self.cells[mover].parents}), place)

    def add_sliced(self, leaf: Leaf, slices: Slices, image: bool) -> None:
        """Note where units lie in a leaf whose rows (the axis that is cut) fall into slices with columns of their own.

        Rows take whole slices along, column by column. If slices that are exchanged have their columns in different
        orders, that isn't enough: then rows, too, move entry by entry.
        """
        rows = leaf.labels[slices.axis]
        by_row = self._lying(rows, image)
        columns = {dim: self._columns(leaf.labels[dim], image) for dim in slices.dims}
        tangled = [dim for dim, own in columns.items() if not own.aligned]
        if not tangled:
            self.add((leaf.site, slices.axis, 1, leaf.buffer), rows, image)
        else:
            run = Run(leaf.shape, [slices.axis, *tangled])
            for mover, units in by_row.items():
                above = set(self.cells[mover].parents)
                keys = {slices.axis: self._key(rows, by_row, {mover, *above})}
                keys |= {dim: self._key(columns[dim].atoms, columns[dim].inside, above) for dim in tangled}
                self._add_entries(mover, slices.axis, units, keys, run, leaf)
        for dim, own in columns.items():
            run = Run(leaf.shape, [slices.axis, dim])
            for mover, units in own.inside.items():
                above = set(self.cells[mover].parents)
                keys = {slices.axis: self._key(rows, by_row, above)}
                keys[dim] = self._key(own.atoms, own.inside, {mover, *above})
                self._add_entries(mover, dim, units, keys, run, leaf)

    def _add_entries(self, mover: int, dim: int, units: Array, keys: dict[int, Array], run: Run, leaf: Leaf) -> None:
        """Note where units lie among the entries of a run of axes.

        :param units: of each row, or, slice by slice, of each column ``dim``.
        :param keys: axis -> for each row, or each column, a number of what it is alike in apart from these units.
        """
        slices = leaf.slices
        assert slices is not None
        row = run.places[slices.axis]

        def number(axis: int) -> Array:
            return row if axis == slices.axis else slices.of[row] * leaf.shape[axis] + run.places[axis]

        key = np.zeros(len(row), dtype=np.int64)
        for axis in run.dims:
            key = _paired(key, keys[axis][number(axis)] if axis in keys else run.places[axis])
        self._add_blocks(mover, units[number(dim)], key, (leaf.site, run.dims[0], len(run.dims), leaf.buffer))

    def _columns(self, labels: Array, image: bool) -> _Columns:
        """The movers of the columns of slices, ``labels``."""
        by_column, inside, whole = self._lying(labels.reshape(-1), image), {}, []
        for mover, units in by_column.items():
            units = units.reshape(labels.shape)
            same = (units == units[:, :1]).all(1)
            whole.append(np.where(same, units[:, 0], -1))
            if not same.all():
                inside[mover] = np.where(same[:, None], -1, units).reshape(-1)
        aligned = all(self._aligned(units, inside, labels.shape) for units in whole)
        return _Columns(labels.reshape(-1), inside, aligned)

    def _aligned(self, group: Array, inside: Lying, shape: tuple[int, ...]) -> bool:
        """True if groups that move, with these units, have the units inside them in the same order of columns."""
        for mover, units in inside.items():
            rank = np.where(units < 0, -1, self.rank[mover][units]).reshape(shape)[group >= 0]
            if (rank != rank[:1]).any():
                return False
        return True

    def _lying(self, atoms: Array, image: bool) -> Lying:
        """The movers of the positions along an axis."""
        classes = self.structure.unit_class[atoms]
        cells = self.structure.cell[classes]
        found: Lying = {}
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

    def _key(self, atoms: Array, lying: Lying, without: set[int]) -> Array:
        """Equal for positions that are alike in all but the units of some cells."""
        classes = self.structure.unit_class[atoms]
        ranks = [np.where(units < 0, -1, self.rank[m][units]) for m, units in lying.items() if m not in without]
        copies = rank_within(classes, self.structure.atom_colour[atoms])
        return distinct_rows(self.structure.colour[classes], copies, *ranks)[1]

    def _add_blocks(self, mover: int, units: Array, key: Array, place: Place) -> None:
        """Group positions into blocks: within a block all but the unit is equal."""
        where = np.flatnonzero(units >= 0)
        number = self.number[mover][units[where]]
        order = np.lexsort([number, key[where]])
        count = self.cells[mover].size
        if len(order) % count or (number[order].reshape(-1, count) != np.arange(count)).any():
            raise RuntimeError(f"interchangeable units lie unevenly along axis {place[1]} of {place[0]!r}")
        self.blocks.setdefault(mover, {}).setdefault(place, []).append(where[order].reshape(-1, count))

    def units(self, shapes: Mapping[str, Sequence[int]]) -> dict[int, Units]:
        """Named after the module whose outputs are permuted: that of the first site in which the units lie."""
        has_inner = {cell.direct[0] for cell in self.cells.values() if len(cell.direct) == 1}
        built: dict[int, Units] = {}
        for mover in self._order():
            axes = tuple(
                narrowed(
                    Axis(site, dim, torch.from_numpy(_in_order(np.concatenate(blocks))), 0, buffer, None, span),
                    shapes[site],
                )
                for (site, dim, span, buffer), blocks in self.blocks[mover].items()
            )
            size, direct = int(self.rank[mover].max()) + 1, self.cells[mover].direct
            parent = built[direct[0]].name if direct else None
            name = module_name(axes[0].site)
            if mover in has_inner:  # units with an inner life are heads of attention, or groups of channels
                name += ".groups" if mover in self.of_images else ".heads"
            name = unused(name, [one.name for one in built.values()])
            built[mover] = Units(name, size, axes, parent, self.cells[mover].size // size)
        return built

    def _order(self) -> list[int]:
        """Cells in order of first use, owners first."""
        chains = ([*self.cells[mover].parents, mover] for mover in self.blocks)
        chains = (sorted(chain, key=lambda number: len(self.cells[number].parents)) for chain in chains)
        return list(dict.fromkeys(mover for chain in chains for mover in chain))


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


def unused(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}~{number}"
    return candidate


def _paired(one: Array, other: Array) -> Array:
    """One number for each pair of small numbers."""
    return one * (int(other.max(initial=0)) + 1) + other
