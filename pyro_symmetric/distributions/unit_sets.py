"""The sets of units that a finite group exchanges, flips, or both: what a proposal goes through, one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyro_symmetric.symmetry.factor import Axis, Factor, RescaledAxis
from pyro_symmetric.symmetry.finite import AnyFiniteGroup, FiniteGroup
from pyro_symmetric.symmetry.permutation import PermutationGroup


@dataclass(frozen=True, eq=False)
class UnitSets:
    """A subgroup that can be proposed from, as sets of units.

    :param permutations: one factor for each set.
    :param sign_of: set -> the factor of signs that flips its units.
    :param flipped: set -> the (site, axis) pairs that its signs flip.
    :param fixed: sets whose units aren't exchanged, only flipped.
    """

    permutations: PermutationGroup
    sign_of: dict[str, str]
    flipped: dict[str, frozenset[tuple[str, int]]]
    fixed: frozenset[str]

    def log_order(self) -> float:
        """Logarithm of the number of elements."""
        sizes = self.permutations.factors
        exchanges = sum(math.lgamma(n + 1) for name, n in sizes.items() if name not in self.fixed)
        return exchanges + math.log(2) * sum(sizes[name] for name in self.sign_of)

    def flips(self, name: str, site: str, dim: int) -> bool:
        """Whether the signs of a set's units flip this axis."""
        return (site, dim) in self.flipped.get(name, ())

    def is_flipped(self, site: str) -> bool:
        """Whether any signs flip this site."""
        return any(site == other for pairs in self.flipped.values() for other, _ in pairs)


@functools.lru_cache(maxsize=64)
def unit_sets(group: AnyFiniteGroup) -> UnitSets:
    """The outer factors of a group with the signs of their units, and signs of units that aren't exchanged.

    Left out, so that an estimate averages over a subgroup only: factors inside the units of others, factors of one
    unit, units that lie along several axes at once (inputs of grouped convolutions), and signs whose units are neither
    those of a factor nor apart from all factors.
    """
    permutations = group.permutations if isinstance(group, FiniteGroup) else group
    kept = [permutations.factor(name) for name, n in permutations.factors.items() if n > 1]
    kept = [factor for factor in kept if factor.parent is None and all(axis.span == 1 for axis in factor.axes)]
    sign_of: dict[str, str] = {}
    flipped: dict[str, frozenset[tuple[str, int]]] = {}
    fixed: list[Factor] = []
    if isinstance(group, FiniteGroup):
        for name in group.signs.factors:
            signs = group.signs.factor(name)
            if any(axis.span > 1 for axis in signs.axes):
                continue
            axes = [axis for axis in signs.axes if axis.exponent % 2]
            partner = next((factor for factor in kept if _has_units_of(factor, axes)), None)
            if partner is None and not _meets(permutations, axes):
                lying = tuple(Axis(axis.site, axis.dim, axis.index, axis.buffer) for axis in axes)
                partner = Factor(f"signs of {name}", signs.size, lying)
                fixed.append(partner)
            if partner is not None and partner.name not in sign_of:
                sign_of[partner.name] = name
                flipped[partner.name] = frozenset((axis.site, axis.dim) for axis in axes)
    shapes = group.site_shapes
    return UnitSets(PermutationGroup([*kept, *fixed], shapes), sign_of, flipped, frozenset(f.name for f in fixed))


def _has_units_of(factor: Factor, axes: Sequence[RescaledAxis]) -> bool:
    """Whether signs on these axes belong to the units that the factor exchanges, in the same order."""
    own = {(axis.site, axis.dim): axis.index for axis in factor.axes}
    return bool(axes) and all(
        (axis.site, axis.dim) in own and torch.equal(own[axis.site, axis.dim].cpu(), axis.index.cpu()) for axis in axes
    )


def _meets(permutations: PermutationGroup, axes: Sequence[RescaledAxis]) -> bool:
    """Whether any of these axes is one along which something is exchanged."""
    return any(axis.dim in permutations.dims(axis.site) for axis in axes)
