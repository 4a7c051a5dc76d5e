"""A symmetry taken apart: what is decided over, in one view of the sites, and which sites count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pyro_symmetric.alignment.parts.units import Units, units_of
from pyro_symmetric.symmetry.finite import FiniteGroup, SignedPermutation
from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup
from pyro_symmetric.symmetry.rescaling import RescalingGroup, Scaling, ScalingGroup, ShiftGroup, Sign, SignGroup
from pyro_symmetric.symmetry.weight_symmetry import SymmetryElement, WeightSymmetry

AnyGroup = PermutationGroup | SignGroup | ScalingGroup | FiniteGroup | WeightSymmetry
Element = Permutation | Sign | Scaling | SignedPermutation | SymmetryElement


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a symmetry that alignment decides over, all in one view of the sites.

    :param roots: the outermost sets of units, with what lies inside them.
    """

    permutations: PermutationGroup
    signs: SignGroup
    scalings: ScalingGroup
    roots: tuple[Units, ...]

    @property
    def rescalings(self) -> dict[str, RescalingGroup[Any]]:
        """The multipliers, by kind."""
        return {"sign": self.signs, "scale": self.scalings}

    def offsets(self, kind: str) -> dict[str, slice]:
        """Where the units of each multiplier lie among all of its kind."""
        offsets, start = {}, 0
        for name, n in self.rescalings[kind].factors.items():
            offsets[name] = slice(start, start + n)
            start += n
        return offsets


@dataclass(frozen=True, eq=False)
class Problem:
    """A group taken apart for the descent.

    :param group: as it was given.
    :param parts: permutations, signs and scalings in one view.
    :param shifts: constants in front of a softmax.
    :param sites: the sites that may be compared: all that the group knows, without buffers.
    :param required: those that must be there.
    :param buffers: what moves along without being compared.
    """

    group: AnyGroup
    parts: Parts
    shifts: ShiftGroup
    sites: tuple[str, ...]
    required: frozenset[str]
    buffers: tuple[str, ...]

    @property
    def site_shapes(self) -> dict[str, torch.Size]:
        return self.parts.permutations.site_shapes


def problem_of(group: AnyGroup) -> Problem:
    """Take a group apart.

    :raises TypeError: if it is none.
    """
    if not isinstance(group, AnyGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; it must be a PermutationGroup, SignGroup, ScalingGroup, FiniteGroup "
            "or WeightSymmetry, e.g. find_symmetry(net, x) or PermutationGroup.declare(...)"
        )
    given: list[Any] = [group]
    if isinstance(group, FiniteGroup | WeightSymmetry):
        given = [group.permutations, group.signs]
    if isinstance(group, WeightSymmetry):
        given.append(group.scalings)
    spans = frozenset(span for part in given for span in part.spans)
    shapes = dict(group.site_shapes)

    def part(kind: Any) -> Any:
        found = next((own for own in given if isinstance(own, kind)), None)
        if found is None:
            return kind((), shapes, spans)
        alike = found.site_shapes == shapes and found.spans == spans
        return found if alike else found.over(shapes, spans)

    permutations = part(PermutationGroup)
    parts = Parts(permutations, part(SignGroup), part(ScalingGroup), tuple(units_of(permutations)))
    shifts = group.shifts if isinstance(group, WeightSymmetry) else ShiftGroup((), shapes)
    every: list[Any] = [parts.permutations, parts.signs, parts.scalings, shifts]
    required = frozenset(site for own in every for site in own.required_sites)
    acted = {site for own in every for site in own.sites}
    sites = tuple(site for site in shapes if site in required or site not in acted)
    return Problem(group, parts, shifts, sites, required, tuple(site for site in shapes if site in acted - required))
