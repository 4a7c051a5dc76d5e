"""From what operators say of atoms to units that permute: cells of interchangeable units, how these are nested, names.

Units are the classes of atoms that were unified. Colour refinement (the 1-dimensional Weisfeiler-Leman algorithm)
separates units that play different roles; the rest of one colour form a *cell*. Membership relations between cells
then say how a cell moves:

* a cell without parents is a symmetric group of its own;
* a cell whose units are members of larger units is one symmetric group inside each of these (a wreath product);
* a cell with one unit in each larger unit, or in each pair of units of two independent cells, just rides along.

Whatever has another shape is individualised: units get colours of their own and move no more. Refining is always sound:
it can only make the group smaller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from pyro_symmetric.discovery.flow import Flow, Leaf, rank_within
from pyro_symmetric.discovery.registry import Array
from pyro_symmetric.groups import Axis, Units

NOTHING = np.empty(0, dtype=np.int64)
_U = np.uint64
# Site, axis, how many axes it spans, whether the site is a buffer; whether units lie along the columns of both axes.
Place = tuple[str, int, int, bool, bool]


@dataclass(eq=False)
class Cell:
    """Interchangeable units.

    :ivar size: the number of units.
    :ivar parents: cell -> for each unit, the unit of that cell that it is a member of.
    :ivar direct: the parents that aren't parents of other parents. None: a symmetric group of its own. One: a
        symmetric group inside each unit of that cell. Two: each unit is a pair of units of these, and rides along.
    """

    size: int
    parents: dict[int, Array] = field(default_factory=dict)
    direct: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Cells:
    """The solution.

    :param unit: atom -> class of unified atoms.
    :param atom_colour: atom -> colour, telling the atoms of one class apart.
    :param colour: class -> colour (several colours may ride in one cell).
    :param cell: class -> cell.
    :param place: class -> number of its unit within the cell.
    :param cells: cell number -> cell, of those with two units or more.
    """

    unit: Array
    atom_colour: Array
    colour: Array
    cell: Array
    place: Array
    cells: dict[int, Cell]


def solve(flow: Flow) -> Cells:
    """The cells of interchangeable units, and how they are nested."""
    with np.errstate(over="ignore"):
        return _Refinement(flow).solve()


class _Refinement:
    def __init__(self, flow: Flow):
        self.flow = flow
        one, other = (np.concatenate([NOTHING, *(fact[end] for fact in flow.unions)]) for end in (0, 1))
        self.count, self.unit = components(flow.size, one, other)
        self.atom_colour = np.zeros(flow.size, dtype=np.uint64)
        for atoms, number in flow.occurrences.values():
            np.add.at(self.atom_colour, atoms.reshape(-1), salt(2 * number))
        for atoms, colours, number in flow.refinements:
            np.add.at(self.atom_colour, atoms, mix(salt(2 * number + 1) ^ colours.astype(np.uint64)))
        self.child, self.parent, self.kind = self._memberships()
        self.extra = np.zeros(self.count, dtype=np.uint64)

    def _memberships(self) -> tuple[Array, Array, Array]:
        """Distinct pairs of classes, of which one is a member of the other, and the fact that says so."""
        relations = self.flow.relations
        child = self.unit[np.concatenate([NOTHING, *(fact.one for fact in relations)])]
        parent = self.unit[np.concatenate([NOTHING, *(fact.other for fact in relations)])]
        kind = np.repeat([fact.number for fact in relations], [len(fact.one) for fact in relations]).astype(np.int64)
        apart = child != parent
        rows = distinct_rows(kind[apart], child[apart], parent[apart])[0]
        return child[apart][rows], parent[apart][rows], kind[apart][rows]

    def solve(self) -> Cells:
        self._set_apart_ambiguous_owners()
        self._tell_copies_apart()
        while True:
            colour = self._refined()
            try:
                nesting = _Nesting(self.child, self.parent, self.kind, colour)
                deduced = nesting.deduced()
                if not deduced:
                    nesting.check_shape()
                    return Cells(self.unit, self.atom_colour, colour, nesting.cell, nesting.place, nesting.cells)
            except NotNested as tangled:
                self._individualise(tangled.classes)
                continue
            for child, parent in deduced:
                self.child, self.parent = np.r_[self.child, child], np.r_[self.parent, parent]
                self.kind = np.r_[self.kind, np.full(len(child), self.kind.max() + 1)]
            new = int(self.parent.max()) + 1 - len(self.extra)  # classes of no atom, which the others were members of
            self.extra = np.r_[self.extra, np.zeros(max(0, new), dtype=np.uint64)]

    def _individualise(self, classes: Array) -> None:
        """Tell classes apart from all others."""
        self.extra[classes] = mix(self.extra[classes] ^ mix(mix(classes)))

    def _refined(self) -> Array:
        """Stable colours, as numbers 0 ... : units of one colour have equally coloured members and owners."""
        first = self.extra.copy()
        np.add.at(first, self.unit, mix(self.atom_colour))
        _, colour = np.unique(first, return_inverse=True)
        up, down = mix(mix(2 * self.kind)), mix(mix(2 * self.kind + 1))  # twice: colours, too, are hashed small numbers
        number = -1
        while number != colour.max(initial=0):
            number = colour.max(initial=0)
            new, hashed = mix(colour), mix(colour)
            np.add.at(new, self.child, mix(hashed[self.parent] ^ up))
            np.add.at(new, self.parent, mix(hashed[self.child] ^ down))
            _, colour = np.unique(new, return_inverse=True)
        return colour

    def _set_apart_ambiguous_owners(self) -> None:
        """A relation that names two larger units for one unit is no membership: these two stay put.

        The unit itself may still move, to one that has the same two owners in the same places. (A rotary embedding ties
        entry ``i`` of a head to entry ``i + d/2``, and a weight that all heads share owns both: heads may be exchanged
        all the same.)
        """
        if not len(self.child):
            return
        _, where, counts = distinct_rows(self.kind, self.child)
        bad = counts[where] > 1
        owners = np.unique(self.parent[bad])
        self._individualise(owners)
        fixed = np.zeros(self.count, dtype=bool)
        fixed[owners] = True
        doubtful = set(np.unique(self.kind[bad]).tolist())
        for child, parent, number in self.flow.relations:
            if number in doubtful:
                own = self.unit[parent]
                chosen = fixed[own] & (self.unit[child] != own)
                np.add.at(self.atom_colour, child[chosen], mix(mix(own[chosen]) ^ salt(2 * number + 1)))

    def _tell_copies_apart(self) -> None:
        """A unit that occurs twice in one tensor is a rigid block if its places have different colours there.

        Its places are first coloured by what they meet elsewhere; a unit whose places can't be told apart stays put.
        """
        doubled = np.zeros(self.count, dtype=bool)
        for atoms, _ in self.flow.occurrences.values():
            classes, counts = np.unique(self.unit[atoms.reshape(-1)], return_counts=True)
            doubled[classes[counts > 1]] = True
        if not doubled.any():
            return
        self._refine_atoms(doubled)
        self._tell_members_apart(doubled)
        stuck = np.zeros(self.count, dtype=bool)
        for atoms, _ in self.flow.occurrences.values():
            chosen = atoms[doubled[self.unit[atoms]]]
            if len(chosen):
                _, where, counts = distinct_rows(self.unit[chosen], self.atom_colour[chosen])
                stuck[self.unit[chosen[counts[where] > 1]]] = True
        self._individualise(np.flatnonzero(stuck))
        if stuck.any():  # each of its places stays, with what lies there
            places = np.flatnonzero(stuck[self.unit])
            self.atom_colour[places] = mix(self.atom_colour[places] ^ mix(mix(places)))
            self._tell_members_apart(stuck)

    def _tell_members_apart(self, doubled: Array) -> None:
        """Members of a rigid block are members of one of its places each: they have the colour of that place."""
        colour = self.atom_colour.copy()
        for child, parent, number in self.flow.relations:
            chosen = doubled[self.unit[parent]]
            if chosen.any():
                np.add.at(self.atom_colour, child[chosen], mix(mix(colour[parent[chosen]] ^ salt(2 * number))))

    def _refine_atoms(self, doubled: Array, rounds: int = 20) -> None:
        edges = []
        for one, other, number in self.flow.unions:
            chosen = doubled[self.unit[one]]
            if chosen.any():
                edges.append((one[chosen], other[chosen], mix(mix(np.array([2 * number, 2 * number + 1])))))
        concerned, before = doubled[self.unit], -1
        for _ in range(rounds):
            hashed = mix(self.atom_colour)
            new = hashed.copy()
            for one, other, salts in edges:
                np.add.at(new, one, mix(hashed[other] ^ salts[0]))
                np.add.at(new, other, mix(hashed[one] ^ salts[1]))
            self.atom_colour = np.where(concerned, new, self.atom_colour)
            now = len(np.unique(self.atom_colour[concerned]))
            if now == before:
                break
            before = now


class NotNested(Exception):
    """Memberships have no simple shape: these classes must be told apart first."""

    def __init__(self, classes: Array):
        super().__init__("units that must be told apart")
        self.classes = classes


class _Nesting:
    """Cells and their owners.

    A membership says of each unit of one cell which unit of another it is part of. Cells whose units belong together
    one to one are one cell. Owners of owners are owners.

    :param child, parent, kind: one entry for each member, its owner, and each reason why it is one. Members of one
        colour have owners of one colour.
    :param colour: class -> colour.
    """

    def __init__(self, child: Array, parent: Array, kind: Array, colour: Array):
        self.colour = colour
        sizes = np.bincount(colour)
        lower, upper = sizes[colour[child]], sizes[colour[parent]]
        one_to_one, within = (lower == upper) & (lower > 1), (lower > upper) & (upper > 1)
        self._unite(child[one_to_one], parent[one_to_one])
        self._add_parents(child[within], parent[within], kind[within])

    def _unite(self, child: Array, parent: Array) -> None:
        """Units whose members belong together one to one are the same units."""
        colour = self.colour
        _, unit = components(len(colour), child, parent)
        _, together = components(int(colour.max(initial=-1)) + 1, colour[child], colour[parent])
        _, first, label = np.unique(together[colour], return_index=True, return_inverse=True)
        self.cell = first.argsort().argsort()[label]  # in the order of their first units
        rows, where, _ = distinct_rows(self.cell, unit)
        self.place = where - np.searchsorted(self.cell[rows], self.cell)
        numbers, sizes = np.unique(self.cell[rows], return_counts=True)
        self.cells = {c: Cell(n) for c, n in zip(numbers.tolist(), sizes.tolist(), strict=True) if n > 1}
        first, _, counts = distinct_rows(unit, colour)
        if (counts > 1).any():  # a unit with two members of one colour
            raise self._tangled(int(self.cell[first[counts > 1][0]]))

    def _add_parents(self, child: Array, parent: Array, kind: Array) -> None:
        first, where, counts = distinct_rows(kind, self.colour[child], self.colour[parent])
        pieces = np.split(np.argsort(where, kind="stable"), np.cumsum(counts)[:-1]) if len(first) else []
        for at, piece in zip(first, pieces, strict=True):
            lower, upper = int(self.cell[child[at]]), int(self.cell[parent[at]])
            function = np.full(self.cells[lower].size, -1)
            function[self.place[child[piece]]] = self.place[parent[piece]]
            if (function < 0).any():
                raise self._tangled(lower)
            self._add(lower, upper, function)
        for lower in sorted(self.cells, key=lambda number: self.cells[number].size):  # owners are fewer: they are done
            for upper, function in list(self.cells[lower].parents.items()):
                for top, further in self.cells[upper].parents.items():
                    self._add(lower, top, further[function])

    def _add(self, lower: int, upper: int, function: Array) -> None:
        """Units of ``lower`` are members of units of ``upper``."""
        if not np.array_equal(self.cells[lower].parents.setdefault(upper, function), function):
            raise self._tangled(upper)

    def deduced(self) -> list[tuple[Array, Array]]:
        """Members and owners that two owners of the same units tell of.

        Either one determines the other; or their units meet in every combination, inside a larger unit if not all of
        them meet. That may be a new one.
        """
        found, new = list[tuple[Array, Array]](), len(self.colour)
        for own in self.cells.values():
            for a, b in combinations(own.parents, 2):
                if b in self.cells[a].parents or a in self.cells[b].parents:
                    continue
                f, g = own.parents[a], own.parents[b]
                rows, _, _ = distinct_rows(f, g)
                in_a, in_b = self._representatives(a), self._representatives(b)
                if len(rows) in (len(in_a), len(in_b)):
                    pair = in_a[f[rows]], in_b[g[rows]]
                    found.append(pair if len(rows) == len(in_a) else pair[::-1])
                    continue
                number, label = components(len(in_a) + len(in_b), f[rows], g[rows] + len(in_a))
                left, right = np.split(label, [len(in_a)])
                if (np.bincount(left, minlength=number) * np.bincount(right, minlength=number)).sum() != len(rows):
                    raise self._tangled(a if len(in_a) <= len(in_b) else b)
                common = self.cells[a].parents.keys() & self.cells[b].parents.keys()
                if number > 1 and all(self.cells[c].size != number for c in common):
                    found += [(in_a, new + left), (in_b, new + right)]
                    new += number
        return found

    def _representatives(self, number: int) -> Array:
        """One class for each unit of a cell, all of one colour."""
        classes = np.flatnonzero(self.cell == number)
        classes = classes[self.colour[classes] == self.colour[classes[0]]]
        return classes[self.place[classes].argsort()]

    def _tangled(self, number: int) -> NotNested:
        """The units of a cell must be told apart one by one."""
        return NotNested(np.flatnonzero(self.cell == number))

    def check_shape(self) -> None:
        """Every cell must be free, lie inside one cell, or ride along with two."""
        for own in self.cells.values():
            above = {top for upper in own.parents for top in self.cells[upper].parents}
            own.direct = sorted(upper for upper in own.parents if upper not in above)
            if len(own.direct) > 2:
                raise self._tangled(min(own.direct, key=lambda c: self.cells[c].size))
        for number, own in self.cells.items():
            if own.direct:
                _, _, inside = distinct_rows(*(own.parents[upper] for upper in own.direct))
                pairs = len(own.direct) == 2 or len(self.cells[own.direct[0]].direct) == 2
                if (inside != inside[0]).any() or (inside[0] > 1 and pairs):  # a group inside pairs fits no tree
                    raise self._tangled(number)


# from cells to units --------------------------------------------------------------------------------------------------


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


def distinct_rows(*columns: Array) -> tuple[Array, Array, Array]:
    """Rows of several integer columns: (index of the first of each distinct row, inverse, counts), rows sorted."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[order][1:] != column[order][:-1]
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.cumsum(new) - 1
    return order[new], inverse, np.bincount(inverse)


def components(size: int, one: Array, other: Array) -> tuple[int, Array]:
    """Connected components of a graph: their number, and the component of each node."""
    graph = coo_matrix((np.ones(len(one), dtype=np.int8), (one, other)), shape=(size, size))
    count, label = connected_components(graph, directed=False)
    return count, label.astype(np.int64)


def mix(values: Array) -> Array:
    """Hash integers to 64 bits (splitmix64): sums of hashes tell multisets apart but for a chance of 2^-64 a pair."""
    with np.errstate(over="ignore"):
        z = values.astype(_U) + _U(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
        return z ^ (z >> _U(31))


def salt(number: int) -> np.uint64:
    """A hash of one number, whose square of use is another salt."""
    return mix(np.array([number]))[0]
