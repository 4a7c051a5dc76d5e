r"""Rotations of units that permute, from the conservation law of the gradient.

Let :math:`W_a`, with a row for each unit, be the weights along an axis ``a``, and
:math:`G_a` the gradient of a loss there. If outputs are invariant under
:math:`W_a \to R\, W_a` for all orthogonal :math:`R`, the derivative along each
generator of rotations vanishes:

.. math:: \sum_a (W_a G_a^\top - G_a W_a^\top) = 0.

Its twin for positive scales is the diagonal of the same products. Units that rotate
also permute and flip, so only sets that permute need a test. What the law proposes is
tried on the network itself, by random rotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.axes import rows
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.groups.units import pruned
from pyro_symmetric.weights import Weights

# random columns by which the matrix of the law is multiplied
PROBES = 2


class Slope(NamedTuple):
    """The gradient of a loss at some weights, by site."""

    weights: Weights
    gradient: Weights

    def of_sites(self, sources: Mapping[str, str]) -> Slope:
        """Return the numbers of some sites.

        :param sources: site -> the site that has its numbers: itself, or an equal one.
        """
        weights = {site: self.weights[sources[site]].cpu() for site in sources}
        gradient = {site: self.gradient[sources[site]].cpu() for site in sources}
        return Slope(weights, gradient)


def rotating_units(
    group: Group,
    slopes: Sequence[Slope],
    tolerance: float,
    stand_in: Mapping[str, str],
    keys: Callable[[Sequence[Axis]], Sequence[Any]],
) -> tuple[str, ...]:
    """Return the names of units whose rotations the law allows at all points.

    :param slopes: one for each point. At one alone, ReLUs may be linear.
    :param tolerance: of the law, relative to the magnitudes of its terms.
    :param stand_in: site -> the equal site whose gradient is known.
    :param keys: returns a key for each axis, equal for those in the same place of other
        blocks.
    """
    names = []
    verdicts = dict[frozenset[Any], bool]()  # equal blocks share theirs
    first = slopes[0]
    for name in group.names("permute"):
        sites = {axis.site for axis in group[name].axes}
        sources = {site: stand_in.get(site, site) for site in sites}
        has_gradient = set(sources.values()) <= first.gradient.keys()
        if not (has_gradient and may_rotate(group, group[name])):
            continue
        if any(first.weights[source].is_complex() for source in sources.values()):
            continue
        block = frozenset(keys(group.axes(name)))
        if block not in verdicts:
            of_units = [slope.of_sites(sources) for slope in slopes]
            verdicts[block] = _vanishes(group, name, of_units, tolerance)
        if verdicts[block]:
            names.append(name)
    return tuple(names)


def _vanishes(
    group: Group, name: str, slopes: Sequence[Slope], tolerance: float
) -> bool:
    """Return whether the matrix of the law, times random columns, vanishes beside the
    norms of its terms, summed over the points where it is finite.
    """
    laws = [_norms_of_law(group, name, slope) for slope in slopes]
    laws = [law for law in laws if math.isfinite(law.violation + law.norms)]
    violation = sum(law.violation for law in laws)
    norms = sum(law.norms for law in laws)
    return norms > 0 and violation <= tolerance * norms


class _Norms(NamedTuple):
    """The norm of the matrix of a law, and the sum of those of its terms."""

    violation: float
    norms: float


def _norms_of_law(group: Group, name: str, slope: Slope) -> _Norms:
    """Return the norms of the law of rotations at one point, by random columns."""
    units = group[name]
    shape = (units.copies, units.size)
    generator = torch.Generator("cpu").manual_seed(0)
    columns = torch.randn(units.size, PROBES, generator=generator, device="cpu")
    violation = torch.zeros((), device="cpu")
    norms = 0.0
    for axis in group.axes(name):
        dims = len(group.view_shapes[axis.site])
        entries, gradient = (
            rows(group.view(axis.site, sites[axis.site]), axis, dims) for sites in slope
        )
        norms += float(entries.norm()) * float(gradient.norm())
        entries = entries.unflatten(0, shape)
        gradient = gradient.unflatten(0, shape)
        # products with two columns take ten times as long as with one
        products = [
            entries @ (gradient.mT @ column) - gradient @ (entries.mT @ column)
            for column in columns.to(entries).split(1, dim=1)
        ]
        violation = violation + torch.cat(products, -1)
    return _Norms(float(violation.norm()) / math.sqrt(PROBES), norms)


def rotated(group: Group, names: Sequence[str]) -> Group:
    """Return the group in which some units rotate, of those that still permute: all, or
    those that fit in one after the other.
    """
    with suppress(ValueError):
        return _all_rotated(group, names)
    fitting = list[str]()
    for name in names:
        with suppress(ValueError):  # two of them lie along the same positions
            _all_rotated(group, [*fitting, name])
            fitting.append(name)
    return _all_rotated(group, fitting)


def _all_rotated(group: Group, names: Sequence[str]) -> Group:
    """Return the group in which units rotate, of those that still permute.

    Multipliers of the same entries are dropped, as they mix with rotations to more than
    a group here can hold; so are units whose moves don't fit in with rotations.
    """
    turning = {name for name in names if name in group.names("permute")}
    places = {(a.site, a.dim) for name in turning for a in group.axes(name)}
    units = []
    for name, unit_set in group.units.items():
        meets = any(
            (axis.site, axis.dim) in places
            and (axis.exponent or "shift" in unit_set.moves)
            for axis in group.axes(name)
        )
        if name in turning:
            axes = (
                replace(axis, exponent=axis.exponent if axis.exponent == -1 else 1)
                for axis in unit_set.axes
            )
            moves = frozenset[Move]({"rotate"})
            units.append(replace(unit_set, axes=tuple(axes), moves=moves))
        elif meets and unit_set.moves != {"permute"}:
            units.append(replace(unit_set, moves=unit_set.moves & {"permute"}))
        else:
            units.append(unit_set)
    return Group(pruned(units), group.site_shapes, group.of_network)


def confirmed(
    group: Group, names: Sequence[str], broken: Callable[[Group], Collection[str]]
) -> tuple[str, ...]:
    """Return the units whose rotations hold, all of them together.

    :param broken: the units of a group whose rotations change the function.
    """
    remaining = tuple(names)
    while remaining:
        turning = rotated(group, remaining).rotations
        remaining = tuple(name for name in remaining if name in turning.units)
        wrong = broken(turning)
        if not wrong:
            break
        remaining = tuple(name for name in remaining if name not in wrong)
    return remaining


def may_rotate(group: Group, units: Units) -> bool:
    """Return whether units hold no others, and lie along no running statistics."""
    if units.size < 2 or len(group.family(units.name)) > 1:
        return False
    return not any(a.buffer or a.epsilon is not None for a in units.axes)
