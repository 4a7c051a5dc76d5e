"""The flow of axes through a network: which entries of a tensor belong to which unit, and what operators say of units.

A network's symmetry moves *units*: channels, features, heads. Every position along every axis of a parameter starts as
a unit of its own, an *atom*. While the traced graph is walked, each tensor carries a ``Value``: arrays of atoms, laid
out like the data, so that reshape, transpose, slice and cat move them exactly as they move numbers. Operators then say
three things of atoms, entry by entry: two belong to the same unit (:meth:`Flow.unify`); one is a member of a larger
unit, say of a head (:meth:`Flow.relate`); units aren't interchangeable (:meth:`Flow.refine`).

What no rule understands is pinned, never freed. :mod:`~pyro_symmetric.discovery.cells` solves these facts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import torch

Array = np.ndarray
# Products of units cost one atom for each entry; beyond this many, units are pinned, and a warning says so.
PRODUCT_LIMIT = 4_000_000


@dataclass(frozen=True, eq=False)
class Part:
    """Atoms of a tensor's entries, which depend on some axes only.

    :param axes: these axes, ascending.
    :param atoms: int64 array, one axis for each entry of ``axes``.
    """

    axes: tuple[int, ...]
    atoms: Array

    def moved(self, to: Mapping[int, int]) -> Part:
        """The same atoms after axes were renumbered; those that are gone have length one."""
        order = sorted((i for i, axis in enumerate(self.axes) if axis in to), key=lambda i: to[self.axes[i]])
        axes = tuple(to[self.axes[i]] for i in order)
        if order == [*range(len(self.axes))]:
            return Part(axes, self.atoms)
        gone = [i for i in range(len(self.axes)) if i not in order]
        return Part(axes, self.atoms.transpose([*order, *gone]).reshape([self.atoms.shape[i] for i in order]))


@dataclass(frozen=True, eq=False)
class Value:
    """All that is known about a tensor.

    Along an axis, entries either belong to units (the axis lies in one of ``parts``), or differ in a way that no
    symmetry touches (the axis is ``fixed``: batch, time, pixels, classes), or are all equal (neither).

    :param parts: their axes are disjoint, but for a matrix whose slices have columns of their own: these come second.
    :param constant: the tensor itself, if it is known while tracing (index maps).
    :param mask: whether its entries are true or false.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    fixed: frozenset[int] = frozenset()
    constant: torch.Tensor | None = None
    mask: bool = False

    @property
    def dim(self) -> int:
        return len(self.shape)

    def axis(self, axis: int) -> int:
        """A possibly negative axis, counted from the front."""
        return axis % self.dim if self.dim else 0

    def part_on(self, axis: int) -> Part | None:
        """The first part that depends on this axis."""
        return next((part for part in self.parts if axis in part.axes), None)

    @property
    def columns(self) -> Part | None:
        """The columns of a matrix whose slices have columns of their own."""
        return next((part for part in self.parts[1:2] if part.axes == (0, 1) and self.part_on(0) is not part), None)

    def across(self, axes: Collection[int]) -> Value:
        """The units along all other axes; these have length one."""
        shape = tuple(1 if axis in axes else n for axis, n in enumerate(self.shape))
        parts = tuple(part for part in self.parts if not set(part.axes) & set(axes))
        return Value(shape, parts, self.fixed.difference(axes))


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter, or a running statistic.

    :param value: its atoms, along each axis.
    :param kernel: whether it belongs to a convolution.
    :param slices: of a matrix whose rows fall into slices with columns of their own, the slice of each row.
    """

    site: str
    value: Value
    buffer: bool = False
    kernel: bool = False
    slices: Array | None = None


class Fact(NamedTuple):
    """A statement of an operator about two arrays of atoms, or about atoms and colours."""

    one: Array
    other: Array
    number: int


class Flow:
    """Carries atoms through operators, and notes what these say: the methods that rules are written in.

    :ivar where: the operator that is looked at and its module, in words.
    """

    def __init__(self) -> None:
        self.where = "?"
        self.size = 0
        self.starts: list[int] = []  # of arrays of new atoms
        self.origins: list[str] = []  # of facts, by their numbers
        self.members: dict[int, Array] = {}  # first atom of joined units -> what each is a place of
        self.unions: list[Fact] = []
        self.relations: list[Fact] = []
        self.refinements: list[Fact] = []
        self.occurrences: dict[int, tuple[Array, int]] = {}
        self.leaves: dict[str, Leaf] = {}
        self.lost: dict[str, None] = {}  # where units were left out that might move, and why

    # facts ----------------------------------------------------------------------------------------------------------

    def _number(self, why: str = "") -> int:
        self.origins.append(why or self.where)
        return len(self.origins) - 1

    def fresh(self, shape: Sequence[int]) -> Array:
        """New atoms, never seen before."""
        count = math.prod(shape)
        self.starts.append(self.size)
        self.size += count
        return np.arange(self.size - count, self.size, dtype=np.int64).reshape(shape)

    def unify(self, one: Array, other: Array) -> None:
        """Entry by entry, both atoms belong to the same unit."""
        if one is not other:
            self.unions.append(Fact(one.reshape(-1), other.reshape(-1), self._number()))

    def relate(self, child: Array, parent: Array) -> None:
        """Entry by entry, the unit ``child`` is part of the unit ``parent`` and moves with it."""
        self.relations.append(Fact(child.reshape(-1), parent.reshape(-1), self._number()))

    def refine(self, atoms: Array, colours: Array, why: str = "") -> None:
        """Units whose atoms have different colours can't be exchanged."""
        self.refinements.append(Fact(atoms.reshape(-1), colours.reshape(-1), self._number(why)))

    def occur(self, atoms: Array) -> None:
        """These atoms are all that lie in one tensor, so that a symmetry maps them onto each other."""
        if id(atoms) not in self.occurrences:
            self.occurrences[id(atoms)] = atoms, self._number()

    def pin(self, value: Value, why: str = "") -> None:
        """Nothing may move in this operand."""
        for part in value.parts:
            self.refine(part.atoms, np.arange(part.atoms.size), why)

    def give_up(self, operands: Iterable[Value], shape: Iterable[int], why: str) -> Value:
        """Pin all operands, and have a warning say so; nothing is known about the result."""
        for value in operands:
            if any(part.atoms.size for part in value.parts):
                self.lost[f"{self.where} ({why})"] = None
            self.pin(value)
        return opaque(shape)

    def leaf(
        self, site: str, shape: Sequence[int], buffer: bool = False, kernel: bool = False, slices: Array | None = None
    ) -> Leaf:
        """A parameter: every position along every axis is a unit of its own until an operator ties or pins it."""
        if site not in self.leaves:
            parts = [Part((i,), self.fresh((n,))) for i, n in enumerate(shape)]
            if slices is not None:
                parts[1] = Part((0, 1), self.fresh((int(slices[-1]) + 1, shape[1]))[slices])
            for part in parts:
                self.occur(np.unique(part.atoms))
            self.leaves[site] = Leaf(site, Value(tuple(shape), tuple(parts)), buffer, kernel, slices)
        leaf = self.leaves[site]
        if leaf.slices is None or (slices is not None and np.array_equal(leaf.slices, slices)):
            return leaf
        # Another pass reads the matrix in another way, and so the same columns in all slices.
        rows, columns, *rest = leaf.value.parts
        self.unify(columns.atoms, np.broadcast_to(columns.atoms[0], columns.atoms.shape))
        return replace(leaf, value=replace(leaf.value, parts=(rows, Part((1,), columns.atoms[0]), *rest)))

    # values ---------------------------------------------------------------------------------------------------------

    def value(self, shape: Iterable[int], parts: Iterable[Part] = (), fixed: Iterable[int] = ()) -> Value:
        """A value, whose parts are noted as all that lies in one tensor."""
        parts, shape = tuple(parts), tuple(shape)
        for part in parts:
            self.occur(part.atoms)
        labelled = {axis for part in parts for axis in part.axes}
        return Value(shape, parts, frozenset(i for i in fixed if i not in labelled and shape[i] > 1))

    def parent_units(self, part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]) -> Part:
        """New units over some axes of a part, whose units are members of these."""
        parent = Part(axes, self.fresh([sizes[a] for a in axes]))
        self.relate(part.atoms, spread(parent, part.axes, sizes))
        return parent

    def product_units(self, parts: Sequence[Part], sizes: Mapping[int, int], axes: Iterable[int] = ()) -> Part:
        """Units over all axes of ``parts`` (and further ones) that are members of theirs: one of them, or new ones."""
        union = tuple(sorted(set(axes).union(*(part.axes for part in parts))))
        found = next((part for part in parts if part.axes == union), None)
        units = found or Part(union, self.fresh([sizes[a] for a in union]))
        for part in parts:
            if part.axes == union:
                self.unify(units.atoms, part.atoms)
            else:
                self.relate(units.atoms, spread(part, union, sizes))
        return units

    def narrow(self, part: Part, keep: Collection[int], sizes: Mapping[int, int]) -> list[Part]:
        """The parents that remain when a part is summed over its other axes; none if no axis remains."""
        axes = tuple(axis for axis in part.axes if axis in keep)
        return [part] if axes == part.axes else [self.parent_units(part, axes, sizes)] if axes else []

    def restrict(self, value: Value, keep: Iterable[int]) -> Value:
        """Allow units along the axes ``keep`` only; along all others entries are told apart by their place."""
        keep, sizes = set(keep), dict(enumerate(value.shape))
        parts, fixed = list[Part](), set(value.fixed)
        for part in value.parts:
            off = set(part.axes) - keep
            if off:
                fixed |= off
                self.refine(part.atoms, positions(off, part.axes, sizes))
            parts += self.narrow(part, keep, sizes)
        return value if parts == list(value.parts) else self.value(value.shape, parts, fixed)

    def reduce(self, value: Value, axes: Iterable[int], keepdim: bool = False) -> Value:
        """A symmetric reduction (sum, mean, largest ...) over some axes: units along them vanish."""
        gone = {value.axis(axis) for axis in axes}
        keep = [axis for axis in range(value.dim) if axis not in gone]
        parts = [left for part in value.parts for left in self.narrow(part, keep, dict(enumerate(value.shape)))]
        left = replace(value, parts=tuple(parts))
        return self.relaid(left, [None if i in gone else i for i in range(value.dim)] if keepdim else keep)

    def off(self, value: Value, axes: Collection[int]) -> Value:
        """Allow units along all other axes only; these have length one then."""
        return self.restrict(value, set(range(value.dim)).difference(axes)).across(axes)

    def normalise(self, value: Value, axes: Iterable[int]) -> Value:
        """Any function of an entry and of symmetric statistics along some axes."""
        self.reduce(value, axes)
        return value

    # axes without a change of entries -------------------------------------------------------------------------------

    def relaid(self, value: Value, axes: Sequence[int | None], shape: Iterable[int] | None = None) -> Value:
        """The same entries with the axes in another order.

        :param axes: for each new axis the old one, or None if all entries along it are equal. Axes that are left out
            are gone.
        :param shape: the new shape; axes without an old one have length one by default.
        """
        to = {old: new for new, old in enumerate(axes) if old is not None}
        parts = [moved for part in value.parts if (moved := part.moved(to)).axes]
        shape = shape or [1 if old is None else value.shape[old] for old in axes]
        return self.value(shape, parts, [to[i] for i in value.fixed if i in to])

    def squeeze(self, value: Value, axes: Iterable[int]) -> Value:
        """Drop axes of length one."""
        gone = {value.axis(axis) for axis in axes if value.dim and value.shape[value.axis(axis)] == 1}
        return self.relaid(value, [axis for axis in range(value.dim) if axis not in gone])

    def unsqueeze(self, value: Value, axis: int) -> Value:
        """Insert an axis of length one."""
        order: list[int | None] = [*range(value.dim)]
        order.insert(axis % (value.dim + 1), None)
        return self.relaid(value, order)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast: axes that grow or are new hold equal entries."""
        new = len(shape) - value.dim
        kept = (i if value.shape[i] == shape[new + i] else None for i in range(value.dim))
        return self.relaid(value, [*[None] * new, *kept], shape)

    def take(self, value: Value, axis: int, index: Array) -> Value:
        """Choose places along an axis; if one is chosen twice, a unit's copies are told apart by their place."""
        if np.array_equal(index, np.arange(value.shape[axis])):
            return value
        twice, parts = np.unique(index).size < index.size, []
        for part in value.parts:
            if part is value.columns:  # of one slice
                part = Part((1,), part.atoms[index[0]])
            elif axis in part.axes:
                chosen = np.take(part.atoms, index, axis=part.axes.index(axis))
                part = Part(part.axes, self.copies(chosen, part.axes.index(axis)) if twice else chosen)
            parts.append(part)
        return self.value([len(index) if i == axis else n for i, n in enumerate(value.shape)], parts, value.fixed)

    def copies(self, atoms: Array, axis: int) -> Array:
        """New atoms for an array that holds a unit more than once along an axis: first copies, second copies, ..."""
        line = np.moveaxis(atoms, axis, 0).reshape(atoms.shape[axis], -1)[:, 0]
        rank = rank_within(line).reshape([-1 if i == axis else 1 for i in range(atoms.ndim)])
        fresh = self.fresh(atoms.shape)
        self.unify(fresh, atoms)  # places of one unit, also where another label of the same unit is copied
        self.refine(fresh, np.broadcast_to(rank, atoms.shape))
        return fresh

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """View with another shape; axes that are merged get products of units, split axes keep theirs."""
        known = math.prod(n for n in shape if n != -1)
        shape = tuple(math.prod(value.shape) // known if n == -1 else int(n) for n in shape)
        if 0 in value.shape:
            return self.give_up([value], shape, "there are no entries")
        groups = matching_axes(value.shape, shape)
        for old, _ in groups:
            value = self._joined(value, old)
        parts = [split for part in value.parts for split in split_and_merged(part, groups, shape)]
        fixed = {new for olds, news in groups for new in news if value.fixed & set(olds)}
        apart = [self._taken_apart(part) for part in parts]
        fixed |= {axis for part, left in zip(parts, apart, strict=True) for axis in part.axes if axis not in left.axes}
        return self.value(shape, apart, fixed)

    def _joined(self, value: Value, axes: Sequence[int]) -> Value:
        """Make one part cover all of ``axes`` that are longer than one, if any part touches them."""
        long = {axis for axis in axes if value.shape[axis] > 1}
        touching = [part for part in value.parts if set(part.axes) & set(axes)]
        if not touching or (len(touching) == 1 and long <= set(touching[0].axes)):
            return value
        sizes = dict(enumerate(value.shape))
        labelled = {axis for part in touching for axis in part.axes}
        if math.prod(sizes[a] for a in long | labelled) > PRODUCT_LIMIT:
            self.lost[f"{self.where} (they belong to more than {PRODUCT_LIMIT} products)"] = None
            return self.restrict(value, set(range(value.dim)) - labelled)
        units = self.product_units(touching, sizes, long)
        apart = [axis for axis in units.axes if axis not in labelled and axis in value.fixed]
        if apart:
            self.refine(units.atoms, positions(apart, units.axes, sizes))
        if len(touching) == 1 and labelled.union(apart) == set(units.axes):
            self.members[int(units.atoms.flat[0])] = spread(touching[0], units.axes, sizes).reshape(-1)
        rest = [part for part in value.parts if part not in touching]
        return replace(value, parts=(*rest, units), fixed=value.fixed - set(units.axes))

    def _taken_apart(self, part: Part) -> Part:
        """The units that were joined with places of fixed axes, if these are axes of their own again.

        A batch that is merged with heads and split from them, as attention does, would else multiply the atoms of all
        that follows.
        """
        first = int(part.atoms.min(initial=self.size))
        start = self.starts[max(0, bisect_right(self.starts, first) - 1)]
        members = self.members.get(start)
        if members is None or int(part.atoms.max()) >= start + len(members):
            return part
        inner = members[part.atoms - start]
        alike = [n > 1 and bool((inner == inner.take([0], i)).all()) for i, n in enumerate(inner.shape)]
        inner = inner[tuple(0 if same else slice(None) for same in alike)]
        if not any(alike) or not inner.ndim or np.unique(inner).size < inner.size:
            return part
        return Part(tuple(axis for axis, same in zip(part.axes, alike, strict=True) if not same), inner)

    # several operands -----------------------------------------------------------------------------------------------

    def elementwise(self, operands: Sequence[Value]) -> Value:
        """Any function of entries in the same place, with broadcasting."""
        dim = max(value.dim for value in operands)
        return self.combine([(value, range(dim - value.dim, dim)) for value in operands], range(dim))

    def combine(self, operands: Sequence[tuple[Value, Sequence[int]]], out: Iterable[int]) -> Value:
        """Multiply or add operands whose axes carry letters, and sum over all letters that aren't in ``out``.

        Units along equal letters are tied: as the same units if they depend on the same letters, as members of larger
        units if one depends on more letters than the other. No operand has a letter twice.
        """
        out, sizes = list(out), dict[int, int]()
        for value, letters in operands:
            for letter, n in zip(letters, value.shape, strict=True):
                sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]
        terms = []
        for value, letters in operands:
            own = {axis: letter for axis, letter in enumerate(letters) if value.shape[axis] == sizes[letter]}
            parts = [moved for part in value.parts if (moved := part.moved(own)).axes]
            terms.append((parts, {letters[axis] for axis in value.fixed}))
        self._tie(terms, sizes)
        known = {letter for _, fixed in terms for letter in fixed}
        terms = [([part for part in parts if not known.issuperset(part.axes)], fixed) for parts, fixed in terms]
        groups: list[list[Part]] = []  # those that meet on some axis
        for part in [left for parts, _ in terms for one in parts for left in self.narrow(one, out, sizes)]:
            touching = [g for g in groups if any(set(part.axes) & set(other.axes) for other in g)]
            groups = [g for g in groups if g not in touching] + [[*(p for g in touching for p in g), part]]
        place = {letter: i for i, letter in enumerate(out)}
        parts = [self.product_units(group, sizes).moved(place) for group in groups]
        fixed = {place[letter] for letter in known if letter in place}
        return self.value([sizes.get(letter, 1) for letter in out], parts, fixed)

    def _tie(self, terms: Sequence[tuple[list[Part], set[int]]], sizes: Mapping[int, int]) -> None:
        """State which units of different operands are the same, or members of each other."""
        for (parts, _), (others, _) in combinations(terms, 2):
            for one, other in product(parts, others):
                common = tuple(axis for axis in one.axes if axis in other.axes)
                if one.axes == other.axes:
                    self.unify(one.atoms, other.atoms)
                elif common:
                    shared = next((part for part in (one, other) if part.axes == common), None)
                    shared = shared or self.parent_units(one, common, sizes)
                    for part in (one, other):
                        if part is not shared:
                            self.relate(part.atoms, spread(shared, part.axes, sizes))
        for number, (parts, _) in enumerate(terms):
            for part in parts:
                self.occur(part.atoms)
                for fixed in (own & set(part.axes) for i, (_, own) in enumerate(terms) if i != number):
                    if fixed:
                        self.refine(part.atoms, positions(fixed, part.axes, sizes))

    def cat(self, values: Sequence[Value], axis: int) -> Value:
        """Side by side along ``axis``: units on it are joined end to end, units on other axes are tied as in a sum."""
        along = [value.part_on(axis) for value in values]
        axes = {part.axes for part in along if part is not None}
        if len(axes) > 1 or (None in along and not axes <= {(axis,)}):  # units of different kinds: reduce to this axis
            other = set[int]().union(*axes) - {axis}
            values = [self.restrict(value, set(range(value.dim)) - other) for value in values]
            along = [value.part_on(axis) for value in values]
        tied = self.elementwise([value.across([axis]) for value in values])
        shape = [sum(value.shape[axis] for value in values) if i == axis else n for i, n in enumerate(tied.shape)]
        like = next((part for part in along if part is not None), None)
        if like is None:
            return self.value(shape, tied.parts, tied.fixed | {axis})
        pieces = []
        for value, part in zip(values, along, strict=True):
            atoms = self.fresh((value.shape[axis],)) if part is None else part.atoms
            if axis in value.fixed:  # nothing in this stretch may move, unless all entries are equal
                self.refine(atoms, np.arange(atoms.size))
            pieces.append(atoms)
        joined = np.concatenate(pieces, like.axes.index(axis))
        if np.unique(joined).size < joined.size:  # the same units twice, as in cat(x, -x)
            joined = self.copies(joined, like.axes.index(axis))
        return self.value(shape, [*tied.parts, Part(like.axes, joined)], tied.fixed - {axis})


