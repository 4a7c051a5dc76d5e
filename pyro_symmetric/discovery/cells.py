"""From facts about atoms to units that permute: colour refinement, nesting, and the
axes along which units lie.

Units are classes of unified atoms. Colour refinement (the 1-dimensional
Weisfeiler-Leman algorithm) separates units that play different roles; the remaining
units of one colour form a *cell*. Memberships between cells then say how a cell moves:

* a cell without parents is a symmetric group of its own;
* a cell whose units are members of larger units is one symmetric group inside each of
  these (a wreath product);
* a cell with one unit in each larger unit, or in each pair of units of two independent
  cells, rides along.

Cells of any other shape are individualised: their units get colours of their own and
stay. Refinement is always sound: it only makes the group smaller.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from pyro_symmetric.discovery.flow import Fact, Flow, Leaf, rank_within
from pyro_symmetric.discovery.registry import Array, Part, hash64, salt
from pyro_symmetric.groups import Axis, Units

NOTHING = np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class Cell:
    """Interchangeable units.

    :ivar size: the number of units.
    :ivar parents: parent cell -> for each unit, the unit of that cell of which it is a
        member.
    :ivar direct: the parents that aren't parents of other parents. None: a symmetric
        group of its own. One: a symmetric group inside each unit of that cell. Two:
        each unit is a pair of units of these, and rides along.
    """

    size: int
    parents: dict[int, Array] = field(default_factory=dict)
    direct: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of interchangeable units.

    :param unit: atom -> class of unified atoms.
    :param atom_colour: atom -> colour, which tells the atoms of one class apart.
    :param colour: class -> colour (several colours may ride in one cell).
    :param cell: class -> cell number.
    :param place: class -> number of its unit within the cell.
    :param cells: cell number -> cell, of those with two units or more.
    :param doubtful: whether units that looked alike had to be told apart.
    """

    unit: Array
    atom_colour: Array
    colour: Array
    cell: Array
    place: Array
    cells: dict[int, Cell]
    doubtful: bool = False


def solve(flow: Flow) -> Cells:
    """Find the cells of interchangeable units, and how they are nested."""
    facts = _Facts(flow)
    while True:
        colour = facts.refined_colours()
        try:
            nesting = _Nesting(facts.child, facts.parent, facts.relation, colour)
            implied = nesting.implied()
            if not implied:
                nesting.check_shape()
                return Cells(
                    facts.unit,
                    facts.atom_colour,
                    colour,
                    nesting.cell,
                    nesting.place,
                    nesting.cells,
                    facts.doubtful,
                )
            facts.add(implied)
        except NotNested as failure:
            facts.individualise(failure.classes)


# colour refinement --------------------------------------------------------------------


def colour_refine(
    colour: Array, edges: Iterable[tuple[Array, Array, Array, Array]], rounds: int
) -> Array:
    """Refine colours along edges until their number is stable (the 1-dimensional
    Weisfeiler-Leman algorithm).

    :param edges: nodes at one end, nodes at the other, and hashes that either end sees.
    :returns: colours, numbered from 0.
    """
    _, colour = np.unique(colour, return_inverse=True)
    for _ in range(rounds):
        hashed = hash64(colour)
        signature = hashed.copy()
        for first, second, up, down in edges:
            np.add.at(signature, first, hash64(hashed[second] ^ up))
            np.add.at(signature, second, hash64(hashed[first] ^ down))
        before = colour
        _, colour = np.unique(signature, return_inverse=True)
        if colour.max(initial=0) == before.max(initial=0):
            break
    return colour


class _Memberships(NamedTuple):
    """Classes, those of which they are members, and the numbers of the facts."""

    children: Array
    parents: Array
    facts: Array


class _Grouping(NamedTuple):
    """The distinct parents of a row of members: a position in the row for each, and for
    each position the number of its parent among them.
    """

    parents: Array
    position: Array
    number_of: Array


