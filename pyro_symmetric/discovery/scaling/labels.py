"""Labels of a tensor: which of its entries belong to which unit.

A network's symmetry moves *units*: channels, features, heads. While the traced graph is walked, every tensor carries a
:class:`Value` that says, for each entry, whose it is. Labels are integers, *atoms*, laid out like the data, so that
reshape, transpose, slice and cat move them exactly as they move numbers, and flattening, channel shuffles, dense
connections and fused projections need no special treatment.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

Array = np.ndarray


@dataclass(frozen=True)
class Passes:
    """The multipliers that an operation lets through: ``scale`` if positively homogeneous, ``sign`` if odd."""

    scale: bool
    sign: bool


LINEAR = Passes(scale=True, sign=True)
HOMOGENEOUS = Passes(scale=True, sign=False)
ODD = Passes(scale=False, sign=True)
NOTHING = Passes(scale=False, sign=False)


@dataclass(frozen=True, eq=False)
class Part:
    """A labelling of entries by atoms that depends on some axes only.

    :param axes: the axes that it depends on, ascending. None at all: one atom, whose multiplier all entries share.
    :param atoms: int64 array, one axis for each entry of ``axes``.
    """

    axes: tuple[int, ...]
    atoms: Array

    def renumbered(self, to: Mapping[int, int]) -> Part:
        """The same labels after its axes were renumbered."""
        axes = [to[axis] for axis in self.axes]
        order = sorted(range(len(axes)), key=axes.__getitem__)
        atoms = (
            self.atoms if order == [*range(len(axes))] else self.atoms.transpose(order)
        )  # the same array if it can be
        return Part(tuple(axes[i] for i in order), atoms)


@dataclass(frozen=True, eq=False)
class Value:
    """All that is known about a tensor.

    Along an axis, entries either belong to labelled units (the axis lies in one of ``parts``), or differ in a way that
    no symmetry touches (the axis is ``fixed``: batch, time, pixels, classes), or are all equal (neither).

    :param parts: labellings; an entry is found by its atoms and its place along the fixed axes. Their axes are disjoint
        unless the value *overlaps*: along one axis of a stack of matrices lie the matrices, each of which has rows and
        columns of its own, and parts lie on (stack, rows) and on (stack, columns).
    :param zero: whether all entries are known to be zero.
    :param constant: the value itself, if it is known while tracing (index maps).
    :param routes: axis -> which router, for axes along which the data have chosen each entry from a list (an expert for
        each token). Parts on such an axis are as long as the list, since any of it may be chosen.
    :param mask: whether its entries are true or false.
    :param numbers: of integers that number units of some axis (those of the chosen experts), the atoms of these units,
        in order: as units are exchanged, so are their numbers.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    fixed: frozenset[int] = frozenset()
    zero: bool = False
    constant: torch.Tensor | None = None
    routes: Mapping[int, int] = field(default_factory=dict)
    mask: bool = False
    numbers: Array | None = None

    @property
    def sizes(self) -> dict[int, int]:
        """The length of each axis as parts on it have it."""
        sizes = dict(enumerate(self.shape))
        for part in self.parts if self.routes else ():
            sizes |= dict(zip(part.axes, part.atoms.shape, strict=True))
        return sizes

    @property
    def overlaps(self) -> bool:
        """True if some axis lies in several parts."""
        axes = [axis for part in self.parts for axis in part.axes]
        return len(set(axes)) < len(axes)

    @property
    def dim(self) -> int:
        return len(self.shape)

    @property
    def labelled(self) -> bool:
        """True if units lie along some axis."""
        return any(part.axes for part in self.parts)

    def axis(self, axis: int) -> int:
        """A possibly negative axis, counted from the front."""
        return axis % self.dim if self.dim else 0

    def part_on(self, axis: int) -> Part | None:
        """The labelling that depends on this axis."""
        return next((part for part in self.parts if axis in part.axes), None)


def opaque(shape: Iterable[int], constant: torch.Tensor | None = None) -> Value:
    """A tensor of which nothing is known: data, masks, whatever a rule gave up on."""
    shape = tuple(int(n) for n in shape)
    return Value(shape, (), frozenset(i for i, n in enumerate(shape) if n > 1), constant=constant)


def spread(part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    """A part's atoms, broadcast to more axes (ascending, a superset of its own)."""
    shape = [sizes[a] if a in part.axes else 1 for a in axes]
    return np.broadcast_to(part.atoms.reshape(shape), [sizes[a] for a in axes])


def positions(along: Collection[int], axes: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    """For every entry over ``axes``, its place along the axes ``along``, as one integer."""
    own = tuple(axis for axis in axes if axis in along)
    lengths = [sizes[axis] for axis in own]
    return spread(Part(own, np.arange(math.prod(lengths)).reshape(lengths)), axes, sizes)


def distinct_rows(*columns: Array) -> tuple[Array, Array, Array]:
    """Rows of several integer columns: (index of the first of each distinct row, inverse, counts), rows sorted."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[order][1:] != column[order][:-1]
    number = np.cumsum(new) - 1
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = number
    return order[new], inverse, np.bincount(number)


def rank_within(owner: Array, by: Array | None = None) -> Array:
    """For each entry, how many of the same owner come before it, sorted by another array or as they lie."""
    order = np.argsort(owner, kind="stable") if by is None else np.lexsort([by, owner])
    place = np.arange(len(owner))
    starts = np.r_[True, owner[order][1:] != owner[order][:-1]][: len(owner)]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return rank


def by_appearance(labels: Array) -> tuple[Array, Array]:
    """The distinct labels in the order in which they first appear, and the number of each label in that order."""
    distinct, first, where = np.unique(labels, return_index=True, return_inverse=True)
    order = first.argsort()
    return distinct[order], order.argsort()[where]


def components(size: int, one: Array, other: Array) -> tuple[int, Array]:
    """Connected components of a graph: their number, and the component of each node."""
    graph = coo_matrix((np.ones(len(one), dtype=np.int8), (one, other)), shape=(size, size))
    count, label = connected_components(graph, directed=False)
    return count, label.astype(np.int64)
