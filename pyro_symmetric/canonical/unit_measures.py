"""Measuring units by what enters them, from the input on, so that each measure rests on canonical ones only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.canonical.scales import evened
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import along_axis, lay_out, rows
from pyro_symmetric.groups.units import Axis

Measure = Callable[[Tensor], Tensor]
Multiplying = Literal["scale", "flip"]


def norm(entries: Tensor) -> Tensor:
    """Euclidean norm of each unit's entries, ``batch + (n, entries)`` -> ``batch + (n,)``."""
    return torch.linalg.vector_norm(entries, dim=-1)


def spread(entries: Tensor) -> Tensor:
    """Standard deviation of each unit's entries; the norm if that is zero (one entry, or all entries alike)."""
    size, std = norm(entries), entries.std(-1, correction=0)
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


def removing_element(weights: Mapping[str, Tensor], group: Group, move: Multiplying, measure: Measure) -> Element:
    """The element after which the measure of every unit's incoming weights is one.

    Units that can only be measured by one another get the scales of :func:`~pyro_symmetric.canonical.scales.evened`;
    their signs stay.

    :param measure: what an element multiplies by its ``exponent``-th power; zero if it can't say.
    """
    group = group.restricted(move)
    seen, plan = _Seen(weights, group, move), _plan(group, move)
    for step in plan:
        if step.axes or step.biases:
            seen.learn(step, measure)
        elif move == "scale":
            seen.even(step.names)
    for step in reversed(plan):
        seen.scale_dead_units(step.names[0], measure)
    return seen.element()


class _Step(NamedTuple):
    """Units that can be measured now.

    :ivar axes: the axes along which the weights lie that they are measured by; none for units in a circle.
    :ivar biases: those of biases, which count if the weights say nothing.
    """

    names: tuple[str, ...]
    axes: tuple[Axis, ...] = ()
    biases: tuple[Axis, ...] = ()


class _Seen:
    """Weights (of the view) as they look to a unit: known multipliers applied, dead units silent.

    Numbers are signs or log-scales, ``batch + (count,)``.
    """

    def __init__(self, weights: Mapping[str, Tensor], group: Group, move: Multiplying):
        self.given, self.group, self.move = weights, group, move
        self.batch = group.batch_shape(weights)
        self.weights = {  # of a running variance, what is multiplied is its sum with epsilon
            site: group.view(site, weights[site].double()) + group.epsilon(site)
            for site in group.sites
            if site in weights
        }
        self.numbers: dict[str, Tensor] = {}
        self.dead: dict[str, Tensor] = {}

    def element(self) -> Element:
        found = {name: v.reshape(*self.batch, *self.group[name].shape) for name, v in self.numbers.items()}
        signs, log_scales = (found, None) if self.move == "flip" else (None, found)
        return Element(self.group, None, signs, log_scales, batch_shape=self.batch)

    def learn(self, step: _Step, measure: Measure) -> None:
        """Give units the multipliers that make their size one; where that is zero (ties) along all axes, along one
        after the other, then of their biases."""
        size: Tensor | None = None
        single = sorted(step.axes, key=lambda axis: (axis.site, axis.dim)) if len(step.axes) > 1 else []
        for axes in ([step.axes] if step.axes else []) + [(axis,) for axis in (*single, *step.biases)]:
            if size is not None and not bool((size == 0).any()):
                break
            own = measure(entries_of(self.group, self.weights, axes))
            size = own if size is None else torch.where(size == 0, own, size)
        assert size is not None
        name, (incoming, outgoing) = step.names[0], _sides(self.group, step.names[0], self.move)
        self._multiply(name, self._inverse(size, (step.axes or step.biases)[0].exponent))
        dead = size == 0
        if bool(dead.any()) and bool(
            (dead := dead & (entries_of(self.group, self.weights, incoming) == 0).all(-1)).any()
        ):
            self.dead[name] = dead
            for axis in outgoing:
                self._multiply_axis(axis, (~dead).double())

    def even(self, names: Collection[str]) -> None:
        """Give units in a circle their scales."""
        sites = sorted({axis.site for name in names for axis in _touched(self.group, name, self.move)})
        values = {site: self.weights[site].reshape(-1, *self.group.view_shapes[site]) for site in sites}
        at = {name: where for name, where in self.group.slots.items() if name in names}
        first = next(iter(values.values()))
        free = first.new_zeros(len(first), self.group.size, dtype=torch.bool)
        for where in at.values():
            free[:, where] = True
        u = evened(self.group, values, free)
        for name, where in at.items():
            self._multiply(name, u[:, where].reshape(*self.batch, -1))

    def scale_dead_units(self, name: str, measure: Measure) -> None:
        """Give dead units the multipliers that make the size of what leaves them one."""
        axes = _of_least_power(_sides(self.group, name, self.move)[1])
        if name in self.dead and axes:
            now = self.element()
            moved = {a.site: self.group.view(a.site, now.on_site(a.site, self.given[a.site].double())) for a in axes}
            number = self._inverse(measure(entries_of(self.group, moved, axes)), axes[0].exponent)
            self.numbers[name] = torch.where(self.dead[name], number, self.numbers[name])

    def _inverse(self, size: Tensor, exponent: int) -> Tensor:
        """The numbers of multipliers that make a size one; neutral if it is zero."""
        size = torch.where(size == 0, 1.0, size)
        return size if self.move == "flip" else size.log() / -exponent

    def _multiply(self, name: str, number: Tensor) -> None:
        self.numbers[name] = number
        for axis in self.group.axes(name):
            if axis.exponent and axis.site in self.weights:
                flip = self.move == "flip"
                self._multiply_axis(axis, number**axis.exponent if flip else (axis.exponent * number).exp())

    def _multiply_axis(self, axis: Axis, factor: Tensor) -> None:
        shape = self.group.view_shapes[axis.site]
        along = lay_out(factor, axis.index, 1.0, shape[axis.dim])
        self.weights[axis.site] = self.weights[axis.site] * along_axis(along, axis.dim, len(shape))


