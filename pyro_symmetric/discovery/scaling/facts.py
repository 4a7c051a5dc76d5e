"""Findings of the operator rules, as plain facts about atoms; :mod:`..cells` and :mod:`multipliers` solve them.

*Permutations*: two atoms belong to the same unit (:meth:`Facts.unify`); a unit is a member of a larger one, say of a
head (:meth:`Facts.relate`); units aren't interchangeable (:meth:`Facts.refine`).
*Scalings and signs*: every atom also stands for the multiplier of its unit in that place; :meth:`Facts.balance` states
a linear equation between logarithms of multipliers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyro_symmetric.discovery.arrays import Array, components
from pyro_symmetric.discovery.flow import Fact, Part
from pyro_symmetric.discovery.scaling.labels import Value
from pyro_symmetric.discovery.scaling.slices import Slices

Multiple = tuple[float, Array]  # a coefficient, and the atoms whose log-multipliers it multiplies


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter (or a running statistic) as the graph's input: its site, and the labels along each of its axes.

    :param labels: for each axis its atoms, ``(length,)``; along an axis with slices ``(slices, length)``.
    :param slices: the slices that it is cut into, if any.
    """

    site: str
    shape: tuple[int, ...]
    labels: tuple[Array, ...]
    buffer: bool = False
    slices: Slices | None = None

    @property
    def plain(self) -> tuple[tuple[int, Array], ...]:
        """The axes whose labels depend on no other axis, and these labels."""
        return tuple((dim, atoms) for dim, atoms in enumerate(self.labels) if atoms.ndim == 1)

    def value(self) -> Value:
        """As a tensor. A slice of one position needs no label for that position: its own rows and columns tell."""
        if self.slices is None:
            return Value(self.shape, tuple(Part((dim,), atoms) for dim, atoms in self.plain))
        told = {self.slices.axis} if self.slices.owned and self.slices.single else set()
        parts = [Part((dim,), atoms) for dim, atoms in self.plain if dim not in told]
        parts += [self.slices.part(dim, self.labels[dim]) for dim in self.slices.dims]
        return Value(self.shape, tuple(sorted(parts, key=lambda part: part.axes)))


class Entangled(Exception):
    """Labels of slices met an operator that can't keep them apart: these sites must be labelled axis by axis."""

    def __init__(self, sites: Iterable[str]):
        super().__init__(", ".join(sites))
        self.sites = set(sites)


