"""Elements that remove a symmetry: permutations that sort units, multipliers that give
them a measure of one.

Units are visited from the input on, so that each set depends only on sets in canonical
form. Samples have one batch dimension, sites have the shapes of the group's view.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.scales import evened, weights_of
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis, Element, Move, along_axis, laid_out, rows
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Weights

# keys tie within this many roundings: after unit norm, units with one incoming weight
# have 1 or -1 there
TIE = 16

Axes = tuple[Axis, ...]
PermutationKey = Literal["first", "max", "norm"]
# of each unit's entries, ``(samples, n, entries)`` -> ``(samples, n)``
Measure = Callable[[Tensor], Tensor]


def sorting_permutation(
    weights: Mapping[str, Tensor] | nn.Module | Posterior,
    symmetry: Any,
    key: PermutationKey = "max",
) -> Element:
    """Return the permutation that sorts all units, as
    :func:`~pyro_symmetric.canonical.forms.canonicalize` does.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> weights = {"w": torch.tensor([[5.0, 0.0], [1.0, 0.0], [3.0, 0.0]])}
    >>> ps.canonical.sorting_permutation(weights, group)(weights)["w"][:, 0]
    tensor([1., 3., 5.])

    :param weights: site -> tensor ``batch_shape + site_shape``, or a network, or a
        posterior, chain after chain.
    :param symmetry: a symmetry or a group; its permutations count.
    :param key: ``"first"``, ``"max"`` or ``"norm"``.
    """
    arguments.one_of("key", key, get_args(PermutationKey))
    whole = group_of(symmetry)
    weights = arguments.weights(
        "weights", weights_of(weights, whole), "a network or a posterior"
    )
    group = whole.permutations
    group.require_own(weights)
    shape, images = group.batch_shape(weights), dict[str, Tensor]()
    flat = _viewed(group, weights)
    # Only the first entry depends on the order of neighbours: with other keys, units
    # can be sorted in any order.
    for step in (
        plan(group, "permute") if key == "first" else [Step(group.names("permute"))]
    ):
        for name in filter(group.axes, step.names):
            own = {axis.site: flat[axis.site] for axis in group.axes(name)}
            keys = _keys(group, name, own, key)
            for axis in step.axes[:1]:
                placed = Element(group, images, batch_shape=[shape.numel()])
                seen = placed.on_site(
                    axis.site, flat[axis.site], len(group.view_shapes[axis.site])
                )
                keys = itertools.chain(
                    [entries_of(group, {axis.site: seen}, [axis])[..., 0]], keys
                )
            images[name] = _sorted(group, name, keys)
    device = next(iter(weights.values())).device
    named = {
        name: own.reshape(*shape, *group[name].shape) for name, own in images.items()
    }
    return Element(group, named, batch_shape=shape, device=device)


def principal_axes(weights: Mapping[str, Tensor], group: Group) -> Element:
    """Return the rotations to the principal axes of each copy: the second moments of
    all entries are diagonal, and decrease. Signs are arbitrary.
    """
    shape, viewed = group.batch_shape(weights), group.viewed(weights)
    rotations = {}
    for name in group.names("rotate"):
        one = group[name]
        axes = [axis for axis in group.axes(name) if axis.site in viewed]
        units = entries_of(group, viewed, axes).double()
        units = units.unflatten(-2, (one.copies, one.size))
        ascending = torch.linalg.eigh(units @ units.mT).eigenvectors
        rotations[name] = ascending.flip(-1).mT.reshape(*shape, *one.shape, one.size)
    return Element(group, rotations=rotations, batch_shape=shape)


def removing_element(
    weights: Mapping[str, Tensor],
    group: Group,
    move: Literal["scale", "flip"],
    measure: Measure,
) -> Element:
    """Return the element after which the measure of every unit's incoming weights is
    one.

    Units in a circle, each of which enters the next, get the scales of
    :func:`~pyro_symmetric.canonical.scales.evened`; their signs stay. Dead units, whose
    incoming weights are zero, are left out of the measures behind them; at last their
    own outgoing weights get a measure of one.

    :param measure: equivariant: a multiplier multiplies it by its ``exponent``-th
        power. Zero if undecided.
    """
    group = group.restricted(move)
    shape, current = group.batch_shape(weights), _viewed(group, weights)
    numbers, dead = dict[str, Tensor](), dict[str, Tensor]()

    def inverse(size: Tensor, axis: Axis) -> Tensor:
        size = torch.where(size == 0, 1.0, size.double())
        return size if move == "flip" else size.log() / -axis.exponent

    def apply(name: str, number: Tensor) -> None:
        numbers[name] = number
        for axis in (
            own for own in group.axes(name) if own.site in current and own.exponent
        ):
            _multiply(
                group,
                current,
                axis,
                number**axis.exponent
                if move == "flip"
                else (axis.exponent * number).exp(),
            )

    def element() -> Element:
        named = {
            name: number.reshape(*shape, *group[name].shape)
            for name, number in numbers.items()
        }
        # the group has one of these moves
        return Element(group, signs=named, log_scales=named, batch_shape=shape)

    for step in plan(group, move):
        if step.axes or step.biases:
            name, size = step.names[0], _size(group, current, step, measure)
            apply(name, inverse(size, (step.axes or step.biases)[0]))
            incoming, outgoing = sides(group, name, move)
            if bool((size == 0).any()):
                dead[name] = (size == 0) & (
                    entries_of(group, current, incoming) == 0
                ).all(-1)
                for axis in outgoing:
                    _multiply(group, current, axis, (~dead[name]).double())
        elif move == "scale":
            for name, number in _in_circle(group, current, step.names).items():
                apply(name, number)
    for name in reversed(dead):
        if axes := of_least_power(sides(group, name, move)[1], move):
            moved = _viewed(
                group,
                element().on_sites(
                    {axis.site: weights[axis.site].double() for axis in axes}
                ),
            )
            number = inverse(measure(entries_of(group, moved, axes)), axes[0])
            numbers[name] = torch.where(dead[name], number, numbers[name])
    return element()


def largest_sign(entries: Tensor, tie: float = 0.0) -> Tensor:
    """Return the sign of each unit's entry of largest magnitude, whatever their order;
    0 for a tie.

    :param tie: relative difference up to which magnitudes tie.
    """
    high, low = entries.amax(-1), entries.amin(-1)
    both = high + low
    return torch.where(
        both.abs() > tie * torch.maximum(high.abs(), low.abs()), both.sign(), 0.0
    )


def _viewed(group: Group, weights: Mapping[str, Tensor]) -> Weights:
    """Return weights as the group's view, ``(samples, *view_shape)``, with epsilon
    added to running variances.
    """
    flat = {
        s: weights[s].reshape(-1, *group.view_shapes[s])
        for s in group.sites
        if s in weights
    }
    return {
        site: value + epsilon if (epsilon := group.epsilon(site)) else value
        for site, value in flat.items()
    }


# sorting ------------------------------------------------------------------------------


def _sorted(group: Group, name: str, keys: Iterable[Tensor]) -> Tensor:
    """Sort units within their copies by the first key; ties, up to rounding, by the
    next, and so on.
    """
    order, rank = torch.zeros(0, dtype=torch.long, device="cpu"), None
    for key in keys:
        key = key.unflatten(-1, group[name].shape)
        order = key.argsort(dim=-1, stable=True)
        if rank is not None:
            order = order.gather(
                -1, rank.gather(-1, order).argsort(dim=-1, stable=True)
            )
        key = key.gather(-1, order)
        eps = torch.finfo(key.dtype).eps if key.dtype.is_floating_point else 0.0
        close = key.diff(dim=-1) <= TIE * eps * key.abs().amax(-1, keepdim=True)
        if rank is not None:
            close &= rank.gather(-1, order).diff(dim=-1) == 0
        if not bool(close.any()):
            break
        rank = torch.zeros_like(order).scatter(-1, order[..., 1:], (~close).cumsum(-1))
    return order


def _keys(
    group: Group, name: str, weights: Weights, key: PermutationKey
) -> Iterator[Tensor]:
    """Iterate over the key, unless that is the first entry, and tie-breakers,
    ``(samples, count)`` each.
    """
    incoming, outgoing = sides(group, name, "permute")
    matrices, others = (_matrices(group, side) for side in (incoming, outgoing))
    if key == "norm":
        yield sum(
            _squared(entries_of(group, weights, [axis]))
            for axis in matrices + others or incoming[:1]
        )  # type: ignore[misc]
    elif key == "max":
        yield entries_of(group, weights, matrices or others or incoming[:1]).amax(-1)
    for axis in incoming + outgoing:
        entries = entries_of(group, weights, [axis])
        yield entries.amin(-1)
        yield _squared(entries)
        yield entries.amax(-1)


def _matrices(group: Group, axes: Axes) -> Axes:
    return tuple(axis for axis in axes if len(group.site_shapes[axis.site]) > 1)


def _squared(entries: Tensor) -> Tensor:
    return entries.double().square().sum(-1)


# measuring ----------------------------------------------------------------------------


def _size(group: Group, weights: Weights, step: Step, measure: Measure) -> Tensor:
    """Return the measure of units along all axes; where that is zero (a tie), along
    each alone, then of biases.
    """
    size = torch.zeros((), device=next(iter(weights.values())).device)
    for axes in filter(
        None, (step.axes, *((axis,) for axis in step.axes + step.biases))
    ):
        if bool((size == 0).any()):
            size = torch.where(
                size == 0, measure(entries_of(group, weights, axes)), size
            )
    return size


def _in_circle(
    group: Group, weights: Weights, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the scales of units in a circle, ``(samples, count)``."""
    # Running statistics count: they may be all that distinguishes the multipliers of a
    # batch norm behind another one.
    axes = [
        axis
        for name in names
        for axis in group.axes(name)
        if axis.exponent and axis.site in weights
    ]
    values = {axis.site: weights[axis.site] for axis in axes}
    first = next(iter(values.values()))
    free = torch.zeros(len(first), group.size, dtype=torch.bool, device=first.device)
    for name in names:
        free[:, group.slots[name]] = True
    u = evened(group, values, free)
    return {name: u[:, group.slots[name]] for name in names}


