"""The moves that operator rules are written in: combine, project, restrict, reshape, reduce.

Each takes values and returns a value, and records the facts under which the operation commutes with the symmetry.
Whatever isn't understood is pinned, never freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from pyro_symmetric.discovery.arrays import Array, rank_within
from pyro_symmetric.discovery.flow import Part, matching_axes, positions, spread
from pyro_symmetric.discovery.scaling.combination import combine
from pyro_symmetric.discovery.scaling.labels import LINEAR, NOTHING, ODD, Passes, Value
from pyro_symmetric.discovery.scaling.recorder import Recorder

# Joint labels of several axes cost one atom for each entry; beyond this many, units are pinned, and a warning says so.
JOINT_LIMIT = 4_000_000


class Labeller(Recorder):
    """Carries labels through operators: the methods that rules are written in."""

    # statistics -----------------------------------------------------------------------------------------------------

    def normalise(self, value: Value, axes: Iterable[int], passes: Passes = NOTHING) -> Value:
        """Any function of an entry and of symmetric statistics along some axes, which know no multipliers."""
        self.still(value, passes)
        self.reduce(self.unscaled(value), axes)
        return replace(value, zero=False)

    def standardise(self, value: Value, axes: Iterable[int]) -> Value:
        """Less the mean and divided by the deviation over some axes: all entries along these have one sign."""
        self.still(value, ODD)
        left = self.reduce(value, axes, passes=ODD)
        given = [part.atoms for part in value.parts]
        self.facts.common += [
            int(one) for part in left.parts if all(part.atoms is not own for own in given) for one in part.atoms.flat
        ]
        return replace(value, zero=False)

    def reduce(self, value: Value, axes: Iterable[int], keepdim: bool = False, passes: Passes = LINEAR) -> Value:
        """A symmetric reduction (sum, mean, largest ...) over some axes: labels on them vanish."""
        gone = {value.axis(axis) for axis in axes}
        keep = [axis for axis in range(value.dim) if axis not in gone]
        sizes = dict(enumerate(value.shape))
        left = replace(value, parts=tuple(self.project(part, keep, sizes, passes) for part in value.parts))
        self.still(left, passes)
        return self.relaid(left, [None if i in gone else i for i in range(value.dim)] if keepdim else keep)

    # axes without a change of entries -------------------------------------------------------------------------------

    def relaid(self, value: Value, axes: Sequence[int | None], shape: Iterable[int] | None = None) -> Value:
        """The same entries with the axes in another order.

        :param axes: for each new axis the old one, or None if all entries along it are equal. Axes that are left out
            are gone; of a labelled one (of length one), the unit isn't rescaled, as no label says any more where it is.
        :param shape: the new shape; axes without an old one have length one by default.
        """
        to = {old: new for new, old in enumerate(axes) if old is not None}
        parts = [thin.renumbered(to) for part in value.parts for thin in self.thinned(part, to, value.sizes)]
        if shape is None:
            shape = [1 if old is None else value.shape[old] for old in axes]
        routes = {to[axis]: route for axis, route in value.routes.items() if axis in to}
        return self.value(shape, parts, [to[i] for i in value.fixed if i in to], value.zero, routes)

    def squeeze(self, value: Value, axes: Iterable[int]) -> Value:
        """Drop axes of length one."""
        gone = {value.axis(axis) for axis in axes if value.shape[value.axis(axis)] == 1}
        return self.relaid(value, [axis for axis in range(value.dim) if axis not in gone])

    def unsqueeze(self, value: Value, axis: int) -> Value:
        """Insert an axis of length one."""
        order: list[int | None] = [*range(value.dim)]
        order.insert(axis % (value.dim + 1), None)
        return self.relaid(value, order)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast: axes that grow or are new hold equal entries."""
        new = len(shape) - value.dim
        full = [*shape[:new], *(old if n == -1 else n for old, n in zip(value.shape, shape[new:], strict=True))]
        kept = (i if old == n else None for i, (old, n) in enumerate(zip(value.shape, full[new:], strict=True)))
        return self.relaid(value, [*[None] * new, *kept], full)

    def take(self, value: Value, axis: int, index: Array) -> Value:
        """Choose places along an axis; if one is chosen twice, a unit's copies are told apart by their place."""
        if np.array_equal(index, np.arange(value.shape[axis])):
            return value
        value = self.settled(value, [axis])
        parts = []
        for part in value.parts:
            if axis in part.axes:
                chosen = np.take(part.atoms, index, axis=part.axes.index(axis))
                if np.unique(index).size < index.size:
                    if value.overlaps:
                        raise self.facts.entangled(value.parts)
                    chosen = self.copies(chosen, part.axes, axis)
                part = Part(part.axes, chosen)
                part = _of_one_slice(part, axis) if value.overlaps else part
            parts.append(part)
        shape = [len(index) if i == axis else n for i, n in enumerate(value.shape)]
        return self.value(shape, parts, value.fixed, value.zero, value.routes)

    def copies(self, atoms: Array, axes: tuple[int, ...], axis: int) -> Array:
        """New atoms for an array that holds a unit more than once along ``axis``: first copies, second copies, ..."""
        line = np.moveaxis(atoms, axes.index(axis), 0).reshape(atoms.shape[axes.index(axis)], -1)[:, 0]
        fresh = self.facts.fresh(atoms.shape)
        self.facts.unify(fresh, atoms)  # places of one unit, also where another label of the same unit is copied
        shape = [-1 if i == axes.index(axis) else 1 for i in range(atoms.ndim)]
        self.facts.refine(fresh, np.broadcast_to(rank_within(line).reshape(shape), atoms.shape), self.where)
        self.facts.balance([(1.0, fresh), (-1.0, atoms)])
        return fresh

    def diagonal(self, value: Value, rows: int, columns: int) -> Value:
        """Entries that have the same place along two axes, as a new last axis.

        An entry's multiplier is the product of its row's and its column's. So is the diagonal's, entry by entry, if the
        rows' units and the columns' move alike.
        """
        value = self.settled(value, [rows, columns])
        keep = [axis for axis in range(value.dim) if axis not in (rows, columns)]
        if value.overlaps or any({rows, columns} <= set(part.axes) for part in value.parts):
            value = self.restrict(value, keep)
        along = [part for part in value.parts if columns in part.axes]
        others = [part for part in value.parts if columns not in part.axes]
        factors = [
            self.relaid(replace(value, parts=tuple(parts)), [*keep, axis])
            for parts, axis in ((others, rows), (along, columns))
        ]
        return replace(self.elementwise(factors, "product"), zero=value.zero)

    # reshape --------------------------------------------------------------------------------------------------------

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """View with another shape; axes that are merged get joint labels, split axes keep theirs."""
        shape = tuple(_resolved(value.shape, shape))
        if 0 in value.shape:
            return self.give_up([value], shape, "there are no entries")
        groups = matching_axes(value.shape, shape)
        for old, _ in groups:
            value = self._joined(value, old)
        parts: list[Part] = []
        for part in value.parts:
            split = _split_and_merged(part, groups, value.shape, shape) if part.axes else part
            if split is None:
                self.facts.still(part.atoms)
            else:
                parts.append(self._simplified(split))
        fixed = {new for olds, news in groups for new in news if value.fixed & set(olds)}
        fixed |= {i for olds, news in groups for i in news for p in value.parts if set(p.axes) & set(olds)}
        return self.value(shape, parts, fixed, value.zero)

    def _joined(self, value: Value, axes: Sequence[int]) -> Value:
        """Make one part cover all of ``axes`` that are longer than one, if any part touches them."""
        long = {axis for axis in axes if value.shape[axis] > 1}
        touching = [part for part in value.parts if set(part.axes) & set(axes)]
        if not touching or (len(touching) == 1 and long <= set(touching[0].axes)):
            return value
        sizes = dict(enumerate(value.shape))
        if math.prod(sizes[a] for a in long.union(*(part.axes for part in touching))) > JOINT_LIMIT:
            self.lose(touching, f"they belong to more than {JOINT_LIMIT} joint units")
            return self.restrict(value, [i for i in range(value.dim) if all(i not in p.axes for p in touching)])
        joint = self.joint(touching, sizes, long)
        wide = [spread(part, joint.axes, sizes) for part in touching]
        self.facts.balance([(-1.0, joint.atoms), *((1.0, atoms) for atoms in wide)])
        labelled = {axis for part in touching for axis in part.axes}
        apart = [axis for axis in joint.axes if axis not in labelled and axis in value.fixed]
        place = positions(apart, joint.axes, sizes)
        if apart:
            self.facts.refine(joint.atoms, place, self.where)
        if len(touching) == 1 and set(apart) | labelled == set(joint.axes):
            self.facts.placed(joint.atoms, wide[0], place)
        rest = [part for part in value.parts if all(part is not other for other in touching)]
        return replace(value, parts=(*rest, joint), fixed=value.fixed - set(joint.axes))

    def _simplified(self, part: Part) -> Part:
        """Labels that were told apart by their place along axes that were merged, and lie along these again.

        Units lie along some axes, and places along all others: then labels on the former say all.
        """
        found = self.facts.origin(part.atoms) if len(part.axes) > 1 else None
        if found is None:
            return part
        origin, place = found
        every = range(origin.ndim)
        flat = [i for i in every if (origin == origin.take([0], i)).all()]  # no unit changes along these
        thin = origin[tuple(slice(0, 1) if i in flat else slice(None) for i in every)]
        rest = place[tuple(slice(None) if i in flat else slice(0, 1) for i in every)]
        if not 0 < len(flat) < origin.ndim or (place != rest).any() or np.unique(thin).size < thin.size:
            return part
        axes = tuple(axis for i, axis in enumerate(part.axes) if i not in flat)
        return Part(axes, np.ascontiguousarray(thin.squeeze(tuple(flat))))

    # several operands -----------------------------------------------------------------------------------------------

    def elementwise(
        self, operands: Sequence[Value], kind: str = "sum", passes: Passes = LINEAR, coefficients: Sequence[float] = ()
    ) -> Value:
        """Entry by entry, with broadcasting.

        :param kind: "sum" (all operands have one multiplier) or "product" (their multipliers multiply).
        """
        dim = max(value.dim for value in operands)
        letters = [list(range(dim - value.dim, dim)) for value in operands]
        return self.combine(list(zip(operands, letters, strict=True)), range(dim), kind, passes, coefficients)

    def combine(
        self,
        operands: Sequence[tuple[Value, Sequence[int]]],
        out: Iterable[int],
        kind: str = "product",
        passes: Passes = LINEAR,
        coefficients: Sequence[float] = (),
    ) -> Value:
        """Multiply or add operands whose axes carry letters, and sum over all letters that aren't in ``out``.

        Labels of equal letters are tied: as the same units if they depend on the same letters, as members of larger
        units if one depends on more letters than the other. Of an operand with a letter twice, the diagonal counts.
        """
        operands = [self._once(value, list(letters)) for value, letters in operands]
        return combine(self, operands, list(out), kind, passes, list(coefficients) or [1.0] * len(operands))

    def _once(self, value: Value, letters: list[int]) -> tuple[Value, list[int]]:
        """An operand none of whose letters comes twice."""
        twice = next((letter for letter in letters if letters.count(letter) > 1), None)
        if twice is None:
            return value, letters
        rows = letters.index(twice)
        columns = letters.index(twice, rows + 1)
        rest = [letter for axis, letter in enumerate(letters) if axis not in (rows, columns)]
        return self._once(self.diagonal(value, rows, columns), [*rest, twice])


# small steps --------------------------------------------------------------------------------------------------------


def _of_one_slice(part: Part, axis: int) -> Part:
    """Labels that no longer depend on an axis, since all of its positions are of one slice."""
    place = part.axes.index(axis)
    first = part.atoms.take(0, place)
    if part.atoms.shape[place] == 1 or not (part.atoms == np.expand_dims(first, place)).all():
        return part
    return Part(tuple(a for a in part.axes if a != axis), first)


def _resolved(old: Sequence[int], new: Sequence[int]) -> list[int]:
    known = math.prod(n for n in new if n != -1)
    return [math.prod(old) // known if n == -1 else int(n) for n in new]


def _split_and_merged(
    part: Part, groups: Sequence[tuple[list[int], list[int]]], old: Sequence[int], new: Sequence[int]
) -> Part | None:
    axes: list[int] = []
    for olds, news in groups:
        if set(olds) & set(part.axes):
            long = [axis for axis in news if new[axis] > 1]
            axes += long
            if not long and len(olds) == len(news) == 1:  # else it is unclear where a unit of size one went
                axes += news
    return Part(tuple(axes), part.atoms.reshape([new[a] for a in axes])) if axes else None