def _stated_of_parents(
    groupings: dict[bytes, list[_Grouping] | None], child: Array, parent: Array
) -> tuple[Array, Array]:
    """Return the children and parents of a membership: if parents that an earlier one
    gave to the same members determine the new ones, then those and these.

    Refinement sees as much: the colours of members tell those of their parents, which
    tell those of the parents' parents.

    :param groupings: earlier memberships by their members; ``None`` if some of these
        come twice. A new one is added if it has half as many parents as members.
    """
    members = child.tobytes()
    if members not in groupings:
        distinct = (np.diff(np.sort(child)) > 0).all()
        groupings[members] = [] if distinct else None
    known = groupings[members]
    if known is None:
        return child, parent
    for parents, position, number_of in known:
        grandparents = parent[position]
        if np.array_equal(grandparents[number_of], parent):
            return parents, grandparents
    grouping = _Grouping(*np.unique(parent, return_index=True, return_inverse=True))
    if 2 * len(grouping.parents) <= len(child):
        known.append(grouping)
    return child, parent


class _Facts:
    """Colours and memberships of units, as hashes and index arrays.

    :ivar unit: atom -> class of unified atoms.
    :ivar atom_colour: atom -> hash of its occurrences and refinements.
    :ivar child, parent, relation: one entry for each membership: the member, its
        parent, and the number of the fact.
    :ivar individual: class -> a hash of its own, or zero.
    :ivar doubtful: whether classes were told apart that may be alike.
    """

    def __init__(self, flow: Flow):
        self.flow = flow
        self.count, self.unit = unified(flow)
        self.atom_colour = np.zeros(flow.size, dtype=np.uint64)
        for atoms, history, number in flow.occurrences.values():
            colour: Any = salt(2 * number)
            if history is not None:
                colour = hash64(hash64(history.reshape(-1) ^ colour))
            np.add.at(self.atom_colour, atoms.reshape(-1), colour)
        for atoms, colours, number in flow.refinements:
            hashed = hash64(salt(2 * number + 1) ^ colours.astype(np.uint64))
            np.add.at(self.atom_colour, atoms, hashed)
        self.child, self.parent, self.relation = self._memberships()
        self.individual = np.zeros(self.count, dtype=np.uint64)
        self.doubtful = False
        self._individualise_ambiguous_parents()
        self._tell_copies_apart()

    def _memberships(self) -> _Memberships:
        """Return the distinct memberships between classes.

        Each block of a residual network states anew of which of its units the same
        entries are members. What follows from an earlier membership is stated for the
        parents instead, which are fewer.
        """
        groupings: dict[bytes, list[_Grouping] | None] = {}
        children = [NOTHING]
        parents = [NOTHING]
        numbers = [NOTHING]
        for atoms, partners, number in self.flow.relations:
            child, parent = _stated_of_parents(
                groupings, self.unit[atoms], self.unit[partners]
            )
            proper = child != parent
            children.append(child[proper])
            parents.append(parent[proper])
            numbers.append(np.full(len(child[proper]), number))
        every = _Memberships(*map(np.concatenate, (children, parents, numbers)))
        rows = distinct_rows(every.facts, every.children, every.parents).first
        return _Memberships(*(column[rows] for column in every))

    def refined_colours(self) -> Array:
        """Return stable colours, numbered from 0: units of one colour have equally
        coloured members and parents.
        """
        initial = self.individual.copy()
        np.add.at(initial, self.unit, hash64(self.atom_colour))
        # Numbers of relations are hashed twice: colours, which are small numbers as
        # well, are hashed once.
        up = hash64(hash64(2 * self.relation))
        down = hash64(hash64(2 * self.relation + 1))
        edges = (self.child, self.parent, up, down)
        return colour_refine(initial, [edges], len(initial) + 1)

    def individualise(self, classes: Array) -> None:
        """Give each of these classes a colour of its own."""
        self.doubtful |= len(classes) > 1
        before = self.individual[classes]
        self.individual[classes] = hash64(before ^ hash64(hash64(classes)))

    def add(self, memberships: Sequence[tuple[Array, Array]]) -> None:
        """Add memberships, each a relation of its own; parents may be new classes
        without atoms.
        """
        for child, parent in memberships:
            self.child = np.r_[self.child, child]
            self.parent = np.r_[self.parent, parent]
            relation = np.full(len(child), self.relation.max() + 1)
            self.relation = np.r_[self.relation, relation]
        new = int(self.parent.max()) + 1 - len(self.individual)
        self.individual = np.r_[self.individual, np.zeros(max(0, new), dtype=np.uint64)]

    def _individualise_ambiguous_parents(self) -> None:
        """Individualise the parents of each unit to which one relation gives two
        parents: this is no membership.

        The unit may still move, to one with the same two parents at the same positions.
        (A rotary embedding ties entry ``i`` of a head to entry ``i + d/2``, and a
        weight that all heads share is parent to both: heads may be exchanged all the
        same.)
        """
        if not len(self.child):
            return
        _, row, counts = distinct_rows(self.relation, self.child)
        ambiguous = counts[row] > 1
        parents = np.unique(self.parent[ambiguous])
        self.individualise(parents)
        relations = set(np.unique(self.relation[ambiguous]).tolist())
        for child, parent, number in self.flow.relations:
            if number in relations:
                owner = self.unit[parent]
                chosen = np.isin(owner, parents) & (self.unit[child] != owner)
                colours = hash64(hash64(owner[chosen]) ^ salt(2 * number + 1))
                np.add.at(self.atom_colour, child[chosen], colours)

    def _tell_copies_apart(self) -> None:
        """Make a unit that occurs repeatedly in one tensor a rigid block: tell its
        positions there apart.

        Positions are coloured by what they meet elsewhere. A unit whose positions still
        look alike is individualised.
        """
        repeated = np.zeros(self.count, dtype=bool)
        for atoms, _, _ in self.flow.occurrences.values():
            classes = self.unit[atoms.reshape(-1)]
            classes, counts = np.unique(classes, return_counts=True)
            repeated[classes[counts > 1]] = True
        if not repeated.any():
            return
        self._refine_atoms(repeated)
        self._colour_members(repeated)
        indistinct = np.zeros(self.count, dtype=bool)
        for atoms, _, _ in self.flow.occurrences.values():
            chosen = atoms[repeated[self.unit[atoms]]]
            if len(chosen):
                units = self.unit[chosen]
                _, row, counts = distinct_rows(units, self.atom_colour[chosen])
                indistinct[units[counts[row] > 1]] = True
        self.individualise(np.flatnonzero(indistinct))
        if indistinct.any():  # each of its positions stays, with its members there
            atoms = np.flatnonzero(indistinct[self.unit])
            before = self.atom_colour[atoms]
            self.atom_colour[atoms] = hash64(before ^ hash64(hash64(atoms)))
            self._colour_members(indistinct)

    def _refine_atoms(self, chosen: Array) -> None:
        """Refine the colours of the atoms of some classes along unions."""
        inside = chosen[self.unit]
        number_of = np.cumsum(inside) - 1
        edges = []
        for first, second, number in self.flow.unions:
            chosen_entries = inside[first]
            if chosen_entries.any():
                firsts = number_of[first[chosen_entries]]
                seconds = number_of[second[chosen_entries]]
                up, down = hash64(hash64(np.array([2 * number, 2 * number + 1])))
                edges.append((firsts, seconds, up, down))
        colours = colour_refine(self.atom_colour[inside], edges, rounds=20)
        self.atom_colour[inside] = colours

    def _colour_members(self, chosen: Array) -> None:
        """Colour members of some classes by the atom of the parent to which a relation
        assigns them.
        """
        colour = self.atom_colour.copy()
        for child, parent, number in self.flow.relations:
            inside = chosen[self.unit[parent]]
            if inside.any():
                colours = hash64(hash64(colour[parent[inside]] ^ salt(2 * number)))
                np.add.at(self.atom_colour, child[inside], colours)


