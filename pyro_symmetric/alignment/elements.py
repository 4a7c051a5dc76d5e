"""Small operations on batches of elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_symmetric.groups import Element


def act(element: Element, site: str, channels: Tensor) -> Tensor:
    """Act on all channels of a site; signs change the first only."""
    moved = [element.on_site(site, channel) for channel in channels]
    return torch.stack([moved[0], *(channel.abs() for channel in moved[1:])])


def choose(condition: Tensor, chosen: Element, otherwise: Element) -> Element:
    """Choose from two batches ``(B,)``, as :func:`torch.where` does."""
    condition = condition.unsqueeze(-1)
    return chosen.changed(
        lambda move, value: torch.where(condition, value, otherwise.numbers[move]),
        chosen.batch_shape,
    )


def reshape(element: Element, shape: Sequence[int]) -> Element:
    """Reshape a batch of elements ``(B,)``."""
    return element.changed(
        lambda move, value: value.reshape(*shape, value.shape[-1]), shape
    )


def put(element: Element, rows: Tensor, new: Element) -> Element:
    """Replace some elements of a batch ``(B,)``."""
    return element.changed(
        lambda move, value: value.index_copy(0, rows, new.numbers[move].to(value)),
        element.batch_shape,
    )


def recentre(element: Element) -> Element:
    """Multiply a batch of :math:`g` by :math:`h^{-1}`, so that most are the identity.

    Here :math:`h` are the commonest permutations and signs, of several the first. The
    frame stays the same.
    """
    finite = [*element.permutations.values(), *element.signs.values()]
    if not finite:
        return element
    numbers = torch.cat([value.flatten(1).long() for value in finite], 1)
    _, kind, counts = numbers.unique(dim=0, return_inverse=True, return_counts=True)
    commonest = (counts[kind] == counts.max()).nonzero()[0]
    return element.select(int(commonest)).inverse() @ element
