"""Signs of units that can only be measured by one another, say those of the rows and of the columns of one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

# An int64 holds this many units as bits.
BITS = 62


class Entries(NamedTuple):
    """The weights of one site, and the units that flip them.

    :param values: float64, ``batch + site_shape``.
    :param units: for each axis, LongTensor ``(depth, length)``: the numbers of the units there, ``count`` for none.
    """

    values: Tensor
    units: Sequence[Tensor]


def agreed_signs(sites: Sequence[Entries], count: int, tie: float = 0.0) -> Tensor:
    r"""Signs after which the largest weights are positive, as many as can be, float64, ``batch + (count,)``.

    The weights' signs are :math:`s_w \prod_{u \in w} s_u`, each a linear equation over GF(2) if it is to be positive.
    The equations are solved from the largest weight down, those that follow from larger ones being left out: the basis
    of greatest weight of a matroid (Edmonds 1971, Mathematical Programming 1). It moves with the units, and with
    nothing else, if no two weights of one site have the same magnitude; of two sites, the first goes first.

    :param count: how many units there are.
    :param tie: magnitudes are the same if they differ by no more than this part of them.
    """
    masks, largest = [], []
    for site in sites:
        mask, value = _largest_of_alike(site, count)
        masks.append(mask)
        largest.append(value)
    mask, value = torch.cat(masks), torch.cat(largest, -1)
    batch = value.shape[:-1]
    value = value.reshape(-1, value.shape[-1])
    units = _bits(torch.arange(count, device=value.device)[None], count)
    rows = torch.cat([mask, units]).expand(len(value), -1, -1).clone()
    signs = torch.cat([value.sign(), value.new_ones(len(value), count)], -1)
    size = torch.cat([value.abs(), value.new_zeros(len(value), count)], -1)
    while True:  # once for each unit at most: every step replaces one unit by others
        open_size = torch.where((rows != 0).any(-1), size, 0.0)
        best = open_size.amax(-1)
        at = (open_size >= (1 - tie) * best[:, None]).int().argmax(-1)  # the first of these
        if not bool((best > 0).any()):
            return signs[:, -count:].reshape(*batch, count)
        row = rows.gather(1, at[:, None, None].expand(-1, 1, rows.shape[-1])) * (best > 0)[:, None, None]
        first = row & -row
        first = first * ((first != 0).cumsum(-1) == 1)
        has = ((rows & first) != 0).any(-1)
        signs = torch.where(has, signs * signs.gather(1, at[:, None]), signs)
        rows = torch.where(has[..., None], rows ^ row, rows)


def _largest_of_alike(site: Entries, count: int) -> tuple[Tensor, Tensor]:
    """The sets of units that flip entries of a site, as bits, and the largest entry of each set; 0 if that is a tie."""
    dims = len(site.units)
    bits = [_bits(units, count) for units in site.units]
    spread = [
        own.reshape(*([1] * dim), len(own), *([1] * (dims - 1 - dim)), own.shape[-1]) for dim, own in enumerate(bits)
    ]
    every = reduce(torch.bitwise_xor, spread).flatten(0, -2)
    sets, where = every.unique(dim=0, return_inverse=True)
    flat = site.values.flatten(site.values.dim() - dims)
    where = where.expand(flat.shape)
    none = flat.new_zeros(*flat.shape[:-1], len(sets))
    high = none.scatter_reduce(-1, where, flat, "amax", include_self=False)
    low = none.scatter_reduce(-1, where, flat, "amin", include_self=False)
    size = torch.maximum(high.abs(), low.abs())
    return sets, size * (high + low).sign()


def _bits(units: Tensor, count: int) -> Tensor:
    """Units ``(depth, length)`` as bits of words, ``(length, words)``; units that occur twice cancel out."""
    words = max(1, -(-count // BITS))
    word, bit = units // BITS, units % BITS
    each = torch.where(units < count, torch.bitwise_left_shift(torch.ones_like(units), bit), 0)
    here = word[..., None] == torch.arange(words, device=units.device)
    return reduce(torch.bitwise_xor, torch.where(here, each[..., None], 0))
