r"""Units that mix: linear combinations of them are as good as they are.

What enters :math:`n` units of one copy, :math:`A` with one row for each, and what leaves them, :math:`B`, matter by
their product :math:`A^\top B` alone if nothing but linear maps lies between: queries and keys, values and outputs,
factors of low rank. It stays the same under :math:`A \to X A,\; B \to X^{-\top} B` with any invertible :math:`X`, so
that :math:`\mathrm{GL}(n)` acts on each copy. Its signs, scales and permutations are moves of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.groups.arrangement import Arrangement
from pyro_symmetric.groups.places import rows
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import Weights


class Sides(NamedTuple):
    """All weights of some units.

    :ivar entering: ``batch + (copies, size, entries)``, biases included.
    :ivar leaving: the same of what leaves them.
    """

    entering: Tensor
    leaving: Tensor


def sides(group: Arrangement, name: str, weights: Mapping[str, Tensor]) -> Sides:
    """The weights that enter and leave units that mix, in float64 at least, from weights with stacks."""
    one = group[name]
    parts: dict[int, list[Tensor]] = {1: [], -1: []}
    for axis in group.axes(name):
        if axis.exponent:
            parts[axis.exponent].append(_taken(group, axis, weights).unflatten(-2, (one.copies, one.size)))
    return Sides(*(torch.cat(parts[exponent], -1) for exponent in (1, -1)))


def replaced(group: Arrangement, name: str, weights: Mapping[str, Tensor], new: Sides) -> Weights:
    """Weights with stacks, with other ones on both sides of units that mix, in the precision that each site has."""
    result = dict(weights)
    starts = {1: 0, -1: 0}
    for axis in group.axes(name):
        if axis.exponent:
            entries = _taken(group, axis, weights).shape[-1]
            side = new.entering if axis.exponent == 1 else new.leaving
            own = side[..., starts[axis.exponent] : starts[axis.exponent] + entries]
            starts[axis.exponent] += entries
            result[axis.site] = _put(group, axis, result[axis.site], own.flatten(-3, -2))
    return result


def mixed(group: Arrangement, name: str, weights: Mapping[str, Tensor], matrix: Tensor) -> Weights:
    r"""The effect of a linear map of units on weights: :math:`X A` and :math:`X^{-\top} B`.

    :param matrix: :math:`X`, ``batch + (copies, size, size)``, invertible.
    """
    stacks = group.stacked(weights)
    own = sides(group, name, stacks)
    new = Sides(matrix @ own.entering, torch.linalg.solve(matrix.mT, own.leaving))
    return group.unstacked(replaced(group, name, stacks, new), weights)


# small steps --------------------------------------------------------------------------------------------------------


def _taken(group: Arrangement, axis: Axis, weights: Mapping[str, Tensor]) -> Tensor:
    """All entries of each unit along one axis, ``batch + (count, entries)``."""
    value = group.view(axis.site, weights[axis.site])
    value = value if value.is_complex() else value.double()
    return rows(value, axis, len(group.view_shapes[axis.site]))


def _put(group: Arrangement, axis: Axis, value: Tensor, new: Tensor) -> Tensor:
    """A site with other entries along one axis: the inverse of :func:`_taken`."""
    viewed = group.view(axis.site, value)
    batch, blocks = viewed.dim() - len(group.view_shapes[axis.site]), len(axis.index)
    along = viewed.movedim(batch + axis.dim, batch)
    by_block = new.unflatten(-1, (blocks, -1)).transpose(-3, -2).flatten(-3, -2)
    source = by_block.reshape(*along.shape[:batch], axis.index.numel(), *along.shape[batch + 1 :]).to(value.dtype)
    along = along.index_copy(batch, axis.index.reshape(-1).to(value.device), source)
    return group.view_back(axis.site, along.movedim(batch, batch + axis.dim))
