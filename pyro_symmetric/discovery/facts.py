"""What the operator rules find out, as plain facts about atoms; :mod:`structure` and :mod:`multipliers` solve them.

*Permutations*: two atoms belong to the same unit (:meth:`Facts.unify`); a unit is a member of a larger one, say of a
head (:meth:`Facts.relate`); units aren't interchangeable (:meth:`Facts.refine`).
*Scalings and signs*: every atom also stands for the multiplier of its unit in that place; :meth:`Facts.balance` states
a linear equation between logarithms of multipliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyro_symmetric.discovery.labels import Array, Part, Value, components

Multiple = tuple[float, Array]  # a coefficient, and the atoms whose log-multipliers it multiplies


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter (or a running statistic) as the graph's input: its site and one part for each of its axes.

    The kernel of a grouped convolution has columns (axis 1) of each group's own: their part lies on axes 0 and 1 and
    holds the same atoms in all rows of a group. Only the rule of convolutions may see it, since parts otherwise don't
    overlap.

    :param groups: into how many groups of rows its columns fall.
    """

    site: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    buffer: bool = False
    groups: int = 1

    def value(self) -> Value:
        return Value(self.shape, self.parts)

    @property
    def columns(self) -> Array:
        """The atoms of a grouped kernel's columns, ``(groups, columns)``."""
        return self.parts[1].atoms.reshape(self.groups, -1, self.shape[1])[:, 0]


@dataclass(frozen=True, eq=False)
class Refinement:
    """Atoms with different colours aren't interchangeable, because of ``why``."""

    atoms: Array
    colours: Array
    why: str


class Facts:
    """All facts about one network, in the order in which they were found."""

    def __init__(self) -> None:
        self.size = 0
        self.unions: list[tuple[Array, Array]] = []
        self.relations: list[tuple[Array, Array]] = []
        self.refinements: list[Refinement] = []
        self.scale_equations: list[list[Multiple]] = []
        self.sign_equations: list[list[Multiple]] = []
        self.leaves: dict[str, Leaf] = {}
        self.epsilons: dict[str, float] = {}
        self.lost: dict[str, None] = {}  # where units were left out that might move, and why
        self._occurrences: dict[int, Array] = {}
        self._still: dict[int, Array] = {}
        self._copies: list[tuple[int, Array, Array]] = []

    def fresh(self, shape: Sequence[int]) -> Array:
        """New atoms, never seen before."""
        count = int(np.prod(shape, dtype=np.int64))
        atoms = np.arange(self.size, self.size + count, dtype=np.int64).reshape(shape)
        self.size += count
        return atoms

    def leaf(self, site: str, shape: Sequence[int], buffer: bool = False, groups: int = 1) -> Leaf:
        """A parameter: every entry of every axis is a unit of its own until an operator ties or pins it.

        :param groups: if more than one, rows fall into so many groups with columns of their own.
        """
        if site not in self.leaves:
            parts = [Part((i,), self.fresh((n,))) for i, n in enumerate(shape)]
            for part in parts if groups == 1 else [parts[0], *parts[2:]]:
                self.occur(part.atoms)
            if groups > 1:
                columns = self.fresh((groups, shape[1]))
                self.occur(columns)
                parts[1] = Part((0, 1), columns.repeat(shape[0] // groups, axis=0))
            self.leaves[site] = Leaf(site, tuple(shape), tuple(parts), buffer, groups)
        return self.leaves[site]

    def classes(self) -> tuple[int, Array]:
        """Units as classes of unified atoms: how many there are, and the class of each atom."""
        ends = (np.concatenate([np.empty(0, int), *(pair[i] for pair in self.unions)]) for i in (0, 1))
        return components(self.size, *ends)

    @property
    def occurrences(self) -> list[Array]:
        """Arrays of atoms that occur together in one tensor: a symmetry maps each onto itself."""
        return list(self._occurrences.values())

    def occur(self, atoms: Array) -> None:
        self._occurrences.setdefault(id(atoms), atoms)

    def unify(self, one: Array, other: Array) -> None:
        """Entry by entry, both atoms belong to the same unit."""
        if one is not other:
            self.unions.append((one.reshape(-1), other.reshape(-1)))

    def relate(self, child: Array, parent: Array) -> None:
        """Entry by entry, the unit ``child`` is part of the unit ``parent`` and moves with it."""
        self.relations.append((child.reshape(-1), parent.reshape(-1)))

    def refine(self, atoms: Array, colours: Array, why: str) -> None:
        """Units whose atoms have different colours can't be exchanged."""
        self.refinements.append(Refinement(atoms.reshape(-1), colours.reshape(-1), why))

    def balance(self, terms: Sequence[Multiple], scale: bool = True, sign: bool = True) -> None:
        """Entry by entry, the sum of coefficient times log-multiplier is zero (for signs: even)."""
        flat = [(coefficient, atoms.reshape(-1)) for coefficient, atoms in terms if coefficient != 0]
        if scale:
            self.scale_equations.append(flat)
        if sign and all(coefficient == int(coefficient) for coefficient, _ in flat):
            self.sign_equations.append(flat)
        elif sign:  # a root: defined for positive entries only
            self.sign_equations.extend([(1.0, atoms)] for _, atoms in flat)

    def still(self, atoms: Array, scale: bool = True, sign: bool = True) -> None:
        """These units can't be rescaled."""
        if scale and sign:
            self._still[id(atoms)] = atoms
        self.balance([(1.0, atoms)], scale, sign)

    def is_still(self, atoms: Array) -> bool:
        """Whether :meth:`still` was said of this very array."""
        return id(atoms) in self._still

    def placed(self, atoms: Array, origin: Array, place: Array) -> None:
        """New ``atoms`` are those of ``origin``, told apart by their ``place`` along fixed axes."""
        self._copies.append((int(atoms.flat[0]), origin.reshape(-1), place.reshape(-1)))

    def origin(self, atoms: Array) -> tuple[Array, Array] | None:
        """Undo :meth:`placed`: what these atoms are, and their places; None if not all come from one such step."""
        low, high = int(atoms.min()), int(atoms.max())
        for start, origin, place in reversed(self._copies):
            if start <= low and high < start + len(origin):
                return origin[atoms - start], place[atoms - start]
        return None

    def epsilon(self, atoms: Array, epsilon: float) -> None:
        """If these are the atoms of a leaf, it is ``leaf + epsilon`` that takes the multiplier."""
        for leaf in self.leaves.values():
            if any(part.atoms.size and part.atoms.flat[0] == atoms.flat[0] for part in leaf.parts):
                self.epsilons[leaf.site] = epsilon

    def pin(self, atoms: Array, why: str) -> None:
        """Nothing moves or rescales these units: each is a colour of its own."""
        self.refine(atoms, np.arange(atoms.size), why)
        self.still(atoms)
