"""Parts of a group: its units with some of their moves or sites left out. Units come with outer ones first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyro_symmetric.groups.units import Axis, Move, Units


def with_moves(units: Sequence[Units]) -> list[Units]:
    """Units that have a move, with the axes that it touches.

    Units that lie between others that move, and have no move themselves, stay: their unit is still what carries those
    inside. What lies inside nothing that permutes has no parent.
    """
    permuting = {one.name for one in units if "permute" in one.moves}
    inside: set[str] = set()
    for one in units:
        if one.parent in permuting or one.parent in inside:
            inside.add(one.name)
    carriers: set[str | None] = set()
    for one in reversed(units):
        if one.name in inside and (one.moves or one.name in carriers):
            carriers.add(one.parent)
    return [
        # What carries others stays where it is, so that they still lie inside it.
        replace(
            one,
            axes=tuple(axis for axis in one.axes if one.name in carriers or _touched(axis, one.moves)),
            parent=one.parent if one.name in inside else None,
        )
        for one in units
        if one.moves or one.name in carriers
    ]


def with_axes(units: Sequence[Units], axes: Mapping[str, Sequence[Axis]]) -> list[Units]:
    """Units along these axes of theirs only; those that lie along none, and hold none that do, are gone."""
    held: set[str | None] = set()
    for one in reversed(units):
        if axes.get(one.name) or one.name in held:
            held |= {one.name, one.parent}
    return [replace(one, axes=tuple(axes.get(one.name, ()))) for one in units if one.name in held]


def _touched(axis: Axis, moves: frozenset[Move]) -> bool:
    """True if moves of the units change what lies along an axis."""
    if "permute" in moves or "shift" in moves:
        return True
    return bool(axis.exponent) if "scale" in moves else "flip" in moves and bool(axis.exponent % 2)