def _multiply(group: Group, weights: Weights, axis: Axis, factor: Tensor) -> None:
    """Multiply the entries of units along one axis, and replace the site in
    ``weights``.
    """
    shape, value = group.view_shapes[axis.site], weights[axis.site]
    along = along_axis(
        laid_out(factor, axis, shape[axis.dim], 1.0), axis.dim, len(shape)
    )
    weights[axis.site] = value * along.to(value.dtype)


# the order of units -------------------------------------------------------------------


class Step(NamedTuple):
    """Units that are visited together.

    :ivar axes: the axes of the weights by which they are measured; none for units in a
        circle.
    :ivar biases: those of biases, which count if the weights' measure is zero.
    """

    names: tuple[str, ...]
    axes: Axes = ()
    biases: Axes = ()


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
    present = [
        name
        for name in group.names(move)
        if move != "permute" or sides(group, name, move)[0]
    ]
    pending = sorted(
        present,
        key=lambda name: [(axis.site, axis.dim) for axis in _by_site(group, name)],
    )
    while pending:
        done = {name for step in steps for name in step.names}
        inner = [
            name
            for name in pending
            if not any(name in group.ancestors(other) for other in pending)
        ]
        ranked = [_step(group, move, name, done) for name in inner]
        ready = [step for rank, step in ranked if rank == 0]
        # Biases may be zero, and scales in circles need none; permutations need neither
        # side.
        for wanted in {"permute": (), "scale": (1,), "flip": (1, 2)}.get(move, ()):
            ready = ready or [step for rank, step in ranked if rank == wanted][:1]
        steps += ready or [Step(tuple(pending))]
        pending = [
            name for name in pending if not any(name in step.names for step in steps)
        ]
    return tuple(steps)


