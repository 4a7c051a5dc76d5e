"""Units that permute and are multiplied, and the group that they make up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from pyro_symmetric.discovery.invariance import guilty
from pyro_symmetric.discovery.units import module_name, unused
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.units import Move

Place = tuple[str, int, int]


def add_multipliers(
    found: dict[str, Units],
    units: Units,
    places: Sequence[Axis],
    moves: Mapping[tuple[int, ...], frozenset[Move]],
    whole: bool = False,
) -> None:
    """Record the exponents of units' places: the first on the units, if they permute; further ones ride along.

    :param found: name -> units, which are changed and added to.
    :param moves: exponents, one for each place -> whether they are of scales or of signs.
    :param whole: whether the units are a site as a whole.
    """

    def late(powers: Sequence[int]) -> tuple[bool, int]:
        """Multipliers of running statistics, which others may leave alone, ride along."""
        touched = [k for k, power in enumerate(powers) if power]
        return any(places[k].buffer for k in touched), touched[0]

    for powers in sorted(moves, key=late):
        host, pairs = found.get(units.name), zip(places, powers, strict=True)
        axes = [replace(axis, exponent=power) for axis, power in pairs if power]
        multiplied, site = together(axes), axes[0].site
        if whole and any({a.site for a in one.axes if a.exponent} == {site} for one in found.values()):
            continue  # each of its units has a scale of its own
        name = units.name if whole else unused(module_name(site), found)
        if host is None:
            found[name] = Units(name, units.count, multiplied, moves=moves[powers])
            continue
        rows = [replace(axis, index=row[None]) for axis in host.axes for row in axis.index]
        own = {(*place_of(axis), *row.tolist()): axis for axis in axes for row in axis.index}
        lying = [own.get((*place_of(axis), *axis.index[0].tolist())) for axis in rows]
        if host.moves & {"scale", "flip"} or sum(axis is not None for axis in lying) < len(own):
            found[name] = Units(name, 1, multiplied, host.name, host.count, moves[powers])
        else:
            rows = [
                replace(row, exponent=one.exponent, epsilon=one.epsilon) if one else row
                for row, one in zip(rows, lying, strict=True)
            ]
            found[host.name] = replace(host, axes=together(rows), moves=host.moves | moves[powers])


def together(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes that differ in their blocks alone as one each."""
    alike: dict[tuple[Place, int], list[Axis]] = {}
    for axis in axes:
        alike.setdefault((place_of(axis), axis.exponent), []).append(axis)
    return tuple(replace(own[0], index=torch.cat([axis.index for axis in own])) for own in alike.values())


def grouped(units: Sequence[Units], shapes: Mapping[str, torch.Size]) -> Group:
    """The group of all units; multipliers that permutations don't carry onto one another are left out."""
    base = {one.name: _permuting(one) for one in units if "permute" in one.moves}

    def built(chosen: Sequence[Units]) -> Group:
        return Group((base | {one.name: one for one in chosen}).values(), shapes, of_network=True)

    def fails(chosen: Sequence[Units]) -> bool:
        try:
            built(chosen)
        except ValueError:
            return True
        return False

    kept = list(units)
    while True:
        try:
            return built(kept)
        except ValueError:
            wrong = {one.name for one in guilty(kept, fails)}
            kept = [one for one in kept if one.name not in wrong]


def _permuting(units: Units) -> Units:
    axes = tuple(replace(axis, exponent=0, epsilon=None) for axis in units.axes)
    return replace(units, axes=axes, moves=frozenset({"permute"}))


def place_of(axis: Axis) -> Place:
    return axis.site, axis.dim, axis.span