# nesting ------------------------------------------------------------------------------


class NotNested(Exception):
    """Memberships have no simple shape: these classes must be individualised first."""

    def __init__(self, classes: Array):
        super().__init__("units must be told apart")
        self.classes = classes


class _Nesting:
    """Cells and their parents.

    Cells whose units belong together one to one are one cell. Parents of parents are
    parents.

    :param child, parent, relation: one entry for each membership. Members of one colour
        have parents of one colour.
    :param colour: class -> colour.
    """

    def __init__(self, child: Array, parent: Array, relation: Array, colour: Array):
        self.colour = colour
        sizes = np.bincount(colour)
        children = sizes[colour[child]]
        parents = sizes[colour[parent]]
        one_to_one = (children == parents) & (children > 1)
        within = (children > parents) & (parents > 1)
        self._unite(child[one_to_one], parent[one_to_one])
        self._add_parents(child[within], parent[within], relation[within])

    def _unite(self, child: Array, parent: Array) -> None:
        """Unite units whose members belong together one to one."""
        colour = self.colour
        _, unit = components(len(colour), child, parent)
        _, together = components(
            int(colour.max(initial=-1)) + 1, colour[child], colour[parent]
        )
        _, first, label = np.unique(
            together[colour], return_index=True, return_inverse=True
        )
        # in the order of their first units
        self.cell = first.argsort().argsort()[label]
        rows, row, _ = distinct_rows(self.cell, unit)
        self.place = row - np.searchsorted(self.cell[rows], self.cell)
        numbers, sizes = np.unique(self.cell[rows], return_counts=True)
        self.cells = {
            c: Cell(n)
            for c, n in zip(numbers.tolist(), sizes.tolist(), strict=True)
            if n > 1
        }
        first, _, counts = distinct_rows(unit, colour)
        if (counts > 1).any():  # a unit with two members of one colour
            raise self._not_nested(int(self.cell[first[counts > 1][0]]))

    def _add_parents(self, child: Array, parent: Array, relation: Array) -> None:
        """Add the parents that memberships state, then parents of parents."""
        first, row, counts = distinct_rows(
            relation, self.colour[child], self.colour[parent]
        )
        groups = np.split(np.argsort(row, kind="stable"), np.cumsum(counts))[:-1]
        for at, group in zip(first, groups, strict=True):
            lower = int(self.cell[child[at]])
            upper = int(self.cell[parent[at]])
            parent_of = np.full(self.cells[lower].size, -1)
            parent_of[self.place[child[group]]] = self.place[parent[group]]
            if (parent_of < 0).any():
                raise self._not_nested(lower)
            self._add_parent(lower, upper, parent_of)
        # parents are smaller: complete
        for lower in sorted(self.cells, key=lambda number: self.cells[number].size):
            for upper, parent_of in list(self.cells[lower].parents.items()):
                for top, grandparent_of in self.cells[upper].parents.items():
                    self._add_parent(lower, top, grandparent_of[parent_of])

    def _add_parent(self, lower: int, upper: int, parent_of: Array) -> None:
        """Make ``upper`` a parent cell of ``lower``, if no other membership
        contradicts.
        """
        known = self.cells[lower].parents.setdefault(upper, parent_of)
        if not np.array_equal(known, parent_of):
            raise self._not_nested(upper)

    def implied(self) -> list[tuple[Array, Array]]:
        """Return the memberships (children, parents) that two parent cells of the same
        units imply.

        Either units of one cell determine those of the other and are their members; or
        units of both meet in every combination, inside a larger unit if not all of them
        meet. That may be new, a class without atoms.
        """
        implied = []
        new = len(self.colour)
        for cell in self.cells.values():
            for a, b in itertools.combinations(cell.parents, 2):
                if b in self.cells[a].parents or a in self.cells[b].parents:
                    continue
                parent_a = cell.parents[a]
                parent_b = cell.parents[b]
                pairs, _, _ = distinct_rows(parent_a, parent_b)
                in_a = self._representatives(a)
                in_b = self._representatives(b)
                if len(pairs) in (len(in_a), len(in_b)):
                    membership = in_a[parent_a[pairs]], in_b[parent_b[pairs]]
                    implied.append(
                        membership if len(pairs) == len(in_a) else membership[::-1]
                    )
                    continue
                count, label = components(
                    len(in_a) + len(in_b), parent_a[pairs], parent_b[pairs] + len(in_a)
                )
                label_a, label_b = np.split(label, [len(in_a)])
                number_a = np.bincount(label_a, minlength=count)
                number_b = np.bincount(label_b, minlength=count)
                if number_a @ number_b != len(pairs):
                    raise self._not_nested(a if len(in_a) <= len(in_b) else b)
                common = self.cells[a].parents.keys() & self.cells[b].parents.keys()
                if count > 1 and all(self.cells[c].size != count for c in common):
                    implied += [(in_a, new + label_a), (in_b, new + label_b)]
                    new += count
        return implied

    def _representatives(self, number: int) -> Array:
        """Return one class for each unit of a cell, all of one colour."""
        classes = np.flatnonzero(self.cell == number)
        classes = classes[self.colour[classes] == self.colour[classes[0]]]
        return classes[self.place[classes].argsort()]

    def _not_nested(self, number: int) -> NotNested:
        """Make the error that has the units of a cell individualised."""
        return NotNested(np.flatnonzero(self.cell == number))

    def check_shape(self) -> None:
        """Raise ``NotNested`` unless each cell is free, lies inside one cell, or rides
        along with two.
        """
        for cell in self.cells.values():
            above = {top for upper in cell.parents for top in self.cells[upper].parents}
            cell.direct = sorted(upper for upper in cell.parents if upper not in above)
            if len(cell.direct) > 2:
                raise self._not_nested(
                    min(cell.direct, key=lambda number: self.cells[number].size)
                )
        for number, cell in self.cells.items():
            if cell.direct:
                _, _, counts = distinct_rows(
                    *(cell.parents[upper] for upper in cell.direct)
                )
                parent = self.cells[cell.direct[0]]
                pairs = 2 in (len(cell.direct), len(parent.direct))
                # a group inside pairs fits no tree
                if (counts != counts[0]).any() or (counts[0] > 1 and pairs):
                    raise self._not_nested(number)


