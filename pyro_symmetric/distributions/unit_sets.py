"""The sets of units of a group, as a matching goes through them: where each set's entries lie, and what else moves
them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Axis, Units, fills


@dataclass(frozen=True, eq=False)
class Member:
    """Units that lie along one axis of a site, as other units meet them there.

    :param index: their positions, ``(blocks, count)``.
    :param plain: whether unit ``i`` simply is position ``i``.
    :param own: those that no units inside them hold; None if there are none.
    :param flips: whether the units' own signs flip them.
    :param flipping: the sets whose signs flip them: this one, and what it lies in.
    """

    name: str
    dim: int
    index: Tensor
    plain: bool
    own: Tensor | None
    flips: bool
    flipping: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class UnitAxis:
    """One axis of a set of units, and what else moves the same entries.

    :param own: the positions that no units inside these hold, ``(blocks, count)``.
    :param plain: whether unit ``i`` simply is position ``i``.
    :param flips: whether the units' signs flip these entries.
    :param around: units that these lie inside of and that flip the same entries.
    :param beside: other units on the same axis, the inner ones first: inputs beside the outputs of a grouped kernel.
    :param across: those of each other axis, the inner ones first.
    """

    site: str
    dim: int
    own: Tensor
    plain: bool
    flips: bool
    around: tuple[Member, ...]
    beside: tuple[Member, ...]
    across: tuple[tuple[Member, ...], ...]

    def rows(self, value: Tensor, lead: int) -> Tensor:
        """``lead dims + site`` -> ``lead dims + (count, everything else of a unit)``."""
        dim = lead + self.dim
        if self.plain:
            return value.movedim(dim, lead).flatten(lead + 1) if value.dim() > lead + 1 else value.unsqueeze(-1)
        picked = value.index_select(dim, self.own.reshape(-1)).unflatten(dim, tuple(self.own.shape))
        return picked.movedim(dim + 1, lead).flatten(lead + 1)


@dataclass(frozen=True, eq=False)
class UnitSet:
    """A set of units that has entries to move, or holds one that has.

    :param is_permuted: whether there is anything to exchange.
    :param is_flipped: whether the units have signs.
    :param parent: the set that these lie inside of, if any.
    :param inside: the sets that lie inside these.
    :param outer_signs: the sets around these whose signs flip entries of these, or inside these.
    :param neighbours: the sets that move entries of these along other axes, or beside these; this one, if it lies along
        two axes of a site.
    :param waits: whether these, or what lies inside them, have neighbours.
    :param alone: whether no other units move any of their sites, and they move each along one axis, without signs.
    """

    units: Units
    is_permuted: bool
    is_flipped: bool
    axes: tuple[UnitAxis, ...]
    parent: str | None
    inside: tuple[str, ...]
    outer_signs: frozenset[str]
    neighbours: frozenset[str]
    waits: bool
    alone: bool


@functools.lru_cache(maxsize=64)
def unit_sets(group: Group, sites: tuple[str, ...], device: torch.device) -> dict[str, UnitSet]:
    """All sets that move entries of these sites, each followed by what lies inside it; other sites are buffers."""
    order = nested_order(group, group.roots)
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        axes = {
            name: tuple(
                _unit_axis(group, name, axis, own, device)
                for axis in group.axes(name)
                if axis.site in sites and (own := _own_rows(group, name, axis)) is not None
            )
            for name in order
        }
    holding = {name for name in order if any(axes[part] for part in nested_order(group, (name,)))}
    return {name: _unit_set(group, name, axes) for name in order if name in holding}


def nested_order(group: Group, names: Iterable[str]) -> list[str]:
    """These sets, each followed by what lies inside it."""
    return [part for name in names for part in (name, *nested_order(group, group.children(name)))]


def log_order_of(group: Group, names: Iterable[str]) -> float:
    """Logarithm of the number of permutations and signs that some sets of units have."""
    total = 0.0
    for units in map(group.__getitem__, names):
        total += units.copies * math.lgamma(units.size + 1) * ("permute" in units.moves)
        total += units.count * math.log(2.0) * ("flip" in units.moves)
    return total


# small steps --------------------------------------------------------------------------------------------------------


def _unit_set(group: Group, name: str, axes: dict[str, tuple[UnitAxis, ...]]) -> UnitSet:
    units, subtree = group[name], nested_order(group, (name,))
    inner = [axis for part in subtree for axis in axes[part]]
    around = {member.name for axis in inner for member in axis.around}
    sites = [axis.site for axis in axes[name]]
    moving = [other for other in axes if any(axis.site in sites for axis in axes[other])]
    single = moving == [name] and len(set(sites)) == len(sites) and "flip" not in units.moves
    return UnitSet(
        units,
        units.size > 1 and "permute" in units.moves,
        "flip" in units.moves,
        axes[name],
        units.parent,
        tuple(child for child in group.children(name) if any(axes[part] for part in nested_order(group, (child,)))),
        frozenset(around - set(subtree)),
        frozenset().union(*map(_neighbours, axes[name])),
        any(_neighbours(axis) for axis in inner),
        single and units.copies == 1 and units.parent is None and not group.children(name),
    )


def _neighbours(axis: UnitAxis) -> set[str]:
    return {member.name for members in (axis.beside, *axis.across) for member in members}


def _unit_axis(group: Group, name: str, axis: Axis, own: Tensor, device: torch.device) -> UnitAxis:
    met = {
        dim: [_member(group, other, there, device) for other, there in members]
        for dim, members in group.members(axis.site).items()
    }
    here = met.pop(axis.dim)
    outside = group.ancestors(name)
    around = (member for member in here if member.name in outside and member.flips)
    beside = (
        member
        for member in here
        if member.name not in (name, *outside)
        and name not in group.ancestors(member.name)
        and bool(torch.isin(member.index.cpu(), own.cpu()).any())
    )
    plain = fills(replace(axis, index=own), group.view_shapes[axis.site][axis.dim])
    flips = _flips(group, name, axis)
    across = tuple(map(tuple, met.values()))
    return UnitAxis(axis.site, axis.dim, own.to(device), plain, flips, tuple(around), tuple(beside), across)


def _member(group: Group, name: str, axis: Axis, device: torch.device) -> Member:
    line, here = (name, *group.ancestors(name)), group.members(axis.site)[axis.dim]
    flipping = tuple(other for other, there in here if other in line and _flips(group, other, there))
    own, index = _own_rows(group, name, axis), axis.index.to(device)
    if own is not None:
        own = index if len(own) == len(index) else own.to(device)
    return Member(name, axis.dim, index, group.is_plain(axis), own, name in flipping, flipping)


def _own_rows(group: Group, name: str, axis: Axis) -> Tensor | None:
    """The positions of units that no units inside them hold: whole rows, as exchanged units are alike inside."""
    here = group.members(axis.site)[axis.dim]
    inner = [there.index.reshape(-1) for other, there in here if name in group.ancestors(other)]
    own = axis.index[~torch.isin(axis.index[:, 0], torch.cat(inner))] if inner else axis.index
    return own if len(own) else None


def _flips(group: Group, name: str, axis: Axis) -> bool:
    return "flip" in group[name].moves and axis.exponent % 2 == 1
