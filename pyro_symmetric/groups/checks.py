"""Checks that units and their axes make up a group: each raises ``ValueError`` and says what doesn't fit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.tensors import gather_last
from pyro_symmetric.groups.units import Axis, Units

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group

DRAWS = 32  # two exchanges that don't commute are missed with probability (3/4)^32 < 2e-4; all else is far more visible
AT_ONCE = 2**20  # positions of an axis, times elements, that are moved together: memory that is at hand again and again


def check_axis(name: str, axis: Axis, site_shapes: Mapping[str, torch.Size]) -> None:
    """An axis lies within its site, and no two units share a position."""
    dims = f"axis {axis.dim}" if axis.span == 1 else f"axes {axis.dim} to {axis.dim + axis.span - 1}"
    found = f"the units {name!r} lie along {dims} of {axis.site!r}"
    if axis.site not in site_shapes:
        raise ValueError(f"{found}, but the known sites are {sorted(site_shapes)}")
    shape = site_shapes[axis.site]
    if axis.dim + axis.span > len(shape):
        raise ValueError(f"{found}, but that site has shape {tuple(shape)}")
    length = axis.length(site_shapes)
    if axis.index.numel() and not 0 <= int(axis.index.min()) <= int(axis.index.max()) < length:
        raise ValueError(f"{found}, whose length is {length}, but their index reaches outside")
    if axis.index.unique().numel() != axis.index.numel():
        raise ValueError(f"{found}, but their index names a position twice")


def check_group(group: Group) -> None:
    """The moves of all units together are a group, whose elements have one reduced form each."""
    for units in group.units.values():
        check_once(units)
        check_inside(group, units)
    for site in group.sites:
        check_multipliers(group, site)
    check_products(group)


def check_once(units: Units) -> None:
    """The axes of some units name a position of a site at most once."""
    for one, other in itertools.combinations(units.axes, 2):
        same = (one.site, one.dim, one.span) == (other.site, other.dim, other.span)
        if same and bool(torch.isin(one.index, other.index).any()):
            raise ValueError(f"two axes of the units {units.name!r} name the same positions of {one}")


def check_inside(group: Group, units: Units) -> None:
    """Units lie in their parent's unit, in the same place of every one: exchanged units are alike inside."""
    if units.parent is None:
        return
    for axis in group.axes(units.name):
        along = [outer for outer in group.axes(units.parent) if (outer.site, outer.dim) == (axis.site, axis.dim)]
        owner = torch.full((group.view_shapes[axis.site][axis.dim],), -1, device="cpu")
        place = owner.clone()
        if along:
            index = torch.cat([outer.index.cpu() for outer in along])
            owner[index], place[index] = (
                torch.arange(index.shape[1], device="cpu"),
                torch.arange(len(index), device="cpu")[:, None],
            )
        index = axis.index.cpu().reshape(-1, units.copies, units.size)
        inside = owner[index] == torch.arange(units.copies, device="cpu")[:, None]
        if not bool((inside & (place[index] == place[index[:, :1]])).all()):
            raise ValueError(
                f"the units {units.name!r} lie along axis {axis.dim} of {axis.site!r}, but not one copy in each unit "
                f"of {units.parent!r} and in the same places of every one; units that are exchanged must be alike "
                "inside"
            )


def check_multipliers(group: Group, site: str) -> None:
    """All that multiplies a site adds the same to its values first, and what shifts it lies along the same axis."""
    members = [(dim, name, axis) for dim, own in group.members(site).items() for name, axis in own]
    multiplied = [(dim, name, axis) for dim, name, axis in members if axis.exponent]
    if len(found := {axis.epsilon for _, _, axis in multiplied}) > 1:
        raise ValueError(f"units multiply {site!r} with different epsilons, {found}; a site has one")
    for dim, name, _ in members:
        across = [other for own, other, _ in multiplied if own != dim]
        if across and "shift" in group[name].moves:
            raise ValueError(f"the units {name!r} shift {site!r}, which the units {across} multiply along other axes")


def check_products(group: Group) -> None:
    """Along every axis, ``g @ h`` does what ``h`` and then ``g`` do, for random elements."""
    generator = torch.Generator("cpu").manual_seed(0)
    g, h = (group.sample((DRAWS,), dtype=torch.float64, generator=generator) for _ in range(2))
    product = g @ h

    @functools.cache
    def triples(size: int) -> list[tuple[Element, Element, Element]]:
        parts = [slice(at, at + size) for at in range(0, DRAWS, size)]
        return [(g.select(p), h.select(p), product.select(p)) for p in parts] if size < DRAWS else [(g, h, product)]

    for site in group.sites:
        for dim, members in group.members(site).items():
            value = torch.randn(group.view_shapes[site][dim], dtype=torch.float64, generator=generator, device="cpu")
            if not all(_agree(*three, site, dim, value) for three in triples(max(1, AT_ONCE // len(value)))):
                raise ValueError(
                    f"the moves of the units {[name for name, _ in members]} along axis {dim} of {site!r} make up no "
                    "group: units that permute the same positions must lie inside one another, in the same places of "
                    "every one, or be rows and columns of a table; units that are multiplied must be those that are "
                    "permuted, lie inside them, or be left alone by every permutation; a shift needs units of its own, "
                    "which nothing else multiplies"
                )


def _agree(g: Element, h: Element, product: Element, site: str, dim: int, value: Tensor) -> bool:
    """True if the product does what its two factors do, one after the other."""
    twice = _along(g, site, dim, _along(h, site, dim, value))
    return torch.allclose(_along(product, site, dim, value), twice, rtol=1e-9, atol=1e-12)


def _along(element: Element, site: str, dim: int, value: Tensor) -> Tensor:
    """The effect of elements on values along one axis alone, ``batch + (length,)``."""
    shift, factor = element.axis_shift(site, dim), element.axis_multiplier(site, dim)
    return gather_last((value if shift is None else value + shift) * factor, element.axis_index(site, dim))