class Facts:
    """All facts about one network, in the order in which they were found.

    Each has a number of its own.

    :param plan: site -> the slices that it is cut into; None if it mustn't be.
    :param statistics: the buffers that move along with units, and how they are used.
    """

    def __init__(
        self, plan: Mapping[str, Slices | None] | None = None, statistics: Mapping[str, str | None] | None = None
    ) -> None:
        self.plan, self.statistics = dict(plan or {}), dict(statistics or {})
        self.kernels: set[str] = set()  # of convolutions
        self.stacks: list[Array] = []  # atoms along axes of which each entry has a life of its own
        self.crossed: list[
            tuple[Array, Array]
        ] = []  # atoms along two axes of a factor; another's lie along both at once
        self.moving: set[int] = set()  # routers whose choices are made among units that move
        self.size = 0
        self.starts: list[int] = []  # of arrays of atoms
        self.unions: list[Fact] = []
        self.relations: list[Fact] = []
        self.refinements: list[Fact] = []
        self.scale_equations: list[list[Multiple]] = []
        self.sign_equations: list[list[Multiple]] = []
        self.leaves: dict[str, Leaf] = {}
        self.epsilons: dict[str, float] = {}
        self.lost: dict[str, None] = {}  # where units were left out that might move, and why
        self.common: list[int] = []  # atoms that are no unit's, but a multiplier that all units of something share
        # Arrays of atoms that occur together in one tensor, with a number: a symmetry maps each onto itself.
        self.occurrences: dict[int, tuple[Array, int]] = {}
        self._count = 0
        self._still: dict[int, Array] = {}
        self._unscaled: dict[int, Array] = {}
        self._copies: list[tuple[int, Array, Array]] = []

    def _number(self) -> int:
        self._count += 1
        return self._count

    def fresh(self, shape: Sequence[int]) -> Array:
        """New atoms, never seen before."""
        count = int(np.prod(shape, dtype=np.int64))
        atoms = np.arange(self.size, self.size + count, dtype=np.int64).reshape(shape)
        self.starts.append(self.size)
        self.size += count
        return atoms

    def shared(self) -> Array:
        """One new atom, without axes: a multiplier that all units of something share."""
        self.common.append(self.size)
        return self.fresh(())

    def leaf(self, site: str, shape: Sequence[int], buffer: bool = False, slices: Slices | None = None) -> Leaf:
        """A parameter: every entry of every axis is a unit of its own until an operator ties or pins it.

        :param slices: what it is cut into; each slice has units of its own.
        """
        if site not in self.leaves:
            dims = () if slices is None else slices.dims
            labels = [self.fresh((slices.count, n) if slices and i in dims else (n,)) for i, n in enumerate(shape)]
            for atoms in labels:
                self.occur(atoms)
            if slices is not None and slices.owned:
                along = labels[slices.axis]
                owner = along if slices.single else self.fresh((slices.count,))
                if owner is not along:
                    self.relate(along, owner[slices.of])
                for dim in dims:
                    self.relate(labels[dim], owner.repeat(shape[dim]))
                if slices.single:  # multipliers of all rows and columns do what one of the slice would do
                    self.still(along)
            self.leaves[site] = Leaf(site, tuple(shape), tuple(labels), buffer, slices)
        return self.leaves[site]

    def is_sliced(self, atoms: Array) -> bool:
        """True if these are labels of slices, as some parameter has them."""
        one = atoms.flat[0]
        owned = [leaf for leaf in self.leaves.values() if leaf.slices is not None and leaf.slices.owned]
        return any(a.flat[0] <= one <= a.flat[-1] for leaf in owned for a in leaf.labels if a.ndim > 1 and a.size)

    def entangled(self, parts: Iterable[Part]) -> Entangled:
        """The error for labels of slices: it names the sites that they belong to, or all that may be meant."""
        sliced = {site: leaf for site, leaf in self.leaves.items() if leaf.slices is not None and leaf.slices.owned}
        ranges = {site: [(a.min(), a.max()) for a in leaf.labels if a.size] for site, leaf in sliced.items()}
        firsts = [part.atoms.flat[0] for part in parts if part.atoms.size]
        named = [s for s, own in ranges.items() if any(low <= one <= high for low, high in own for one in firsts)]
        return Entangled(named or sliced)

    def classes(self) -> tuple[int, Array]:
        """Units as classes of unified atoms: how many there are, and the class of each atom."""
        ends = (np.concatenate([np.empty(0, int), *(union[i] for union in self.unions)]) for i in (0, 1))
        return components(self.size, *ends)

    def occur(self, atoms: Array) -> None:
        self.occurrences.setdefault(id(atoms), (atoms, self._number()))

    def unify(self, one: Array, other: Array) -> None:
        """Entry by entry, both atoms belong to the same unit."""
        if one is not other:
            self.unions.append(Fact(one.reshape(-1), other.reshape(-1), self._number()))

    def relate(self, child: Array, parent: Array) -> None:
        """Entry by entry, the unit ``child`` is part of the unit ``parent`` and moves with it."""
        self.relations.append(Fact(child.reshape(-1), parent.reshape(-1), self._number()))

    def refine(self, atoms: Array, colours: Array, why: str) -> None:
        """Units whose atoms have different colours can't be exchanged."""
        self.refinements.append(Fact(atoms.reshape(-1), colours.reshape(-1), self._number()))

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
        if scale:
            self._unscaled[id(atoms)] = atoms
        if scale or sign:
            self.balance([(1.0, atoms)], scale, sign)

    def is_still(self, atoms: Array) -> bool:
        """True if :meth:`still` was said of this very array."""
        return id(atoms) in self._still

    def is_unscaled(self, atoms: Array) -> bool:
        """True if :meth:`still` was said of the scales of this very array."""
        return id(atoms) in self._unscaled

    def placed(self, atoms: Array, origin: Array, place: Array) -> None:
        """New ``atoms`` are those of ``origin``, told apart by their ``place`` along fixed axes."""
        before = self.origin(origin)
        if before is not None:  # these were told apart by other places already
            origin, earlier = before
            place = earlier * (int(place.max(initial=0)) + 1) + place
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
            if any(own.size and own.flat[0] == atoms.flat[0] for own in leaf.labels):
                self.epsilons[leaf.site] = epsilon

    def pin(self, atoms: Array, why: str) -> None:
        """Nothing moves or rescales these units: each is a colour of its own."""
        self.refine(atoms, np.arange(atoms.size), why)
        self.still(atoms)

    def hold(self, leaf: Leaf) -> None:
        """A site stays as it is, whatever its values: the multipliers of its axes cancel out."""
        if leaf.slices is not None:
            for atoms in leaf.labels:
                self.still(atoms)
            return
        for atoms in leaf.labels:
            self.balance([(1.0, atoms[1:]), (-1.0, np.broadcast_to(atoms[:1], atoms[1:].shape))])
        if all(atoms.size for atoms in leaf.labels) and leaf.labels:
            self.balance([(1.0, atoms[:1]) for atoms in leaf.labels])
