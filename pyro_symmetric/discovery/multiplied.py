"""Units that permute and are multiplied, and the group that they make up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyro_symmetric.discovery.cells import module_name, unused
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.units import Move

Place = tuple[str, int, int]
Powers = tuple[int, ...]  # for each place of some units, the power with which a multiplier enters


def add_multipliers(
    found: dict[str, Units], units: Units, places: Sequence[Axis], moves: Mapping[Powers, frozenset[Move]]
) -> None:
    """Record the exponents of units' places: the first on the units, if they permute; further ones ride along.

    :param found: name -> units, which are changed and added to.
    :param moves: exponents -> whether they are of scales or of signs.
    """

    def late(powers: Powers) -> tuple[bool, int]:
        """Multipliers of running statistics, which others may leave alone, ride along."""
        touched = [k for k, power in enumerate(powers) if power]
        return any(places[k].buffer for k in touched), touched[0]

    for powers in sorted(moves, key=late):
        axes = [replace(axis, exponent=power) for axis, power in zip(places, powers, strict=True) if power]
        name, host = unused(module_name(axes[0].site), found), found.get(units.name)
        if host is None:
            found[name] = Units(name, units.count, _together(axes), moves=moves[powers])
            continue
        own = {(*place_of(axis), *row.tolist()): axis for axis in axes for row in axis.index}
        rows = [replace(axis, index=row[None]) for axis in host.axes for row in axis.index]
        lying = [own.pop((*place_of(row), *row.index[0].tolist()), row) for row in rows]
        if own or host.moves & {"scale", "flip"}:
            found[name] = Units(name, 1, _together(axes), host.name, host.count, moves[powers])
        else:
            rows = [replace(row, exponent=a.exponent, epsilon=a.epsilon) for row, a in zip(rows, lying, strict=True)]
            found[host.name] = replace(host, axes=_together(rows), moves=host.moves | moves[powers])


def _together(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes that differ in their blocks alone as one each."""
    alike: dict[tuple[Place, int], list[Axis]] = {}
    for axis in axes:
        alike.setdefault((place_of(axis), axis.exponent), []).append(axis)
    return tuple(replace(own[0], index=torch.cat([axis.index for axis in own])) for own in alike.values())


def grouped(units: Sequence[Units], shapes: Mapping[str, torch.Size]) -> Group:
    """The group of all units; multipliers that permutations don't carry onto one another are left out."""
    kept = {one.name: one for one in units}
    try:
        return Group(kept.values(), shapes, of_network=True)
    except ValueError:
        kept = {one.name: _permuting(one) for one in units if "permute" in one.moves}
    for one in units:
        try:
            kept = Group((kept | {one.name: one}).values(), shapes).units
        except ValueError:
            continue
    return Group(kept.values(), shapes, of_network=True)


def _permuting(units: Units) -> Units:
    axes = tuple(replace(axis, exponent=0, epsilon=None) for axis in units.axes)
    return replace(units, axes=axes, moves=frozenset({"permute"}))


def place_of(axis: Axis) -> Place:
    return axis.site, axis.dim, axis.span


def one_run(shape: Sequence[int], axis: Axis) -> tuple[int, ...]:
    """A site's shape if the axes that an axis spans are one."""
    first, last = axis.dim, axis.dim + axis.span
    return (*shape[:first], math.prod(shape[first:last]), *shape[last:])


def multiplied(value: Tensor, axis: Axis, units: Tensor, factor: float) -> Tensor:
    """A site's value with some units multiplied along one axis."""
    run, epsilon = one_run(value.shape, axis), axis.epsilon or 0.0
    factors = torch.ones(run[axis.dim], dtype=value.real.dtype, device="cpu")
    factors[axis.index[:, units]] = factor
    factors = factors.to(value.device).reshape(-1, *(1 for _ in run[axis.dim + 1 :]))
    return ((value.reshape(run) + epsilon) * factors - epsilon).reshape(value.shape)


def odd_of(powers: Powers) -> Powers:
    """The places that a sign enters whose multiplier enters them with these powers."""
    return tuple(power % 2 for power in powers)
