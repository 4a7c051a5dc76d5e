"""The places of units: the axes of sites along which they lie, and what lies there."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.groups.units import MOVES, Axis, Move, Units, outer_first
from pyro_symmetric.weights import Weights, batch_shape, is_bias, require_same_network, require_sites

Members = list[tuple[str, Axis]]


class PlacedUnits:
    """Units by name and by the sites that they lie along; what a group acts on.

    If an axis spans several axes of its site, these are flattened for all that lies there: :meth:`view` reshapes so,
    and :meth:`members` and :meth:`axes` count axes in this view.

    :param runs: site -> first and last (excluded) of the axes that are flattened at least.
    :ivar view_shapes: shapes of the sites in the view.
    :ivar slots: name of the units -> their numbers, all units numbered through; ``size``: how many there are.
    :ivar depth: how many units lie inside one another at most, without the outermost; ``roots``: those in no others.
    :ivar sites: the sites that units lie along; of these ``buffers`` are running statistics, ``required_sites`` not.
    """

    def __init__(
        self,
        units: Sequence[Units],
        site_shapes: Mapping[str, torch.Size],
        of_network: bool,
        runs: Mapping[str, tuple[int, int]],
    ):
        self.site_shapes, self.of_network, self.units = dict(site_shapes), of_network, outer_first(units)
        self._runs = dict(runs)
        for axis in (axis for one in units for axis in one.axes if axis.span > 1):
            first, last = self._runs.get(axis.site, (axis.dim, 0))
            self._runs[axis.site] = min(first, axis.dim), max(last, axis.dim + axis.span)
        self.view_shapes = dict(self.site_shapes)
        for site, (first, last) in self._runs.items():
            shape = self.site_shapes[site]
            self.view_shapes[site] = torch.Size([*shape[:first], math.prod(shape[first:last]), *shape[last:]])
        self._axes = {name: tuple(map(self._viewed, one.axes)) for name, one in self.units.items()}
        self._members: dict[str, dict[int, Members]] = {}
        for name in sorted(self.units, key=lambda name: -len(self.ancestors(name))):
            for axis in self._axes[name]:
                self._members.setdefault(axis.site, {}).setdefault(axis.dim, []).append((name, axis))
        ends = [0, *itertools.accumulate(one.count for one in self.units.values())]
        self.slots = {name: slice(*pair) for name, pair in zip(self.units, itertools.pairwise(ends), strict=True)}
        self.size, self.depth = ends[-1], max((len(self.ancestors(name)) for name in self.units), default=0)
        self.roots = tuple(name for name, one in self.units.items() if one.parent is None)
        self._by_move = {move: tuple(n for n, one in self.units.items() if move in one.moves) for move in MOVES}
        self.sites = tuple(site for site in self.site_shapes if site in self._members)
        self.buffers = tuple(site for site in self.sites if all(axis.buffer for axis in self._along(site)))
        self.required_sites = tuple(site for site in self.sites if site not in self.buffers)
        self._kept: dict[Any, Any] = {}

    def __getitem__(self, name: str) -> Units:
        if name not in self.units:
            raise ValueError(f"the group has no units {name!r}; it has {list(self.units)}")
        return self.units[name]

    def names(self, move: Move) -> tuple[str, ...]:
        """The units that admit a move."""
        return self._by_move[move]

    def ancestors(self, name: str) -> tuple[str, ...]:
        """The units that these lie inside of, the nearest first; none for most."""
        parent = self[name].parent
        return () if parent is None else (parent, *self.ancestors(parent))

    def family(self, name: str) -> tuple[str, ...]:
        """These units and all that lies inside them, outer ones first."""
        inside = (other for other, one in self.units.items() if one.parent == name)
        return (name, *(inner for child in inside for inner in self.family(child)))

    def axes(self, name: str) -> tuple[Axis, ...]:
        """The axes of some units in the view, in the order of ``group[name].axes``."""
        return self._axes[name]

    def members(self, site: str) -> dict[int, Members]:
        """For each axis of a viewed site that units lie along: (name, axis) pairs, inner units before outer ones."""
        return self._members.get(site, {})

    def dims(self, site: str) -> tuple[int, ...]:
        """The axes of a site itself, rather than of its view, that units lie along."""
        axes = [axis for one in self.units.values() for axis in one.axes if axis.site == site]
        return tuple(sorted({dim for axis in axes for dim in range(axis.dim, axis.dim + axis.span)}))

    @property
    def weight_sites(self) -> tuple[str, ...]:
        """The sites that are weights: all but buffers, biases by name, and further sites of one axis.

        Such a site is a weight if units multiply it with a negative exponent, or if its name ends in ``weight``.
        """
        leaving = {axis.site for axes in self._axes.values() for axis in axes if axis.exponent < 0}
        found = (site for site in self.site_shapes if not is_bias(site) and site not in self.buffers)
        return tuple(s for s in found if len(self.site_shapes[s]) > 1 or s in leaving or s.endswith("weight"))

    def epsilon(self, site: str) -> float:
        """The summand that is added to a site's values before they are multiplied, and subtracted afterwards."""
        return next((a.epsilon for a in self._along(site) if a.exponent and a.epsilon is not None), 0.0)

    def view(self, site: str, value: Tensor) -> Tensor:
        """A site, ``batch_shape + site_shape``, with the axes flattened that some axis spans."""
        if site not in self._runs:
            return value
        start, end = (dim - len(self.site_shapes[site]) for dim in self._runs[site])
        return value.flatten(start, end - 1)

    def viewed(self, weights: Mapping[str, Tensor]) -> Weights:
        """All sites as :meth:`view` shows them."""
        return {site: self.view(site, value) for site, value in weights.items()}

    def require_own(self, sites: Iterable[str], name: str = "weights") -> None:
        """:raises ValueError: if there are parameters that a network's group doesn't know: another network's."""
        if self.of_network:
            require_same_network(sites, self.site_shapes, name)

    def batch_shape(self, weights: Mapping[str, Tensor]) -> torch.Size:
        """The batch shape of ``weights`` that are only looked at, checked against the sites' shapes."""
        require_sites(weights, self.required_sites)
        return batch_shape(weights, self.site_shapes)

    @functools.cached_property
    @torch.inference_mode(False)  # what is kept outlives the mode that it is made in
    def nesting(self) -> Tensor:
        """Three numbers of each unit: of the first in its copy, of the unit which it lies in, and its copy's size.

        ``(3, size)``; units that lie in no others have themselves, and size 0.
        """
        found = [torch.zeros(3, 0, dtype=torch.long, device="cpu")]
        for name, one in self.units.items():
            own = torch.arange(self.slots[name].start, self.slots[name].stop, device="cpu")
            copies = (own - self.slots[name].start) // one.size
            parent = own if one.parent is None else self.slots[one.parent].start + copies
            size = torch.full_like(own, 0 if one.parent is None else one.size)
            found.append(torch.stack([self.slots[name].start + copies * one.size, parent, size]))
        return torch.cat(found, 1)

    # small steps ------------------------------------------------------------------------------------------------------

    def _along(self, site: str) -> list[Axis]:
        return [axis for members in self.members(site).values() for _, axis in members]

    def _viewed(self, axis: Axis) -> Axis:
        """An axis of a site as one of the view: its units occupy all positions along the rest of the run."""
        if axis.site not in self._runs:
            return axis
        start, end = self._runs[axis.site]
        if not start <= axis.dim < end:
            return axis if axis.dim < start else replace(axis, dim=axis.dim - (end - start - 1))
        shape, first = self.site_shapes[axis.site][start:end], axis.dim - start
        places = torch.arange(shape.numel(), device=axis.index.device)
        along = places.reshape(*shape[:first], -1, *shape[first + axis.span :]).movedim(first, 0)
        index = along.reshape(len(along), -1)[axis.index].movedim(-1, 1).flatten(0, 1).contiguous()
        return replace(axis, dim=start, index=index, span=1)


