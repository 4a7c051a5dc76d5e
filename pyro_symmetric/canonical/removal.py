"""Elements that remove a symmetry: permutations that sort units, multipliers that give
them a measure of one.

Samples have one batch dimension, sites have the shapes of the group's view.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Names
from pyro_symmetric.canonical.order import (
    Axes,
    Step,
    entries_of,
    of_least_power,
    plan,
    sides,
)
from pyro_symmetric.canonical.scales import evened, weights_of
from pyro_symmetric.groups.axes import Axis, along_axis, laid_out
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.moves import polar
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Tensors, Weights, first_value

# keys tie within this many roundings: after unit norm, units with one incoming weight
# have 1 or -1 there
TIE = 16
VARIMAX_STEPS = 200

PermutationKey = Literal["first", "max", "norm"]
# of each unit's entries, ``(samples, n, entries)`` -> ``(samples, n)``
Measure = Callable[[Tensor], Tensor]


# sorting ------------------------------------------------------------------------------


def sorting_permutation(
    weights: Tensors | nn.Module | Posterior,
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
    declared = group_of(symmetry)
    draws = arguments.weights(
        "weights", weights_of(weights, declared), "a network or a posterior"
    )
    group = declared.permutations
    group.require_own(draws)
    batch_shape = group.batch_shape(draws)
    viewed = _viewed(group, draws)
    images = dict[str, Tensor]()
    if key == "first":
        for step in plan(group, "permute"):
            for name in filter(group.axes, step.names):
                keys = _keys(group, name, viewed, key)
                if step.axes:
                    entry = _first_entry(group, viewed, step.axes[0], images)
                    keys = itertools.chain([entry], keys)
                images[name] = _sorted(group, name, keys)
    else:  # which doesn't depend on the order of neighbours
        for name in filter(group.axes, group.names("permute")):
            images[name] = _sorted(group, name, _keys(group, name, viewed, key))
    named = {
        name: image.reshape(*batch_shape, *group[name].shape)
        for name, image in images.items()
    }
    device = first_value(draws).device
    return Element(group, named, batch_shape=batch_shape, device=device)


def _first_entry(group: Group, weights: Weights, axis: Axis, images: Tensors) -> Tensor:
    """Return the first entry of each unit along an axis, once the units before it are
    sorted.
    """
    value = weights[axis.site]
    placed = Element(group, images, batch_shape=[len(value)])
    sorted_value = placed.on_site(axis.site, value, len(group.view_shapes[axis.site]))
    return entries_of(group, {axis.site: sorted_value}, [axis])[..., 0]


def _sorted(group: Group, name: str, keys: Iterable[Tensor]) -> Tensor:
    """Sort units within their copies by the first key; ties, up to rounding, by the
    next, and so on.
    """
    order = torch.zeros(0, dtype=torch.long, device="cpu")
    rank = None  # of each unit by the keys before; units that tie share it
    for key in keys:
        key = key.unflatten(-1, group[name].shape)
        order = key.argsort(dim=-1, stable=True)
        if rank is not None:
            by_rank = rank.gather(-1, order).argsort(dim=-1, stable=True)
            order = order.gather(-1, by_rank)
        ascending = key.gather(-1, order)
        rounding = 0.0
        if key.dtype.is_floating_point:
            rounding = TIE * torch.finfo(key.dtype).eps
        largest = ascending.abs().amax(-1, keepdim=True)
        close = ascending.diff(dim=-1) <= rounding * largest
        if rank is not None:
            close &= rank.gather(-1, order).diff(dim=-1) == 0
        if not close.any():
            break
        later_ranks = (~close).cumsum(-1)
        rank = torch.zeros_like(order).scatter(-1, order[..., 1:], later_ranks)
    return order


def _keys(
    group: Group, name: str, weights: Weights, key: PermutationKey
) -> Iterator[Tensor]:
    """Iterate over the key, unless that is the first entry, and tie-breakers,
    ``(samples, count)`` each.
    """
    incoming, outgoing = sides(group, name, "permute")
    into = _matrices(group, incoming)
    out_of = _matrices(group, outgoing)
    if key == "norm":
        yield _squared_norm(group, weights, into + out_of or incoming[:1])
    elif key == "max":
        yield entries_of(group, weights, into or out_of or incoming[:1]).amax(-1)
    for axis in incoming + outgoing:
        entries = entries_of(group, weights, [axis])
        yield entries.amin(-1)
        yield _squared_norm(group, weights, (axis,))
        yield entries.amax(-1)


def _matrices(group: Group, axes: Axes) -> Axes:
    return tuple(axis for axis in axes if len(group.site_shapes[axis.site]) > 1)


def _squared_norm(group: Group, weights: Weights, axes: Axes) -> Tensor:
    """Return the sum of squares of each unit's entries along some axes, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=weights[axes[0].site].device)
    for axis in axes:
        total = total + entries_of(group, weights, [axis]).double().square().sum(-1)
    return total