def _step(group: Group, move: Move, name: str, done: set[str]) -> tuple[int, Step]:
    """Choose the weights by which to measure some units, with a rank: 0 for incoming
    ones, 3 for none yet.
    """
    inside, weight_sites = [name, *group.ancestors(name)], set(group.weight_sites)
    entering, leaving = (
        tuple(axis for axis in side if _acting(group, axis, inside) <= done)
        for side in sides(group, name, move)
    )
    incoming, outgoing = (
        tuple(a for a in side if a.site in weight_sites) for side in (entering, leaving)
    )
    biases = tuple(axis for axis in entering if axis.site not in weight_sites)
    if incoming or outgoing:
        return int(not incoming), Step(
            (name,), of_least_power(incoming or outgoing, move), biases
        )
    return 2 if entering or leaving else 3, Step((name,), (), entering or leaving)


def _acting(group: Group, axis: Axis, inside: Iterable[str]) -> set[str]:
    """Return the unit sets that act on the entries along an axis of the view.

    :param inside: the units and those that they lie inside, which act along that axis
        anyway: they count if they lie there twice (grouped convolutions whose inputs
        are their outputs).
    """
    positions, acting = axis.index.flatten(), set[str]()
    for dim, members in group.members(axis.site).items():
        names = [
            other
            for other, entry in members
            if dim != axis.dim or bool(torch.isin(entry.index, positions).any())
        ]
        once = {name for name in inside if dim == axis.dim and names.count(name) == 1}
        acting |= {name for name in names if group[name].moves} - once
    return acting


