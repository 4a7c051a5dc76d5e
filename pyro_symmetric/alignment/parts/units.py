"""What an alignment can move, read off a group's axes: units, what lies inside them, what multiplies them.

All factors of one kind (one in each slot of each unit of a parent) are one set of :class:`Units`; most factors are a
set of their own. A :class:`Move` is what one step of the descent decides at once: the units of one factor with all that
is nested inside them, and every sign and scale that belongs to exactly one of these units. Where two sets inside one
factor meet in one site (the inputs and outputs of a grouped convolution) each gets a move of its own. Multipliers that
belong to no unit (one scale of a whole stream) are moves, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.wreath import Family

Place = tuple[str, int]  # a site, and an axis of its view


@dataclass(frozen=True, eq=False)
class Units:
    """The units of all factors of one kind.

    :param names: the factors in the order of their paths; the first one's name is that of the set.
    :param size: units of each factor.
    :param places: where they lie -> index ``(blocks, len(names) * size)``, as in ``Axis``; a block is the same place
        in every unit.
    :param inner: the sets inside.
    """

    names: tuple[str, ...]
    size: int
    places: dict[Place, Tensor]
    inner: tuple[Units, ...] = ()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def count(self) -> int:
        """Units of all factors together."""
        return len(self.names) * self.size

    def tree(self) -> list[Units]:
        """This set and all inside, outer ones first."""
        return [self, *chain.from_iterable(child.tree() for child in self.inner)]

    def meets(self, other: Units) -> bool:
        """Whether some weight is moved by both."""
        return any(
            site == other_site and (dim != other_dim or bool(torch.isin(index, other_index).any()))
            for (site, dim), index in self.places.items()
            for (other_site, other_dim), other_index in other.places.items()
        )


@dataclass(frozen=True, eq=False)
class Slot:
    """One multiplier for each of a set of units.

    :param kind: ``"sign"`` or ``"scale"``.
    :param factors: the rescaling factors that it consists of.
    :param units: for each unit, the number of its multiplier among all of this kind.
    :param exponents: place -> block -> exponent.
    """

    kind: str
    factors: tuple[str, ...]
    units: Tensor
    exponents: dict[Place, dict[int, int]]


@dataclass(frozen=True, eq=False)
class Term:
    """Blocks of a set's units at one place that are multiplied alike.

    :param units: the name of the set.
    :param index: ``(blocks, count)``.
    :param signs: numbers, among the set's slots, of those that flip it.
    :param scale: number of the slot that scales it.
    :param exponent: of that scale.
    :param depends: actors other than the move's own that act on the site, and the move's own on other axes.
    """

    units: str
    place: Place
    index: Tensor
    signs: tuple[int, ...] = ()
    scale: int | None = None
    exponent: int = 0
    depends: frozenset[str] = frozenset()

    @cached_property
    def plain(self) -> bool:
        """Whether unit ``i`` is position ``i``."""
        return len(self.index) == 1 and bool((self.index[0].diff() == 1).all()) and int(self.index[0, 0]) == 0


@dataclass(frozen=True, eq=False)
class Move:
    """What is decided at once.

    :param root: the outermost units; ``None`` if the move is of a multiplier alone.
    :param active: the sets that are rearranged, outer ones first; sets that aren't ride along.
    :param slots: name of a set -> the multipliers of its units that are chosen with them.
    :param multiplier: kind and factor of a multiplier that is moved alone.
    """

    root: Units | None
    active: tuple[Units, ...] = ()
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    terms: tuple[Term, ...] = ()
    multiplier: tuple[str, str] | None = None

    @property
    def actors(self) -> frozenset[str]:
        """What it changes."""
        if self.multiplier is not None:
            return frozenset([actor(*self.multiplier)])
        own = {units.name for units in self.active}
        return frozenset(own | {actor(s.kind, f) for slots in self.slots.values() for s in slots for f in s.factors})

    @property
    def moves_itself(self) -> bool:
        """Whether its units lie along two axes of one site, so that its scores depend on what it decides."""
        return any(term.depends & self.actors for term in self.terms)

    def inside(self, units: Units) -> list[Units]:
        """The active sets right inside another."""
        return [child for child in units.inner if any(child is own for own in self.active)]


def actor(kind: str, factor: str) -> str:
    """The name of a multiplier among all that acts; sets of units go by their own names."""
    return f"{kind} of {factor}"


def units_of(group: PermutationGroup) -> list[Units]:
    """The sets of units of the outermost factors."""
    return [_units(tree, group, None) for tree in group.families]


def lookup(index: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """For each position of an axis, its block and its unit; -1 where no unit lies."""
    block, unit = torch.full((length,), -1), torch.full((length,), -1)
    blocks, n = index.shape
    block[index.reshape(-1)] = torch.arange(blocks).repeat_interleave(n)
    unit[index.reshape(-1)] = torch.arange(n).repeat(blocks)
    return block, unit


def covered_blocks(units: Units, child: Units, place: Place) -> Tensor:
    """The blocks of a set's units in which those of an inner set lie."""
    if place not in child.places:
        return torch.zeros(0, dtype=torch.long)
    return torch.isin(units.places[place][:, 0], child.places[place]).nonzero().flatten()


# small steps --------------------------------------------------------------------------------------------------------


def _units(family: Family, group: PermutationGroup, parent: Units | None) -> Units:
    by_place: dict[Place, list[Tensor]] = {}
    for name in family.names:
        own: dict[Place, list[Tensor]] = {}
        for axis in group.axes(name):
            own.setdefault((axis.site, axis.dim), []).append(axis.index.cpu())
        for place, parts in own.items():
            index = torch.cat(parts)
            if parent is not None:  # blocks come in the order of the parent's, so that they agree between slots
                block, _ = lookup(parent.places[place], group.view_shapes[place[0]][place[1]])
                index = index[block[index[:, 0]].argsort()]
            by_place.setdefault(place, []).append(index)
    result = Units(family.names, family.size, {place: torch.cat(parts, 1) for place, parts in by_place.items()})
    return replace(result, inner=tuple(_units(child, group, result) for child in family.inner))
