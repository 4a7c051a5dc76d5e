"""Labels of a tensor: which of its entries belong to which unit.

A network's symmetry moves *units*: channels, features, heads. While the traced graph is walked, every tensor carries a
:class:`Value` that says, for each entry, whose it is. Labels are integers, *atoms*, laid out like the data, so that
reshape, transpose, slice and cat move them exactly as they move numbers, and flattening, channel shuffles, dense
connections and fused projections need no special treatment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.flow import Part


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
