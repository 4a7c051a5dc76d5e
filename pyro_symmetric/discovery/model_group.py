"""The group of the moves that were found in a Pyro model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pyro_symmetric.discovery.model_permutations import Factor
from pyro_symmetric.discovery.model_signs import SignFlip
from pyro_symmetric.discovery.valid_sets import PlaceSet, in_words
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.weights import Shapes

PERMUTE: frozenset[Move] = frozenset({"permute"})
FLIP: frozenset[Move] = frozenset({"flip"})


class Built(NamedTuple):
    """A group, and what it couldn't take in."""

    group: Group
    remarks: list[str]


def built_group(
    factors: Sequence[Factor],
    flips: Sequence[SignFlip],
    shapes: Shapes,
) -> Built:
    """Build the group of units that permute, and of signs."""
    builder = _Builder(shapes)
    remaining = list(flips)
    for factor in factors:
        if factor.outer is None:
            remaining = builder.add_outer(factor, remaining)
    outer_of = {_alone(factor): factor.outer for factor in factors}
    rows_of_tables = set[Factor]()
    for factor in factors:
        outer = factor.outer
        if outer is None:
            continue
        if outer_of.get(outer) != _alone(factor):
            builder.add_inner(factor, outer)
        elif _alone(factor) not in rows_of_tables:
            rows_of_tables.add(outer)
            builder.add_entries(_alone(factor), outer)
    for flip in remaining:
        builder.add_flip(flip)
    return builder.built()


def _alone(factor: Factor) -> Factor:
    """Return the units without those that they lie in."""
    return factor._replace(outer=None)


