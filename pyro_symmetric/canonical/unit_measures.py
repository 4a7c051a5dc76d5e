"""Measuring units by what enters them, from the input on, so that each measure rests on canonical ones only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import offsets, owners, rows
from pyro_symmetric.groups.tensors import along_axis
from pyro_symmetric.groups.units import Axis

Measure = Callable[[Tensor], Tensor]
Multiplying = Literal["scale", "flip"]


def norm(entries: Tensor) -> Tensor:
    """Euclidean norm of each unit's entries, ``batch + (n, entries)`` -> ``batch + (n,)``."""
    return torch.linalg.vector_norm(entries, dim=-1, dtype=torch.float64)


def spread(entries: Tensor) -> Tensor:
    """Standard deviation of each unit's entries; the norm if that is zero (one entry, or all entries alike)."""
    size = norm(entries)
    std = entries.double().std(-1, correction=0)
    return torch.where(std > 1e-7 * size, std, size)


def largest_sign(entries: Tensor) -> Tensor:
    """The sign of each unit's entry of largest magnitude, in whatever order the entries come; 0 if that is a tie."""
    return (entries.amax(-1) + entries.amin(-1)).sign()


def removing_element(
    weights: Mapping[str, Tensor],
    group: Group,
    move: Multiplying,
    measure: Measure,
    only: Mapping[str, Tensor] | None = None,
) -> Element:
    """The element after which the measure of every unit's incoming weights is one.

    :param measure: what an element multiplies by its ``exponent``-th power; zero if it can't say.
    :param only: name -> bool ``batch + units.shape``; other units stay.
    """
    group = group.restricted(move)
    shape = group.batch_shape(weights)
    seen = _Seen(weights, group, move)
    steps = list(_from_input_on(group, move))
    for name, axes, biases in steps:
        size = torch.zeros_like(seen.of(seen.numbers, name))
        size = measure(_joined([seen.entries(axis) for axis in axes])).double() if axes else size
        for axis in biases:
            size = torch.where(size == 0, measure(seen.entries(axis)).double(), size)
        free = None if only is None else only[name].reshape(size.shape)
        seen.learn(name, size, (axes or biases)[0].exponent if axes or biases else 1, free)
    for name, _, _ in reversed(steps):
        seen.rouse(name, measure)
    found = {name: seen.of(seen.numbers, name).reshape(*shape, *group[name].shape) for name in group.names(move)}
    return group.element(signs=found) if move == "flip" else group.element(log_scales=found)


def meeting(group: Group, axis: Axis, besides: Iterable[str]) -> set[str]:
    """The unit sets that act on the entries along an axis of the view.

    :param besides: sets that don't count for what they do along that axis itself.
    """
    own = axis.index.flatten()
    return {
        other
        for dim, members in group.members(axis.site).items()
        for other, entry in members
        if group[other].moves
        and (dim != axis.dim or (other not in besides and bool(torch.isin(entry.index.flatten(), own).any())))
    }