# multipliers --------------------------------------------------------------------------


def principal_axes(weights: Tensors, group: Group) -> Element:
    """Return the rotations to the principal axes of each copy: the second moments of
    all entries are diagonal, and decrease; the largest entry of each is positive.
    """
    shape = group.batch_shape(weights)
    viewed = group.viewed(weights)
    rotations = {}
    for name in group.names("rotate"):
        unit_set = group[name]
        axes = [axis for axis in group.axes(name) if axis.site in viewed]
        units = entries_of(group, viewed, axes).double()
        units = units.unflatten(-2, (unit_set.copies, unit_set.size))
        ascending = torch.linalg.eigh(units @ units.mT).eigenvectors
        matrices = _largest_positive(ascending.flip(-1).mT, units)
        rotations[name] = matrices.reshape(*shape, *unit_set.shape, unit_set.size)
    return Element(group, rotations=rotations, batch_shape=shape)


def varimax_axes(weights: Tensors, group: Group, site: str) -> Element:
    """Return the rotations to the varimax axes of a site (Kaiser 1958): its squared
    entries vary the most along each unit.

    Units decrease in their sums of squares there, and the largest entry of each is
    positive. Units elsewhere get their principal axes.
    """
    principal = principal_axes(weights, group)
    viewed = group.viewed(principal.on_sites(weights))
    rotations = {}
    for name in group.names("rotate"):
        unit_set = group[name]
        axes = [axis for axis in group.axes(name) if axis.site == site]
        if not axes:
            continue
        units = entries_of(group, viewed, axes).double()
        units = units.unflatten(-2, (unit_set.copies, unit_set.size))
        matrices = torch.eye(unit_set.size, dtype=units.dtype, device=units.device)
        for _ in range(VARIMAX_STEPS):
            turned = matrices @ units
            squares = turned.square()
            slope = turned * (squares - squares.mean(-1, keepdim=True))
            matrices = polar(slope @ units.mT)
        order = (matrices @ units).square().sum(-1, keepdim=True).argsort(-2).flip(-2)
        matrices = _largest_positive(matrices.take_along_dim(order, -2), units)
        shape = (*principal.batch_shape, *unit_set.shape, unit_set.size)
        rotations[name] = matrices.reshape(shape)
    batch_shape = principal.batch_shape
    return Element(group, rotations=rotations, batch_shape=batch_shape) @ principal


def _largest_positive(matrices: Tensor, units: Tensor) -> Tensor:
    """Change signs so that the largest entry of each turned unit is positive."""
    turned = matrices @ units
    largest = turned.take_along_dim(turned.abs().argmax(-1, keepdim=True), -1)
    return torch.where(largest < 0, -matrices, matrices)


