"""From cells to units that permute: their axes, index maps, nesting and names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from pyro_symmetric.discovery.arrays import Array, components, distinct_rows, rank_within
from pyro_symmetric.discovery.cells import Cells
from pyro_symmetric.discovery.flow import Flow, Leaf
from pyro_symmetric.groups import Axis, Units

# Site, axis, how many axes it spans, whether the site is a buffer; whether units lie along the columns of both axes.
Place = tuple[str, int, int, bool, bool]


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
    axes, tied, pairs = list[Axis](), dict[bytes, Array](), list[tuple[Array, Array]]()
    for leaf in flow.leaves.values():
        for part in leaf.value.parts if leaf.slices is None else ():
            own = cells.unit[part.atoms]
            fixed = np.flatnonzero(~np.isin(cells.cell[own], list(cells.cells)))
            if len(fixed) and not (leaf.kernel and part.axes[0] > 1):  # pixels have no multipliers
                axes.append(Axis(leaf.site, part.axes[0], torch.from_numpy(fixed)[None], buffer=leaf.buffer))
                pairs.append((tied.setdefault(fixed.tobytes(), own[fixed]), own[fixed]))
    if not axes:
        return []
    _, unit = components(len(cells.cell), *map(np.concatenate, zip(*pairs, strict=True)))
    lying = defaultdict[int, list[tuple[int, int]]](list)  # of each unit: the number of an axis, and a position there
    for number, (axis, (_, own)) in enumerate(zip(axes, pairs, strict=True)):
        for one, position in zip(unit[own].tolist(), axis.index[0].tolist(), strict=True):
            lying[one].append((number, position))
    alike = defaultdict[tuple[int, ...], list[tuple[int, ...]]](list)
    for places in lying.values():
        numbers, positions = zip(*places, strict=True)
        alike[numbers].append(positions)
    found = list[Units]()
    for numbers, rows in alike.items():
        lines = zip(numbers, torch.tensor(rows, device="cpu").T, strict=True)
        own_axes = tuple(replace(axes[number], index=line[None]) for number, line in lines)
        found.append(Units(f"fixed {len(found)}", len(rows), own_axes, moves=frozenset()))
    return found


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
            self._add_blocks(mover, units, key, (leaf.site, dim, 1, leaf.buffer, False))

    def add_sliced(self, leaf: Leaf, slices: Array) -> None:
        """Note entry by entry where units lie in a matrix whose rows fall into slices with columns of their own.

        Units that hold all columns of a slice move with its rows.
        """
        rows, every, *rest = (part.atoms for part in leaf.value.parts)
        columns = every[np.searchsorted(slices, np.arange(slices[-1] + 1))]
        by_row, inside = self._lying(rows, leaf), dict[int, Array]()
        for mover, units in self._lying(columns.reshape(-1), leaf).items():
            apart = (units.reshape(columns.shape) != units.reshape(columns.shape)[:, :1]).any(1)
            if apart.any():
                inside[mover] = np.where(np.repeat(apart, columns.shape[1]), units, -1)
        row, column = (grid.reshape(-1) for grid in np.indices(every.shape))
        column = slices[row] * columns.shape[1] + column
        for lying, where in ((by_row, row), (inside, column)):
            for mover, units in lying.items():
                above, along = set(self.cells[mover].parents), lying is inside
                of_row = self._key(rows, by_row, above if along else {mover, *above})[row]
                of_column = self._key(columns.reshape(-1), inside, {mover, *above} if along else above)[column]
                place = leaf.site, 0, 2, leaf.buffer, along
                self._add_blocks(mover, units[where], of_row * (of_column.max() + 1) + of_column, place)
        for dim, atoms in enumerate(rest, start=2):
            self.add(leaf, dim, atoms)

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
                for (site, dim, span, buffer, _), blocks in self.blocks[mover].items()
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
