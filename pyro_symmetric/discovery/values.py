"""Values: all that is known of a tensor while axes flow through a network, which entries belong to which unit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pyro_symmetric.discovery.arrays import Array


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