@lru_cache(maxsize=1024)
def sides(group: Group, name: str, move: Move) -> tuple[Axes, Axes]:
    """Return the axes of incoming weights of some units, and those of outgoing ones, by
    site.

    The sides have exponents of opposite sign, but which is positive is arbitrary for
    two factors of a product. So the side with biases is incoming, else the one with
    rows of matrices or with vectors, else the one whose sites come first by name.
    Without exponents of both signs, rows are incoming.

    :param group: restricted to the move.
    """
    own = {
        viewed: axis
        for axis, viewed in zip(group[name].axes, group.axes(name), strict=True)
    }
    axes = [
        axis
        for axis in _by_site(group, name)
        if {"flip": axis.exponent % 2, "scale": axis.exponent}.get(move, 1)
    ]
    parameters = [axis for axis in axes if not axis.buffer]
    axes = parameters if parameters or move == "permute" else axes
    weight_sites = set(group.weight_sites)

    def rank(side: Axes) -> tuple[bool, bool, bool, list[str]]:
        biased = any(axis.site not in weight_sites for axis in side)
        return (
            not side,
            not biased,
            not any(own[axis].dim == 0 for axis in side),
            [axis.site for axis in side],
        )

    by_sign = [
        tuple(axis for axis in axes if axis.exponent * sign > 0) for sign in (1, -1)
    ]
    if move == "scale" or (move == "flip" and all(by_sign)):
        incoming, outgoing = sorted(by_sign, key=rank)
        return incoming, outgoing
    columns = {axis for axis in axes if own[axis].dim > 0 or own[axis].span > 1}
    rows_of, others = (
        tuple(a for a in axes if (a in columns) == side) for side in (False, True)
    )
    return (rows_of, others) if rows_of else (others, rows_of)


def of_least_power(axes: Axes, move: Move) -> Axes:
    """Keep the axes of lowest power: entries that scale with different powers have no
    common norm.
    """
    lowest = min((abs(axis.exponent) for axis in axes), default=1)
    return tuple(
        axis for axis in axes if move != "scale" or abs(axis.exponent) == lowest
    )


def entries_of(
    group: Group, weights: Mapping[str, Tensor], axes: Sequence[Axis]
) -> Tensor:
    """Return the entries of each unit along some axes of the view, ``batch + (n,
    entries)``.
    """
    parts = [
        rows(weights[axis.site], axis, len(group.view_shapes[axis.site]))
        for axis in axes
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _by_site(group: Group, name: str) -> list[Axis]:
    """Sort the axes of some units by site, so that the order of definition doesn't
    matter.
    """
    return sorted(group.axes(name), key=lambda axis: (axis.site, axis.dim))
