"""The units of a site: their rows, and what multiplies each position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_symmetric.groups.units import Axis, Move

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group


def rows(value: Tensor, axis: Axis, site_dims: int) -> Tensor:
    """All entries of each unit along one axis.

    :param value: a site in the group's view, ``batch_shape + site_shape``.
    :param axis: an axis of the view.
    :param site_dims: the number of the viewed site's axes.
    :return: ``batch_shape + (count, entries)``; a view of ``value`` if unit ``i`` is position ``i``.
    """
    batch = value.dim() - site_dims
    if not axis.fills(value.shape[batch + axis.dim]):
        value = value.index_select(batch + axis.dim, axis.index.reshape(-1).to(value.device))
    along = value.movedim(batch + axis.dim, batch)
    along = along.flatten(batch + 1) if site_dims > 1 else along.unsqueeze(-1)
    blocks, count = axis.index.shape
    return along if blocks == 1 else along.unflatten(-2, (blocks, count)).transpose(-3, -2).flatten(-2)


def offsets(group: Group, move: Move) -> dict[str, slice]:
    """The range of each set of units among all units that admit a move, in the group's order."""
    found, start = {}, 0
    for name in group.names(move):
        found[name] = slice(start, start + group[name].count)
        start = found[name].stop
    return found


def owners(group: Group, site: str, dim: int, move: Move, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The units that multiply each position of a viewed axis, and their exponents.

    :param move: ``"flip"`` or ``"scale"``; of flips, only odd exponents count.
    :return: LongTensor and float64 tensor ``(depth, length)``: units numbered as in :func:`offsets`, and their number
        if there is none. ``depth`` is 1 unless several units multiply one position.
    """
    length, where = group.view_shapes[site][dim], offsets(group, move)
    none = max((at.stop for at in where.values()), default=0)
    layers: list[tuple[Tensor, Tensor]] = []
    for name, axis in group.members(site).get(dim, []):
        if name not in where or axis.exponent == 0 or (move == "flip" and axis.exponent % 2 == 0):
            continue
        index = axis.index.cpu()
        layer = next((own for own in layers if bool((own[0][index] == none).all())), None)
        if layer is None:
            layer = torch.full((length,), none, device="cpu"), torch.zeros(length, dtype=torch.float64, device="cpu")
            layers.append(layer)
        layer[0][index] = where[name].start + torch.arange(index.shape[1], device="cpu")
        layer[1][index] = float(axis.exponent)
    if not layers:
        layers = [(torch.full((length,), none, device="cpu"), torch.zeros(length, dtype=torch.float64, device="cpu"))]
    units, exponents = (torch.stack(part).to(device) for part in zip(*layers, strict=True))
    return units, exponents