# entries along axes ---------------------------------------------------------------------------------------------------


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


def laid_out(numbers: Tensor, axis: Axis, length: int, elsewhere: float) -> Tensor:
    """Numbers of units, ``batch + (count,)``, at the positions of an axis, ``batch + (length,)``."""
    if axis.fills(length):
        return numbers
    full = numbers.new_full((*numbers.shape[:-1], length), elsewhere)
    full[..., axis.index.to(numbers.device)] = numbers.unsqueeze(-2)
    return full


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
        own = value.shape[: value.dim() - site_dims]
        batch = torch.broadcast_shapes(own, index.shape[:-1])
        if dim == 0 and site_dims > 1 and own.numel() == 1:  # rows of one value, which needn't be repeated
            value = value.reshape(site).index_select(0, index.flatten()).reshape(*batch, *site)
            continue
        value = value.expand(*batch, *site)
        if dim == 0 and site_dims > 1:  # whole rows, which are copied many times as fast as their entries one by one
            first = site[0] * torch.arange(batch.numel(), device=value.device).reshape(*batch, 1)
            rows_of_all = value.reshape(-1, *site[1:]).index_select(0, (index + first).flatten())
            value = rows_of_all.reshape(*batch, *site)
        else:
            value = value.gather(dim - site_dims, along_axis(index, dim, site_dims).expand(*batch, *site))
    return value