# from cells to units ------------------------------------------------------------------


def permuted_units(flow: Flow, cells: Cells) -> dict[int, Units]:
    """Return cell -> its units, if they move, in order of first use; parents come
    before their members.
    """
    builder = _Builder(cells)
    for leaf in flow.leaves.values():
        parts = leaf.value.parts
        if leaf.slices is not None:
            builder.add_sliced(leaf, leaf.slices)
            parts = parts[2:]
        for part in parts:
            builder.add(leaf, part)
    return builder.units({leaf.site: leaf.value.shape for leaf in flow.leaves.values()})


def fixed_units(flow: Flow, cells: Cells) -> list[Units]:
    """Return the units that nothing permutes, those along the same axes together.

    Unified atoms are one unit. So are equal positions along axes whose fixed positions
    are the same: they may belong to the same entry of a mask or of the network's
    inputs.
    """
    lines = _fixed_lines(flow, cells)
    if not lines:
        return []
    first = np.concatenate([line.equal for line in lines])
    classes = np.concatenate([line.classes for line in lines])
    _, unit = components(len(cells.cell), first, classes)
    # unit -> the numbers of the lines that it lies on, and its place on each
    numbers = defaultdict[int, list[int]](list)
    places = defaultdict[int, list[int]](list)
    for number, line in enumerate(lines):
        for place, name in enumerate(unit[line.classes].tolist()):
            numbers[name].append(number)
            places[name].append(place)
    together = defaultdict[tuple[int, ...], list[list[int]]](list)
    for name in numbers:
        together[tuple(numbers[name])].append(places[name])
    units = list[Units]()
    for numbers_of_units, rows in together.items():
        axes = []
        columns = torch.tensor(rows, device="cpu").T
        for number, column in zip(numbers_of_units, columns, strict=True):
            axis = lines[number].axis
            axes.append(replace(axis, index=axis.index[:, column]))
        name = f"fixed {len(units)}"
        units.append(Units(name, len(rows), tuple(axes), moves=frozenset()))
    return units