def removing_element(
    weights: Tensors,
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
    removal = _Removal(weights, group.restricted(move), move, measure)
    for step in plan(removal.group, move):
        removal.visit(step)
    removal.finish_dead_units()
    return removal.element()


class _Removal:
    """The removal of scales or signs, unit after unit.

    :ivar current: weights of the view, multiplied by all numbers so far.
    :ivar numbers: name -> log-scales or signs of units that were visited.
    :ivar dead: name -> units whose incoming weights are zero, of sets that have such.
    """

    def __init__(
        self,
        weights: Tensors,
        group: Group,
        move: Literal["scale", "flip"],
        measure: Measure,
    ):
        self.weights = weights
        self.group = group
        self.move = move
        self.measure = measure
        self.batch_shape = group.batch_shape(weights)
        self.current = _viewed(group, weights)
        self.numbers = dict[str, Tensor]()
        self.dead = dict[str, Tensor]()

    def visit(self, step: Step) -> None:
        """Give the units of a step their numbers, and apply these."""
        axes = step.axes or step.biases
        if axes:
            (name,) = step.names
            size = self._size(step)
            self._apply(name, self._inverse(size, axes[0]))
            if (size == 0).any():
                self._leave_out_dead(name, size)
        elif self.move == "scale":
            for name, number in _in_circle(
                self.group, self.current, step.names
            ).items():
                self._apply(name, number)

    def finish_dead_units(self) -> None:
        """Give the outgoing weights of dead units a measure of one, from the output
        on.
        """
        for name in reversed(self.dead):
            outgoing = sides(self.group, name, self.move).outgoing
            axes = of_least_power(outgoing, self.move)
            if not axes:
                continue
            values = {axis.site: self.weights[axis.site].double() for axis in axes}
            moved = _viewed(self.group, self.element().on_sites(values))
            size = self.measure(entries_of(self.group, moved, axes))
            number = self._inverse(size, axes[0])
            self.numbers[name] = torch.where(
                self.dead[name], number, self.numbers[name]
            )

    def element(self) -> Element:
        """Return the element of all numbers so far."""
        named = {
            name: number.reshape(*self.batch_shape, *self.group[name].shape)
            for name, number in self.numbers.items()
        }
        if self.move == "flip":
            return Element(self.group, signs=named, batch_shape=self.batch_shape)
        return Element(self.group, log_scales=named, batch_shape=self.batch_shape)

    def _size(self, step: Step) -> Tensor:
        """Return the measure of units along all axes; where that is zero (a tie), along
        each alone, then of biases.
        """
        device = first_value(self.current).device
        size = torch.zeros((), device=device)
        single_axes = [(axis,) for axis in step.axes + step.biases]
        for axes in filter(None, [step.axes, *single_axes]):
            if (size == 0).any():
                measured = self.measure(entries_of(self.group, self.current, axes))
                size = torch.where(size == 0, measured, size)
        return size

    def _inverse(self, size: Tensor, axis: Axis) -> Tensor:
        """Return the number that makes a measure one; none is needed where it is
        zero.
        """
        size = torch.where(size == 0, 1.0, size.double())
        return size if self.move == "flip" else size.log() / -axis.exponent

    def _apply(self, name: str, number: Tensor) -> None:
        self.numbers[name] = number
        for axis in self.group.axes(name):
            if axis.site not in self.current or not axis.exponent:
                continue
            if self.move == "flip":
                self._multiply(axis, number**axis.exponent)
            else:
                self._multiply(axis, (axis.exponent * number).exp())

    def _leave_out_dead(self, name: str, size: Tensor) -> None:
        """Set the outgoing weights of dead units to zero."""
        incoming, outgoing = sides(self.group, name, self.move)
        empty = (entries_of(self.group, self.current, incoming) == 0).all(-1)
        self.dead[name] = (size == 0) & empty
        for axis in outgoing:
            self._multiply(axis, (~self.dead[name]).double())

    def _multiply(self, axis: Axis, factor: Tensor) -> None:
        """Multiply the entries of units along one axis of the current weights."""
        shape = self.group.view_shapes[axis.site]
        factors = laid_out(factor, axis, shape[axis.dim], 1.0)
        along = along_axis(factors, axis.dim, len(shape))
        value = self.current[axis.site]
        self.current[axis.site] = value * along.to(value.dtype)


def _in_circle(group: Group, weights: Weights, names: Names) -> Weights:
    """Return the scales of units in a circle, ``(samples, count)``."""
    # Running statistics count: they may be all that distinguishes the multipliers of a
    # batch norm behind another one.
    values = {}
    for name in names:
        for axis in group.axes(name):
            if axis.exponent and axis.site in weights:
                values[axis.site] = weights[axis.site]
    first = first_value(values)
    free = torch.zeros(len(first), group.size, dtype=torch.bool, device=first.device)
    for name in names:
        free[:, group.slots[name]] = True
    log_scales = evened(group, values, free)
    return {name: log_scales[:, group.slots[name]] for name in names}


def largest_sign(entries: Tensor, tie: float = 0.0) -> Tensor:
    """Return the sign of each unit's entry of largest magnitude, whatever their order;
    0 for a tie.

    :param tie: relative difference up to which magnitudes tie.
    """
    high = entries.amax(-1)
    low = entries.amin(-1)
    excess = high + low
    largest = torch.maximum(high.abs(), low.abs())
    return torch.where(excess.abs() > tie * largest, excess.sign(), 0.0)


def _viewed(group: Group, weights: Tensors) -> Weights:
    """Return weights as the group's view, ``(samples, *view_shape)``, with epsilon
    added to running variances.
    """
    viewed = Weights()
    for site in group.sites:
        if site not in weights:
            continue
        value = weights[site].reshape(-1, *group.view_shapes[site])
        epsilon = group.epsilon(site)
        viewed[site] = value + epsilon if epsilon else value
    return viewed
