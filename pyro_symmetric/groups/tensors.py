"""Vectors and permutations of units along one axis of a site."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def along_axis(vector: Tensor, dim: int, site_dims: int) -> Tensor:
    """``batch + (n,)`` -> ``batch + (1, .., n, .., 1)``, lying along axis ``dim`` of a site of ``site_dims`` axes."""
    return vector.reshape(*vector.shape[:-1], *([1] * dim), vector.shape[-1], *([1] * (site_dims - 1 - dim)))


def gather_last(value: Tensor, index: Tensor) -> Tensor:
    """``value.gather(-1, index)`` with broadcasting of the leading dimensions."""
    if value.shape[:-1] == index.shape[:-1]:
        return value.gather(-1, index)
    shape = torch.broadcast_shapes(value.shape[:-1], index.shape[:-1])
    return value.expand(*shape, value.shape[-1]).gather(-1, index.expand(*shape, index.shape[-1]))


def permute_axes(value: Tensor, indices: Mapping[int, Tensor], site_dims: int) -> Tensor:
    """Permute axes of ``batch + site_shape`` (a site of ``site_dims`` axes), each by ``batch_p + (length,)``.

    Batch shapes broadcast.
    """
    batch = value.shape[: value.dim() - site_dims]
    if all(index.dim() == 1 or (site_dims > 1 and index.shape[:-1] == batch) for index in indices.values()):
        for dim, index in indices.items():
            one = index.shape[:-1].numel() == 1
            whole = index.reshape(-1) if one else index
            value = value.index_select(dim - site_dims, whole) if one else _permute_rows(value, dim, len(batch), whole)
        return value
    if len(indices) == 1 and batch.numel() == 1:  # several elements meet one value: all that comes anywhere, at once
        ((dim, index),) = indices.items()
        lead = (1,) * max(0, len(batch) + 1 - index.dim()) + index.shape
        picked = value.reshape(value.shape[len(batch) :]).index_select(dim, index.reshape(-1)).unflatten(dim, lead)
        return picked.movedim(tuple(range(dim, dim + len(lead) - 1)), tuple(range(len(lead) - 1)))
    # Elements that meet several values each: one gather with flat indices, which are computed once for an element.
    shape = value.shape[value.dim() - site_dims :]
    source = torch.zeros((), dtype=torch.long, device=value.device)
    for dim, length in enumerate(shape):
        index = indices.get(dim, torch.arange(length, device=value.device))
        source = source + along_axis(index * math.prod(shape[dim + 1 :]), dim, site_dims)
    flat = gather_last(value.reshape(*batch, math.prod(shape)), source.flatten(source.dim() - site_dims))
    return flat.reshape(*flat.shape[:-1], *shape)


def _permute_rows(value: Tensor, dim: int, batch: int, index: Tensor) -> Tensor:
    """One element for each set of weights: copying whole rows is several times faster than gathering entries."""
    whole = value.movedim(batch + dim, batch)
    starts = index.shape[-1] * torch.arange(index.shape[:-1].numel(), device=index.device).unsqueeze(-1)
    source = (index.reshape(-1, index.shape[-1]) + starts).reshape(-1)
    permuted = whole.flatten(0, batch).index_select(0, source).reshape(whole.shape)
    return permuted.movedim(batch, batch + dim).contiguous()


def lay_out(numbers: Tensor, index: Tensor, filler: float, length: int) -> Tensor:
    """Numbers of units, ``batch + (count,)``, at the positions ``(blocks, count)`` of an axis; ``filler`` elsewhere."""
    index = index.to(numbers.device)
    full = numbers.new_full((*numbers.shape[:-1], length), filler)
    full[..., index.reshape(-1)] = numbers.unsqueeze(-2).expand(*numbers.shape[:-1], *index.shape).flatten(-2)
    return full
