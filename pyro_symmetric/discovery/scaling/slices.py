"""Slices: runs of positions along one axis of a parameter that have rows and columns of their own.

The weights of all experts are one tensor ``(experts, in, out)``, those of all heads ``(heads, in, size)``, those of
queries, keys and values ``(3 * out, in)``; the kernel of a grouped convolution sees other inputs in the rows of each
group. What lies along the other axes then differs from slice to slice: its labels depend on the slice, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.flow import Part
from pyro_symmetric.groups import Axis


@dataclass(frozen=True, eq=False)
class Slices:
    """The cuts of a parameter.

    :param axis: the axis that is cut.
    :param of: for each position along it, the number of its slice, ascending.
    :param dims: the axes along which each slice has labels of its own.
    :param owned: whether these are known to be parts of the slice (else an operator's rule will say what they are).
    """

    axis: int
    of: Array
    dims: tuple[int, ...]
    owned: bool = True

    @classmethod
    def at(cls, axis: int, cuts: Sequence[int], shape: Sequence[int], owned: bool = True) -> Slices:
        """Cut an axis at these places, its ends included; all other axes have labels of each slice's own."""
        of = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
        return cls(axis, of, tuple(i for i in range(len(shape)) if i != axis), owned)

    @cached_property
    def sizes(self) -> Array:
        """The length of each slice."""
        return np.bincount(self.of)

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def single(self) -> bool:
        """True if each slice is one position."""
        return self.count == len(self.of)

    def part(self, dim: int, labels: Array) -> Part:
        """Labels ``(slices, length)`` of an axis, position by position."""
        full = labels if self.single else labels[self.of]
        return Part((self.axis, dim), full) if self.axis < dim else Part((dim, self.axis), full.T)


class Run:
    """Neighbouring axes of a site, flattened: positions are numbered through all of them.

    :param shape: the site's shape.
    :param axes: the run goes from the first of these to the last.
    """

    def __init__(self, shape: Sequence[int], axes: Sequence[int]):
        self.dims = range(min(axes), max(axes) + 1)
        self.lengths = [shape[dim] for dim in self.dims]

    @cached_property
    def places(self) -> dict[int, Array]:
        """For each position, its place along each axis."""
        each = np.unravel_index(np.arange(math.prod(self.lengths)), self.lengths)
        return dict(zip(self.dims, each, strict=True))

    def stride(self, dim: int) -> int:
        """The distance between neighbours along an axis."""
        return math.prod(self.lengths[dim - self.dims[0] + 1 :])


def narrowed(axis: Axis, shape: Sequence[int]) -> Axis:
    """An axis that spans several as one that spans but one, if units lie alike at all places of the others."""
    if axis.span == 1:
        return axis
    run = Run(shape, range(axis.dim, axis.dim + axis.span))
    index = axis.index.cpu().numpy()
    for dim in run.dims:
        stride, length = run.stride(dim), shape[dim]
        along = index // stride % length
        others = index - along * stride
        if (others != others[:, :1]).any():
            continue
        order = np.lexsort([along[:, 0], others[:, 0]])
        rest = math.prod(run.lengths) // length
        if len(order) % rest:
            continue
        alike = along[order].reshape(rest, -1, index.shape[1])
        places = others[order, 0].reshape(rest, -1)
        if (places == places[:, :1]).all() and len(np.unique(places)) == rest and (alike == alike[:1]).all():
            return replace(axis, dim=dim, span=1, index=torch.from_numpy(np.ascontiguousarray(alike[0])))
    return axis