# in which order -----------------------------------------------------------------------------------------------------


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


@lru_cache(maxsize=256)
def _plan(group: Group, move: Multiplying) -> tuple[_Step, ...]:
    """All units, each as soon as its incoming weights are settled, those along another axis being done.

    If there are none: one set with settled outgoing weights, or (of signs) biases; of several that whose sites come
    first by name, whatever the order in which units and sites were defined. What is left at the end is a circle.
    """
    plan: list[_Step] = []
    pending = sorted(group.names(move), key=lambda name: sorted((a.site, a.dim) for a in group.axes(name)))
    while pending:
        done = {name for step in plan for name in step.names}
        steps = [_step(group, move, name, done) for name in pending]
        ready = [step for rank, step in steps if rank == 0]
        others = (1, 2) if move == "flip" else (1,)  # biases may be zero, and scales in circles can do without
        ready = ready or [step for wanted in others for rank, step in steps if rank == wanted][:1]
        plan += ready or [_Step(tuple(pending))]
        pending = [name for name in pending if not any(name in step.names for step in plan)]
    return tuple(plan)


def _step(group: Group, move: Multiplying, name: str, done: set[str]) -> tuple[int, _Step]:
    """Choose what to measure some units by, with a rank: 0 is by what enters them, 3 is nothing yet."""
    weight_sites = set(group.weight_sites)
    entering, leaving = (
        [axis for axis in side if meeting(group, axis, [name]) <= done] for side in _sides(group, name, move)
    )
    incoming, outgoing = ([a for a in side if a.site in weight_sites] for side in (entering, leaving))
    biases = tuple(axis for axis in entering if axis.site not in weight_sites)
    if incoming or outgoing:
        return int(not incoming), _Step((name,), tuple(_of_least_power(incoming or outgoing)), biases)
    return 2 if entering or leaving else 3, _Step((name,), (), tuple(entering or leaving))


@lru_cache(maxsize=1024)
def _sides(group: Group, name: str, move: Multiplying) -> tuple[list[Axis], list[Axis]]:
    """The axes along which something enters some units, and those along which it leaves them.

    Multipliers enter both sides with opposite exponents, and which are positive follows the order of definition between
    two factors of a product. So the side with biases is the incoming one, else that with rows of matrices or with
    vectors, else that whose sites come first by name.
    """
    known = _touched(group, name, move)
    touched = [pair for pair in zip(group[name].axes, group.axes(name), strict=True) if pair[1] in known]
    weight_sites = set(group.weight_sites)

    def rank(side: list[tuple[Axis, Axis]]) -> tuple[bool, bool, bool, list[str]]:
        biased = any(own.site not in weight_sites for own, _ in side)
        return not side, not biased, not any(own.dim == 0 for own, _ in side), sorted(own.site for own, _ in side)

    sides = [[pair for pair in touched if pair[1].exponent * side > 0] for side in (1, -1)]
    if move == "flip" and not (sides[0] and sides[1]):  # signs have no exponents that would tell
        sides = [[pair for pair in touched if (pair[0].dim == 0) == row] for row in (True, False)]
        sides = sides if sides[0] else sides[::-1]
    else:
        sides.sort(key=rank)
    incoming, outgoing = ([axis for _, axis in side] for side in sides)
    return incoming, outgoing


def _of_least_power(axes: Sequence[Axis]) -> list[Axis]:
    """Entries that scale with different powers have no common norm: the lowest power decides."""
    lowest = min((abs(axis.exponent) for axis in axes), default=1)
    return [axis for axis in axes if abs(axis.exponent) == lowest]


def _touched(group: Group, name: str, move: Multiplying) -> list[Axis]:
    """The axes of parameters, of buffers if there are none, along which a set multiplies; no sign flips an even
    power."""
    axes = [axis for axis in group.axes(name) if not axis.buffer] or group.axes(name)
    return [axis for axis in axes if (axis.exponent % 2 if move == "flip" else axis.exponent)]


def entries_of(group: Group, weights: Mapping[str, Tensor], axes: Sequence[Axis]) -> Tensor:
    """The entries of each unit along some axes, ``batch + (n, entries)``."""
    parts = [rows(weights[axis.site], axis, len(group.view_shapes[axis.site])) for axis in axes]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
