"""Axes of sites along which units lie, and entries along them."""

from __future__ import annotations

import functools
import math
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.weights import Shapes


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of one site along which units lie.

    >>> rows = ps.groups.Axis("hidden.weight", 0, torch.arange(3)[None], exponent=1)
    >>> columns = ps.groups.Axis("out.weight", 1, torch.arange(3)[None], exponent=-1)
    >>> units = ps.groups.Units(
    ...     "hidden", 3, (rows, columns), moves=frozenset({"permute", "scale"})
    ... )
    >>> ps.Group(
    ...     [units],
    ...     {"hidden.weight": torch.Size([3, 2]), "out.weight": torch.Size([1, 3])},
    ... ).factors
    {'hidden': 3}

    :param index: integers ``(blocks, count)``: unit ``u`` occupies the positions
        ``index[:, u]``. Kept as a contiguous LongTensor on the CPU.
    :param exponent: a sign or scale ``f`` of a unit multiplies these entries by ``f **
        exponent``: 1 for what enters a unit (its rows and bias), -1 for what leaves it,
        2 for a running variance, 0 for no effect. Rotations need 1 or -1, and do the
        same along both.
    :param buffer: whether the site is a buffer (running statistics), which guides and
        models may lack.
    :param epsilon: if given, a stored value ``v`` becomes ``f ** exponent * (v +
        epsilon) - epsilon``, which is exact for the running variances of batch
        normalisation.
    :param span: how many axes, from ``dim`` on, are flattened into one. The input
        channels of group ``g`` of a grouped convolution occupy columns (axis 1) in the
        rows (axis 0) of that group only. A scalar site has no axis: 0 makes it one of
        length 1.
    """

    site: str
    dim: int
    index: Tensor
    exponent: int = 0
    buffer: bool = False
    epsilon: float | None = None
    span: int = 1

    def __post_init__(self) -> None:
        index = arguments.tensor("index", self.index)
        integral = not (index.is_floating_point() or index.is_complex())
        if index.dim() != 2 or index.dtype == torch.bool or not integral:
            raise ValueError(
                f"index is {index.dtype} {tuple(index.shape)}; it must hold integers, "
                "(blocks, count)"
            )
        # groups outlive the mode they are built in
        with torch.inference_mode(False):
            if index.is_inference():
                index = index.clone()
            index = index.to("cpu", torch.long).contiguous()
        object.__setattr__(self, "index", index)

    def __str__(self) -> str:
        dims = ", ".join(map(str, range(self.dim, self.dim + self.span)))
        places = f"[{dims}]" if dims else ""
        return f"{self.site}{places}" + (f"^{self.exponent}" if self.exponent else "")

    def touched(self, moves: Set[Move]) -> bool:
        """Return whether moves of the units change the weights along the axis."""
        multiplied = (
            bool(self.exponent)
            if "scale" in moves
            else "flip" in moves and bool(self.exponent % 2)
        )
        return multiplied or bool(moves & {"permute", "shift", "rotate"})

    def length(self, site_shapes: Shapes) -> int:
        """Return the number of positions along the axis, or along all axes that it
        spans.
        """
        return math.prod(site_shapes[self.site][self.dim : self.dim + self.span])

    def fills(self, length: int) -> bool:
        """Return whether unit ``i`` is position ``i`` of an axis of this length, for
        all positions.
        """
        return self.index.shape[1] == int(length) and self._in_order

    @functools.cached_property
    def _in_order(self) -> bool:
        blocks, count = self.index.shape
        return blocks == 1 and torch.equal(
            self.index[0], torch.arange(count, device=self.index.device)
        )


def rows(value: Tensor, axis: Axis, site_dims: int) -> Tensor:
    """Return all entries of each unit along one axis.

    :param value: a site in the group's view, ``batch_shape + site_shape``.
    :param axis: an axis of the view.
    :param site_dims: the number of the viewed site's axes.
    :return: ``batch_shape + (count, entries)``; a view of ``value`` if unit ``i`` is
        position ``i``.
    """
    batch = value.dim() - site_dims
    if not axis.fills(value.shape[batch + axis.dim]):
        value = value.index_select(
            batch + axis.dim, axis.index.reshape(-1).to(value.device)
        )
    along = value.movedim(batch + axis.dim, batch)
    along = along.flatten(batch + 1) if site_dims > 1 else along.unsqueeze(-1)
    blocks, count = axis.index.shape
    return (
        along
        if blocks == 1
        else along.unflatten(-2, (blocks, count)).transpose(-3, -2).flatten(-2)
    )


def with_rows(value: Tensor, new: Tensor, axis: Axis, site_dims: int) -> Tensor:
    """Replace all entries of each unit along one axis: what :func:`rows` returns of the
    result is ``new``. Batch shapes broadcast.
    """
    blocks, count = axis.index.shape
    dim = axis.dim - site_dims
    moved = value.movedim(dim, -site_dims)
    site = moved.shape[moved.dim() - site_dims :]
    new = new.unflatten(-1, (blocks, site[1:].numel())).transpose(-3, -2)
    new = new.reshape(*new.shape[:-3], blocks * count, *site[1:])
    if not axis.fills(site[0]):
        full = moved.expand(*new.shape[: new.dim() - site_dims], *site)
        positions = axis.index.flatten().to(value.device)
        new = full.index_copy(-site_dims, positions, new)
    return new.movedim(-site_dims, dim)


def spanned(value: Tensor, dim: int, span: int) -> Tensor:
    """Merge the dimensions of a site that an axis spans."""
    return value.flatten(dim, dim + span - 1)


def along_axis(vector: Tensor, dim: int, site_dims: int) -> Tensor:
    """Reshape ``batch + (n,)`` to ``batch + (1, .., n, .., 1)``, along axis ``dim`` of
    a site of ``site_dims`` axes.
    """
    return vector.reshape(
        *vector.shape[:-1],
        *([1] * dim),
        vector.shape[-1],
        *([1] * (site_dims - 1 - dim)),
    )


def laid_out(numbers: Tensor, axis: Axis, length: int, elsewhere: float) -> Tensor:
    """Lay out numbers of units, ``batch + (count,)``, at the positions of an axis,
    ``batch + (length,)``.
    """
    if axis.fills(length):
        return numbers
    full = numbers.new_full((*numbers.shape[:-1], length), elsewhere)
    full[..., axis.index.to(numbers.device)] = numbers.unsqueeze(-2)
    return full


def permute_axis(value: Tensor, dim: int, index: Tensor, site_dims: int) -> Tensor:
    """Permute an axis of ``batch + site_shape`` by ``batch_p + (length,)``; batch
    shapes broadcast.
    """
    batch = value.shape[: value.dim() - site_dims]
    site = value.shape[value.dim() - site_dims :]
    if index.shape[:-1].numel() == 1 and index.dim() <= len(batch) + 1:
        return value.index_select(dim - site_dims, index.reshape(-1))
    if dim == 0 and site_dims > 1:
        # whole rows, many times as fast as a gather of their entries
        first = site[0] * torch.arange(batch.numel(), device=value.device)
        row = index + first.reshape(*batch, 1)
        rows = value.flatten(0, len(batch)).index_select(0, row.flatten())
        return rows.reshape(*row.shape, *site[1:])
    full = (*torch.broadcast_shapes(batch, index.shape[:-1]), *site)
    index = along_axis(index, dim, site_dims).expand(full)
    return value.expand(full).gather(dim - site_dims, index)
