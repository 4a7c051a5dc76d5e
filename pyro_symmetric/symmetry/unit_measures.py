"""Measuring units by what enters them, from the input on, so that each measure rests on canonical ones only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_symmetric.symmetry.factored import along_axis
from pyro_symmetric.symmetry.rescaling import Multipliers, RescaledAxis, RescalingGroup

M = TypeVar("M", bound=Multipliers[Any])
Measure = Callable[[Tensor], Tensor]


def norm(entries: Tensor) -> Tensor:
    """Euclidean norm of each unit's entries, ``batch + (n, entries)`` -> ``batch + (n,)``."""
    return torch.linalg.vector_norm(entries, dim=-1, dtype=torch.float64)


def spread(entries: Tensor) -> Tensor:
    """Standard deviation of each unit's entries; the norm where that is zero (one entry, or all entries alike)."""
    size = norm(entries)
    std = entries.double().std(-1, correction=0)
    return torch.where(std > 1e-7 * size, std, size)


def largest_sign(entries: Tensor) -> Tensor:
    """The sign of each unit's entry of largest magnitude, in whatever order the entries come; 0 if that is a tie."""
    return (entries.amax(-1) + entries.amin(-1)).sign()


def removing_element(
    weights: Mapping[str, Tensor],
    group: RescalingGroup[Any],
    kind: type[M],
    measure: Measure,
    only: Mapping[str, Tensor] | None = None,
) -> M:
    """The element after which the measure of every unit's incoming weights is one.

    :param measure: what an element multiplies by its ``exponent``-th power; zero where it can't say.
    :param only: factor -> bool ``batch + (n,)``; other units stay.
    """
    shape = group.batch_shape(weights)
    seen = _Seen(weights, group, kind)
    factors = list(_from_input_on(group))
    for name, axes, biases in factors:
        free = torch.ones((), dtype=torch.bool) if only is None else only[name]
        size = next(iter(weights.values())).new_zeros(*shape, group.factors[name], dtype=torch.float64)
        size = measure(_joined([seen.entries(axis) for axis in axes])).double() if axes else size
        for axis in biases:
            bias = seen.entries(axis)
            size = torch.where(size == 0, measure(bias).double(), size)
        exponent = (axes or biases)[0].exponent if axes or biases else 1
        seen.known.add(name)
        seen.images[name] = torch.where((size == 0) | ~free, 1.0, size) ** (-1.0 / exponent)
        seen.dead[name] = seen.is_dead(name, size) & free
    for name, _, _ in reversed(factors):
        if bool(seen.dead[name].any()):
            seen.images[name] = torch.where(seen.dead[name], seen.outgoing(name, measure), seen.images[name])
    return kind(group, seen.images)


class _Seen:
    """Weights as they look to a unit while the element is being built: measured factors applied, dead units silent."""

    def __init__(self, weights: Mapping[str, Tensor], group: RescalingGroup[Any], kind: type[Multipliers[Any]]):
        self.weights = group.viewed(weights)
        self.group = group
        self.kind = kind
        device = next(iter(weights.values())).device
        one = torch.ones((), dtype=torch.float64, device=device)
        self.known: set[str] = set()
        self.images = {name: one.expand(n) for name, n in group.factors.items()}
        self.dead = {name: (one == 0).expand(n) for name, n in group.factors.items()}

    def entries(self, axis: RescaledAxis, silent: bool = True) -> Tensor:
        """The entries of each unit along an axis (of the view), ``batch + (n, entries)``."""
        site_dims = len(self.group.view_shapes[axis.site])
        value, positions = _units_only(self.weights[axis.site], axis, site_dims)
        for dim, members in self.group.members(axis.site).items():
            own = dim == axis.dim
            relevant = [(name, other) for name, other in members if name in self.known and _meets(other, axis)]
            if not relevant:
                continue
            factor = self.kind(self.group, self.images).axis_multiplier(axis.site, dim)
            if silent and any(bool(self.dead[name].any()) for name, _ in relevant):
                # An infinite multiplier marks the positions of dead units, whatever the exponent.
                marks = {name: torch.where(dead, torch.inf, 1.0) for name, dead in self.dead.items()}
                factor = factor * (self.kind(self.group, marks).axis_multiplier(axis.site, dim) == 1)
            factor = factor if positions is None or not own else factor[..., positions]
            value = value.double() * along_axis(factor, dim, site_dims)
        return _by_unit(value, axis, site_dims)

    def is_dead(self, name: str, size: Tensor) -> Tensor:
        """Units into which nothing flows along any axis, ``batch + (n,)``."""
        dead = size == 0
        for axis in self.group.axes(name):
            if bool(dead.any()) and axis.exponent > 0 and not axis.buffer:
                dead = dead & (self.entries(axis) == 0).all(-1)
        return dead

    def outgoing(self, name: str, measure: Measure) -> Tensor:
        """What dead units are multiplied by, so that the measure of what leaves them is one."""
        axes = [axis for axis in self.group.axes(name) if axis.exponent < 0 and not axis.buffer]
        if not axes:
            return torch.ones_like(self.images[name])
        size = measure(_joined([self.entries(axis, silent=False) for axis in axes])).double()
        return torch.where(size == 0, 1.0, size) ** (-1.0 / axes[0].exponent)