# parts and arrays of atoms --------------------------------------------------------------------------------------------


def opaque(shape: Iterable[int], constant: torch.Tensor | None = None, mask: bool = False) -> Value:
    """A tensor of which nothing is known: data, masks, whatever a rule gave up on."""
    shape = tuple(int(n) for n in shape)
    return Value(shape, (), frozenset(i for i, n in enumerate(shape) if n > 1), constant, mask)


def spread(part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    """A part's atoms, broadcast to more axes (ascending, a superset of its own)."""
    shape = [sizes[a] if a in part.axes else 1 for a in axes]
    return np.broadcast_to(part.atoms.reshape(shape), [sizes[a] for a in axes])


def positions(along: Collection[int], axes: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    """For every entry over ``axes``, its place along the axes ``along``, as one integer."""
    own = tuple(axis for axis in axes if axis in along)
    lengths = [sizes[axis] for axis in own]
    return spread(Part(own, np.arange(math.prod(lengths)).reshape(lengths)), axes, sizes)


def matching_axes(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest pairing of runs of old axes with runs of new axes that hold equally many entries.

    A run ends where as many entries lie before its end in both shapes.
    """
    before, after = np.cumprod(old, dtype=np.int64), np.cumprod(new, dtype=np.int64)
    ends = np.intersect1d(before, after)
    olds, news = np.searchsorted(ends, before), np.searchsorted(ends, after)
    return [(np.flatnonzero(olds == k).tolist(), np.flatnonzero(news == k).tolist()) for k in range(len(ends))]


def split_and_merged(part: Part, groups: Sequence[tuple[list[int], list[int]]], new: Sequence[int]) -> list[Part]:
    """A part after a change of shape, of which whole runs of axes are covered; none if no axis is left."""
    axes: list[int] = []
    for olds, news in groups:
        if set(olds) & set(part.axes):
            long = [axis for axis in news if new[axis] > 1]
            axes += long
            if not long and len(olds) == len(news) == 1:  # else it is unclear where a unit of size one went
                axes += news
    return [Part(tuple(axes), part.atoms.reshape([new[a] for a in axes]))] if axes else []


def rank_within(owner: Array, by: Array | None = None) -> Array:
    """For each entry, how many of the same owner come before it, sorted by another array or as they lie."""
    order = np.argsort(owner, kind="stable") if by is None else np.lexsort([by, owner])
    place = np.arange(len(owner))
    starts = np.r_[True, owner[order][1:] != owner[order][:-1]][: len(owner)]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return rank
