"""The flow of axes through a network: which entries of a tensor belong to which unit.

A network's symmetry moves *units*: channels, features, heads. Every position along
every axis of a parameter starts as a unit of its own, an *atom*. One pass over the
traced graph carries arrays of atoms, laid out like the data, so that reshape,
transpose, slice and cat move them as they move numbers::

    for node in graph:
        values[node] = rule(flow, node)  # propagate.py; the rules are in rules.py
    cells = nested(colour_refine(facts))  # cells.solve

For example, let three units lie between ``Linear(2, 3)``, a ReLU and ``Linear(3, 1)``::

    0.weight    rows 0 1 2, columns 3 4    the atoms of each axis
    0.bias      5 6 7
    2.weight    row 8, columns 9 10 11
    2.bias      12
    linear      unify 0 1 2 with 5 6 7; 3 4 meet inputs, and are told apart (refine)
    relu        the atoms of its result are those of its operand
    linear      unify 0 1 2 with 9 10 11, which it sums over, and 8 with 12
    output      8 is pinned

The classes {0, 5, 9}, {1, 6, 10} and {2, 7, 11} look alike: three units of one cell.

Rules state three kinds of facts, entry by entry: two atoms belong to the same unit
(:meth:`Flow.unify`); the unit of one is a member of that of the other, a head, say
(:meth:`Flow.relate`); units of different colours aren't interchangeable
(:meth:`Flow.refine`). Operators without a rule pin their operands.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.discovery.registry import (
    Array,
    Part,
    Value,
    opaque,
    salt,
    salt_of,
)

# products of units cost one atom for each entry; beyond, units are pinned, with a
# warning
PRODUCT_LIMIT = 4_000_000
# constants with more entries are told apart by position
CONSTANT_LIMIT = 2**20
# units of a matrix in slices are found entry by entry; larger matrices aren't sliced
SLICED_LIMIT = 2**22


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter, or a running statistic.

    :param value: its atoms, along each axis.
    :param kernel: whether it belongs to a convolution.
    :param slices: of a matrix whose rows fall into slices with columns of their own,
        the slice of each row.
    :param members: the axis of members, each of which has units of its own along all
        others.
    """

    site: str
    value: Value
    buffer: bool = False
    kernel: bool = False
    slices: Array | None = None
    members: int | None = None


class Fact(NamedTuple):
    """A statement of an operator about atoms.

    :param partners: atom by atom, the one it is unified with, its parent, or its
        colour.
    """

    atoms: Array
    partners: Array
    number: int


class Term(NamedTuple):
    """An operand of a product, whose axes carry letters.

    :ivar fixed: letters along which its entries are told apart.
    """

    parts: list[Part]
    fixed: set[int]


class Product(NamedTuple):
    """A product whose operands share axes.

    :param shared: the axes that several operands have.
    :param units: units that lie along a single axis.
    """

    shared: frozenset[int]
    units: list[Part]


