"""Checks that units and their axes make up a group: each raises ``ValueError`` and says what doesn't fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.places import permute_axes
from pyro_symmetric.groups.units import Units

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group

DRAWS = 32  # two exchanges that don't commute are missed with probability (3/4)^32 < 2e-4; all else is far more visible


def check_axes(units: Iterable[Units], site_shapes: Mapping[str, torch.Size]) -> None:
    """Each axis lies within its site, and no two units of a set share a position."""
    for name, axis in ((one.name, axis) for one in units for axis in one.axes):
        shape, index = site_shapes.get(axis.site), axis.index
        if shape is None or axis.dim + axis.span > len(shape):
            raise ValueError(f"the units {name!r} lie along {axis}, but the known sites are {dict(site_shapes)}")
        outside = bool((index < 0).any() or (index >= axis.length(site_shapes)).any())
        if outside or index.unique().numel() != index.numel():
            raise ValueError(f"the index of {name!r} names a position of {axis} twice, or one outside: {index}")


def check_group(group: Group) -> None:
    """The moves of all units together are a group, whose elements have one reduced form each."""
    generator = torch.Generator("cpu").manual_seed(0)
    g, h = (group.sample((DRAWS,), dtype=torch.float64, generator=generator) for _ in range(2))
    both = g @ h
    for site in group.sites:
        members = [(dim, name, axis) for dim, own in group.members(site).items() for name, axis in own]
        if len(found := {axis.epsilon for _, _, axis in members if axis.exponent}) > 1:
            raise ValueError(f"units multiply {site!r} with different epsilons, {found}; a site has one")
        for dim, name, _ in members:
            if "shift" in group[name].moves and any(axis.exponent and own != dim for own, _, axis in members):
                raise ValueError(f"the units {name!r} shift {site!r}, which other units multiply along other axes")
        for dim in group.members(site):
            value = torch.randn(group.view_shapes[site][dim], dtype=torch.float64, generator=generator, device="cpu")
            twice = _along(g, site, dim, _along(h, site, dim, value))
            if not torch.allclose(_along(both, site, dim, value), twice, rtol=1e-9, atol=1e-12):
                raise ValueError(
                    f"the moves of the units {[name for name, _ in group.members(site)[dim]]} along axis {dim} of "
                    f"{site!r} make up no group: units that permute the same positions must lie inside one another, or "
                    "be rows and columns of a table; units that are multiplied must be those that are permuted, lie "
                    "inside them, or be left alone by every permutation; a shift needs units of its own"
                )


def _along(element: Element, site: str, dim: int, value: Tensor) -> Tensor:
    """The effect of elements on values along one axis alone, ``batch + (length,)``."""
    moved = (value + element.axis_shift(site, dim)) * element.axis_multiplier(site, dim)
    return permute_axes(moved, {0: element.axis_index(site, dim)}, 1)
