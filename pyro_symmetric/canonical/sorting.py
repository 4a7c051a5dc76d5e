"""Sorting units by a key that is read off their weights, the innermost first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.unit_measures import entries_of, meeting
from pyro_symmetric.discovery.symmetry import plain_weights
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis
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
    shape = group.batch_shape(weights)
    device = next(iter(weights.values())).device
    images = dict(group.identity(shape, device=device).permutations)
    viewed = group.viewed(weights)
    for name, axis in _sort_order(group, key):
        keys = _keys(viewed, group, name, None if axis else key)
        if axis is not None:
            site = Element(group, images).on_site(axis.site, weights[axis.site])
            first = entries_of(group, {axis.site: group.view(axis.site, site)}, [axis])[..., 0]
        else:
            first = next(keys)
        images[name] = _sorted(first, keys, group[name].shape, len(shape))
    return Element(group, images, batch_shape=shape)


class _Sides(NamedTuple):
    """Axes (of the view) along which weights enter units, biases lie, weights leave; the first is never empty."""

    incoming: list[Axis]
    biases: list[Axis]
    outgoing: list[Axis]


def _sides(group: Group, name: str) -> _Sides:
    """Incoming weights of units that are permuted are rows of a site itself."""
    pairs = sorted(zip(group[name].axes, group.axes(name), strict=True), key=lambda pair: (pair[0].site, pair[0].dim))
    axes = [(viewed, axis.dim == 0 and axis.span == 1) for axis, viewed in pairs if not axis.buffer]
    matrices = [(axis, is_row) for axis, is_row in axes if len(group.site_shapes[axis.site]) > 1]
    vectors = [axis for axis, _ in axes if len(group.site_shapes[axis.site]) == 1]
    if not matrices:
        return _Sides(vectors[:1], vectors[1:], [])
    rows, columns = ([axis for axis, is_row in matrices if is_row == side] for side in (True, False))
    return _Sides(rows or columns, vectors, columns if rows else [])


def _sort_order(group: Group, key: str) -> list[tuple[str, Axis | None]]:
    """Units in the order of sorting, each with the axis that holds its "first" weights if these are well-defined.

    They are if all other units of that site are sorted already; without such an axis (two sets of units around one
    matrix and nothing else) units go by their largest weights, whatever the order of their neighbours. Units are sorted
    once all that lies inside them is.
    """
    lying = [name for name in group.names("permute") if not all(axis.buffer for axis in group[name].axes)]
    # The order in which sites and units were defined doesn't matter.
    lying.sort(key=lambda name: sorted((axis.site, axis.dim) for axis in group.axes(name)))
    pending = sorted(lying, key=lambda name: -len(group.ancestors(name)))
    order: list[tuple[str, Axis | None]] = [(name, None) for name in pending]
    if key == "first":
        order, done = [], set[str]()
        while pending:
            ready = [name for name in pending if not any(name in group.ancestors(other) for other in pending)]
            found = [(name, axis) for name in ready for axis in _settled(group, name, done)[:1]]
            order += found or [(ready[0], None)]  # all at once: none goes by what another one settles
            done = {name for name, _ in order}
            pending = [name for name in pending if name not in done]
    return order


def _settled(group: Group, name: str, done: set[str]) -> list[Axis]:
    """The incoming axes of which all that decides their first entries is done; outer units don't decide."""
    besides = [name, *group.ancestors(name)]
    return [axis for axis in _sides(group, name).incoming if meeting(group, axis, besides) <= done]


def _keys(weights: Weights, group: Group, name: str, key: str | None) -> Iterator[Tensor]:
    """The key (if it doesn't depend on an order), then tie-breakers, ``batch + (count,)`` each; none depends on the
    order of neighbours."""
    sides = _sides(group, name)
    if key == "norm":
        yield sum(_squared(entries_of(group, weights, [a])) for a in (*sides.incoming, *sides.outgoing))  # type: ignore[misc]
    elif key is not None:
        yield entries_of(group, weights, sides.incoming).amax(-1)
    for axis in (*sides.incoming, *sides.biases, *sides.outgoing):
        entries = entries_of(group, weights, [axis])
        yield entries.amax(-1)
        yield entries.amin(-1)
        yield _squared(entries)


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