class _FixedLine(NamedTuple):
    """The units along an axis that nothing permutes.

    :ivar classes: of their atoms.
    :ivar equal: those of the first axis whose fixed positions are the same.
    """

    axis: Axis
    classes: Array
    equal: Array


def _fixed_lines(flow: Flow, cells: Cells) -> list[_FixedLine]:
    """Return the axes of all sites with the units along them that nothing permutes."""
    lines = []
    first = dict[bytes, Array]()
    for leaf in flow.leaves.values():
        for part in leaf.value.parts if leaf.slices is None else ():
            if part.axes == (leaf.members,):  # its members' units are told apart
                continue
            classes = cells.unit[part.atoms.reshape(-1)]
            fixed = np.flatnonzero(~np.isin(cells.cell[classes], list(cells.cells)))
            dim = part.axes[0]
            if not len(fixed) or (leaf.kernel and dim > 1):
                continue  # pixels have no multipliers
            span = part.axes[-1] - dim + 1
            index = torch.from_numpy(_positions(part, leaf.value.shape)[:, fixed])
            axis = Axis(leaf.site, dim, index, 0, leaf.buffer, None, span)
            equal = first.setdefault(fixed.tobytes(), classes[fixed])
            lines.append(_FixedLine(axis, classes[fixed], equal))
    return lines


