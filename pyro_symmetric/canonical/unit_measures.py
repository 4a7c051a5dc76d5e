"""Measuring units by what enters them, from the input on, so that each measure rests on canonical ones only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pyro_symmetric.canonical.scales import Array, Balance, least_logs
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import offsets, owners, rows
from pyro_symmetric.groups.tensors import along_axis
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.placement import as_tensor

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


def largest_sign(entries: Tensor, tie: float = 0.0) -> Tensor:
    """The sign of each unit's entry of largest magnitude, in whatever order the entries come; 0 if that is a tie.

    :param tie: magnitudes tie if they differ by no more than this part of them.
    """
    high, low = entries.amax(-1), entries.amin(-1)
    both = high + low
    return torch.where(both.abs() > tie * torch.maximum(high.abs(), low.abs()), both.sign(), 0.0)


def rounding(weights: Mapping[str, Tensor]) -> float:
    """The part of a weight by which equal weights may differ after they were multiplied a few times."""
    return 16 * max((torch.finfo(w.dtype).eps for w in weights.values() if w.dtype.is_floating_point), default=0.0)


def removing_element(
    weights: Mapping[str, Tensor],
    group: Group,
    move: Multiplying,
    measure: Measure,
    only: Mapping[str, Tensor] | None = None,
    with_biases: bool = False,
) -> Element:
    """The element after which the measure of every unit's incoming weights is one.

    :param measure: what an element multiplies by its ``exponent``-th power; zero if it can't say.
    :param only: name -> bool ``batch + units.shape``; other units stay.
    :param with_biases: measure biases with the incoming weights; otherwise only those of units that have no others.
    """
    group = group.restricted(move)
    shape = group.batch_shape(weights)
    seen = _Seen(weights, group, move)
    steps: list[tuple[str, ...]] = []
    done: set[str] = set()
    while len(done) < len(group.names(move)):
        ready = _measured_next(group, move, done)
        ready = [one.with_biases() for one in ready] if with_biases else ready
        sizes = [_size(seen, one.axes, one.biases, measure) for one in ready]
        for one, size in zip(ready, sizes, strict=True):
            free = None if only is None else only[one.name].reshape(size.shape)
            seen.learn(one.name, size, (one.axes or one.biases)[0].exponent, free)
        names = tuple(one.name for one in ready)
        if not ready:  # the rest is a circle: its units are measured by one another, but for signs
            names = tuple(sorted(set(group.names(move)) - done))
            if move == "scale":
                seen.settle(names, only)
            seen.known |= set(names)
        steps.append(names)
        done |= set(names)
    for name in (name for names in reversed(steps) for name in names):
        seen.rouse(name, measure)
    found = {name: seen.of(seen.numbers, name).reshape(*shape, *group[name].shape) for name in group.names(move)}
    return group.element(signs=found) if move == "flip" else group.element(log_scales=found)


def meeting(group: Group, axis: Axis, besides: Iterable[str]) -> set[str]:
    """The unit sets that act on the entries along an axis of the view.

    :param besides: sets that don't count for what they do along that axis itself, unless they lie there twice (grouped
        convolutions whose inputs are their outputs).
    """
    own, besides = axis.index.flatten(), set(besides)
    found: set[str] = set()
    for dim, members in group.members(axis.site).items():
        names = [other for other, entry in members if dim != axis.dim or bool(torch.isin(entry.index, own).any())]
        once = {name for name in besides if dim == axis.dim and names.count(name) == 1}
        found |= {name for name in names if group[name].moves} - once
    return found


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
        for axis in _sides(self.group, name, self.move)[0]:
            if bool(dead.any()):
                dead = dead & (self.entries(axis) == 0).all(-1)
        if bool(dead.any()):
            self.of(self.dead, name).copy_(dead)
            self.silent = True

    def settle(self, names: Collection[str], only: Mapping[str, Tensor] | None) -> None:
        """Give units that can only be measured by one another the scales at which logarithms of weights are least.

        .. math:: \\min_u \\sum_t (\\log |w_t| + a_t \\cdot u)^2

        over all weights that aren't zero: a linear problem, whose solution moves with the units and in no other way.
        """
        at = torch.cat(
            [torch.arange(self.offsets[name].start, self.offsets[name].stop, device="cpu") for name in names]
        )
        free = torch.zeros(self.numbers.shape[-1] - 1, dtype=torch.bool, device=self.device)
        free[at.to(self.device)] = True
        sites = sorted({axis.site for name in names for axis in _touched(self.group, name, self.move)})
        values = {site: self._multiplied(site).flatten(0, len(self.numbers.shape) - 2) for site in sites}
        logs, counts = [], []
        for site, value in values.items():
            value = value.reshape(-1, *self.group.view_shapes[site])
            dims = sorted(self.group.members(site))
            rest = [dim + 1 for dim in range(value.dim() - 1) if dim not in dims]
            some = value != 0
            log = torch.where(some, value.abs().log(), 0.0)
            log, count = ((part.sum(rest) if rest else part) for part in (log, some.double()))
            units, exponents = zip(*(owners(self.group, site, dim, "scale", self.device) for dim in dims), strict=True)
            logs.append(Array(log, units, exponents))
            counts.append(Array(count, units, exponents))
        every = free.expand(self.numbers[..., :-1].reshape(-1, len(free)).shape)
        if only is not None:
            held = torch.cat([only[name].flatten(self.numbers.dim() - 1) for name in self.group.names("scale")], -1)
            every = every & held.reshape(every.shape)
        found = least_logs(Balance(logs, len(free)), Balance(counts, len(free)), every)
        found = found.reshape(self.numbers[..., :-1].shape)
        self.numbers[..., :-1] = torch.where(every.reshape(found.shape), found, self.numbers[..., :-1])

    def rouse(self, name: str, measure: Measure) -> None:
        """Give dead units the multipliers that make the size of what leaves them one."""
        dead = self.of(self.dead, name)
        axes = _of_least_power(_sides(self.group, name, self.move)[1])
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
        return rows(self._multiplied(axis.site, everything), axis, len(self.group.view_shapes[axis.site]))

    def _multiplied(self, site: str, everything: bool = False) -> Tensor:
        """A site (of the view) with all known multipliers."""
        value = self.weights[site]
        site_dims = len(self.group.view_shapes[site])
        for dim, members in self.group.members(site).items():
            if not self.known.isdisjoint(other for other, _ in members):
                units, exponents = owners(self.group, site, dim, self.move, self.device)
                numbers = self.numbers[..., units]
                factor = numbers.prod(-2) if self.move == "flip" else (numbers * exponents).sum(-2).exp()
                if self.silent and not everything:
                    factor = factor * ~self.dead[..., units].any(-2)
                value = value.double() * along_axis(factor, dim, site_dims)
        return value


@dataclass(frozen=True)
class _Measured:
    """Units that can be measured now.

    :param axes: the axes along which the weights lie that they are measured by.
    :param biases: those of biases, which count if the weights say nothing.
    """

    name: str
    axes: list[Axis]
    biases: list[Axis]

    def with_biases(self) -> _Measured:
        """The same units, measured by weights and biases together."""
        if not self.axes:
            return self
        alike = [axis for axis in self.biases if axis.exponent == self.axes[0].exponent]
        return replace(self, axes=self.axes + alike, biases=[])


def _measured_next(group: Group, move: Multiplying, done: set[str]) -> list[_Measured]:
    """All units whose incoming weights are settled, those along another axis being done.

    If there are none: one set with settled outgoing weights, or settled biases. The order in which units and sites were
    defined doesn't matter; of several sets, that whose sites come first by name is taken.
    """
    weight_sites = set(group.weight_sites)
    pending = sorted(set(group.names(move)) - done, key=lambda name: sorted((a.site, a.dim) for a in group.axes(name)))
    others: list[tuple[int, _Measured]] = []
    found = []
    for name in pending:
        sides = _sides(group, name, move)
        settled = [[a for a in side if meeting(group, a, [name]) <= done] for side in sides]
        incoming, outgoing = ([a for a in side if a.site in weight_sites] for side in settled)
        biases = [a for a in settled[0] if a.site not in weight_sites]
        if incoming:
            found.append(_Measured(name, _of_least_power(incoming), biases))
        elif outgoing:
            others.append((0, _Measured(name, _of_least_power(outgoing), biases)))
        elif settled[0] or settled[1]:
            others.append((1, _Measured(name, [], settled[0] or settled[1])))
    return found or [one for _, one in sorted(others, key=lambda pair: pair[0])[:1]]


def _size(seen: _Seen, axes: list[Axis], biases: list[Axis], measure: Measure) -> Tensor:
    """The measure of what lies along some axes; where that is zero (signs that tie), of one after the other."""
    size: Tensor | None = None
    single = sorted(axes, key=lambda axis: (axis.site, axis.dim)) if len(axes) > 1 else []
    for parts in ([axes] if axes else []) + [[axis] for axis in (*single, *biases)]:
        if size is not None and not bool((size == 0).any()):
            break
        own = measure(_joined([seen.entries(axis) for axis in parts])).double()
        size = own if size is None else torch.where(size == 0, own, size)
    return as_tensor(size)


def _sides(group: Group, name: str, move: Multiplying) -> tuple[list[Axis], list[Axis]]:
    """The axes along which something enters some units, and those along which it leaves them.

    Multipliers enter both sides with opposite exponents, and which are positive follows the order of definition between
    two factors of a product. So the side with biases is the incoming one, else that with rows of matrices or with
    vectors, else that whose sites come first by name.
    """
    known = _touched(group, name, move)
    touched = [pair for pair in zip(group[name].axes, group.axes(name), strict=True) if pair[1] in known]
    weight_sites = set(group.weight_sites)
    sides = [[pair for pair in touched if pair[1].exponent * side > 0] for side in (1, -1)]
    if move == "flip" and not (sides[0] and sides[1]):  # signs have no exponents that would tell
        sides = [[pair for pair in touched if (pair[0].dim == 0) == row] for row in (True, False)]
    if not sides[0]:
        sides.reverse()
    elif sides[1]:

        def rank(side: list[tuple[Axis, Axis]]) -> tuple[bool, bool, list[str]]:
            biased = any(own.site not in weight_sites for own, _ in side)
            return not biased, not any(own.dim == 0 for own, _ in side), sorted(own.site for own, _ in side)

        sides.sort(key=rank)
    incoming, outgoing = ([axis for _, axis in side] for side in sides)
    return incoming, outgoing


def _of_least_power(axes: list[Axis]) -> list[Axis]:
    """Entries that scale with different powers have no common norm: the lowest power decides."""
    lowest = min((abs(axis.exponent) for axis in axes), default=1)
    return [axis for axis in axes if abs(axis.exponent) == lowest]


def _touched(group: Group, name: str, move: Multiplying) -> list[Axis]:
    """The axes of parameters, of buffers if there are none, along which a set multiplies; no sign flips an even
    power."""
    axes = [axis for axis in group.axes(name) if not axis.buffer] or group.axes(name)
    return [axis for axis in axes if (axis.exponent % 2 if move == "flip" else axis.exponent)]


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate along the last axis; a single part isn't copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
