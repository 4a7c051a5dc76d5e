"""Nesting of cells of interchangeable units inside one another.

A membership says of each unit of one cell which unit of another it is part of. Cells whose units belong together one to
one are one cell. Owners of owners are owners. Two owners of the same units are compared: either one determines the
other; or their units meet in every combination, inside a common owner if not all of them meet; or there is no nesting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from pyro_symmetric.discovery.arrays import Array, components, distinct_rows, rank_within


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


class NotNested(Exception):
    """Memberships have no simple shape: these classes must be told apart first, by the given colours."""

    def __init__(self, classes: Array, colours: Array):
        super().__init__("units that must be told apart")
        self.classes, self.colours = classes, colours


@dataclass(frozen=True)
class Memberships:
    """Members of one colour have owners of one colour.

    :param child, parent, kind: one entry for each member, its owner, and each reason why it is one.
    :param colour: class -> colour.
    """

    child: Array
    parent: Array
    kind: Array
    colour: Array

    def with_one(self, child: Array, parent: Array, new: Array | None = None) -> Memberships:
        """One more kind of membership; perhaps with new classes, given by their colours."""
        kind = np.full(len(child), self.kind.max(initial=-1) + 1)
        colour = self.colour if new is None else np.r_[self.colour, new]
        return Memberships(np.r_[self.child, child], np.r_[self.parent, parent], np.r_[self.kind, kind], colour)


def nested(given: Memberships) -> tuple[Array, Array, dict[int, Cell]]:
    """(class -> cell, class -> place in its cell, cells with two units or more).

    :raises NotNested: if some classes must be told apart first.
    """
    count, all_ = len(given.colour), given
    while True:
        nesting = _Nesting(all_, count)
        more = nesting.compared()
        if more is all_:
            nesting.check_shape()
            return nesting.cell[:count], nesting.place[:count], nesting.cells
        all_ = more


class _Nesting:
    """Cells and their owners.

    :param count: how many classes were given; those behind them were only deduced.
    """

    def __init__(self, given: Memberships, count: int):
        self.given, self.count = given, count
        sizes = np.bincount(given.colour)
        lower, upper = sizes[given.colour[given.child]], sizes[given.colour[given.parent]]
        one_to_one = (lower == upper) & (lower > 1)
        self._unite(given.child[one_to_one], given.parent[one_to_one])
        self._add_parents((lower > upper) & (upper > 1))

    def _unite(self, child: Array, parent: Array) -> None:
        """Units whose members belong together one to one are the same units."""
        colour = self.given.colour
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

    def _add_parents(self, chosen: Array) -> None:
        child, parent, kind = self.given.child[chosen], self.given.parent[chosen], self.given.kind[chosen]
        first, where, counts = distinct_rows(kind, self.given.colour[child], self.given.colour[parent])
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

    def compared(self) -> Memberships:
        """The memberships, with what two owners of the same units tell of each other."""
        result, done = self.given, set[tuple[int, int]]()
        for lower, own in self.cells.items():
            for a, b in combinations(own.parents, 2):
                if (a, b) not in done and b not in self.cells[a].parents and a not in self.cells[b].parents:
                    done |= {(a, b), (b, a)}
                    result = self._compare(lower, a, b, result)
        return result

    def _compare(self, lower: int, a: int, b: int, result: Memberships) -> Memberships:
        f, g = self.cells[lower].parents[a], self.cells[lower].parents[b]
        rows, pair, times = distinct_rows(f, g)
        in_a, in_b = self._representatives(a), self._representatives(b)
        if len(rows) == len(in_a):  # each unit of a meets one of b
            return result.with_one(in_a[f[rows]], in_b[g[rows]])
        if len(rows) == len(in_b):
            return result.with_one(in_b[g[rows]], in_a[f[rows]])
        number, label = components(len(in_a) + len(in_b), f[rows], g[rows] + len(in_a))
        left, right = label[: len(in_a)], label[len(in_a) :]
        if (np.bincount(left, minlength=number) * np.bincount(right, minlength=number)).sum() != len(rows):
            if (times != times[0]).any():  # pairs of owners that share more units than others
                raise self._tangled(lower, times[pair])
            raise self._tangled(a if len(in_a) <= len(in_b) else b)
        common = self.cells[a].parents.keys() & self.cells[b].parents.keys()
        if number == 1 or any(self.cells[c].size == number for c in common):
            return result
        start, colour = len(result.colour), int(result.colour.max()) + 1
        result = result.with_one(in_a, start + left, np.full(number, colour))
        return result.with_one(in_b, start + right)

    def _representatives(self, number: int) -> Array:
        """One class for each unit of a cell, all of one colour."""
        classes = np.flatnonzero(self.cell == number)
        classes = classes[self.given.colour[classes] == self.given.colour[classes[0]]]
        return classes[self.place[classes].argsort()]

    def _tangled(self, number: int, colours: Array | None = None) -> NotNested:
        """The units of a cell are told apart, by colours or one by one; if it was only deduced, its members are."""
        own = np.flatnonzero(self.cell[: self.count] == number)
        if len(own) and colours is not None:
            return NotNested(own, colours[self.place[own]])
        members = [lower for lower, cell in self.cells.items() if number in cell.parents]
        own = own if len(own) else np.flatnonzero(np.isin(self.cell[: self.count], members))
        own = own if len(own) else np.arange(self.count)
        return NotNested(own, own)

    def check_shape(self) -> None:
        """Every cell must be free, lie inside one cell, or ride along with two."""
        for own in self.cells.values():
            above = {top for upper in own.parents for top in self.cells[upper].parents}
            own.direct = sorted(upper for upper in own.parents if upper not in above)
            if len(own.direct) > 2:
                raise self._tangled(min(own.direct, key=lambda c: self.cells[c].size))
        for number, own in self.cells.items():
            if own.direct:
                _, owner, inside = distinct_rows(*(own.parents[upper] for upper in own.direct))
                if (inside != inside[0]).any():
                    raise self._tangled(number)
                if inside[0] > 1 and (len(own.direct) == 2 or len(self.cells[own.direct[0]].direct) == 2):
                    # A group inside pairs of units has no place in a tree: tell its units apart by their rank.
                    raise self._tangled(number, rank_within(owner))