class Flow:
    """Facts about atoms, and the methods that rules are written in.

    :param members: site -> the axis of its members; see :class:`Leaf`.
    """

    def __init__(self, members: Mapping[str, int] | None = None) -> None:
        self.members = members or {}
        # for each sum of products, units along axes that several operands and the
        # result have, and units along other axes
        self.batches: list[tuple[list[Array], list[Array]]] = []
        # id of a result's parts -> the parts, and the product that they are
        self.unsummed: dict[int, tuple[tuple[Part, ...], Product]] = {}
        # the operator that is being applied and its module, in words
        self.operator = ""
        self.size = 0
        self.starts: list[int] = []  # the first atom of each new array
        self.origins: list[str] = []  # fact number -> the operator that states it
        # first atom of an array of product units -> the factor of each
        self.products: dict[int, Array] = {}
        self.unions: list[Fact] = []
        self.relations: list[Fact] = []
        self.refinements: list[Fact] = []
        # id of an array of atoms, and its history -> both, with the fact's number
        self.occurrences: dict[
            tuple[int, bytes | None], tuple[Array, Array | None, int]
        ] = {}
        # id of a value that is cut into pieces -> the value, and its number
        self.sources: dict[int, tuple[Value, int]] = {}
        self.leaves: dict[str, Leaf] = {}  # by site
        # operators that pinned units for lack of a rule, and why
        self.given_up: dict[str, None] = {}
        # operators by which units stay that might move
        self.doubts: dict[str, None] = {}
        self._by_data: list[Array] = []

    @property
    def by_data(self) -> Array:
        """Atoms of positions that data choose: rows of an embedding, say."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self._by_data])

    # facts ----------------------------------------------------------------------------

    def _number(self, why: str = "") -> int:
        """Number a new fact."""
        self.origins.append(why or self.operator)
        return len(self.origins) - 1

    def _state(
        self, facts: list[Fact], atoms: Array, partners: Array, why: str = ""
    ) -> None:
        number = self._number(why)
        facts.append(Fact(atoms.reshape(-1), partners.reshape(-1), number))

    def fresh(self, shape: Sequence[int]) -> Array:
        """Return an array of new atoms."""
        count = math.prod(shape)
        self.starts.append(self.size)
        self.size += count
        return np.arange(self.size - count, self.size, dtype=np.int64).reshape(shape)

    def unify(self, first: Array, second: Array) -> None:
        """State that, entry by entry, both atoms belong to the same unit."""
        if first is not second:
            self._state(self.unions, first, second)

    def relate(self, child: Array, parent: Array) -> None:
        """State that, entry by entry, the unit of ``child`` is a member of the unit of
        ``parent`` and moves with it.
        """
        self._state(self.relations, child, parent)

    def refine(self, atoms: Array, colours: Array, why: str = "") -> None:
        """State that units whose atoms have different colours aren't
        interchangeable.
        """
        self._state(self.refinements, atoms, colours, why)

    def occur(self, atoms: Array, history: Array | None = None) -> None:
        """State that these are all atoms of one tensor: a symmetry maps them onto each
        other, and atoms onto atoms of the same history.
        """
        key = id(atoms), None if history is None else history.tobytes()
        if key not in self.occurrences:
            self.occurrences[key] = atoms, history, self._number()

    def noted(self, value: Value) -> Value:
        """Note the pieces of a value as a tensor of their own, and return it without
        their history.
        """
        if all(part.history is None for part in value.parts):
            return value
        for part in value.parts:
            if part.history is not None:
                self.occur(part.atoms, part.history)
        parts = (Part(part.axes, part.atoms) for part in value.parts if part.axes)
        return replace(value, parts=tuple(parts))

    def pin(self, value: Value, why: str = "") -> None:
        """Pin all units of an operand."""
        for part in value.parts:
            self.refine(part.atoms, np.arange(part.atoms.size), why)

    def give_up(
        self, operands: Iterable[Value], shape: Iterable[int], why: str
    ) -> Value:
        """Pin all operands, with a warning, and return a result in which nothing
        moves.
        """
        for value in operands:
            if any(part.atoms.size for part in value.parts):
                self.given_up[f"{self.operator} ({why})"] = None
                self.doubts[self.operator] = None
            self.pin(value)
        return opaque(shape)

    def leaf(
        self,
        site: str,
        shape: Sequence[int],
        buffer: bool = False,
        kernel: bool = False,
        slices: Array | None = None,
    ) -> Leaf:
        """Return a parameter's leaf: every position along every axis is a unit of its
        own until a fact ties or pins it.

        If a second pass reads other slices of a matrix, its columns count as the same
        in all slices.
        """
        if site not in self.leaves:
            parts = [Part((i,), self.fresh((n,))) for i, n in enumerate(shape)]
            if slices is not None:
                parts[1] = Part(
                    (0, 1), self.fresh((int(slices[-1]) + 1, shape[1]))[slices]
                )
            members = self.members.get(site) if slices is None else None
            if members is not None:
                parts = self._per_member(parts, members, shape)
            for part in parts:
                self.occur(np.unique(part.atoms))
            value = Value(tuple(shape), tuple(parts))
            self.leaves[site] = Leaf(site, value, buffer, kernel, slices, members)
        leaf = self.leaves[site]
        if leaf.slices is None or (
            slices is not None and np.array_equal(leaf.slices, slices)
        ):
            return leaf
        rows, columns, *further = leaf.value.parts
        first_slice = columns.atoms[0]
        self.unify(columns.atoms, np.broadcast_to(first_slice, columns.atoms.shape))
        in_all_slices = (rows, Part((1,), first_slice), *further)
        return replace(leaf, value=replace(leaf.value, parts=in_all_slices))

    def _per_member(
        self, parts: list[Part], members: int, shape: Sequence[int]
    ) -> list[Part]:
        """Return the parts of a parameter each of whose members has units of its own.

        Of weights (member, in, out), units are pairs (member, in) and (member, out);
        an entry belongs to both, which tie to the same member.
        """
        sizes = dict(enumerate(shape))
        parts_of_member = list[Part]()
        other_axes = [axis for axis in sizes if axis != members]
        for axis in other_axes:
            axes = tuple(sorted((axis, members)))
            parts_of_member.append(Part(axes, self.fresh([shape[a] for a in axes])))
        if len(other_axes) > 1:
            for part in parts_of_member:
                self.relate(part.atoms, spread(parts[members], part.axes, sizes))
            parts_of_member.append(parts[members])
        return parts_of_member

    # values ---------------------------------------------------------------------------

    def value(
        self,
        shape: Iterable[int],
        parts: Iterable[Part] = (),
        fixed: Iterable[int] = (),
    ) -> Value:
        """Return a value, and note each of its parts as all that lies in one tensor,
        unless they are pieces.
        """
        parts = tuple(parts)
        shape = tuple(shape)
        for part in parts:
            if part.history is None:
                self.occur(part.atoms)
        fixed = set(fixed) - axes_of(parts)
        return Value(shape, parts, frozenset(i for i in fixed if shape[i] > 1))

    def known(self, constant: Tensor) -> Value:
        """Return the value of a constant: positions along an axis at which it is the
        same are units that look alike, all others are told apart.
        """
        shape = tuple(constant.shape)
        mask = constant.dtype == torch.bool
        constant_value = as_constant(constant)
        if constant_value is None or 0 in shape:
            return opaque(shape, constant_value, mask)
        parts = []
        fixed = []
        for axis, n in enumerate(shape):
            if n == 1:
                continue
            labels = line_labels(constant_value, axis)
            count = int(labels.max()) + 1
            if count == n:
                fixed.append(axis)
            elif count > 1:
                atoms = self.fresh((n,))
                self.refine(atoms, labels)
                parts.append(Part((axis,), atoms))
        value = self.value(shape, parts, fixed)
        return replace(value, constant=constant_value, mask=mask)

    def without(self, value: Value, dead: Tensor | None) -> Value:
        """Give positions at which all entries are constant units of their own.

        :param dead: where entries are constant, with a shape that can be broadcast.
        """
        if dead is None or not bool(dead.any()) or bool(dead.all()):
            return value
        self.doubts[self.operator] = None
        dead = dead.reshape([1] * (value.dim - dead.dim()) + [*dead.shape])
        parts = []
        for part in value.parts:
            if len(part.axes) == 1:
                axis = part.axes[0]
                lines = dead.movedim(axis, 0).flatten(1).all(1)
                chosen = lines.expand(part.atoms.size).numpy()
                atoms = np.where(chosen, self.fresh(part.atoms.shape), part.atoms)
                self.refine(atoms, chosen)
                part = Part(part.axes, atoms) if chosen.any() else part
            parts.append(part)
        result = self.value(value.shape, parts, value.fixed)
        return replace(result, constant=value.constant, mask=value.mask)

    def parent_units(
        self, part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]
    ) -> Part:
        """Return new units over some axes of a part, of which the part's units are
        members.
        """
        parent = Part(axes, self.fresh([sizes[a] for a in axes]))
        self.relate(part.atoms, spread(parent, part.axes, sizes))
        return parent

    def product_units(
        self, parts: Sequence[Part], sizes: Mapping[int, int], axes: Iterable[int] = ()
    ) -> Part:
        """Return units over all axes of ``parts`` (and further ones), members of the
        units of each part.
        """
        union = tuple(sorted(axes_of(parts).union(axes)))
        widest = next((part for part in parts if part.axes == union), None)
        units = widest or Part(union, self.fresh([sizes[a] for a in union]))
        for part in parts:
            if part.axes == union:
                self.unify(units.atoms, part.atoms)
            else:
                self.relate(units.atoms, spread(part, union, sizes))
        return units

    def project(
        self, part: Part, keep: Collection[int], sizes: Mapping[int, int]
    ) -> list[Part]:
        """Project a part on the axes ``keep``: return its parents there, or nothing if
        it depends on none of them.
        """
        axes = tuple(axis for axis in part.axes if axis in keep)
        if axes == part.axes:
            return [part]
        return [self.parent_units(part, axes, sizes)] if axes else []

    def restrict(self, value: Value, keep: Collection[int]) -> Value:
        """Keep units along the axes ``keep`` only; tell entries along all others apart
        by their position, which may be more than the operator does.
        """
        if any(set(part.axes).difference(keep) for part in value.parts):
            self.doubts[self.operator] = None
        return self.told_apart(value, keep)

    def chosen_by_data(self, value: Value, keep: Collection[int]) -> Value:
        """Keep units along the axes ``keep`` only; data choose positions along all
        others.
        """
        for part in value.parts:
            if set(part.axes).isdisjoint(keep):
                self._by_data.append(part.atoms.reshape(-1))
        return self.told_apart(value, keep)

    def told_apart(self, value: Value, keep: Collection[int]) -> Value:
        """Keep units along the axes ``keep`` only; all others are different for
        certain, each with a role of its own.
        """
        sizes = dict(enumerate(value.shape))
        parts = list[Part]()
        fixed = set(value.fixed)
        for part in value.parts:
            dropped = set(part.axes).difference(keep)
            if dropped:
                fixed |= dropped
                self.refine(part.atoms, positions(dropped, part.axes, sizes))
            parts += self.project(part, keep, sizes)
        if parts == [*value.parts]:
            return value
        return self.value(value.shape, parts, fixed)

    def collapse(self, value: Value, axes: Collection[int]) -> Value:
        """Restrict units to all other axes; these get length one."""
        keep = set(range(value.dim)).difference(axes)
        return self.restrict(value, keep).collapsed(axes)

    def reduce(self, value: Value, axes: Iterable[int], keepdim: bool = False) -> Value:
        """Apply a symmetric reduction (sum, mean, largest entry) over some axes, along
        which units vanish.
        """
        reduced = {value.axis(axis) for axis in axes}
        keep = [axis for axis in range(value.dim) if axis not in reduced]
        if id(value.parts) in self.unsummed:
            _, product = self.unsummed[id(value.parts)]
            self._note_batch(product, keep)
        sizes = dict(enumerate(value.shape))
        parts = list[Part]()
        for part in value.parts:
            parts += self.project(part, keep, sizes)
        order: list[int | None] = [*keep]
        if keepdim:
            for axis in sorted(reduced):
                order.insert(axis, None)
        return self.relaid(replace(value, parts=tuple(parts)), order)

    def normalise(self, value: Value, axes: Iterable[int]) -> Value:
        """Apply any function of an entry and of symmetric statistics along some
        axes.
        """
        self.reduce(value, axes)
        return value

    # rearranged axes and entries ------------------------------------------------------

    def relaid(
        self,
        value: Value,
        axes: Sequence[int | None],
        shape: Iterable[int] | None = None,
    ) -> Value:
        """Rearrange the axes.

        :param axes: for each new axis the old one, or None if all entries along it are
            equal. Axes that are left out are dropped.
        :param shape: the new shape; axes without an old one have length one by default.
        """
        to = {old: new for new, old in enumerate(axes) if old is not None}
        if [*to] != sorted(to):
            value = value.past(salt_of(*to))
        moved = [part.renumbered(to) for part in value.parts]
        parts = [part for part in moved if part.axes or part.history is not None]
        shape = shape or [1 if old is None else value.shape[old] for old in axes]
        return self.value(shape, parts, [to[i] for i in value.fixed if i in to])

    def squeeze(self, value: Value, axes: Iterable[int]) -> Value:
        """Drop axes of length one."""
        dropped = {value.axis(axis) for axis in axes} if value.dim else set()
        order = [i for i, n in enumerate(value.shape) if n != 1 or i not in dropped]
        return self.relaid(value, order)

    def unsqueeze(self, value: Value, axis: int) -> Value:
        """Insert an axis of length one."""
        order: list[int | None] = [*range(value.dim)]
        order.insert(axis % (value.dim + 1), None)
        return self.relaid(value, order)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast: axes that grow or are new hold equal entries."""
        order: list[int | None] = [None] * (len(shape) - value.dim)
        for axis, n in enumerate(value.shape):
            order.append(axis if n == shape[len(order)] else None)
        return self.relaid(value, order, shape)

    def take(self, value: Value, axis: int, index: Array) -> Value:
        """Select positions along an axis; those of a unit that is selected twice are
        told apart by their order.
        """
        if np.array_equal(index, np.arange(value.shape[axis])):
            return value
        repeated = np.unique(index).size < index.size
        parts = []
        for part in value.parts:
            if part is value.columns:  # the selected rows belong to one slice
                part = Part((1,), part.atoms[index[0]])
            elif axis in part.axes:
                place = part.axes.index(axis)
                take = functools.partial(np.take, indices=index, axis=place)
                part = part.mapped(part.axes, take)
                part = self._copies(part, place) if repeated else part
            elif axis in value.fixed or value.part_on(axis) is not None:
                if part.history is not None:
                    part = part.past(salt_of(axis, index.tolist()))
            parts.append(part)
        shape = list(value.shape)
        shape[axis] = len(index)
        return self.value(shape, parts, value.fixed)

    def cut(self, value: Value, axis: int, index: Array) -> Value:
        """Select positions along an axis, as :meth:`take`, of which others may be
        joined to them again: they aren't noted as a tensor of their own yet.
        """
        if np.array_equal(index, np.arange(value.shape[axis])):
            return value
        if value.columns is not None:
            return self.take(value, axis, index)
        return self.take(self.cuttable(value), axis, index)

    def cuttable(self, value: Value) -> Value:
        """Begin the history of a value's parts: only pieces of the same tensor have
        the same.
        """
        _, number = self.sources.setdefault(id(value), (value, len(self.sources)))
        parts = tuple(
            part.past(salt(number)) if part.history is None else part
            for part in value.parts
        )
        return replace(value, parts=parts)

    def _copies(self, part: Part, axis: int) -> Part:
        """Return new atoms for a part that holds units repeatedly along an axis: first
        copies, second copies, ...
        """
        atoms = part.atoms
        line = _first_line(atoms, axis)
        past = None if part.history is None else _first_line(part.history, axis)
        shape = [1] * atoms.ndim
        shape[axis] = len(line)
        rank = rank_within(line, past).reshape(shape)
        copies = self.fresh(atoms.shape)
        # positions of one unit, also where another atom of the same unit is copied
        self.unify(copies, atoms)
        self.refine(copies, np.broadcast_to(rank, atoms.shape))
        return Part(part.axes, copies, part.history)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Reshape: axes that are merged get products of units, axes that are split keep
        theirs.
        """
        lengths = [*map(int, shape)]
        if -1 in lengths:
            lengths[lengths.index(-1)] = math.prod(value.shape) // -math.prod(lengths)
        shape = tuple(lengths)
        if 0 in value.shape:
            return self.give_up([value], shape, "there are no entries")
        runs = matching_runs(value.shape, shape)
        if [n for n in value.shape if n > 1] != [n for n in shape if n > 1]:
            value = value.past(salt_of(value.shape, shape))
        for old, _ in runs:
            value = self._merge(value, old)
        fixed = set[int]()
        for olds, news in runs:
            if value.fixed.intersection(olds):
                fixed.update(news)
        parts = []
        for part in value.parts:
            for merged in reshape_part(part, runs, shape):
                split = self._undo_merge(merged)
                fixed.update(set(merged.axes).difference(split.axes))
                parts.append(split)
        return self.value(shape, parts, fixed)

    def _merge(self, value: Value, axes: Sequence[int]) -> Value:
        """Make one part cover all axes of a run that are longer than one, if any part
        touches them.
        """
        long = {axis for axis in axes if value.shape[axis] > 1}
        touching = [part for part in value.parts if set(part.axes) & set(axes)]
        if not touching or (len(touching) == 1 and long <= set(touching[0].axes)):
            return value
        if any(part.history is not None for part in touching):
            return self._merge(self.noted(value), axes)
        sizes = dict(enumerate(value.shape))
        labelled = axes_of(touching)
        if math.prod(sizes[a] for a in long | labelled) > PRODUCT_LIMIT:
            self.given_up[
                f"{self.operator} (they belong to more than {PRODUCT_LIMIT} products)"
            ] = None
            self.doubts[self.operator] = None
            return self.restrict(value, set(range(value.dim)) - labelled)
        units = self.product_units(touching, sizes, long)
        merged = set(units.axes)
        fixed = (merged - labelled) & value.fixed
        if fixed:
            self.refine(units.atoms, positions(fixed, units.axes, sizes))
        if len(touching) == 1 and labelled | fixed == merged:
            factors = spread(touching[0], units.axes, sizes)
            self.products[int(units.atoms.flat[0])] = factors.reshape(-1)
        untouched = [part for part in value.parts if part not in touching]
        return replace(value, parts=(*untouched, units), fixed=value.fixed - merged)

    def _undo_merge(self, part: Part) -> Part:
        """Return the units that were merged with positions along fixed axes, if a
        reshape splits these off again.

        Attention merges a batch with heads and splits it off. Without this, the batch
        would multiply the atoms of all that follows.
        """
        first = int(part.atoms.min(initial=self.size))
        start = self.starts[max(0, bisect_right(self.starts, first) - 1)]
        factor = self.products.get(start)
        if factor is None or int(part.atoms.max()) >= start + len(factor):
            return part
        if part.history is not None:
            return part
        atoms = factor[part.atoms - start]
        axes = list[int]()
        for axis in part.axes:
            first_line = atoms.take([0], len(axes))
            if atoms.shape[len(axes)] > 1 and (atoms == first_line).all():
                atoms = first_line.squeeze(len(axes))
            else:
                axes.append(axis)
        if not axes or len(axes) == len(part.axes):
            return part
        return Part(tuple(axes), atoms) if np.unique(atoms).size == atoms.size else part

    # several operands -----------------------------------------------------------------

    def elementwise(self, operands: Iterable[Value | None]) -> Value:
        """Apply any function of entries at the same position, with broadcasting; ignore
        operands that are None.
        """
        values = [value for value in operands if value is not None]
        dim = max(value.dim for value in values)
        terms = [(value, range(dim - value.dim, dim)) for value in values]
        return self.combine(terms, range(dim))

    def einsum(self, equation: str, *operands: Value) -> Value:
        """Combine operands by an equation of ``torch.einsum``, in which no operand has
        a letter twice.
        """
        inputs, _, out = equation.partition("->")
        terms = []
        most_hidden = 0
        for text, value in zip(inputs.split(","), operands, strict=True):
            hidden = value.dim - len(text.replace("...", ""))
            most_hidden = max(most_hidden, hidden)
            terms.append((value, letters_of(text, hidden)))
        return self.combine(terms, letters_of(out, most_hidden))

    def combine(
        self, operands: Sequence[tuple[Value, Sequence[int]]], out: Iterable[int]
    ) -> Value:
        """Multiply or add operands whose axes carry letters, and sum over all letters
        that ``out`` lacks.

        Units along equal letters are tied: as the same units if they depend on the same
        letters, as members of larger units if one depends on more letters than the
        other. No operand has a letter twice.
        """
        out = list(out)
        sizes = dict[int, int]()
        for value, letters in operands:
            for letter, n in zip(letters, value.shape, strict=True):
                sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]
        terms = [_term(value, letters, sizes) for value, letters in operands]
        parts = [*chain.from_iterable(term.parts for term in terms)]
        fixed = set[int]().union(*(term.fixed for term in terms))
        unit_letters = axes_of(parts)
        for term, (value, _) in zip(terms, operands, strict=True):
            # a constant that isn't told apart along one axis alone, as that of a shift
            if value.constant is not None and len(value.fixed) > 1:
                if unit_letters & term.fixed:
                    self.doubts[self.operator] = None
        self._tie(terms, sizes)
        product = _product(operands, parts)
        if sizes.keys() - out:
            self._note_batch(product, out)
        projected = list[Part]()
        for part in parts:
            if not fixed.issuperset(part.axes):
                projected += self.project(part, out, sizes)
        to = {letter: i for i, letter in enumerate(out)}
        units = []
        for connected in _connected(projected):
            units.append(self.product_units(connected, sizes).renumbered(to))
        shape = [sizes.get(letter, 1) for letter in out]
        result = self.value(shape, units, {to[i] for i in fixed & to.keys()})
        if product.shared and out == [*range(len(out))]:
            self.unsummed[id(result.parts)] = result.parts, product
        return result

    def _note_batch(self, product: Product, out: Collection[int]) -> None:
        """Note a sum of products over all axes but those of the result."""
        shared = product.shared.intersection(out)
        batch = list[Array]()
        unshared = list[Array]()
        for part in product.units:
            units = batch if part.axes[0] in shared else unshared
            units.append(part.atoms)
        if batch and unshared:
            self.batches.append((batch, unshared))

    def _tie(self, terms: Sequence[Term], sizes: Mapping[int, int]) -> None:
        """State which units of different operands are the same, or members of each
        other.
        """
        for first_term, second_term in combinations(terms, 2):
            for first, second in product(first_term.parts, second_term.parts):
                self._tie_parts(first, second, sizes)
        for term in terms:
            for part in term.parts:
                self.occur(part.atoms)
                for second_term in terms:
                    fixed = second_term.fixed & set(part.axes)
                    if fixed and second_term is not term:
                        self.refine(part.atoms, positions(fixed, part.axes, sizes))

    def _tie_parts(self, first: Part, second: Part, sizes: Mapping[int, int]) -> None:
        common = tuple(axis for axis in first.axes if axis in second.axes)
        if first.axes == second.axes:
            self.unify(first.atoms, second.atoms)
        elif common == second.axes:
            self.relate(first.atoms, spread(second, first.axes, sizes))
        elif common:
            (parent,) = self.project(first, common, sizes)
            self.relate(second.atoms, spread(parent, second.axes, sizes))

    def cat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate along ``axis``: units on it are joined end to end, units on other
        axes are tied as in a sum.
        """
        values = self._pieces_along(values, axis)
        along = [value.part_on(axis) for value in values]
        axes = {part.axes for part in along if part is not None}
        # units of different kinds: reduce to this axis
        if len(axes) > 1 or (None in along and not axes <= {(axis,)}):
            dropped = set[int]().union(*axes) - {axis}
            values = [
                self.restrict(self.noted(value), set(range(value.dim)) - dropped)
                for value in values
            ]
            along = [value.part_on(axis) for value in values]
        tied = self.elementwise(
            [self.noted(value.collapsed([axis])) for value in values]
        )
        shape = list(tied.shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        example = next((part for part in along if part is not None), None)
        if example is None:
            return self.value(shape, tied.parts, tied.fixed | {axis})
        cut = any(part is not None and part.history is not None for part in along)
        pieces = []
        for value, part in zip(values, along, strict=True):
            if part is None:
                part = Part((axis,), self.fresh((value.shape[axis],)))
            # nothing in this stretch may move, unless all entries are equal
            if axis in value.fixed:
                self.refine(part.atoms, np.arange(part.atoms.size))
            if cut and part.history is None:
                part = self.cuttable(replace(value, parts=(part,))).parts[0]
            pieces.append(part)
        place = example.axes.index(axis)
        joined = Part(
            example.axes,
            np.concatenate([part.atoms for part in pieces], place),
            np.concatenate([part.history for part in pieces], place) if cut else None,
        )
        # the same units twice, as in cat(x, -x)
        if np.unique(joined.atoms).size < joined.atoms.size:
            joined = self._copies(joined, place)
        return self.value(shape, [*tied.parts, joined], tied.fixed - {axis})

    def _pieces_along(self, values: Sequence[Value], axis: int) -> list[Value]:
        """Let units that whole tensors of length one belong to lie along the axis on
        which these are joined.
        """
        if all(value.shape[axis] == 1 for value in values):
            values = self._spread_pieces(values, axis)
        joined = []
        for value in values:
            units = [part for part in value.parts if not part.axes]
            if len(units) == 1 and value.shape[axis] == 1:
                along = units[0].mapped((axis,), lambda array: array.reshape(1))
                parts = [part for part in value.parts if part.axes]
                value = replace(value, parts=(along, *parts))
            elif units:
                value = self.noted(value)
            joined.append(value)
        return joined

    def _spread_pieces(self, values: Sequence[Value], axis: int) -> list[Value]:
        """Let pieces of one tensor with units along another axis have these along the
        axis on which they are stacked, too.
        """
        cut = [
            [part for part in value.parts if part.history is not None]
            for value in values
        ]
        if any(len(parts) != 1 or not parts[0].axes for parts in cut):
            return list(values)
        pieces = [parts[0] for parts in cut]
        sources = {self._source(part.atoms) for part in pieces}
        atoms = np.concatenate([part.atoms.reshape(-1) for part in pieces])
        distinct = np.unique(atoms).size == atoms.size
        if len(sources) > 1 or len({part.axes for part in pieces}) > 1 or not distinct:
            return list(values)
        axes = tuple(sorted((*pieces[0].axes, axis)))
        stacked = []
        for value, piece in zip(values, pieces, strict=True):
            shape = [value.shape[a] for a in axes]
            widen = functools.partial(_reshaped, shape=shape)
            wide = piece.mapped(axes, widen)
            parts = (wide if part is piece else part for part in value.parts)
            stacked.append(replace(value, parts=tuple(parts)))
        return stacked

    def _source(self, atoms: Array) -> int:
        """Return the number of the array in which an atom was new."""
        return bisect_right(self.starts, int(atoms.min(initial=self.size)))


# constants ----------------------------------------------------------------------------


def as_constant(value: Any) -> Tensor | None:
    """Return a small constant tensor on the CPU; None for anything else."""
    if type(value) is not Tensor or value.is_meta or value.layout != torch.strided:
        return None
    if value.numel() > CONSTANT_LIMIT:
        return None
    return value.detach().cpu()


def line_labels(constant: Tensor, axis: int) -> Array:
    """Number the positions along an axis; those at which a constant is the same have
    the same number.

    >>> from pyro_symmetric.discovery.flow import line_labels
    >>> line_labels(torch.tensor([[1.0, 0.0], [2.0, 3.0], [1.0, 0.0]]), 0)
    array([0, 1, 0])
    """
    real = torch.view_as_real(constant) if constant.is_complex() else constant
    lines = real.movedim(axis, 0).reshape(constant.shape[axis], -1).numpy()
    if real.is_floating_point():
        lines = (lines.astype(np.float64) + 0.0).view(np.int64)
    _, place = np.unique(lines, axis=0, return_inverse=True)
    return place.reshape(-1)


# parts and arrays of atoms ------------------------------------------------------------


def axes_of(parts: Iterable[Part]) -> set[int]:
    """Return the axes along which the units of some parts lie."""
    return set[int]().union(*(part.axes for part in parts))


def _term(value: Value, letters: Sequence[int], sizes: Mapping[int, int]) -> Term:
    """Return an operand's units along axes that aren't broadcast, by letters."""
    lengths = dict(zip(letters, value.shape, strict=True))
    full = {i: a for i, a in enumerate(letters) if lengths[a] == sizes[a]}
    parts = [part.renumbered(full) for part in value.parts]
    fixed = {letters[axis] for axis in value.fixed}
    return Term([part for part in parts if part.axes], fixed)


def _connected(parts: Iterable[Part]) -> list[list[Part]]:
    """Group parts that share axes, directly or through others."""
    groups = list[list[Part]]()
    for part in parts:
        apart = []
        joined = []
        for group in groups:
            if axes_of(group).intersection(part.axes):
                joined += group
            else:
                apart.append(group)
        groups = [*apart, [*joined, part]]
    return groups


def _first_line(array: Array, axis: int) -> Array:
    """Return the entries along an axis at the first position of all others."""
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)[:, 0]


