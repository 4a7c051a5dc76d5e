"""From facts about units to a group: which units are interchangeable, and which move inside others.

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

from dataclasses import dataclass

import numpy as np

from pyro_symmetric.discovery.nesting import Cell, Memberships, NotNested, nested
from pyro_symmetric.discovery.scaling.facts import Facts
from pyro_symmetric.discovery.scaling.labels import Array, distinct_rows

_U = np.uint64


def mix(values: Array) -> Array:
    """Hash integers to 64 bits (splitmix64): sums of hashes tell multisets apart but for a chance of 2^-64 a pair."""
    with np.errstate(over="ignore"):
        z = values.astype(_U) + _U(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
        return z ^ (z >> _U(31))


@dataclass(eq=False)
class Structure:
    """The solution.

    :ivar unit_class: atom -> class (of unified atoms).
    :ivar atom_colour: atom -> colour, telling the atoms of one class apart.
    :ivar colour: class -> colour (several colours may ride in one cell).
    :ivar cell: class -> cell.
    :ivar place: class -> number of its unit within the cell.
    :ivar cells: cell number -> cell.
    :ivar individualised: classes that were set apart because their relations have no simple shape.
    """

    unit_class: Array
    atom_colour: Array
    colour: Array
    cell: Array
    place: Array
    cells: dict[int, Cell]
    individualised: Array


def solve(facts: Facts) -> Structure:
    """The cells of interchangeable units, and how they are nested."""
    return _Solver(facts).solve()


class _Solver:
    def __init__(self, facts: Facts):
        self.count, self.unit_class = facts.classes()
        self.unions = facts.unions
        self.relations = facts.relations
        self.occurrences = facts.occurrences
        self.atom_colour = self._first_colours(facts)
        self.child, self.parent, self.kind = self._relations(facts)
        self.extra = np.zeros(self.count, dtype=_U)
        self.individualised = np.zeros(self.count, dtype=bool)

    def _first_colours(self, facts: Facts) -> Array:
        colour = np.zeros(facts.size, dtype=_U)
        for atoms, number in self.occurrences:
            np.add.at(colour, atoms.reshape(-1), mix(np.array([2 * number]))[0])
        for refinement in facts.refinements:
            salted = mix(mix(np.array([2 * refinement.number + 1]))[0] ^ refinement.colours.astype(_U))
            np.add.at(colour, refinement.atoms, salted)
        return colour

    def _relations(self, facts: Facts) -> tuple[Array, Array, Array]:
        if not facts.relations:
            return (np.empty(0, dtype=np.int64),) * 3
        child = self.unit_class[np.concatenate([child for child, _, _ in facts.relations])]
        parent = self.unit_class[np.concatenate([parent for _, parent, _ in facts.relations])]
        kind = np.repeat([number for *_, number in facts.relations], [len(child) for child, *_ in facts.relations])
        apart = child != parent
        rows = distinct_rows(kind[apart], child[apart], parent[apart])[0]
        return child[apart][rows], parent[apart][rows], kind[apart][rows]

    def solve(self) -> Structure:
        self._set_apart_ambiguous_owners()
        self._tell_copies_apart()
        while True:
            colour = self._refine()
            try:
                cell, place, cells = nested(Memberships(self.child, self.parent, self.kind, colour))
            except NotNested as ambiguous:
                self._individualise(ambiguous.classes, ambiguous.colours)
                continue
            return Structure(self.unit_class, self.atom_colour, colour, cell, place, cells, self.individualised)

    def _individualise(self, classes: Array, colours: Array) -> None:
        """Tell classes apart by further colours."""
        self.extra[classes] = mix(self.extra[classes] ^ mix(mix(colours)))
        self.individualised[classes] = True

    def _class_colour(self) -> Array:
        colour = self.extra.copy()
        with np.errstate(over="ignore"):
            np.add.at(colour, self.unit_class, mix(self.atom_colour))
        return colour

    def _refine(self) -> Array:
        """Stable colours, as numbers 0 ... : units of one colour have equally coloured members and owners."""
        _, colour = np.unique(self._class_colour(), return_inverse=True)
        up, down = mix(mix(2 * self.kind)), mix(mix(2 * self.kind + 1))  # twice: colours, too, are hashed small numbers
        number = -1
        while number != colour.max(initial=0):
            number = colour.max(initial=0)
            new = mix(colour)
            hashed = mix(colour)
            with np.errstate(over="ignore"):
                np.add.at(new, self.child, mix(hashed[self.parent] ^ up))
                np.add.at(new, self.parent, mix(hashed[self.child] ^ down))
            _, colour = np.unique(new, return_inverse=True)
        return colour

    def _tell_copies_apart(self) -> None:
        """A unit that occurs twice in one tensor is a rigid block if its places have different colours there.

        Its places are first coloured by what they meet elsewhere; a unit whose places can't be told apart stays put.
        """
        doubled = np.zeros(self.count, dtype=bool)
        for atoms, _ in self.occurrences:
            classes, counts = np.unique(self.unit_class[atoms.reshape(-1)], return_counts=True)
            doubled[classes[counts > 1]] = True
        if not doubled.any():
            return
        self._refine_atoms(doubled)
        self._tell_members_apart(doubled)
        stuck = np.zeros(self.count, dtype=bool)
        for atoms, _ in self.occurrences:
            chosen = atoms[doubled[self.unit_class[atoms]]]
            if len(chosen):
                _, where, counts = distinct_rows(self.unit_class[chosen], self.atom_colour[chosen])
                stuck[self.unit_class[chosen[counts[where] > 1]]] = True
        self._individualise(np.flatnonzero(stuck), np.flatnonzero(stuck))
        if stuck.any():  # each of its places stays, with what lies there
            places = np.flatnonzero(stuck[self.unit_class])
            self.atom_colour[places] = mix(self.atom_colour[places] ^ mix(mix(places)))
            self._tell_members_apart(stuck)

    def _tell_members_apart(self, doubled: Array) -> None:
        """Members of a rigid block are members of one of its places each: they have the colour of that place."""
        colour = self.atom_colour.copy()
        for child, parent, number in self.relations:
            chosen = doubled[self.unit_class[parent]]
            if chosen.any():
                place = mix(colour[parent[chosen]] ^ mix(np.array([2 * number]))[0])
                with np.errstate(over="ignore"):
                    np.add.at(self.atom_colour, child[chosen], mix(place))

    def _refine_atoms(self, doubled: Array, rounds: int = 20) -> None:
        edges = []
        for one, other, number in self.unions:
            chosen = doubled[self.unit_class[one]]
            if chosen.any():
                edges.append((one[chosen], other[chosen], number))
        before = -1
        for _ in range(rounds):
            hashed = mix(self.atom_colour)
            new = hashed.copy()
            with np.errstate(over="ignore"):
                for one, other, number in edges:
                    salt = mix(mix(np.array([2 * number, 2 * number + 1])))
                    np.add.at(new, one, mix(hashed[other] ^ salt[0]))
                    np.add.at(new, other, mix(hashed[one] ^ salt[1]))
            concerned = doubled[self.unit_class]
            self.atom_colour = np.where(concerned, new, self.atom_colour)
            now = len(np.unique(self.atom_colour[concerned]))
            if now == before:
                break
            before = now

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
        self._individualise(owners, owners)
        fixed = np.zeros(self.count, dtype=bool)
        fixed[owners] = True
        doubtful = set(np.unique(self.kind[bad]).tolist())
        for child, parent, number in self.relations:
            if number not in doubtful:
                continue
            own = self.unit_class[parent]
            chosen = fixed[own] & (self.unit_class[child] != own)
            with np.errstate(over="ignore"):
                np.add.at(self.atom_colour, child[chosen], mix(mix(own[chosen]) ^ mix(np.array([2 * number + 1]))))
