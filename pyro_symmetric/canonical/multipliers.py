"""Multipliers that give units a measure of one: the norm of what enters them, or the sign of its largest entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from pyro_symmetric.canonical.order import Step, entries_of, of_least_power, plan, sides
from pyro_symmetric.canonical.scales import evened
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import along_axis
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.weights import Weights

Measure = Callable[[Tensor], Tensor]


def norm(entries: Tensor) -> Tensor:
    """Euclidean norm of each unit's entries, ``batch + (n, entries)`` -> ``batch + (n,)``."""
    return torch.linalg.vector_norm(entries, dim=-1)


def largest_sign(entries: Tensor, tie: float = 0.0) -> Tensor:
    """The sign of each unit's entry of largest magnitude, in whatever order the entries come; 0 if that is a tie.

    :param tie: magnitudes tie if they differ by no more than this part of them.
    """
    high, low = entries.amax(-1), entries.amin(-1)
    both = high + low
    return torch.where(both.abs() > tie * torch.maximum(high.abs(), low.abs()), both.sign(), 0.0)


def removing_element(
    weights: Mapping[str, Tensor], group: Group, move: Literal["scale", "flip"], measure: Measure
) -> Element:
    """The element after which the measure of every unit's incoming weights is one.

    Units that can only be measured by one another get the scales of :func:`~pyro_symmetric.canonical.scales.evened`;
    their signs stay. Behind dead units, which nothing enters, weights count without them; what leaves them measures
    one, once all else is known.

    :param measure: what an element multiplies by its ``exponent``-th power; zero if it can't say.
    """
    group = group.restricted(move)
    shape = group.batch_shape(weights)
    now = {  # of a running variance, what is multiplied is its sum with epsilon
        site: group.view(site, weights[site].double()) + group.epsilon(site) for site in group.sites if site in weights
    }
    numbers: dict[str, Tensor] = {}
    dead: dict[str, Tensor] = {}

    def inverse(size: Tensor, axis: Axis) -> Tensor:
        size = torch.where(size == 0, 1.0, size)
        return size if move == "flip" else size.log() / -axis.exponent

    def give(name: str, number: Tensor) -> None:
        numbers[name] = number
        for axis in (own for own in group.axes(name) if own.site in now and own.exponent):
            _multiply(group, now, axis, number**axis.exponent if move == "flip" else (axis.exponent * number).exp())

    def element() -> Element:
        named = {name: number.reshape(*shape, *group[name].shape) for name, number in numbers.items()}
        return Element(group, signs=named, log_scales=named, batch_shape=shape)  # of which the group has one

    for step in plan(group, move):
        if step.axes or step.biases:
            name, size = step.names[0], _size(group, now, step, measure)
            give(name, inverse(size, (step.axes or step.biases)[0]))
            incoming, outgoing = sides(group, name, move)
            silent = (size == 0) & (entries_of(group, now, incoming) == 0).all(-1)
            if bool(silent.any()):
                dead[name] = silent
                for axis in outgoing:
                    _multiply(group, now, axis, (~silent).double())
        elif move == "scale":
            for name, number in _in_circle(group, now, step.names).items():
                give(name, number.reshape(*shape, -1))
    for name in reversed(dead):
        if axes := of_least_power(sides(group, name, move)[1], move):
            known = element()
            moved = {a.site: group.view(a.site, known.on_site(a.site, weights[a.site].double())) for a in axes}
            number = inverse(measure(entries_of(group, moved, axes)), axes[0])
            numbers[name] = torch.where(dead[name], number, numbers[name])
    return element()


# small steps --------------------------------------------------------------------------------------------------------


def _size(group: Group, weights: Weights, step: Step, measure: Measure) -> Tensor:
    """The measure of some units; where it is zero (ties) along all axes, along one after the other, then of biases."""
    size = measure(entries_of(group, weights, step.axes or step.biases[:1]))
    for axis in (*(step.axes if len(step.axes) > 1 else ()), *step.biases):
        if not bool((size == 0).any()):
            break
        size = torch.where(size == 0, measure(entries_of(group, weights, [axis])), size)
    return size


def _in_circle(group: Group, weights: Weights, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The scales of units that can only be measured by one another, ``(samples, units)``."""
    sites = sorted({axis.site for name in names for side in sides(group, name, "scale") for axis in side})
    values = {site: weights[site].reshape(-1, *group.view_shapes[site]) for site in sites}
    first = next(iter(values.values()))
    free = first.new_zeros(len(first), group.size, dtype=torch.bool)
    for name in names:
        free[:, group.slots[name]] = True
    u = evened(group, values, free)
    return {name: u[:, group.slots[name]] for name in names}


def _multiply(group: Group, weights: Weights, axis: Axis, factor: Tensor) -> None:
    """Multiply all entries of units along one axis, in place of what weights hold."""
    shape = group.view_shapes[axis.site]
    along = factor.new_ones(*factor.shape[:-1], shape[axis.dim])
    along[..., axis.index.to(factor.device)] = factor.unsqueeze(-2)
    weights[axis.site] = weights[axis.site] * along_axis(along, axis.dim, len(shape))
