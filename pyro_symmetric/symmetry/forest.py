"""How cells of interchangeable units are nested: the second half of :mod:`structure`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from pyro_symmetric.symmetry.labels import Array, distinct_rows


def components(size: int, one: Array, other: Array) -> tuple[int, Array]:
    """Connected components of a graph: their number, and the component of each node."""
    graph = coo_matrix((np.ones(len(one), dtype=np.int8), (one, other)), shape=(size, size))
    count, label = connected_components(graph, directed=False)
    return count, label.astype(np.int64)


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


class Conflict(Exception):
    """Memberships without a simple shape: these classes must be told apart (by the given colours) first."""

    def __init__(self, classes: Array, colours: Array | None = None):
        super().__init__("units that must be told apart")
        self.classes = classes
        self.colours = colours


class Forest:
    """Cells and memberships from stable colours.

    :param colour: class -> colour.
    :param child, parent, kind: the memberships, one entry for each pair of classes and kind of relation.
    """

    def __init__(self, colour: Array, child: Array, parent: Array, kind: Array):
        sizes = np.bincount(colour)
        order = np.argsort(colour, kind="stable")
        starts = np.r_[0, np.cumsum(sizes)[:-1]]
        self.colour = colour
        self.rank = np.empty(len(colour), dtype=np.int64)
        self.rank[order] = np.arange(len(colour)) - starts[colour[order]]
        self.cells: dict[int, Cell] = {int(c): Cell(int(sizes[c])) for c in np.flatnonzero(sizes > 1)}
        self.children: dict[int, set[int]] = {c: set() for c in self.cells}
        self.merged: dict[int, tuple[int, Array]] = {}
        self.next = len(sizes)
        live = (sizes[colour[child]] > 1) & (sizes[colour[parent]] > 1)
        self.relations = child[live], parent[live], kind[live]

    def build(self) -> tuple[Array, Array, dict[int, Cell]]:
        """(class -> cell, class -> place in its cell, cells).

        :raises Conflict: if some classes must be told apart first.
        """
        self._add_relations()
        while self._inherit() or self._compare_owners():
            pass
        cell, place = self._resolve()
        self._check_shape(cell, place)
        return cell, place, self.cells

    def _add_relations(self) -> None:
        child, parent, kind = self.relations
        if not len(child):
            return
        first, where, counts = distinct_rows(kind, self.colour[child], self.colour[parent])
        pieces = np.split(np.argsort(where, kind="stable"), np.cumsum(counts)[:-1])
        lowers, uppers = self.colour[child[first]].tolist(), self.colour[parent[first]].tolist()
        for lower, upper, chosen in zip(lowers, uppers, pieces, strict=True):
            function = np.empty(len(chosen), dtype=np.int64)
            function[self.rank[child[chosen]]] = self.rank[parent[chosen]]
            self._add(lower, upper, function)

    def _add(self, lower: int, upper: int, function: Array) -> None:
        """Units of ``lower`` are members of units of ``upper``."""
        lower, moved = self._current(lower)
        if moved is not None:
            function = function[moved.argsort()]
        upper, moved = self._current(upper)
        if moved is not None:
            function = moved[function]
        if lower == upper:
            if not np.array_equal(function, np.arange(len(function))):
                raise Conflict(self._classes(lower))
            return
        below, above = self.cells[lower], self.cells[upper]
        if below.size == above.size:
            self._merge(lower, upper, function)
        elif upper not in below.parents:
            below.parents[upper] = function
            self.children[upper].add(lower)
        elif not np.array_equal(below.parents[upper], function):
            raise Conflict(self._classes(upper))

    def _merge(self, lower: int, upper: int, function: Array) -> None:
        """One to one: the units of both cells are tied, ``lower`` goes up in ``upper``."""
        if len(np.unique(function)) < len(function):
            raise Conflict(self._classes(lower))
        gone, back = self.cells.pop(lower), function.argsort()
        self.merged[lower] = upper, function
        ties = [(upper, top, up[back]) for top, up in gone.parents.items()]
        ties += [(bottom, upper, function[self.cells[bottom].parents.pop(lower)]) for bottom in self.children[lower]]
        for top in gone.parents:
            self.children[top].discard(lower)
        del self.children[lower]
        for tie in ties:
            self._add(*tie)

    def _current(self, cell: int) -> tuple[int, Array | None]:
        """The cell that a cell went up in, and where its units went."""
        moved: Array | None = None
        while cell in self.merged:
            cell, step = self.merged[cell]
            moved = step if moved is None else step[moved]
        return cell, moved

    def _inherit(self) -> bool:
        """Owners of owners are owners."""
        for lower in list(self.cells):
            queue = list(self.cells[lower].parents) if lower in self.cells else []
            for upper in queue:
                if lower not in self.cells or upper not in self.cells[lower].parents or upper not in self.cells:
                    continue
                for top, function in list(self.cells[upper].parents.items()):
                    known = self.cells[lower].parents.get(top)
                    composed = function[self.cells[lower].parents[upper]]
                    if known is None or not np.array_equal(known, composed):
                        self._add(lower, top, composed)
                        return True
        return False

    def _compare_owners(self) -> bool:
        """Two owners of the same units: does one determine the other, or have they a common owner?"""
        for lower in list(self.cells):
            owners = list(self.cells[lower].parents)
            for i, a in enumerate(owners):
                for b in owners[:i]:
                    if b not in self.cells[a].parents and a not in self.cells[b].parents and self._compare(lower, a, b):
                        return True
        return False

    def _compare(self, lower: int, a: int, b: int) -> bool:
        f, g = self.cells[lower].parents[a], self.cells[lower].parents[b]
        rows, pair, times = distinct_rows(f, g)
        pairs = f[rows], g[rows]
        found, first, second = len(rows), self.cells[a].size, self.cells[b].size
        if found == first:
            self._add(a, b, _as_function(pairs[0], pairs[1]))
            return True
        if found == second:
            self._add(b, a, _as_function(pairs[1], pairs[0]))
            return True
        number, label = components(first + second, pairs[0], pairs[1] + first)
        left, right = label[:first], label[first:]
        if (np.bincount(left, minlength=number) * np.bincount(right, minlength=number)).sum() != found:
            classes = np.flatnonzero(np.isin(self.colour, [lower, *self._merged_into(lower)]))
            if len(classes) and (times != times[0]).any():  # pairs of owners that share more units than others
                raise Conflict(classes, times[pair[self._place(classes)]])
            raise Conflict(self._classes(a if first <= second else b))
        common = [c for c in self.cells[a].parents if c in self.cells[b].parents and self.cells[c].size == number]
        if number == 1 or common:
            return False
        owner, self.next = self.next, self.next + 1
        self.cells[owner] = Cell(number)
        self.children[owner] = set()
        self._add(a, owner, left)
        self._add(b, owner, right)
        return True

    def _resolve(self) -> tuple[Array, Array]:
        """Class -> (cell, place); classes that are alone in their colour keep a cell number without a cell."""
        cell, place = self.colour.astype(np.int64), self.rank.copy()
        order = np.argsort(self.colour, kind="stable")
        starts = np.r_[0, np.cumsum(np.bincount(self.colour))]
        for lower in self.merged:
            if lower < len(starts) - 1:
                top, moved = self._current(lower)
                chosen = order[starts[lower] : starts[lower + 1]]
                cell[chosen] = top
                place[chosen] = moved[self.rank[chosen]] if moved is not None else self.rank[chosen]
        return cell, place

    def _classes(self, number: int) -> Array:
        """The classes whose units lie in a cell (of a cell that was only deduced: those of its members)."""
        found = np.flatnonzero(np.isin(self.colour, [number, *self._merged_into(number)]))
        if len(found):
            return found
        return np.concatenate([self._classes(lower) for lower in self.children[number]])

    def _merged_into(self, number: int) -> list[int]:
        """The cells that went up in a cell."""
        return [lower for lower in self.merged if self._current(lower)[0] == number]

    def _place(self, classes: Array) -> Array:
        """The numbers of classes' units in the cell that they are in by now."""
        place = self.rank[classes].copy()
        for colour in np.unique(self.colour[classes]).tolist():
            moved = self._current(colour)[1]
            if moved is not None:
                own = self.colour[classes] == colour
                place[own] = moved[place[own]]
        return place

    def _check_shape(self, cell: Array, place: Array) -> None:
        """Every cell must be free, nested in one cell, or ride along with two."""
        for own in self.cells.values():
            above = {top for upper in own.parents for top in self.cells[upper].parents}
            own.direct = sorted(upper for upper in own.parents if upper not in above)
            if len(own.direct) > 2:
                raise Conflict(self._classes(min(own.direct, key=lambda c: self.cells[c].size)))
        for number, own in self.cells.items():
            if not own.direct:
                continue
            owner = own.parents[own.direct[0]]
            for upper in own.direct[1:]:
                owner = owner * self.cells[upper].size + own.parents[upper]
            _, owner = np.unique(owner, return_inverse=True)
            inside = np.bincount(owner)
            if (inside != inside[0]).any():
                raise Conflict(self._classes(number))
            if inside[0] > 1 and (len(own.direct) == 2 or len(self.cells[own.direct[0]].direct) == 2):
                # A group inside pairs of units has no place in a tree of factors: tell its units apart by their rank.
                classes = np.flatnonzero(cell == number)
                raise (
                    Conflict(classes, rank_within(owner)[place[classes]])
                    if len(classes)
                    else Conflict(self._classes(number))
                )


def rank_within(owner: Array) -> Array:
    """For each unit, how many units of the same owner come before it."""
    order = np.argsort(owner, kind="stable")
    starts = np.r_[0, np.cumsum(np.bincount(owner))[:-1]]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = np.arange(len(owner)) - starts[owner[order]]
    return rank


def _as_function(arguments: Array, images: Array) -> Array:
    function = np.empty(len(arguments), dtype=np.int64)
    function[arguments] = images
    return function
