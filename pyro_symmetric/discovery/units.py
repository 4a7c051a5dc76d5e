"""From cells to units that permute: their axes, index maps, nesting and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from pyro_symmetric.discovery.arrays import Array, components, distinct_rows, rank_within
from pyro_symmetric.discovery.cells import Cells
from pyro_symmetric.discovery.flow import Flow, Leaf
from pyro_symmetric.groups import Axis, Units

Place = tuple[str, int, int, bool]  # site, axis, how many axes it spans, whether the site is a buffer


def permuted_units(flow: Flow, cells: Cells) -> dict[int, Units]:
    """Cell -> its units, if they move, in order of first use; owners come before what lies inside them."""
    assembly = _Assembly(cells)
    for leaf in flow.leaves.values():
        if leaf.slices is None:
            for part in leaf.value.parts:
                assembly.add(leaf, part.axes[0], part.atoms)
        else:
            assembly.add_sliced(leaf, leaf.slices)
    return assembly.units({leaf.site: leaf.value.shape for leaf in flow.leaves.values()})


def fixed_units(flow: Flow, cells: Cells) -> list[Units]:
    """Units that nothing permutes, those that lie alike together.

    What operators hold for one unit is one, and so are places with the same numbers along several axes, as far as is
    known: of a mask's, or the network's inputs'.
    """
    axes, where, tied = list[Axis](), list[Array](), dict[bytes, Array]()
    one, other, units = list[Array](), list[Array](), list[Array]()
    for leaf in flow.leaves.values():
        for part in leaf.value.parts if leaf.slices is None else ():
            own = cells.unit[part.atoms]
            fixed = np.flatnonzero(~np.isin(cells.cell[own], list(cells.cells)))
            if not len(fixed) or (leaf.kernel and part.axes[0] > 1):  # pixels have no multipliers
                continue
            axes.append(Axis(leaf.site, part.axes[0], torch.from_numpy(fixed)[None], buffer=leaf.buffer))
            where.append(fixed)
            units.append(own[fixed])
            one.append(tied.setdefault(fixed.tobytes(), own[fixed]))
            other.append(own[fixed])
    if not axes:
        return []
    unit = components(len(cells.cell), np.concatenate(one), np.concatenate(other))[1][np.concatenate(units)]
    place, position = np.repeat(np.arange(len(axes)), list(map(len, where))), np.concatenate(where)
    order = np.lexsort([position, place, unit])
    unit, place, position = unit[order], place[order], position[order]
    alike: dict[bytes, list[Array]] = {}
    for start, count in zip(*np.unique(unit, return_index=True, return_counts=True)[1:], strict=True):
        own = slice(start, start + count)
        alike.setdefault(place[own].tobytes(), []).append(position[own])
    found = []
    for key, rows in alike.items():
        lying = zip(np.frombuffer(key, dtype=place.dtype), torch.from_numpy(np.stack(rows, 1)), strict=True)
        found.append([replace(axes[number], index=row[None]) for number, row in lying])
    return [Units(f"fixed {k}", own[0].index.shape[1], tuple(own), moves=frozenset()) for k, own in enumerate(found)]


class _Assembly:
    def __init__(self, cells: Cells):
        self.given, self.cells = cells, cells.cells
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

    def add(self, leaf: Leaf, dim: int, atoms: Array) -> None:
        """Note where the units of all cells lie along one axis."""
        lying = self._lying(atoms, leaf)
        for mover, units in lying.items():
            key = self._key(atoms, lying, {mover, *self.cells[mover].parents})
            self._add_blocks(mover, units, key, (leaf.site, dim, 1, leaf.buffer))

    def add_sliced(self, leaf: Leaf, slices: Array) -> None:
        """Note where units lie in a matrix whose rows fall into slices with columns of their own.

        Rows take whole slices along, column by column. If slices that are exchanged have their columns in different
        orders, that isn't enough: then rows, too, move entry by entry.
        """
        rows, every, *rest = (part.atoms for part in leaf.value.parts)
        columns = every[np.searchsorted(slices, np.arange(slices[-1] + 1))]
        by_row, by_column = self._lying(rows, leaf), self._lying(columns.reshape(-1), leaf)
        same = {m: (u.reshape(columns.shape) == u.reshape(columns.shape)[:, :1]).all(1) for m, u in by_column.items()}
        inside = {
            m: np.where(np.repeat(same[m], columns.shape[1]), -1, u) for m, u in by_column.items() if not same[m].all()
        }
        row, column = (grid.reshape(-1) for grid in np.indices(every.shape))
        column = slices[row] * columns.shape[1] + column

        def place(mover: int, units: Array, of_row: set[int], of_column: set[int]) -> None:
            one, other = self._key(rows, by_row, of_row)[row], self._key(columns.reshape(-1), inside, of_column)[column]
            self._add_blocks(mover, units, one * (other.max() + 1) + other, (leaf.site, 0, 2, leaf.buffer))

        aligned = all(
            self._aligned(by_column[m].reshape(columns.shape)[:, 0], same[m], inside, columns.shape) for m in by_column
        )
        for mover, units in by_row.items():
            own = {mover, *self.cells[mover].parents}
            if aligned:
                self._add_blocks(mover, units, self._key(rows, by_row, own), (leaf.site, 0, 1, leaf.buffer))
            else:
                place(mover, units[row], own, own - {mover})
        for mover, units in inside.items():
            above = set(self.cells[mover].parents)
            place(mover, units[column], above, {mover, *above})
        for dim, atoms in enumerate(rest, start=2):
            self.add(leaf, dim, atoms)

    def _aligned(self, owner: Array, whole: Array, inside: dict[int, Array], shape: tuple[int, ...]) -> bool:
        """True if slices that move as wholes have the units inside them in the same order of columns."""
        chosen = whole & (owner >= 0)
        ranks = (np.where(u < 0, -1, self.rank[m][u]).reshape(shape)[chosen] for m, u in inside.items())
        return all((rank == rank[:1]).all() for rank in ranks)

    def _lying(self, atoms: Array, leaf: Leaf) -> dict[int, Array]:
        """Cell -> for each of some positions, the unit of this cell that it belongs to, or -1."""
        classes = self.given.unit[atoms]
        cells, found = self.given.cell[classes], dict[int, Array]()
        for number in np.unique(cells).tolist():
            if number in self.cells:
                where = np.flatnonzero(cells == number)
                units = self.given.place[classes[where]]
                for mover, own in [(number, units), *((up, f[units]) for up, f in self.cells[number].parents.items())]:
                    if mover in self.rank:
                        found.setdefault(mover, np.full(len(atoms), -1))[where] = own
        self.of_images.update(found if leaf.kernel and leaf.value.dim > 2 else ())
        return found

    def _key(self, atoms: Array, lying: dict[int, Array], without: set[int]) -> Array:
        """Equal for positions that are alike in all but the units of some cells."""
        classes = self.given.unit[atoms]
        ranks = [np.where(units < 0, -1, self.rank[m][units]) for m, units in lying.items() if m not in without]
        copies = rank_within(classes, self.given.atom_colour[atoms])
        return distinct_rows(self.given.colour[classes], copies, *ranks)[1]

    def _add_blocks(self, mover: int, units: Array, key: Array, place: Place) -> None:
        """Group positions into blocks: within a block all but the unit is equal."""
        where = np.flatnonzero(units >= 0)
        number = self.number[mover][units[where]]
        order = np.lexsort([number, key[where]])
        count = self.cells[mover].size
        if len(order) % count or (number[order].reshape(-1, count) != np.arange(count)).any():
            raise RuntimeError(f"interchangeable units lie unevenly along axis {place[1]} of {place[0]!r}")
        self.blocks.setdefault(mover, {}).setdefault(place, []).append(where[order].reshape(-1, count))

    def units(self, shapes: dict[str, tuple[int, ...]]) -> dict[int, Units]:
        """Named after the module whose outputs are permuted: that of the first site in which the units lie."""
        has_inner = {cell.direct[0] for cell in self.cells.values() if len(cell.direct) == 1}
        built: dict[int, Units] = {}
        for mover in self._order():
            axes = tuple(
                _narrowed(Axis(site, dim, _in_order(blocks), 0, buffer, None, span), shapes[site])
                for (site, dim, span, buffer), blocks in self.blocks[mover].items()
            )
            size, direct = int(self.rank[mover].max()) + 1, self.cells[mover].direct
            name = module_name(axes[0].site)
            if mover in has_inner:  # units with an inner life are heads of attention, or groups of channels
                name += ".groups" if mover in self.of_images else ".heads"
            name = unused(name, [one.name for one in built.values()])
            parent = built[direct[0]].name if direct else None
            built[mover] = Units(name, size, axes, parent, self.cells[mover].size // size)
        return built

    def _order(self) -> list[int]:
        """Cells in order of first use, owners first."""
        chains = ([*self.cells[mover].parents, mover] for mover in self.blocks)
        chains = (sorted(chain, key=lambda number: len(self.cells[number].parents)) for chain in chains)
        return list(dict.fromkeys(mover for chain in chains for mover in chain))


# small steps --------------------------------------------------------------------------------------------------------


def _in_order(blocks: Sequence[Array]) -> torch.Tensor:
    """Blocks by their first position."""
    together = np.concatenate(blocks)
    return torch.from_numpy(together[together[:, 0].argsort()])


def _narrowed(axis: Axis, shape: Sequence[int]) -> Axis:
    """An axis that spans two as one that spans but one, if units lie alike at all places of the other."""
    if axis.span == 1:
        return axis
    rows, columns = shape[axis.dim : axis.dim + 2]
    row, column = np.divmod(axis.index.numpy(), columns)
    for dim, along, across, others in ((0, row, column, columns), (1, column, row, rows)):
        order = np.lexsort([along[:, 0], across[:, 0]])
        if (across != across[:, :1]).any() or len(order) % others:
            continue
        alike, places = along[order].reshape(others, -1, along.shape[1]), across[order, 0].reshape(others, -1)
        if (places == np.arange(others)[:, None]).all() and (alike == alike[:1]).all():
            return replace(axis, dim=axis.dim + dim, span=1, index=torch.from_numpy(np.ascontiguousarray(alike[0])))
    return axis


def module_name(site: str) -> str:
    """``layer.conv.weight`` -> ``layer.conv``; a site that isn't simply a weight or bias keeps its own name, too."""
    module, _, own = site.partition(".parametrizations.")[0].rpartition(".")
    if ".parametrizations." in site:
        return site.partition(".parametrizations.")[0]
    for recurrent in ("weight_ih_", "weight_hh_", "bias_ih_", "bias_hh_"):
        own = own.removeprefix(recurrent)
    plain = own in ("weight", "bias", "in_proj_weight", "in_proj_bias", "weight_g", "weight_v")
    return module if plain and module else f"{module}.{own}" if module else own


def unused(name: str, taken: Iterable[str]) -> str:
    """The name, with a number behind it if it is taken."""
    taken = set(taken)
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}~{number}"
    return candidate
