r"""The order of a finite group: how many of its permutations and signs act differently.

Some elements do nothing. Flipping all rows and all columns of a matrix keeps it, and so
does whatever units do along an axis of a site without entries. These idle elements form
the kernel ``K`` of the action, and the group acts in :math:`|G| / |K|` ways.

An element acts on the entries of a site by a signed permutation. It is idle if no entry
changes its place and none its sign, so that permutations and signs can be judged apart:

* A permutation is idle if it stays wherever its units lie along an axis of a site that
  has entries.
* Signs are idle if they multiply every entry by one: with a bit for each sign, the bits
  of all units that act on an entry add up to zero, modulo two. An entry has a position
  along each axis, and all positions are combined. So the bits at one position add up to
  the same constant all along an axis, and the constants of a site's axes to zero.

Most positions belong to one unit. Units whose bits are equal are joined first, and few
equations are left to eliminate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pyro_symmetric.arguments import Names
from pyro_symmetric.weights import first_value

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group

Equation = frozenset[int]  # bits whose sum is zero, modulo two


class Effective(NamedTuple):
    """Permutations and signs of which no two act alike, and which act in all ways.

    :ivar permuted: the names of the units that permute.
    :ivar flipped: the numbers of the units that flip, counted through all units of the
        group. The signs of others can be undone by these, or have no effect.
    """

    permuted: Names
    flipped: np.ndarray


def effective_moves(group: Group) -> Effective:
    """Find permutations and signs that stand for all actions of a group, one for each.

    >>> axes, shapes = {"w": ("row", "column")}, {"w": torch.zeros(2, 3)}
    >>> group = ps.Group.declare(axes, shapes, moves="flip")
    >>> ps.groups.order.effective_moves(group).flipped  # all but one row
    array([0, 2, 3, 4])
    """
    permuted = tuple(
        name for name in group.names("permute") if _has_entries(group, name)
    )
    units = np.arange(group.size)
    flipping = [units[group.slots[name]] for name in group.names("flip")]
    if not flipping:
        return Effective(permuted, units[:0])
    free = _Signs(group).free()
    return Effective(permuted, np.setdiff1d(np.concatenate(flipping), free))


def _has_entries(group: Group, name: str) -> bool:
    """Return whether some units lie along an axis of a site that has entries."""
    return any(
        len(axis.index) and group.site_shapes[axis.site].numel()
        for axis in group[name].axes
    )


class _Signs:
    """The equations of idle signs, in one bit for each unit of the group, and a last
    one that is zero.

    Two rows and three columns of a matrix, whose bits are ``r`` and ``c``: the pairs
    are :math:`r_0 = r_1` and :math:`c_0 = c_1 = c_2`, the equation is
    :math:`r_0 + c_0 = 0`.
    """

    def __init__(self, group: Group):
        self.group = group
        self.zero = group.size
        self.pairs = [np.empty((2, 0), int)]  # of equal bits
        self.equations: list[Equation] = []
        for site in group.sites:
            if group.site_shapes[site].numel():
                total: Equation = frozenset()
                for dim in group.members(site):
                    total ^= self._add_axis(site, dim)
                self.equations.append(total)

    def _add_axis(self, site: str, dim: int) -> Equation:
        """Add the equations of an axis, where the bits at all positions have one sum;
        return the bits at one position.
        """
        flips = self._flips(site, dim)
        length = self.group.view_shapes[site][dim]
        number = np.bincount(flips.position, minlength=length)
        single = flips.unit[number[flips.position] == 1]
        crowded: dict[int, Equation] = {}
        for position, unit in flips.pairs(number > 1):
            crowded[position] = crowded.get(position, frozenset()) ^ {unit}
        if not number.all():
            constant: Equation = frozenset()
            first = self.zero
        elif len(single):
            first = int(single[0])
            constant = frozenset([first])
        else:
            constant = first_value(crowded)
            first = self.zero
        self.pairs.append(np.stack([np.full_like(single, first), single]))
        self.equations += [constant ^ total for total in crowded.values()]
        return constant

    def _flips(self, site: str, dim: int) -> _Flips:
        positions = [np.empty(0, int)]
        units = [np.empty(0, int)]
        for name, axis in self.group.members(site)[dim]:
            if axis.exponent % 2 and "flip" in self.group[name].moves:
                index = axis.index.numpy()
                numbers = self.group.slots[name].start + np.arange(index.shape[1])
                positions.append(index.ravel())
                units.append(np.broadcast_to(numbers, index.shape).ravel())
        return _Flips(np.concatenate(positions), np.concatenate(units))

    def free(self) -> np.ndarray:
        """Return the units whose bits can be chosen at will; then idle signs are
        determined.
        """
        label = self._joined()
        equations = dict.fromkeys(
            self._between(equation, label) for equation in self.equations
        )
        dependent = {int(label[self.zero])} | _dependent(equations)
        last_unit = {bit: unit for unit, bit in enumerate(label[:-1].tolist())}
        return np.array(
            [u for bit, u in last_unit.items() if bit not in dependent], int
        )

    def _joined(self) -> np.ndarray:
        """Label the bits so that equal ones have one label."""
        first_bits, second_bits = np.concatenate(self.pairs, 1)
        shape = (self.zero + 1, self.zero + 1)
        edges = coo_array(
            (np.ones(len(first_bits)), (first_bits, second_bits)), shape=shape
        )
        return connected_components(edges, directed=False)[1]

    def _between(self, equation: Equation, label: np.ndarray) -> Equation:
        """Return an equation in the labels of bits."""
        times = Counter(int(label[bit]) for bit in equation)
        odd = {bit for bit, number in times.items() if number % 2}
        return frozenset(odd - {int(label[self.zero])})


class _Flips(NamedTuple):
    """Positions along an axis, and the unit that flips the entries there, for each."""

    position: np.ndarray
    unit: np.ndarray

    def pairs(self, chosen: np.ndarray) -> Iterable[tuple[int, int]]:
        """Return positions with units, of the positions chosen."""
        chosen_here = chosen[self.position]
        return zip(
            self.position[chosen_here].tolist(),
            self.unit[chosen_here].tolist(),
            strict=True,
        )


def _dependent(equations: Iterable[Equation]) -> set[int]:
    """Find the bits that the others determine, modulo two."""
    rows: dict[int, int] = {}  # as binary numbers, by their highest digit
    for equation in equations:
        row = sum(1 << bit for bit in equation)
        while (highest := row.bit_length() - 1) in rows:
            row ^= rows[highest]
        if row:
            rows[highest] = row
    return set(rows)
