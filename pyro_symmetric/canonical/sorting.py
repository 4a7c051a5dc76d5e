"""Sorting units by a key that is read off their weights, the innermost first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.unit_measures import meeting
from pyro_symmetric.discovery.symmetry import plain_weights
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.tensors import along_axis
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import Weights

# Keys closer than this many roundings tie: after unit norm, units with one incoming weight all have 1 or -1 there.
TIE = 16

Reduction = Callable[[Tensor, tuple[int, ...]], Tensor]
PermutationKey = Literal["first", "max", "norm"]


def sorting_permutation(
    weights: Mapping[str, Tensor] | nn.Module, symmetry: Any, key: PermutationKey = "max"
) -> Element:
    """The permutation, one per set of weights, that sorts all units; see
    :func:`~pyro_symmetric.canonical.forms.canonicalize`.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> weights = {"w": torch.tensor([[5.0, 0.0], [1.0, 0.0], [3.0, 0.0]])}
    >>> ps.sorting_permutation(weights, group)(weights)["w"][:, 0]
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
    reduced = _Reduced(group.viewed(weights), group)
    for name, axis in _sort_order(group, key):
        keys = reduced.keys(name, key)
        if axis is not None:
            so_far = Element(group, images, {}, {}, {})
            keys = itertools.chain([_first_entry(reduced.weights, so_far, name, axis)], keys)
        images[name] = _sort(keys, reduced, name, key, len(shape))
    return Element(group, images, {}, {}, {}, shape)


# what is sorted when ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
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
    rows = [axis for axis, is_row in matrices if is_row]
    if not matrices:
        return _Sides(vectors[:1], vectors[1:], [])
    if not rows:
        return _Sides([axis for axis, _ in matrices], vectors, [])
    return _Sides(rows, vectors, [axis for axis, is_row in matrices if not is_row])


def _sort_order(group: Group, key: str) -> list[tuple[str, Axis | None]]:
    """Units in the order of sorting, each with the axis that holds its "first" weights if these are well-defined.

    They are if all other units of that site are sorted already; without such an axis (two sets of units around one
    matrix and nothing else) units go by their largest weights, whatever the order of their neighbours. Units are sorted
    once all that lies inside them is.
    """
    lying = [name for name in group.names("permute") if not all(axis.buffer for axis in group[name].axes)]
    # The order in which sites and units were defined doesn't matter.
    lying.sort(key=lambda name: sorted((axis.site, axis.dim) for axis in group.axes(name)))
    innermost_first = sorted(lying, key=lambda name: -len(group.ancestors(name)))
    if key != "first":
        return [(name, None) for name in innermost_first]
    order: list[tuple[str, Axis | None]] = []
    steps: Sequence[tuple[str, Axis | None]]
    pending, done = innermost_first, set[str]()
    while pending:
        ready = [name for name in pending if not any(name in group.ancestors(other) for other in pending)]
        found = [(name, axis) for name in ready if (axis := _settled_axis(group, name, done)) is not None]
        # All that are settled at once, so that none goes by what another one settles.
        steps = found or [(ready[0], None)]
        order += steps
        done |= {name for name, _ in steps}
        pending = [name for name in pending if name not in done]
    return order


def _settled_axis(group: Group, name: str, done: set[str]) -> Axis | None:
    """The first incoming axis of which all that decides its first entries is done; outer units don't decide."""
    for axis in _sides(group, name).incoming:
        if meeting(group, axis, [name, *group.ancestors(name)]) <= done:
            return axis
    return None


# keys ---------------------------------------------------------------------------------------------------------------


def _first_entry(weights: Weights, so_far: Element, name: str, axis: Axis) -> Tensor:
    """The first incoming weight of each unit, ``batch + units.shape``, once ``so_far`` has sorted the other axes."""
    value = weights[axis.site]
    site_dims = len(so_far.group.view_shapes[axis.site])
    batch = value.shape[: value.dim() - site_dims]
    for dim in reversed(range(site_dims)):
        positions = so_far.axis_index(axis.site, dim).to(value.device)
        positions = positions[..., axis.index[0].to(value.device)] if dim == axis.dim else positions[..., :1]
        positions = positions.expand(*batch, positions.shape[-1])
        value = torch.take_along_dim(value, along_axis(positions, dim, site_dims), dim=dim - site_dims)
    return value.reshape(*batch, *so_far.group[name].shape)


class _Reduced:
    """Viewed weights reduced to one number per position of an axis; units that share an axis share the work."""

    def __init__(self, weights: Weights, group: Group):
        self.weights = weights
        self.group = group
        self._positions: dict[tuple[str, int, Reduction], Tensor] = {}

    def select(self, samples: Tensor, sites: set[str]) -> _Reduced:
        """The same for some of the samples, of some sites."""
        return _Reduced({site: self.weights[site][samples] for site in sites}, self.group)

    def keys(self, name: str, key: str) -> Iterator[Tensor]:
        """The key, then the tie-breakers that ``canonicalize`` names, ``batch + units.shape`` each; none depends on the
        order of neighbours."""
        sides = _sides(self.group, name)
        if key == "norm":
            yield self._of_units(name, [*sides.incoming, *sides.outgoing], torch.sum)
        yield self._of_units(name, sides.incoming, torch.amax)
        yield self._of_units(name, sides.incoming, torch.amin)
        for axis in sides.biases:
            yield self._of_units(name, [axis], torch.amax)
        if sides.outgoing:
            yield self._of_units(name, sides.outgoing, torch.amax)
            yield self._of_units(name, sides.outgoing, torch.amin)
        # Of units on two axes of one site, the largest weight of one may be that of another, too.
        for axis in [*sides.incoming, *sides.outgoing]:
            for how in (torch.amax, torch.amin, torch.sum):
                yield self._of_units(name, [axis], how)

    def _of_units(self, name: str, axes: Sequence[Axis], how: Reduction) -> Tensor:
        """Reduce all that belongs to each unit; sums are those of squares."""
        parts = [how(self._along(a, how)[..., a.index.to(self.weights[a.site].device)], (-2,)) for a in axes]
        found = parts[0] if len(parts) == 1 else how(torch.stack(parts, -1), (-1,))
        return found.unflatten(-1, self.group[name].shape)

    def _along(self, axis: Axis, how: Reduction) -> Tensor:
        where = (axis.site, axis.dim, how)
        if where not in self._positions:
            value = self.weights[axis.site]
            value = value.double().square() if how is torch.sum else value
            site_dims = len(self.group.view_shapes[axis.site])
            others = tuple(dim - site_dims for dim in range(site_dims) if dim != axis.dim)
            self._positions[where] = how(value, others) if others else value
        return self._positions[where]


# sorting ------------------------------------------------------------------------------------------------------------


def _sort(keys: Iterator[Tensor], reduced: _Reduced, name: str, key: str, batch_dims: int) -> Tensor:
    """Sort units by the first key; samples in which it ties, up to rounding, are sorted again by all keys."""
    sites = {axis.site for axis in reduced.group[name].axes if not axis.buffer}
    dtypes = {reduced.weights[site].dtype for site in sites}
    eps = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes)
    first = next(keys)
    order, tied = _refined(first, torch.zeros_like(first, dtype=torch.long), eps)
    tied = tied.flatten(batch_dims).any(-1)
    if not bool(tied.any()):
        return order
    rank = torch.zeros_like(order[tied])
    for values in itertools.chain([first[tied]], reduced.select(tied, sites).keys(name, key)):
        suborder, ties = _refined(values, rank, eps)
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
