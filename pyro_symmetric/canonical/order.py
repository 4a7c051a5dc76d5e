"""The order in which units are visited when a symmetry is removed, and the weights by
which they are measured.

Units are visited from the input on, so that each set depends only on sets in canonical
form. A unit has incoming weights and outgoing ones; which are which is read from
biases, rows and the names of sites, and never from the order of definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.arguments import Names
from pyro_symmetric.groups.axes import Axis, rows
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.weights import Tensors

Axes = tuple[Axis, ...]
# Ranks of a set that could follow: by the weights by which it would be measured.
INCOMING, OUTGOING, BIASES, NONE = range(4)
# Ranks that may follow where no set has incoming weights that are ready. Biases may be
# zero, and scales in circles need none; permutations need neither side.
FALLBACKS: dict[Move, tuple[int, ...]] = {
    "permute": (),
    "scale": (OUTGOING,),
    "flip": (OUTGOING, BIASES),
}


class Step(NamedTuple):
    """Units that are visited together.

    :ivar axes: the axes of the weights by which they are measured; none for units in a
        circle.
    :ivar biases: those of biases, which count if the weights' measure is zero.
    """

    names: Names
    axes: Axes = ()
    biases: Axes = ()


class Sides(NamedTuple):
    """The axes of the incoming weights of some units, and those of outgoing ones."""

    incoming: Axes
    outgoing: Axes


class _Candidate(NamedTuple):
    """A set of units that could be visited next."""

    rank: int
    step: Step


@lru_cache(maxsize=256)
def plan(group: Group, move: Move) -> tuple[Step, ...]:
    """Order all units: a set follows once all others that act on its incoming weights,
    and all inside it, are done.

    If none is ready, one set follows whose outgoing weights, or (of signs) biases, are;
    of several the one whose sites come first by name, so that the order of definition
    doesn't matter. What remains at the end is a circle.

    :param group: restricted to the move.
    """
    steps: list[Step] = []
    pending = [
        name
        for name in group.names(move)
        if move != "permute" or sides(group, name, move).incoming
    ]
    pending.sort(key=lambda name: _places(group, name))
    done = set[str]()
    while pending:
        following = _following(group, move, pending, done)
        steps += following
        for step in following:
            done.update(step.names)
        pending = [name for name in pending if name not in done]
    return tuple(steps)


def _following(
    group: Group, move: Move, pending: Sequence[str], done: set[str]
) -> list[Step]:
    """Return the steps that come next: all that are ready, or else the best one, or a
    circle of all that are left.
    """
    enclosing = set()
    for name in pending:
        enclosing |= set(group.ancestors(name))
    candidates = [
        _candidate(group, move, name, done) for name in pending if name not in enclosing
    ]
    ready = [step for rank, step in candidates if rank == INCOMING]
    if ready:
        return ready
    for fallback in FALLBACKS.get(move, ()):
        for rank, step in candidates:
            if rank == fallback:
                return [step]
    return [Step(tuple(pending))]


def _candidate(group: Group, move: Move, name: str, done: set[str]) -> _Candidate:
    """Choose the weights by which to measure some units, once others are done."""
    nest = [name, *group.ancestors(name)]
    weight_sites = set(group.weight_sites)

    def settled(side: Axes) -> Axes:
        return tuple(axis for axis in side if _acting(group, axis, nest) <= done)

    def of_weights(side: Axes) -> Axes:
        return tuple(axis for axis in side if axis.site in weight_sites)

    incoming, outgoing = sides(group, name, move)
    entering = settled(incoming)
    leaving = settled(outgoing)
    biases = tuple(axis for axis in entering if axis.site not in weight_sites)
    if of_weights(entering):
        axes = of_least_power(of_weights(entering), move)
        return _Candidate(INCOMING, Step((name,), axes, biases))
    if of_weights(leaving):
        axes = of_least_power(of_weights(leaving), move)
        return _Candidate(OUTGOING, Step((name,), axes, biases))
    if entering or leaving:
        return _Candidate(BIASES, Step((name,), (), entering or leaving))
    return _Candidate(NONE, Step((name,)))


def _acting(group: Group, axis: Axis, nest: Sequence[str]) -> set[str]:
    """Return the unit sets that act on the entries along an axis of the view.

    :param nest: the units and those that they lie inside, which act along that axis
        anyway: they count if they lie there twice (grouped convolutions whose inputs
        are their outputs).
    """
    positions = axis.index.flatten()
    acting = set()
    for dim, members in group.members(axis.site).items():
        counts = Counter[str]()
        for name, member in members:
            if dim != axis.dim or torch.isin(member.index, positions).any():
                counts[name] += 1
        for name, count in counts.items():
            anyway = dim == axis.dim and name in nest and count == 1
            if group[name].moves and not anyway:
                acting.add(name)
    return acting


@lru_cache(maxsize=1024)
def sides(group: Group, name: str, move: Move) -> Sides:
    """Return the axes of incoming weights of some units, and those of outgoing ones, by
    site.

    The sides have exponents of opposite sign, but which is positive is arbitrary for
    two factors of a product. So the side with biases is incoming, else the one with
    rows of matrices or with vectors, else the one whose sites come first by name.
    Without exponents of both signs, rows are incoming.

    :param group: restricted to the move.
    """
    declared = dict(zip(group.axes(name), group[name].axes, strict=True))
    axes = _moved_axes(group, name, move)
    weight_sites = set(group.weight_sites)

    def rank(side: Axes) -> tuple[Any, ...]:
        biased = any(axis.site not in weight_sites for axis in side)
        has_rows = any(declared[axis].dim == 0 for axis in side)
        return not side, not biased, not has_rows, [axis.site for axis in side]

    positive = tuple(axis for axis in axes if axis.exponent > 0)
    negative = tuple(axis for axis in axes if axis.exponent < 0)
    if move == "scale" or (move == "flip" and positive and negative):
        return Sides(*sorted([positive, negative], key=rank))
    along_rows: Axes = ()
    along_columns: Axes = ()
    for axis in axes:
        if declared[axis].dim > 0 or declared[axis].span > 1:
            along_columns += (axis,)
        else:
            along_rows += (axis,)
    if not along_rows:
        return Sides(along_columns, ())
    return Sides(along_rows, along_columns)


def _moved_axes(group: Group, name: str, move: Move) -> list[Axis]:
    """Return the axes of some units along which a move does something, those of buffers
    only if there are no others.
    """
    axes = sorted(group.axes(name), key=lambda axis: (axis.site, axis.dim))
    if move == "permute":
        return [axis for axis in axes if not axis.buffer]
    if move == "flip":
        axes = [axis for axis in axes if axis.exponent % 2]
    elif move == "scale":
        axes = [axis for axis in axes if axis.exponent]
    return [axis for axis in axes if not axis.buffer] or axes


def of_least_power(axes: Axes, move: Move) -> Axes:
    """Keep the axes of lowest power: entries that scale with different powers have no
    common norm.
    """
    if move != "scale":
        return axes
    lowest = min((abs(axis.exponent) for axis in axes), default=1)
    return tuple(axis for axis in axes if abs(axis.exponent) == lowest)


def entries_of(group: Group, weights: Tensors, axes: Sequence[Axis]) -> Tensor:
    """Return the entries of each unit along some axes of the view, ``batch + (n,
    entries)``.
    """
    parts = [
        rows(weights[axis.site], axis, len(group.view_shapes[axis.site]))
        for axis in axes
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _places(group: Group, name: str) -> list[tuple[str, int]]:
    """Return the places of some units, by site."""
    return sorted((axis.site, axis.dim) for axis in group.axes(name))