class _Seen:
    """Weights as they look to a unit while the element is being built: known multipliers applied, dead units silent.

    All units lie behind one another along the last axis of ``numbers`` (signs or log-scales) and ``dead``; its last
    entry means none.
    """

    def __init__(self, weights: Mapping[str, Tensor], group: Group, move: Multiplying):
        self.weights = group.viewed(weights)
        self.group = group
        self.move = move
        self.offsets = offsets(group, move)
        count = sum(group[name].count for name in group.names(move))
        self.device = next(iter(weights.values())).device
        shape, neutral = (*group.batch_shape(weights), count + 1), 1.0 if move == "flip" else 0.0
        self.numbers = torch.full(shape, neutral, dtype=torch.float64, device=self.device)
        self.dead = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.silent = False
        self.known: set[str] = set()

    def of(self, every: Tensor, name: str) -> Tensor:
        """The part of one unit set, ``batch + (count,)``, as a view."""
        return every[..., self.offsets[name]]

    def learn(self, name: str, size: Tensor, exponent: int, free: Tensor | None) -> None:
        """Give units the multipliers that make their size one.

        :param free: bool; other units stay.
        """
        if free is not None:
            size = torch.where(free, size, 1.0)
        self.of(self.numbers, name).copy_(self._inverse(size, exponent))
        self.known.add(name)
        dead = size == 0
        for axis in _touched(self.group, name, self.move):
            if axis.exponent > 0 and bool(dead.any()):
                dead = dead & (self.entries(axis) == 0).all(-1)
        if bool(dead.any()):
            self.of(self.dead, name).copy_(dead)
            self.silent = True

    def rouse(self, name: str, measure: Measure) -> None:
        """Give dead units the multipliers that make the size of what leaves them one."""
        dead = self.of(self.dead, name)
        axes = [axis for axis in _touched(self.group, name, self.move) if axis.exponent < 0]
        if axes and self.silent and bool(dead.any()):
            size = measure(_joined([self.entries(axis, everything=True) for axis in axes])).double()
            own = self.of(self.numbers, name)
            own.copy_(torch.where(dead, self._inverse(size, axes[0].exponent), own))

    def _inverse(self, size: Tensor, exponent: int) -> Tensor:
        """The numbers of multipliers that make a size one; neutral if it is zero."""
        size = torch.where(size == 0, 1.0, size)
        return size if self.move == "flip" else size.log() / -exponent

    def entries(self, axis: Axis, everything: bool = False) -> Tensor:
        """The entries of each unit along an axis (of the view), ``batch + (n, entries)``.

        :param everything: what leaves dead units included.
        """
        value = self.weights[axis.site]
        site_dims = len(self.group.view_shapes[axis.site])
        for dim, members in self.group.members(axis.site).items():
            if not self.known.isdisjoint(other for other, _ in members):
                units, exponents = owners(self.group, axis.site, dim, self.move, self.device)
                numbers = self.numbers[..., units]
                factor = numbers.prod(-2) if self.move == "flip" else (numbers * exponents).sum(-2).exp()
                if self.silent and not everything:
                    factor = factor * ~self.dead[..., units].any(-2)
                value = value.double() * along_axis(factor, dim, site_dims)
        return rows(value, axis, site_dims)


def _from_input_on(group: Group, move: Multiplying) -> Iterator[tuple[str, list[Axis], list[Axis]]]:
    """Unit sets with their incoming weights and biases, such that all else on these sites belongs to earlier sets."""
    weight_sites = set(group.weight_sites)
    done: set[str] = set()
    pending = list(group.names(move))
    while pending:
        found = ((name, _usable_axes(group, name, move, done)) for name in pending)
        first = pending[0], _usable_axes(group, pending[0], move, done)
        ready, usable = next((pair for pair in found if any(a.site in weight_sites for a in pair[1])), first)
        weights = [axis for axis in usable if axis.site in weight_sites]
        biases = [axis for axis in usable if axis.site not in weight_sites]
        # Entries that scale with different powers have no common norm: the lowest power decides.
        lowest = min((axis.exponent for axis in weights), default=1)
        yield ready, [axis for axis in weights if axis.exponent == lowest], biases
        done.add(ready)
        pending.remove(ready)


def _usable_axes(group: Group, name: str, move: Multiplying, done: set[str]) -> list[Axis]:
    """Axes along which weights enter the units, on sites that no pending set multiplies along another axis."""
    return [axis for axis in _touched(group, name, move) if axis.exponent > 0 and meeting(group, axis, [name]) <= done]


def _touched(group: Group, name: str, move: Multiplying) -> list[Axis]:
    """The axes of parameters along which a set multiplies; no sign flips an even power."""
    axes = (axis for axis in group.axes(name) if not axis.buffer)
    return [axis for axis in axes if (axis.exponent % 2 if move == "flip" else axis.exponent)]


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate along the last axis; a single part isn't copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