class _Builder:
    """Collects units for a group.

    :ivar names: outermost factors -> the names of their units.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.units: dict[str, Units] = {}
        self.names: dict[Factor, str] = {}
        self.remarks: list[str] = []

    def add_outer(self, factor: Factor, flips: list[SignFlip]) -> list[SignFlip]:
        """Add units that permute, with their signs if these flip along some of the same
        places; return the flips that are left.
        """
        flip = self._joint_flip(factor, flips)
        chosen = torch.tensor(factor.units, device="cpu")
        axes = []
        for place in sorted(factor.places):
            index = place.index(factor.length)[:, chosen]
            exponent = int(place in flip.places)
            axes.append(Axis(place.site, place.dim, index, exponent))
        moves = PERMUTE | FLIP if flip.places else PERMUTE
        name = self._name(factor.places)
        self.units[name] = Units(name, len(factor.units), tuple(axes), moves=moves)
        self.names[factor] = name
        if not flip.places:
            return flips
        remaining = [sign for sign in flips if sign is not flip]
        outside = tuple(p for p in flip.positions if p not in factor.units)
        if outside:
            remaining.append(SignFlip(outside, flip.places))
        return remaining

    def add_inner(self, factor: Factor, outer: Factor) -> None:
        """Add units that permute inside others."""
        if outer not in self.names:
            places = in_words(factor.places)
            self.remarks.append(f"units along {places} permute inside further units")
            return
        self._say_what_is_outside(outer)
        parent = self.units[self.names[outer]]
        axes = self._axes_inside(factor, outer)
        if axes is None:
            return
        name = self._name(factor.places)
        self.units[name] = Units(
            name,
            len(factor.units),
            axes,
            parent=parent.name,
            copies=parent.size,
        )

    def add_entries(self, columns: Factor, rows: Factor) -> None:
        """Add the entries of a table, which all permute, as columns do in each row and
        rows in each column; or rows and columns, if a group can't hold that.
        """
        self._say_what_is_outside(rows)
        self._say_what_is_outside(columns)
        axes = self._axes_inside(columns, rows)
        if axes is None:
            self.add_outer(rows, [])
            self.add_outer(columns, [])
            return
        name = self._name(columns.places)
        self.units[name] = Units(name, len(rows.units) * len(columns.units), axes)

    def _say_what_is_outside(self, outer: Factor) -> None:
        """Add a remark that what permutes inside some positions does so in the others:
        an exchange in all positions leaves it, after those inside.
        """
        if len(outer.units) < outer.length:
            places = in_words(outer.places)
            self.remarks.append(
                f"what exchanges in each of the positions {[*outer.units]} of {places} "
                "exchanges in the others by themselves, too"
            )

    def _axes_inside(self, factor: Factor, outer: Factor) -> tuple[Axis, ...] | None:
        """Return the axes of units inside others; None if these don't lie along
        neighbouring axes, with a remark.
        """
        outer_dims = {place.site: place.dim for place in outer.places}
        axes = []
        for place in sorted(factor.places):
            first, last = sorted((place.dim, outer_dims[place.site]))
            if last != first + 1 or place.blocks > 1:
                self.remarks.append(
                    f"units along {place} permute in each of the {len(outer.units)} "
                    f"units along axis {outer_dims[place.site]} of {place.site!r}; a "
                    "group can express that if the two axes are neighbours"
                )
                return None
            shape = self.shapes[place.site]
            grid = torch.arange(shape[first] * shape[last], device="cpu")
            grid = grid.reshape(shape[first], shape[last])
            by_outer = grid if outer_dims[place.site] < place.dim else grid.T
            entries = by_outer[list(outer.units)][:, list(factor.units)]
            axes.append(Axis(place.site, first, entries.reshape(1, -1), span=2))
        return tuple(axes)

    def add_flip(self, flip: SignFlip) -> None:
        """Add units, or whole sites, that only change their signs."""
        if not flip.positions:
            self._add_whole(flip)
            return
        index = torch.tensor([flip.positions], device="cpu")
        axes = tuple(
            Axis(place.site, place.dim, index, exponent=1)
            for place in sorted(flip.places)
        )
        name = self._name(flip.places)
        count = len(flip.positions)
        for outer, parent_name in self.names.items():
            parent = self.units[parent_name]
            if (
                flip.places <= outer.places
                and parent.size == count
                and parent.copies == 1
            ):
                self.units[name] = Units(name, 1, axes, parent_name, count, FLIP)
                return
        self.units[name] = Units(name, count, axes, moves=FLIP)

    def _joint_flip(self, factor: Factor, flips: Sequence[SignFlip]) -> SignFlip:
        """Return the flips of all units of a factor along some of its places; empty if
        there are none or several.
        """
        joint = []
        for flip in flips:
            covers = set(factor.units) <= set(flip.positions)
            if covers and flip.places <= factor.places:
                joint.append(flip)
        return joint[0] if len(joint) == 1 else SignFlip((), frozenset())

    def built(self) -> Built:
        """Return the group, without the flips that don't fit its permutations."""
        try:
            return Built(Group(self.units.values(), self.shapes), self.remarks)
        except ValueError as error:
            permuting = []
            for units in self.units.values():
                if "permute" in units.moves:
                    axes = tuple(replace(axis, exponent=0) for axis in units.axes)
                    permuting.append(replace(units, moves=PERMUTE, axes=axes))
            remark = f"signs are left out, which don't fit the permutations: {error}"
            return Built(Group(permuting, self.shapes), [*self.remarks, remark])

    def _add_whole(self, flip: SignFlip) -> None:
        axes = []
        for site in sorted(flip.sites):
            entries = torch.arange(self.shapes[site].numel(), device="cpu")
            axes.append(
                Axis(site, 0, entries[:, None], exponent=1, span=len(self.shapes[site]))
            )
        name = self._name(flip.places)
        self.units[name] = Units(name, 1, tuple(axes), moves=FLIP)

    def _name(self, places: PlaceSet) -> str:
        """Return a new name: that of the first site, with a number if it is taken."""
        site = min(place.site for place in places)
        numbered = (f"{site}~{number}" for number in itertools.count(2))
        return next(n for n in itertools.chain([site], numbered) if n not in self.units)