def _product(
    operands: Sequence[tuple[Value, Sequence[int]]], parts: Iterable[Part]
) -> Product:
    """Return what several operands, whose axes carry letters, share."""
    holders = Counter[int]()
    for value, letters in operands:
        for letter, n in zip(letters, value.shape, strict=True):
            holders[letter] += n > 1
    shared = frozenset(letter for letter, number in holders.items() if number > 1)
    units = [part for part in parts if len(part.axes) == 1 and part.atoms.size > 1]
    return Product(shared, units)


def letters_of(text: str, hidden: int) -> list[int]:
    """Return the letters of an operand's axes as numbers; the ``hidden`` axes of an
    ellipsis have negative ones.
    """
    before, ellipsis, after = text.partition("...")
    unnamed = range(-hidden, 0) if ellipsis else ()
    return [*map(ord, before), *unnamed, *map(ord, after)]


def spread(part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    """Broadcast a part's atoms to more axes (ascending, a superset of its own)."""
    shape = [sizes[a] if a in part.axes else 1 for a in axes]
    return np.broadcast_to(part.atoms.reshape(shape), [sizes[a] for a in axes])


def positions(
    along: Collection[int], axes: tuple[int, ...], sizes: Mapping[int, int]
) -> Array:
    """Number every entry over ``axes`` by its position along the axes ``along``."""
    part_axes = tuple(axis for axis in axes if axis in along)
    lengths = [sizes[axis] for axis in part_axes]
    numbers = np.arange(math.prod(lengths)).reshape(lengths)
    return spread(Part(part_axes, numbers), axes, sizes)


def matching_runs(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Pair runs of old axes with runs of new axes that hold equally many entries, as
    finely as possible.

    A run ends where equally many entries precede its end in both shapes.
    """
    before = np.cumprod(old, dtype=np.int64)
    after = np.cumprod(new, dtype=np.int64)
    ends = np.intersect1d(before, after)
    runs = []
    for k in range(len(ends)):
        olds = np.flatnonzero(np.searchsorted(ends, before) == k)
        news = np.flatnonzero(np.searchsorted(ends, after) == k)
        runs.append((olds.tolist(), news.tolist()))
    return runs


def reshape_part(
    part: Part, runs: Sequence[tuple[list[int], list[int]]], new: Sequence[int]
) -> list[Part]:
    """Reshape a part that covers whole runs of axes; return nothing if no axis is
    left.
    """
    axes: list[int] = []
    for olds, news in runs:
        if set(olds) & set(part.axes):
            long = [axis for axis in news if new[axis] > 1]
            axes += long
            # else the new axis of a unit of size one is ambiguous
            if not long and len(olds) == len(news) == 1:
                axes += news
    if not axes and part.history is None:
        return []
    shape = [new[axis] for axis in axes]
    return [part.mapped(tuple(axes), lambda array: array.reshape(shape))]


def rank_within(owner: Array, by: Array | None = None) -> Array:
    """Count, for each entry, those of the same owner that precede it, in order or
    sorted by another array.
    """
    order = np.argsort(owner, kind="stable") if by is None else np.lexsort([by, owner])
    place = np.arange(len(owner))
    starts = np.r_[True, owner[order][1:] != owner[order][:-1]][: len(owner)]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return rank


def _reshaped(array: Array, shape: Sequence[int]) -> Array:
    return array.reshape(shape)