class _Location(NamedTuple):
    """An axis of a site along which units lie, or several axes that they span.

    :param dim: the first of these axes.
    :param span: their number.
    :param in_columns: whether the units lie along the columns of a matrix's entries;
        keeps blocks along its rows and its columns apart.
    """

    site: str
    dim: int
    span: int
    is_buffer: bool
    in_columns: bool


class _Builder:
    """Collects the positions of units along the axes of all sites, and builds
    :class:`~pyro_symmetric.Units`.
    """

    def __init__(self, solution: Cells):
        self.solution = solution
        self.cells = solution.cells
        # of positions, (blocks, units)
        self.blocks: dict[int, dict[_Location, list[Array]]] = {}
        # cells whose units lie along an axis of a convolution's kernel
        self.in_images: set[int] = set()
        self.rank = {}  # of each unit of a cell inside its parent
        # of each unit of a cell, in the order of parents
        self.number: dict[int, Array] = {}
        for cell in self._parents_first(self.cells):
            members = self.cells[cell]
            if len(members.direct) > 1:  # rides along with two others
                continue
            parent = np.zeros(members.size, dtype=np.int64)
            for direct in members.direct:
                parent = self.number[direct][members.parents[direct]]
            rank = rank_within(parent)
            self.rank[cell] = rank
            self.number[cell] = parent * (int(rank.max()) + 1) + rank

    def add(self, leaf: Leaf, part: Part) -> None:
        """Locate the units of all cells along the axes of a part.

        Axes that span more than these span those between them, too: layers, in each of
        which the units lie.
        """
        atoms = part.atoms.reshape(-1)
        units_of = self._units_of(leaf, atoms)
        layers = _positions(part, leaf.value.shape)
        layer, position = np.divmod(layers.reshape(-1).argsort(), len(atoms))
        span = part.axes[-1] - part.axes[0] + 1
        location = _Location(
            leaf.site, part.axes[0], span, leaf.buffer, in_columns=False
        )
        for cell, units in units_of.items():
            if _are_members(leaf, part, units):
                continue
            parents = self.cells[cell].parents
            context = self._context(atoms, units_of, {cell, *parents})[position]
            context = context * len(layers) + layer
            self._add_blocks(cell, units[position], context, location)

    def add_sliced(self, leaf: Leaf, slices: Array) -> None:
        """Locate units entry by entry in a matrix whose rows fall into slices with
        columns of their own.

        Units that hold all columns of a slice move with its rows.
        """
        rows, entries = (part.atoms for part in leaf.value.parts[:2])
        # those of each slice's first row
        columns = entries[np.searchsorted(slices, np.arange(slices[-1] + 1))]
        by_row = self._units_of(leaf, rows)
        by_column = {}
        for cell, units in self._units_of(leaf, columns.reshape(-1)).items():
            by_slice = units.reshape(columns.shape)
            varies = (by_slice != by_slice[:, :1]).any(1, keepdims=True)
            if varies.any():
                by_column[cell] = np.where(varies, by_slice, -1).reshape(-1)
        row, column = (grid.reshape(-1) for grid in np.indices(entries.shape))
        column = slices[row] * columns.shape[1] + column
        for units_of, position in ((by_row, row), (by_column, column)):
            for cell, units in units_of.items():
                parents = set(self.cells[cell].parents)
                in_columns = units_of is by_column
                with_cell = {cell, *parents}
                without = parents if in_columns else with_cell
                of_row = self._context(rows, by_row, without)[row]
                without = with_cell if in_columns else parents
                of_column = self._context(columns.reshape(-1), by_column, without)
                of_column = of_column[column]
                context = of_row * (of_column.max() + 1) + of_column
                location = _Location(leaf.site, 0, 2, leaf.buffer, in_columns)
                self._add_blocks(cell, units[position], context, location)

    def _units_of(self, leaf: Leaf, atoms: Array) -> dict[int, Array]:
        """Return cell -> for each position, the unit of this cell that lies there or
        contains it, or -1.
        """
        classes = self.solution.unit[atoms]
        cells = self.solution.cell[classes]
        units_of = dict[int, Array]()
        for number in np.unique(cells).tolist():
            if number in self.cells:
                chosen = np.flatnonzero(cells == number)
                units = self.solution.place[classes[chosen]]
                in_cells = {number: units}
                for up, parent_of in self.cells[number].parents.items():
                    in_cells[up] = parent_of[units]
                for cell, units_of_cell in in_cells.items():
                    if cell in self.rank:
                        units_of.setdefault(cell, np.full(len(atoms), -1))
                        units_of[cell][chosen] = units_of_cell
        self.in_images.update(units_of if leaf.kernel and leaf.value.dim > 2 else ())
        return units_of

    def _context(
        self, atoms: Array, units_of: dict[int, Array], without: set[int]
    ) -> Array:
        """Number positions; two have the same number if they differ at most in their
        units of the cells ``without``.
        """
        classes = self.solution.unit[atoms]
        ranks = [
            np.where(units < 0, -1, self.rank[c][units])
            for c, units in units_of.items()
            if c not in without
        ]
        copies = rank_within(classes, self.solution.atom_colour[atoms])
        return distinct_rows(self.solution.colour[classes], copies, *ranks)[1]

    def _add_blocks(
        self, cell: int, units: Array, context: Array, location: _Location
    ) -> None:
        """Group positions of equal context into blocks, with one position for each
        unit.
        """
        chosen = np.flatnonzero(units >= 0)
        number = self.number[cell][units[chosen]]
        order = np.lexsort([number, context[chosen]])
        count = self.cells[cell].size
        in_order = np.resize(np.arange(count), len(order))
        if len(order) % count or (number[order] != in_order).any():
            raise RuntimeError(
                f"interchangeable units lie unevenly along axis {location.dim} of "
                f"{location.site!r}"
            )
        blocks = self.blocks.setdefault(cell, {}).setdefault(location, [])
        blocks.append(chosen[order].reshape(-1, count))

    def units(self, shapes: dict[str, tuple[int, ...]]) -> dict[int, Units]:
        """Build the units of each cell, named after the module of the first site along
        which they lie.
        """
        with_members = {
            cell.direct[0] for cell in self.cells.values() if len(cell.direct) == 1
        }
        built: dict[int, Units] = {}
        by_use = list[int]()
        for cell in self.blocks:
            by_use += self._parents_first([*self.cells[cell].parents, cell])
        for cell in dict.fromkeys(by_use):
            axes = []
            for location, blocks in self.blocks[cell].items():
                site, dim, span, is_buffer, _ = location
                axis = Axis(site, dim, _index(blocks), 0, is_buffer, None, span)
                axes.append(_on_one_axis(axis, shapes[site]))
            size = int(self.rank[cell].max()) + 1
            direct = self.cells[cell].direct
            name = module_name(axes[0].site)
            if cell in with_members:
                name += ".groups" if cell in self.in_images else ".heads"
            name = unused(name, [unit_set.name for unit_set in built.values()])
            parent = built[direct[0]].name if direct else None
            copies = self.cells[cell].size // size
            built[cell] = Units(name, size, tuple(axes), parent, copies)
        return built

    def _parents_first(self, cells: Iterable[int]) -> list[int]:
        """Sort cells so that parents come before their members."""
        return sorted(cells, key=lambda number: len(self.cells[number].parents))


