"""Steps that all operators take with labels: make values, pin them, tie parts of them to larger and to joint units.

Each step records the facts under which an operation commutes with the symmetry. Whatever isn't understood is pinned,
never freed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from pyro_symmetric.discovery.flow import Part, positions, spread
from pyro_symmetric.discovery.scaling.facts import Facts
from pyro_symmetric.discovery.scaling.labels import LINEAR, NOTHING, Passes, Value, opaque


class Recorder:
    """Records facts on behalf of the operator that is being looked at.

    :param facts: where facts go.
    :ivar where: the operator and its module in words, for explanations.
    """

    def __init__(self, facts: Facts):
        self.facts = facts
        self.where = "?"

    # values ---------------------------------------------------------------------------------------------------------

    def value(
        self,
        shape: Iterable[int],
        parts: Iterable[Part] = (),
        fixed: Iterable[int] = (),
        zero: bool = False,
        routes: Mapping[int, int] | None = None,
    ) -> Value:
        """A value, with its parts noted as occurring together."""
        parts = tuple(parts)
        shape = tuple(shape)
        labelled = {axis for part in parts for axis in part.axes}
        routes = {axis: route for axis, route in (routes or {}).items() if axis in labelled}
        value = Value(
            shape, parts, frozenset(i for i in fixed if i not in labelled and shape[i] > 1), zero, None, routes
        )
        for part in parts:  # labels of slices repeat within each of them
            self.facts.occur(np.unique(part.atoms) if value.overlaps else part.atoms)
        return value

    def still(self, value: Value, passes: Passes = NOTHING) -> None:
        """The operation doesn't let (all) multipliers of this operand through."""
        if passes != LINEAR:
            for part in value.parts:
                self.facts.still(part.atoms, not passes.scale, not passes.sign)

    def pin(self, value: Value) -> None:
        """Nothing may move in this operand."""
        if self.facts.moving.intersection(value.routes.values()):  # the same in all that may be chosen
            value = self.settled(value)
        for part in value.parts:
            self.facts.pin(part.atoms, self.where)
        self.keep_order(value)

    def keep_order(self, value: Value) -> None:
        """The units that these integers number can't be exchanged; the numbers don't depend on their scales."""
        if value.numbers is not None:
            self.facts.refine(value.numbers, np.arange(value.numbers.size), self.where)

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

    def project(self, part: Part, keep: Iterable[int], sizes: Mapping[int, int], passes: Passes = LINEAR) -> Part:
        """The larger units that remain when a part is summed over its other axes.

        If no axis remains, there is still one multiplier, which all units must share.
        """
        axes = tuple(axis for axis in part.axes if axis in set(keep))
        if axes == part.axes:
            return part
        larger = self.larger(part, axes, sizes) if axes else Part((), self.facts.shared())
        wide = spread(larger, part.axes, sizes)
        self.facts.balance([(1.0, part.atoms), (-1.0, wide)], passes.scale, passes.sign)
        for atoms in (part.atoms, larger.atoms):
            self.facts.still(atoms, not passes.scale, not passes.sign)
        return larger

    def restrict(self, value: Value, keep: Iterable[int], shared: bool = False) -> Value:
        """Allow labels on the axes ``keep`` only; along all others units are told apart by their place.

        :param shared: whether units with no such axis may still be rescaled, all by one multiplier.
        """
        keep = set(keep)
        sizes = value.sizes
        parts, fixed = [], set(value.fixed)
        for part in value.parts:
            off = [axis for axis in part.axes if axis not in keep]
            if not off:
                parts.append(part)
                continue
            fixed.update(off)
            told = [axis for axis in off if value.routes.get(axis) not in self.facts.moving]
            if told:
                self.facts.refine(part.atoms, positions(told, part.axes, sizes), self.where)
            if len(off) < len(part.axes) or shared:
                parts.append(self.project(part, keep, sizes))
            else:
                self.facts.still(part.atoms)
        if len(parts) == len(value.parts) and all(p is q for p, q in zip(parts, value.parts, strict=True)):
            return value
        return self.value(value.shape, parts, fixed, value.zero, value.routes)

    def settled(self, value: Value, axes: Iterable[int] | None = None) -> Value:
        """Labels that don't depend on what the data have chosen along (these) routed axes."""
        gone = set(value.routes) if axes is None else set(value.routes) & set(axes)
        return self.restrict(value, set(range(value.dim)) - gone) if gone else value

    def chosen(self, value: Value, axis: int, router: Value, length: int) -> Value:
        """Entries along an axis that the data choose, one for each place along it.

        What lies in a slice of its own (an expert's weights) keeps its labels, whichever slice it is: the axis has a
        route. All other labels don't depend on the axis. If the numbers are those of units, slices move with these.

        :param router: the chosen numbers, or what they follow from; the same for all that is chosen alike.
        """
        self.facts.stacks += [part.atoms for part in value.parts if part.axes == (axis,) and value.dim > 1]
        value, numbers = self.numbered(value, axis, router)
        parts = [part for part in value.parts if axis in part.axes and self.facts.is_sliced(part.atoms)]
        if not parts:
            value = self.restrict(value, set(range(value.dim)) - {axis})
        for part in parts:
            if numbers is not None:
                self.facts.moving.add(id(router))
                self.facts.relate(part.atoms, spread(numbers, part.axes, value.sizes))
            else:
                self.facts.refine(part.atoms, positions({axis}, part.axes, value.sizes), self.where)
        shape = [length if i == axis else n for i, n in enumerate(value.shape)]
        routes = {**value.routes, **({axis: id(router)} if parts else {})}
        return self.value(shape, value.parts, value.fixed | {axis}, value.zero, routes)

    def numbered(self, value: Value, axis: int, chosen: Value) -> tuple[Value, Part | None]:
        """The value along an axis of which entries are looked up by number, without labels along this axis alone.

        :return: the value; and the units along the axis that move with their numbers, which else stay.
        """
        numbers = chosen.numbers
        if numbers is None or chosen.labelled or len(numbers) != value.sizes[axis] or axis in value.fixed:
            self.pin(chosen)
            return value, None
        for part in value.parts:
            if part.axes == (axis,):
                self.facts.unify(part.atoms, numbers)
                self.facts.still(part.atoms)
        kept = [part for part in value.parts if part.axes != (axis,)]
        if all(
            part.axes == (axis,) or axis not in part.axes or self.facts.is_sliced(part.atoms) for part in value.parts
        ):
            return self.value(value.shape, kept, value.fixed | {axis}, value.zero, value.routes), Part((axis,), numbers)
        self.pin(chosen)
        return value, None

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

    def thinned(self, part: Part, kept: Container[int], sizes: Mapping[int, int] | Sequence[int]) -> list[Part]:
        """A part without axes of length one; none if no axis is left."""
        axes = tuple(axis for axis in part.axes if axis in kept)
        if axes == part.axes:
            return [part]
        if not axes:
            self.facts.still(part.atoms)
        return [Part(axes, part.atoms.reshape([sizes[a] for a in axes]))] if axes else []