def _from_input_on(
    group: RescalingGroup[Any],
) -> Iterator[tuple[str, list[RescaledAxis], list[RescaledAxis]]]:
    """Factors with their incoming weights and biases, such that all else on these sites belongs to earlier factors."""
    weight_sites = set(group.weight_sites)
    done: set[str] = set()
    pending = list(group.factors)
    while pending:
        found = ((name, _usable_axes(group, name, done)) for name in pending)
        first = pending[0], _usable_axes(group, pending[0], done)
        ready, usable = next((pair for pair in found if any(a.site in weight_sites for a in pair[1])), first)
        weights = [axis for axis in usable if axis.site in weight_sites]
        biases = [axis for axis in usable if axis.site not in weight_sites]
        # Entries that scale with different powers have no common norm: the lowest power decides.
        lowest = min((axis.exponent for axis in weights), default=1)
        yield ready, [axis for axis in weights if axis.exponent == lowest], biases
        done.add(ready)
        pending.remove(ready)


def _usable_axes(group: RescalingGroup[Any], name: str, done: set[str]) -> list[RescaledAxis]:
    """Axes along which weights enter the units, on sites that no pending factor rescales along another axis."""
    return [
        axis
        for axis in group.axes(name)
        if axis.exponent > 0
        and not axis.buffer
        and all(
            other in done
            for dim, members in group.members(axis.site).items()
            for other, entry in members
            if dim != axis.dim or (entry is not axis and bool(torch.isin(entry.index, axis.index).any()))
        )
    ]


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate along the last axis; a single part isn't copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _units_only(value: Tensor, axis: RescaledAxis, site_dims: int) -> tuple[Tensor, Tensor | None]:
    """Select the positions of an axis, block after block; those positions, or None where that is the whole axis."""
    n = axis.index.shape[1]
    dim = axis.dim - site_dims
    if n == value.shape[dim] and bool((axis.index == torch.arange(n, device=axis.index.device)).all()):
        return value, None
    positions = axis.index.reshape(-1).to(value.device)
    return value.index_select(dim, positions), positions


def _by_unit(value: Tensor, axis: RescaledAxis, site_dims: int) -> Tensor:
    """Selected positions, blocks of ``n`` along one axis -> ``batch + (n, entries)``."""
    batch = value.dim() - site_dims
    rows = value.movedim(batch + axis.dim, batch)
    rows = rows.flatten(batch + 1) if site_dims > 1 else rows.unsqueeze(-1)
    blocks, n = axis.index.shape
    return rows if blocks == 1 else rows.unflatten(-2, (blocks, n)).transpose(-3, -2).flatten(-2)


def _meets(other: RescaledAxis, axis: RescaledAxis) -> bool:
    """Whether another factor multiplies entries of this axis's units."""
    return other.dim != axis.dim or (other is not axis and bool(torch.isin(other.index, axis.index).any()))
