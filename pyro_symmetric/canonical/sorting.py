"""Sorting units by a key that is read off their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.order import Axes, Step, entries_of, plan, sides
from pyro_symmetric.discovery.symmetry import plain_weights
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.weights import Weights

# Keys closer than this many roundings tie: after unit norm, units with one incoming weight all have 1 or -1 there.
TIE = 16

PermutationKey = Literal["first", "max", "norm"]


def sorting_permutation(
    weights: Mapping[str, Tensor] | nn.Module, symmetry: Any, key: PermutationKey = "max"
) -> Element:
    """The permutation, one per set of weights, that sorts all units; see
    :func:`~pyro_symmetric.canonical.forms.canonicalize`.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> weights = {"w": torch.tensor([[5.0, 0.0], [1.0, 0.0], [3.0, 0.0]])}
    >>> ps.canonical.sorting_permutation(weights, group)(weights)["w"][:, 0]
    tensor([1., 3., 5.])

    :param weights: site -> tensor ``batch_shape + site_shape``, or a network.
    :param symmetry: a symmetry or a group; its permutations count.
    :param key: ``"first"``, ``"max"`` or ``"norm"``.
    """
    arguments.one_of("key", key, get_args(PermutationKey))
    whole = group_of(symmetry, "symmetry")
    group = whole.permutations
    weights = plain_weights(weights, whole) if isinstance(weights, nn.Module) else weights
    arguments.weights("weights", weights)
    group.require_own(weights)
    shape, viewed = group.batch_shape(weights), group.viewed(weights)
    images = dict(group.identity(shape, device=next(iter(weights.values())).device).permutations)
    lying = [name for name in group.names("permute") if any(sides(group, name, "permute"))]
    # Other keys than the first entry don't depend on the order of neighbours, so that units can be sorted in any order.
    for step in plan(group, "permute") if key == "first" else [Step((name,)) for name in lying]:
        for name in step.names:
            keys = _keys(viewed, group, name, key)
            if step.axes:
                site = step.axes[0].site
                placed = group.view(site, Element(group, images, batch_shape=shape).on_site(site, weights[site]))
                first = entries_of(group, {site: placed}, step.axes[:1])[..., 0]
            else:
                first = next(keys)
            images[name] = _sorted(first, keys, group[name].shape, len(shape))
    return Element(group, images, batch_shape=shape)


def _keys(weights: Weights, group: Group, name: str, key: PermutationKey) -> Iterator[Tensor]:
    """The key, unless that depends on an order, then tie-breakers, ``batch + (count,)`` each; none depends on the order
    of neighbours."""
    incoming, outgoing = sides(group, name, "permute")
    matrices, others = (_matrices(group, side) for side in (incoming, outgoing))
    if key == "norm":
        yield sum(_squared(entries_of(group, weights, [axis])) for axis in matrices + others or incoming[:1])  # type: ignore[misc]
    elif key == "max":
        yield entries_of(group, weights, matrices or others or incoming[:1]).amax(-1)
    for axis in incoming + outgoing:
        entries = entries_of(group, weights, [axis])
        yield entries.amax(-1)
        yield entries.amin(-1)
        yield _squared(entries)


def _matrices(group: Group, axes: Axes) -> Axes:
    return tuple(axis for axis in axes if len(group.site_shapes[axis.site]) > 1)


def _squared(entries: Tensor) -> Tensor:
    return entries.double().square().sum(-1)


def _sorted(first: Tensor, keys: Iterator[Tensor], shape: tuple[int, ...], batch_dims: int) -> Tensor:
    """Sort units by the first key; samples in which it ties, up to rounding, are sorted again by all keys."""
    eps = torch.finfo(first.dtype).eps if first.dtype.is_floating_point else 0.0
    first = first.unflatten(-1, shape)
    order, close = _refined(first, torch.zeros_like(first, dtype=torch.long), eps)
    tied = close.flatten(batch_dims).any(-1)
    if not bool(tied.any()):
        return order
    rank = torch.zeros_like(order[tied])
    for values in (first, *(own.unflatten(-1, shape) for own in keys)):
        suborder, ties = _refined(values[tied], rank, eps)
        rank = torch.zeros_like(rank).scatter(-1, suborder[..., 1:], (~ties).cumsum(-1))
    order[tied] = rank.argsort(dim=-1, stable=True)
    return order


def _refined(key: Tensor, rank: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sort by rank, then by key: the order, and where neighbours in that order still tie, ``batch + (n - 1,)``."""
    order = key.argsort(dim=-1, stable=True)
    order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))
    key, rank = key.gather(-1, order), rank.gather(-1, order)
    close = key.diff(dim=-1) <= TIE * eps * key.abs().amax(-1, keepdim=True)
    return order, close & (rank.diff(dim=-1) == 0)
