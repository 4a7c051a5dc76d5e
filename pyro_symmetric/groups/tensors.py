"""How vectors and permutations of units lie along one axis of a site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def along_axis(vector: Tensor, dim: int, site_dims: int) -> Tensor:
    """``batch + (n,)`` -> ``batch + (1, .., n, .., 1)``, lying along axis ``dim`` of a site of ``site_dims`` axes."""
    return vector.reshape(*vector.shape[:-1], *([1] * dim), vector.shape[-1], *([1] * (site_dims - 1 - dim)))


def gather_last(value: Tensor, index: Tensor) -> Tensor:
    """``value.gather(-1, index)`` with broadcasting of the leading dimensions."""
    shape = torch.broadcast_shapes(value.shape[:-1], index.shape[:-1])
    return value.expand(*shape, value.shape[-1]).gather(-1, index.expand(*shape, index.shape[-1]))


def permute_axis(value: Tensor, dim: int, site_dims: int, index: Tensor) -> Tensor:
    """Permute axis ``dim`` of ``batch + site_shape`` (a site of ``site_dims`` axes) by ``batch_p + (length,)``."""
    if index.dim() == 1:
        return value.index_select(dim - site_dims, index)
    batch = value.dim() - site_dims
    if site_dims > 1 and index.shape[:-1] == value.shape[:batch]:
        # One element for each set of weights: copying whole rows is several times faster than gathering entries.
        whole = value.movedim(batch + dim, batch)
        starts = index.shape[-1] * torch.arange(index.shape[:-1].numel(), device=index.device).unsqueeze(-1)
        source = (index.reshape(-1, index.shape[-1]) + starts).reshape(-1)
        permuted = whole.flatten(0, batch).index_select(0, source).reshape(whole.shape)
        return permuted.movedim(batch, batch + dim).contiguous()
    # Elements and weights broadcast: one gather of entries from flattened sites, whose index is made once an element.
    site = value.shape[batch:]
    entries = torch.arange(site.numel(), device=index.device).reshape(site).expand(*index.shape[:-1], *site)
    source = torch.take_along_dim(entries, along_axis(index, dim, site_dims), dim=dim - site_dims)
    permuted = gather_last(value.flatten(batch), source.flatten(index.dim() - 1))
    return permuted.unflatten(-1, site)


def permute_axes(value: Tensor, indices: Mapping[int, Tensor], site_dims: int) -> Tensor:
    """Permute several axes of ``batch + site_shape``, each by ``batch_p + (length,)``; batch shapes broadcast."""
    batch = value.shape[: value.dim() - site_dims]
    if all(index.dim() == 1 or index.shape[:-1] == batch for index in indices.values()):
        for dim, index in indices.items():
            value = permute_axis(value, dim, site_dims, index)
        return value
    # Elements that meet several values each: one gather with flat indices, which are computed once for an element.
    shape = value.shape[value.dim() - site_dims :]
    source = torch.zeros((), dtype=torch.long, device=value.device)
    for dim, length in enumerate(shape):
        index = indices.get(dim, torch.arange(length, device=value.device))
        source = source + along_axis(index * math.prod(shape[dim + 1 :]), dim, site_dims)
    flat = gather_last(value.reshape(*batch, -1), source.flatten(source.dim() - site_dims))
    return flat.reshape(*flat.shape[:-1], *shape)


def lift(parts: Sequence[tuple[Tensor, Tensor]], length: int) -> Tensor:
    """Permutations of units as one of the positions of an axis, ``batch + (length,)``.

    :param parts: images of units, ``batch + (count,)``, with the positions ``(blocks, count)`` where they lie; those of
        different parts don't overlap.
    """
    batch = torch.broadcast_shapes(*(images.shape[:-1] for images, _ in parts))
    full = torch.arange(length, device=parts[0][0].device).expand(*batch, length).clone()
    for images, index in parts:
        index = index.to(images.device)
        # Where the new occupant of each position comes from, (blocks, batch, count) -> batch + (blocks * count,).
        full[..., index.reshape(-1)] = index[:, images].movedim(0, -2).flatten(-2)
    return full


def lay_out(numbers: Tensor, index: Tensor, filler: float, length: int) -> Tensor:
    """Numbers of units, ``batch + (count,)``, at the positions ``(blocks, count)`` of an axis; ``filler`` elsewhere."""
    index = index.to(numbers.device)
    full = numbers.new_full((*numbers.shape[:-1], length), filler)
    full[..., index.reshape(-1)] = numbers.unsqueeze(-2).expand(*numbers.shape[:-1], *index.shape).flatten(-2)
    return full
