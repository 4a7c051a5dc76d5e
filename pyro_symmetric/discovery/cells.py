"""From what operators say of atoms to cells of interchangeable units, and how these are nested.

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

from pyro_symmetric.discovery.arrays import Array, components, distinct_rows, mix, salt
from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.nesting import Cell, Memberships, NotNested, nested

NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Cells:
    """The solution.

    :param unit: atom -> class of unified atoms.
    :param atom_colour: atom -> colour, telling the atoms of one class apart.
    :param colour: class -> colour (several colours may ride in one cell).
    :param cell: class -> cell.
    :param place: class -> number of its unit within the cell.
    :param cells: cell number -> cell.
    :param apart: whether units were individualised, so that others, too, may have colours of their own.
    """

    unit: Array
    atom_colour: Array
    colour: Array
    cell: Array
    place: Array
    cells: dict[int, Cell]
    apart: bool


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
                cell, place, cells = nested(Memberships(self.child, self.parent, self.kind, colour))
            except NotNested as ambiguous:
                self._individualise(ambiguous.classes, ambiguous.colours)
                continue
            return Cells(self.unit, self.atom_colour, colour, cell, place, cells, bool(self.extra.any()))

    def _individualise(self, classes: Array, colours: Array) -> None:
        """Tell classes apart by further colours."""
        self.extra[classes] = mix(self.extra[classes] ^ mix(mix(colours)))

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
        self._individualise(owners, owners)
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
        self._individualise(np.flatnonzero(stuck), np.flatnonzero(stuck))
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
