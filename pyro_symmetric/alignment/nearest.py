"""The nearest copy of weights under permutations and signs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.alignment.covers import MOST_ELEMENTS, log_count
from pyro_symmetric.alignment.terms import terms_of
from pyro_symmetric.groups import Element, Group, group_of
from pyro_symmetric.groups.axes import rows
from pyro_symmetric.groups.units import Units
from pyro_symmetric.weights import Weights

# The most entries of all copies of a group that is enumerated.
MOST_ENTRIES = 2**26


class NearestCopy(NamedTuple):
    r"""The element that moves weights least, the distance, its upper bound, and whether
    no other element moves them less.

    All copies of ``D`` weights lie on one sphere, and balls of half their smallest
    distance around them are disjoint; volumes bound it (Gelberg et al. 2024, arXiv
    2408.05496, Theorem 3.1 and its proof):

    .. math:: \|g \cdot w - w\| \le 2\, \|w\| \,/\, (|G|^{1/D} - 1).
    """

    element: Element
    distance: float
    bound: float
    exact: bool


@torch.no_grad()
def nearest_copy(weights: Weights, symmetry: Any) -> NearestCopy:
    """Find the nearest other weights on the orbit under permutations and signs.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> weights = {"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 1.0]])}
    >>> nearest = ps.alignment.nearest_copy(weights, group)
    >>> nearest.element["unit"].tolist(), round(nearest.distance, 3), nearest.exact
    ([0, 2, 1], 4.243, True)

    A permutation moves at least two units, each at least as far as to its nearest
    neighbour. So of one set of units the exchange of the closest pair, up to a sign, or
    the flip of the smallest unit is nearest. Exact for sets that share no site, and for
    groups of up to 5,100 elements, all of which are tried; of others the nearest
    exchange or flip of single units, an upper bound.

    :param weights: one set of weights; running statistics don't count.
    """
    group = group_of(symmetry).finite.without_buffers()
    group.batch_shape(weights)
    host = {site: weights[site].double().cpu() for site in group.sites}
    entries = sum(value.numel() for value in host.values())
    elements = math.exp(min(log_count(group), 99.0))
    if _is_solved_by_short_steps(group):
        nearest = _nearest_step(group, host)
        exact = True
    elif elements <= MOST_ELEMENTS + 0.5 and elements * entries <= MOST_ENTRIES:
        nearest = _nearest_of_all(group, host)
        exact = True
    else:
        nearest = _nearest_step(group, host)
        exact = False
    norm = math.sqrt(sum(float(value.square().sum()) for value in host.values()))
    bound = 2 * norm / math.expm1(group.log_order() / entries)
    element = nearest.element.within(group_of(symmetry))
    return NearestCopy(element, math.sqrt(nearest.square), bound, exact)


class _Nearest(NamedTuple):
    """An element, and the squared distance by which it moves weights."""

    element: Element
    square: float


def _is_solved_by_short_steps(group: Group) -> bool:
    """Return whether no two sets of units share a site, nor two axes of one."""
    if group.depth:
        return False
    return not any(
        term.coupled
        for root in group.roots
        for term in terms_of(group, root, group.sites)
    )


def _nearest_of_all(group: Group, weights: Weights) -> _Nearest:
    """Try all elements; those that move no weights at all don't count."""
    elements = group.enumerate()
    fixed = torch.Generator("cpu").manual_seed(0)
    generic = {}
    for site, value in weights.items():
        generic[site] = torch.rand(
            value.shape, generator=fixed, dtype=value.dtype, device="cpu"
        )
    inert = _squared_moves(elements, generic) == 0
    squares = _squared_moves(elements, weights).masked_fill(inert, math.inf)
    nearest = int(squares.argmin())
    return _Nearest(elements.select(nearest), float(squares[nearest]))


def _nearest_step(group: Group, weights: Weights) -> _Nearest:
    """Return the nearest exchange or flip of single units."""
    nearest = _Nearest(group.identity(), math.inf)
    for name, units in group.units.items():
        for step in _short_steps(units, _unit_entries(group, name, weights)):
            element = step.element(group, name)
            square = float(_squared_moves(element, weights))
            if square < nearest.square:
                nearest = _Nearest(element, square)
    return nearest


def _squared_moves(element: Element, weights: Weights) -> Tensor:
    """Return by how much elements move weights, ``batch_shape``."""
    squares = torch.zeros(element.batch_shape, dtype=torch.float64, device="cpu")
    for site, value in weights.items():
        moved = element.on_site(site, value)
        apart = (moved - value).square()
        squares += apart.reshape(*element.batch_shape, -1).sum(-1)
    return squares


class _UnitEntries(NamedTuple):
    """The entries of units that a sign leaves, and those that it flips, ``(n, d)``."""

    even: Tensor
    odd: Tensor


def _unit_entries(group: Group, name: str, weights: Weights) -> _UnitEntries:
    units = group[name]
    nothing = torch.zeros(units.count, 1, dtype=torch.float64, device="cpu")
    even = [nothing]
    odd = [nothing]
    for axis in group.axes(name):
        view = group.view(axis.site, weights[axis.site])
        flips = "flip" in units.moves and axis.exponent % 2 == 1
        (odd if flips else even).append(rows(view, axis, view.dim()))
    return _UnitEntries(torch.cat(even, 1), torch.cat(odd, 1))


class _Step(NamedTuple):
    """The exchange of two units, or one that stays; and the sign of both."""

    units: list[int]
    sign: float

    def element(self, group: Group, name: str) -> Element:
        """Return the step as an element."""
        units = group[name]
        images = torch.arange(units.size, device="cpu").repeat(units.copies)
        images[self.units] = images[self.units[::-1]]
        signs = torch.ones(units.count, dtype=torch.float64, device="cpu")
        signs[self.units] = self.sign
        images = images.reshape(units.shape)
        return Element(group, {name: images}, {name: signs.reshape(units.shape)})


def _short_steps(units: Units, entries: _UnitEntries) -> list[_Step]:
    """Return the flip of the smallest unit, and the exchanges of the closest pairs."""
    steps = []
    signs = [1.0]
    if "flip" in units.moves:
        smallest = int(entries.odd.norm(dim=1).argmin())
        steps.append(_Step([smallest], -1.0))
        signs = [1.0, -1.0]
    if "permute" not in units.moves or units.size == 1:
        return steps
    copy = torch.arange(units.count, device="cpu") // units.size
    same_unit = torch.eye(units.count, dtype=torch.bool, device="cpu")
    excluded = (copy != copy[:, None]) | same_unit
    for sign in signs:
        even_squares = _squared_distances(entries.even, entries.even)
        squares = even_squares + _squared_distances(entries.odd, sign * entries.odd)
        closest = int(squares.masked_fill(excluded, math.inf).argmin())
        steps.append(_Step(list(divmod(closest, units.count)), sign))
    return steps


def _squared_distances(first: Tensor, second: Tensor) -> Tensor:
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(first, second, compute_mode=exact) ** 2
