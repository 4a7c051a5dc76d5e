"""Weights that enter units and weights that leave them, and the order in which units can be looked at.

That is from the input on, so that each set rests on those that are in canonical form already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Axis, Move, rows

Axes = tuple[Axis, ...]


class Step(NamedTuple):
    """Units that can be looked at now.

    :ivar axes: the axes along which the weights lie that they are known by; none for units in a circle.
    :ivar biases: those of biases, which count if the weights say nothing.
    """

    names: tuple[str, ...]
    axes: Axes = ()
    biases: Axes = ()


@lru_cache(maxsize=256)
def plan(group: Group, move: Move) -> tuple[Step, ...]:
    """All units, each as soon as its incoming weights are settled: all others along them, and all inside it, are done.

    If there are none: one set with settled outgoing weights, or (of signs) biases; of several that whose sites come
    first by name, whatever the order in which units and sites were defined. What is left at the end is a circle.

    :param group: restricted to the move.
    """
    steps: list[Step] = []
    lying = [name for name in group.names(move) if move != "permute" or sides(group, name, move)[0]]
    pending = sorted(lying, key=lambda name: [(axis.site, axis.dim) for axis in _sorted(group, name)])
    while pending:
        done = {name for step in steps for name in step.names}
        inner = [name for name in pending if not any(name in group.ancestors(other) for other in pending)]
        found = [_step(group, move, name, done) for name in inner]
        ready = [step for rank, step in found if rank == 0]
        # Biases may be zero, and scales in circles can do without; to be sorted, units need none of this.
        for wanted in {"permute": (), "scale": (1,), "flip": (1, 2)}.get(move, ()):
            ready = ready or [step for rank, step in found if rank == wanted][:1]
        steps += ready or [Step(tuple(pending))]
        pending = [name for name in pending if not any(name in step.names for step in steps)]
    return tuple(steps)


def _step(group: Group, move: Move, name: str, done: set[str]) -> tuple[int, Step]:
    """Choose what to know some units by, with a rank: 0 is by what enters them, 3 is nothing yet."""
    besides, weight_sites = [name, *group.ancestors(name)], set(group.weight_sites)
    entering, leaving = (
        tuple(axis for axis in side if _meeting(group, axis, besides) <= done) for side in sides(group, name, move)
    )
    incoming, outgoing = (tuple(a for a in side if a.site in weight_sites) for side in (entering, leaving))
    biases = tuple(axis for axis in entering if axis.site not in weight_sites)
    if incoming or outgoing:
        return int(not incoming), Step((name,), of_least_power(incoming or outgoing, move), biases)
    return 2 if entering or leaving else 3, Step((name,), (), entering or leaving)


def _meeting(group: Group, axis: Axis, besides: Iterable[str]) -> set[str]:
    """The unit sets that act on the entries along an axis of the view.

    :param besides: sets that don't count for what they do along that axis itself, unless they lie there twice (grouped
        convolutions whose inputs are their outputs).
    """
    own, found = axis.index.flatten(), set[str]()
    for dim, members in group.members(axis.site).items():
        names = [other for other, entry in members if dim != axis.dim or bool(torch.isin(entry.index, own).any())]
        once = {name for name in besides if dim == axis.dim and names.count(name) == 1}
        found |= {name for name in names if group[name].moves} - once
    return found


@lru_cache(maxsize=1024)
def sides(group: Group, name: str, move: Move) -> tuple[Axes, Axes]:
    """The axes along which something enters some units, and those along which it leaves them, by site.

    Multipliers enter both sides with opposite exponents, and which are positive follows the order of definition between
    two factors of a product. So the side with biases is the incoming one, else that with rows of matrices or with
    vectors, else that whose sites come first by name. Without exponents that tell, rows are incoming.

    :param group: restricted to the move.
    """
    own = {viewed: axis for axis, viewed in zip(group[name].axes, group.axes(name), strict=True)}
    axes = [axis for axis in _sorted(group, name) if {"flip": axis.exponent % 2, "scale": axis.exponent}.get(move, 1)]
    parameters = [axis for axis in axes if not axis.buffer]
    axes = parameters if parameters or move == "permute" else axes
    weight_sites = set(group.weight_sites)

    def rank(side: Axes) -> tuple[bool, bool, bool, list[str]]:
        biased = any(axis.site not in weight_sites for axis in side)
        return not side, not biased, not any(own[axis].dim == 0 for axis in side), [axis.site for axis in side]

    by_sign = [tuple(axis for axis in axes if axis.exponent * sign > 0) for sign in (1, -1)]
    if move == "scale" or (move == "flip" and all(by_sign)):
        incoming, outgoing = sorted(by_sign, key=rank)
        return incoming, outgoing
    columns = {axis for axis in axes if own[axis].dim > 0 or own[axis].span > 1}
    rows_of, others = (tuple(a for a in axes if (a in columns) == side) for side in (False, True))
    return (rows_of, others) if rows_of else (others, rows_of)


def of_least_power(axes: Axes, move: Move) -> Axes:
    """Entries that scale with different powers have no common norm: the lowest power decides."""
    lowest = min((abs(axis.exponent) for axis in axes), default=1)
    return tuple(axis for axis in axes if move != "scale" or abs(axis.exponent) == lowest)


def entries_of(group: Group, weights: Mapping[str, Tensor], axes: Sequence[Axis]) -> Tensor:
    """The entries of each unit along some axes, ``batch + (n, entries)``; weights are those of the view."""
    parts = [rows(weights[axis.site], axis, len(group.view_shapes[axis.site])) for axis in axes]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _sorted(group: Group, name: str) -> list[Axis]:
    """The axes of some units by site: the order in which these were defined doesn't matter."""
    return sorted(group.axes(name), key=lambda axis: (axis.site, axis.dim))
