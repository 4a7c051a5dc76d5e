"""The moves that operator rules are written in: combine, project, restrict, reshape, reduce.

Each takes values and returns a value, and records the facts under which the operation commutes with the symmetry.
Whatever isn't understood is pinned, never freed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.labels import Array, Part, Value, opaque, positions, rank_within, spread

# Joint labels of several axes cost one atom for each entry; beyond this many, units are pinned, and a warning says so.
JOINT_LIMIT = 4_000_000


@dataclass(frozen=True)
class Passes:
    """Which multipliers an operation lets through: ``scale`` if positively homogeneous, ``sign`` if odd."""

    scale: bool
    sign: bool


LINEAR = Passes(scale=True, sign=True)
HOMOGENEOUS = Passes(scale=True, sign=False)
ODD = Passes(scale=False, sign=True)
NOTHING = Passes(scale=False, sign=False)


class Labeller:
    """Records facts on behalf of the operator that is being looked at.

    :param facts: where facts go.
    :ivar where: the operator and its module in words, for explanations.
    """

    def __init__(self, facts: Facts):
        self.facts = facts
        self.where = "?"

    # values ---------------------------------------------------------------------------------------------------------

    def value(
        self, shape: Iterable[int], parts: Iterable[Part] = (), fixed: Iterable[int] = (), zero: bool = False
    ) -> Value:
        """A value, with its parts noted as occurring together."""
        parts = tuple(parts)
        shape = tuple(shape)
        for part in parts:
            self.facts.occur(part.atoms)
        labelled = {axis for part in parts for axis in part.axes}
        return Value(shape, parts, frozenset(i for i in fixed if i not in labelled and shape[i] > 1), zero)

    def still(self, value: Value, passes: Passes = NOTHING) -> None:
        """The operation doesn't let (all) multipliers of this operand through."""
        for part in value.parts:
            self.facts.still(part.atoms, not passes.scale, not passes.sign)

    def pin(self, value: Value) -> None:
        """Nothing may move in this operand."""
        for part in value.parts:
            self.facts.pin(part.atoms, self.where)

    def give_up(self, operands: Iterable[Value], shape: Iterable[int], why: str) -> Value:
        """Pin all operands, and have a warning say so; nothing is known about the result."""
        for value in operands:
            self.lose(value.parts, why)
            self.pin(value)
        return opaque(shape)

    def lose(self, parts: Iterable[Part], why: str) -> None:
        """Have a warning say that units of these parts are left out, though they might move."""
        if any(part.atoms.size for part in parts):
            self.facts.lost[f"{self.where} ({why})"] = None

    # axes -----------------------------------------------------------------------------------------------------------

    def larger(self, part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]) -> Part:
        """New units over some axes of a part, whose units are members of these."""
        larger = Part(axes, self.facts.fresh([sizes[a] for a in axes]))
        self.facts.relate(part.atoms, spread(larger, part.axes, sizes))
        return larger

    def joint(self, parts: Sequence[Part], sizes: Mapping[int, int], axes: Iterable[int] = ()) -> Part:
        """Units over all axes of ``parts`` (and further ones) that are members of theirs: one of them, or new ones."""
        union = tuple(sorted(set(axes).union(*(part.axes for part in parts))))
        found = next((part for part in parts if part.axes == union), None)
        joint = Part(union, self.facts.fresh([sizes[a] for a in union])) if found is None else found
        for part in parts:
            if part.axes == union:
                self.facts.unify(joint.atoms, part.atoms)
            else:
                self.facts.relate(joint.atoms, spread(part, union, sizes))
        return joint

    def project(
        self, part: Part, keep: Iterable[int], sizes: Mapping[int, int], passes: Passes = LINEAR
    ) -> Part | None:
        """The larger units that remain when a part is summed over its other axes; None if no axis remains."""
        axes = tuple(axis for axis in part.axes if axis in set(keep))
        if axes == part.axes:
            return part
        if not axes:
            self.facts.still(part.atoms)
            return None
        larger = self.larger(part, axes, sizes)
        wide = spread(larger, part.axes, sizes)
        self.facts.balance([(1.0, part.atoms), (-1.0, wide)], passes.scale, passes.sign)
        self.facts.still(part.atoms, not passes.scale, not passes.sign)
        return larger

    def restrict(self, value: Value, keep: Iterable[int]) -> Value:
        """Allow labels on the axes ``keep`` only; along all others units are told apart by their place."""
        keep = set(keep)
        sizes = dict(enumerate(value.shape))
        parts, fixed = [], set(value.fixed)
        for part in value.parts:
            off = [axis for axis in part.axes if axis not in keep]
            if not off:
                parts.append(part)
                continue
            fixed.update(off)
            if len(off) == len(part.axes):
                self.facts.pin(part.atoms, self.where)
                continue
            self.facts.refine(part.atoms, positions(off, part.axes, sizes), self.where)
            larger = self.project(part, keep, sizes)
            if larger is not None:
                parts.append(larger)
        if len(parts) == len(value.parts) and all(p is q for p, q in zip(parts, value.parts, strict=True)):
            return value
        return self.value(value.shape, parts, fixed, value.zero)

    def renewed(self, part: Part, passes: Passes) -> Part:
        """The same units with the multipliers that pass; the others end here, which leaves them free."""
        fresh = Part(part.axes, self.facts.fresh(part.atoms.shape))
        self.facts.unify(fresh.atoms, part.atoms)
        self.facts.balance([(1.0, part.atoms), (-1.0, fresh.atoms)], passes.scale, passes.sign)
        self.facts.still(fresh.atoms, not passes.scale, not passes.sign)
        return fresh

    def unscaled(self, value: Value, passes: Passes = NOTHING) -> Value:
        """Other multipliers end here: signs for absolute values; all for places of maxima and random masks."""
        parts = [self.renewed(part, passes) for part in value.parts]
        return self.value(value.shape, parts, value.fixed, value.zero and passes.scale)

    def normalise(self, value: Value, axes: Iterable[int], passes: Passes = NOTHING) -> Value:
        """Any function of an entry and of symmetric statistics along some axes."""
        self.still(value, passes)
        self.reduce(value, axes)
        return replace(value, zero=False)

    def reduce(self, value: Value, axes: Iterable[int], keepdim: bool = False, passes: Passes = LINEAR) -> Value:
        """A symmetric reduction (sum, mean, largest ...) over some axes: labels on them vanish."""
        gone = {value.axis(axis) for axis in axes}
        keep = [axis for axis in range(value.dim) if axis not in gone]
        sizes = dict(enumerate(value.shape))
        parts = (self.project(part, keep, sizes, passes) for part in value.parts)
        left = replace(value, parts=tuple(part for part in parts if part is not None))
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
        parts = [thin.renumbered(to) for part in value.parts for thin in self.thinned(part, to, value.shape)]
        if shape is None:
            shape = [1 if old is None else value.shape[old] for old in axes]
        return self.value(shape, parts, [to[i] for i in value.fixed if i in to], value.zero)

    def thinned(self, part: Part, kept: Container[int], sizes: Mapping[int, int] | Sequence[int]) -> list[Part]:
        """A part without axes of length one; none if no axis is left."""
        axes = tuple(axis for axis in part.axes if axis in kept)
        if not axes:
            self.facts.still(part.atoms)
        return [Part(axes, part.atoms.reshape([sizes[a] for a in axes]))] if axes else []

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
        parts = []
        for part in value.parts:
            if axis in part.axes:
                chosen = np.take(part.atoms, index, axis=part.axes.index(axis))
                if np.unique(index).size < index.size:
                    chosen = self.copies(chosen, part.axes, axis)
                part = Part(part.axes, chosen)
            parts.append(part)
        shape = [len(index) if i == axis else n for i, n in enumerate(value.shape)]
        return self.value(shape, parts, value.fixed, value.zero)

    def copies(self, atoms: Array, axes: tuple[int, ...], axis: int) -> Array:
        """New atoms for an array that holds a unit more than once along ``axis``: first copies, second copies, ..."""
        line = np.moveaxis(atoms, axes.index(axis), 0).reshape(atoms.shape[axes.index(axis)], -1)[:, 0]
        fresh = self.facts.fresh(atoms.shape)
        self.facts.relate(fresh, atoms)
        shape = [-1 if i == axes.index(axis) else 1 for i in range(atoms.ndim)]
        self.facts.refine(fresh, np.broadcast_to(rank_within(line).reshape(shape), atoms.shape), self.where)
        self.facts.balance([(1.0, fresh), (-1.0, atoms)])
        return fresh

    # reshape --------------------------------------------------------------------------------------------------------

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """View with another shape; axes that are merged get joint labels, split axes keep theirs."""
        shape = tuple(_resolved(value.shape, shape))
        if 0 in value.shape:
            return self.give_up([value], shape, "there are no entries")
        groups = _matching_axes(value.shape, shape)
        for old, _ in groups:
            value = self._joined(value, old)
        parts: list[Part] = []
        for part in value.parts:
            split = _split_and_merged(part, groups, value.shape, shape)
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
        """Labels that were told apart by their place along an axis (when it was merged), and lie along it again."""
        found = self.facts.origin(part.atoms) if len(part.axes) > 1 else None
        if found is None:
            return part
        origin, place = found
        for i, axis in enumerate(part.axes):
            first = [slice(0, 1) if j == i else slice(None) for j in range(origin.ndim)]
            rest = [slice(None) if j == i else slice(0, 1) for j in range(origin.ndim)]
            thin = origin[tuple(first)]
            if (origin == thin).all() and (place == place[tuple(rest)]).all() and np.unique(thin).size == thin.size:
                axes = tuple(a for a in part.axes if a != axis)
                return Part(axes, np.ascontiguousarray(thin.squeeze(i)))
        return part

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
        units if one depends on more letters than the other.
        """
        from pyro_symmetric.discovery.combination import combine

        return combine(self, operands, list(out), kind, passes, list(coefficients) or [1.0] * len(operands))


# small steps --------------------------------------------------------------------------------------------------------


def _resolved(old: Sequence[int], new: Sequence[int]) -> list[int]:
    known = math.prod(n for n in new if n != -1)
    return [math.prod(old) // known if n == -1 else int(n) for n in new]


def _matching_axes(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest pairing of runs of old axes with runs of new axes that hold equally many entries."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        olds, news, left, right = [i], [j], old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= old[i]
                olds.append(i)
                i += 1
            else:
                right *= new[j]
                news.append(j)
                j += 1
        groups.append((olds, news))
    if i < len(old) or j < len(new):  # trailing axes of length one
        if not groups:
            return [(list(range(len(old))), list(range(len(new))))]
        groups[-1][0].extend(range(i, len(old)))
        groups[-1][1].extend(range(j, len(new)))
    return groups


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