# small steps --------------------------------------------------------------------------


def _positions(part: Part, shape: Sequence[int]) -> Array:
    """Return the positions of a part's units along the axes that it spans.

    Units along the first and the last of three axes of lengths 2, 3 and 2 have three
    positions, ``(3, 4)``: the first unit's are 0, 2 and 4, the last one's 7, 9 and 11.
    """
    along = shape[part.axes[0] : part.axes[-1] + 1]
    if len(along) == 1:
        return np.arange(along[0])[None]
    positions = np.arange(math.prod(along)).reshape(along[0], -1, along[-1])
    return np.moveaxis(positions, 1, 0).reshape(positions.shape[1], -1)


def _are_members(leaf: Leaf, part: Part, units: Array) -> bool:
    """Return whether units are members as wholes, which move along an axis of their
    own.
    """
    along = (leaf_part.axes for leaf_part in leaf.value.parts)
    if leaf.members is None or len(part.axes) == 1 or (leaf.members,) not in along:
        return False
    place = part.axes.index(leaf.members)
    by_member = np.moveaxis(units.reshape(part.atoms.shape), place, 0)
    return bool((by_member == by_member[:, :1]).all())


def _index(blocks: Sequence[Array]) -> torch.Tensor:
    """Concatenate blocks, sorted by their first position."""
    index = np.concatenate(blocks)
    return torch.from_numpy(index[index[:, 0].argsort()])


