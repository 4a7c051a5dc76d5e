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
from pyro_symmetric.groups.places import rows
from pyro_symmetric.groups.units import Axis, Units


@dataclass(frozen=True, eq=False)
class Member:
    """Units that lie along one axis of a site in the group's view.

    :param axis: where they lie.
    :param own: the axis at those positions that no units inside these hold; None if there are none.
    :param flipping: the sets whose signs flip these entries: this one, and those that it lies inside of.
    """

    name: str
    axis: Axis
    own: Axis | None
    flipping: tuple[str, ...]

    @property
    def flips(self) -> bool:
        """True if the units' own signs flip these entries."""
        return self.name in self.flipping


@dataclass(frozen=True, eq=False)
class UnitAxis:
    """One axis of a set of units that has entries of its own there, and what else moves these entries.

    :param flips: whether the units' signs flip them.
    :param around: units that these lie inside of and that flip them, too.
    :param beside: other units on the same axis, the inner ones first: inputs beside the outputs of a grouped kernel.
    :param across: those of each other axis, the inner ones first.
    """

    own: Axis
    flips: bool
    around: tuple[Member, ...]
    beside: tuple[Member, ...]
    across: tuple[tuple[Member, ...], ...]

    @property
    def neighbours(self) -> set[str]:
        """The sets that move these entries along other axes, or beside these units."""
        return {member.name for members in (self.beside, *self.across) for member in members}

    @functools.cached_property
    def signed(self) -> bool:
        """True if signs of any units flip these entries."""
        members = (*self.beside, *(member for members in self.across for member in members))
        return self.flips or bool(self.around) or any(member.flipping for member in members)

    def rows(self, value: Tensor, lead: int) -> Tensor:
        """``lead dims + site`` -> ``lead dims + (count, everything else of a unit)``."""
        return rows(value, self.own, value.dim() - lead)


@dataclass(frozen=True, eq=False)
class UnitSet:
    """A set of units that has entries to move, or holds one that has.

    :param is_permuted: whether there is anything to exchange.
    :param is_flipped: whether the units have signs.
    :param inside: the sets that lie inside these.
    :param outer_signs: the sets around these whose signs flip entries of these, or inside these.
    :param waits: whether these, or what lies inside them, have neighbours.
    :param alone: whether no other units move any of their sites or lie around or inside them, and no signs flip them.
    """

    units: Units
    axes: tuple[UnitAxis, ...]
    is_permuted: bool
    is_flipped: bool
    inside: tuple[str, ...]
    outer_signs: frozenset[str]
    waits: bool
    alone: bool

    @property
    def is_plain(self) -> bool:
        """True if these lie in no units, no units lie in these, and there is something to exchange or flip."""
        nested = self.units.parent is not None or self.units.copies > 1 or bool(self.inside)
        return not nested and (self.is_permuted or self.is_flipped)


@functools.lru_cache(maxsize=64)
def unit_sets(group: Group, sites: tuple[str, ...], device: torch.device) -> dict[str, UnitSet]:
    """All sets that move entries of these sites, each followed by what lies inside it; other sites are buffers."""
    order = [name for root in group.roots for name in group.family(root)]
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        axes = {
            name: tuple(
                _unit_axis(group, member, device)
                for axis in group.axes(name)
                if axis.site in sites and (member := _member(group, name, axis, device)).own is not None
            )
            for name in order
        }
    holding = {name for name in order if any(axes[part] for part in group.family(name))}
    return {name: _unit_set(group, name, axes, holding) for name in order if name in holding}


def log_order_of(group: Group, names: Iterable[str]) -> float:
    """Logarithm of the number of permutations and signs that some sets of units have."""
    total = 0.0
    for units in map(group.__getitem__, names):
        total += units.copies * math.lgamma(units.size + 1) * ("permute" in units.moves)
        total += units.count * math.log(2.0) * ("flip" in units.moves)
    return total


# small steps --------------------------------------------------------------------------------------------------------


def _unit_set(group: Group, name: str, axes: dict[str, tuple[UnitAxis, ...]], holding: set[str]) -> UnitSet:
    family, units = group.family(name), group[name]
    inner = [axis for part in family for axis in axes[part]]
    sites = {axis.own.site for axis in axes[name]}
    waits, flipped = any(axis.neighbours for axis in inner), "flip" in units.moves
    sharing = [other for other in axes if any(axis.own.site in sites for axis in axes[other])]
    nested = len(family) > 1 or units.parent is not None or units.copies > 1
    return UnitSet(
        units,
        axes[name],
        units.size > 1 and "permute" in units.moves,
        flipped,
        tuple(child for child in group.children(name) if child in holding),
        frozenset(member.name for axis in inner for member in axis.around) - set(family),
        waits,
        sharing == [name] and not waits and not nested and not flipped,
    )


def _unit_axis(group: Group, member: Member, device: torch.device) -> UnitAxis:
    own, line = member.own, (member.name, *group.ancestors(member.name))
    assert own is not None
    met = {
        dim: tuple(_member(group, name, axis, device) for name, axis in members)
        for dim, members in group.members(own.site).items()
    }
    here = met.pop(own.dim)
    beside = (
        other
        for other in here
        if other.name not in line
        and member.name not in group.ancestors(other.name)
        and bool(torch.isin(other.axis.index, own.index).any())
    )
    around = (other for other in here if other.name in line[1:] and other.flips)
    return UnitAxis(own, member.flips, tuple(around), tuple(beside), tuple(met.values()))


def _member(group: Group, name: str, axis: Axis, device: torch.device) -> Member:
    here, line = group.members(axis.site)[axis.dim], (name, *group.ancestors(name))
    flipping = (other for other, one in here if other in line and "flip" in group[other].moves and one.exponent % 2)
    inner = [one.index.reshape(-1) for other, one in here if name in group.ancestors(other)]
    # Whole rows are own or not, as units that may be exchanged are alike inside.
    own = axis.index[~torch.isin(axis.index[:, 0], torch.cat(inner))] if inner else axis.index
    placed = replace(axis, index=axis.index.to(device))
    return Member(name, placed, replace(axis, index=own.to(device)) if len(own) else None, tuple(flipping))
