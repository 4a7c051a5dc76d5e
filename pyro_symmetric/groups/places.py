"""Entries of units, numbers and permutations along one axis of a site."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_symmetric.groups.units import Axis


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


def along_axis(vector: Tensor, dim: int, site_dims: int) -> Tensor:
    """``batch + (n,)`` -> ``batch + (1, .., n, .., 1)``, lying along axis ``dim`` of a site of ``site_dims`` axes."""
    return vector.reshape(*vector.shape[:-1], *([1] * dim), vector.shape[-1], *([1] * (site_dims - 1 - dim)))


def permute_axes(value: Tensor, indices: Mapping[int, Tensor], site_dims: int) -> Tensor:
    """Permute axes of ``batch + site_shape``, each by ``batch_p + (length,)``; batch shapes broadcast."""
    batch, site = value.shape[: value.dim() - site_dims], value.shape[value.dim() - site_dims :]
    alone = {dim for dim, index in indices.items() if index.shape[:-1].numel() == 1 and index.dim() <= len(batch) + 1}
    indices = {dim: index.reshape(-1) if dim in alone else index for dim, index in indices.items()}
    if len(indices) > 1 and any(index.dim() > 1 and index.shape[:-1] != batch for index in indices.values()):
        # Elements that meet several values: one gather with flat indices, which are computed once for an element.
        flat = torch.zeros((), dtype=torch.long, device=value.device)
        for dim, length in enumerate(site):
            index = indices.get(dim, torch.arange(length, device=value.device))
            flat = flat + along_axis(index * math.prod(site[dim + 1 :]), dim, site_dims)
        return permute_axes(value.flatten(len(batch)), {0: flat.flatten(-site_dims)}, 1).unflatten(-1, site)
    for dim, index in indices.items():
        if index.dim() == 1:
            value = value.index_select(dim - site_dims, index)
            continue
        shape = (*torch.broadcast_shapes(value.shape[: value.dim() - site_dims], index.shape[:-1]), *site)
        value = value.expand(shape).gather(dim - site_dims, along_axis(index, dim, site_dims).expand(shape))
    return value