def _on_one_axis(axis: Axis, shape: Sequence[int]) -> Axis:
    """Reduce an axis that spans rows and columns to one of these, if units lie alike at
    all positions of the other.
    """
    if axis.span != 2:
        return axis
    rows, columns = shape[axis.dim : axis.dim + 2]
    row, column = np.divmod(axis.index.numpy(), columns)
    for dim, along, across, length in (
        (0, row, column, columns),
        (1, column, row, rows),
    ):
        order = np.lexsort([along[:, 0], across[:, 0]])
        if (across != across[:, :1]).any() or len(order) % length:
            continue
        lines = along[order].reshape(length, -1, along.shape[1])
        positions = across[order, 0].reshape(length, -1)
        complete = (positions == np.arange(length)[:, None]).all()
        if complete and (lines == lines[:1]).all():
            index = torch.from_numpy(np.ascontiguousarray(lines[0]))
            return replace(axis, dim=axis.dim + dim, span=1, index=index)
    return axis


def module_name(site: str) -> str:
    """Return ``layer.conv`` for ``layer.conv.weight``; a site that isn't a plain weight
    or bias keeps its own name.
    """
    path, parametrised, _ = site.partition(".parametrizations.")
    if parametrised:
        return path
    module, _, last = path.rpartition(".")
    for recurrent in ("weight_ih_", "weight_hh_", "bias_ih_", "bias_hh_"):
        last = last.removeprefix(recurrent)
    plain = last in (
        "weight",
        "bias",
        "in_proj_weight",
        "in_proj_bias",
        "weight_g",
        "weight_v",
    )
    return module if plain and module else f"{module}.{last}" if module else last


def unused(name: str, taken: Iterable[str]) -> str:
    """Return the name, with a number appended if it is taken."""
    taken = set(taken)
    candidate = name
    number = 1
    while candidate in taken:
        number += 1
        candidate = f"{name}~{number}"
    return candidate


def unified(flow: Flow) -> tuple[int, Array]:
    """Return the number of classes of unified atoms, and the class of each atom."""
    return components(flow.size, *_ends(flow.unions))


def _ends(facts: Sequence[Fact]) -> tuple[Array, Array]:
    """Return the atoms at both ends of facts, one after the other."""
    atoms = np.concatenate([NOTHING, *(fact.atoms for fact in facts)])
    return atoms, np.concatenate([NOTHING, *(fact.partners for fact in facts)])


class DistinctRows(NamedTuple):
    """Distinct rows: the index of the ``first`` of each, the number of each row among
    them, and how often they come.
    """

    first: Array
    number: Array
    counts: Array


def distinct_rows(*columns: Array) -> DistinctRows:
    """Find distinct rows of several integer columns, sorted."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[order][1:] != column[order][:-1]
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.cumsum(new) - 1
    return DistinctRows(order[new], inverse, np.bincount(inverse))


def components(size: int, firsts: Array, seconds: Array) -> tuple[int, Array]:
    """Find the connected components of a graph: their number, and the component of each
    node.
    """
    edges = np.ones(len(firsts), dtype=np.int8)
    graph = coo_matrix((edges, (firsts, seconds)), shape=(size, size))
    count, label = connected_components(graph, directed=False)
    return count, label.astype(np.int64)
