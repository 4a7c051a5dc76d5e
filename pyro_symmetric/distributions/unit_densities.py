r"""Log-densities of a draw's units in the places of the base's units.

Under a product of normals with means ``m`` and deviations ``s``, the log-density of a
draw whose units are permuted is a sum over places, :math:`\log q(p \cdot w) = \sum_j
A_{j\,p(j)} + \dots`, of the log-densities of unit ``i`` in place ``j``, up to a
constant for each place,

.. math:: A_{ji} = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2}
    - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big)

over the unit's weights ``a``, incoming and outgoing; units with signs have a matrix for
either sign. Proposals are drawn from these matrices, and the importance weights are
gathered from them.

Any base but a product of normals and of unit blocks is matched by its means and
deviations.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyro_symmetric.arguments import Names
from pyro_symmetric.distributions.random_matchings import best_columns, rows_of
from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.axes import Axis, rows
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.weights import Weights, map_values

# to which normals are fitted if a base has no moments, or if constrained values are
# permuted
FIT_DRAWS = 256
SKETCH = 256  # weights of a unit in its sketch
MAX_ROUNDING = 2e-3  # nats; a matrix with larger rounding errors is computed in float64
# weights are clamped to this, as draws may not be finite; its square is finite
LARGEST_WEIGHT = 1e12


class UnitSet(NamedTuple):
    """The axes of a set of units, on sites that it alone moves and on shared ones; and
    whether it is matched.
    """

    exclusive: tuple[Axis, ...]
    shared: tuple[Axis, ...]
    matched: bool


@functools.lru_cache(maxsize=64)
def unit_sets(group: Group, sites: Names) -> dict[str, UnitSet]:
    """Return the sets of units that move some sites. Those inside others aren't
    matched, nor those that share places with a matched set before them."""
    sets = {}
    taken: set[tuple[str, int, int]] = set()
    for name, units in group.units.items():
        exclusive: list[Axis] = []
        shared: list[Axis] = []
        places = set()
        for axis in group.axes(name):
            if axis.site in sites:
                positions = axis.index.flatten().tolist()
                places |= {(axis.site, axis.dim, position) for position in positions}
                movers = sum(map(len, group.members(axis.site).values()))
                (exclusive if movers == 1 else shared).append(axis)
        outermost = units.parent is None and units.copies == 1
        matched = outermost and taken.isdisjoint(places)
        if matched:
            taken |= places
        if places:
            sets[name] = UnitSet(tuple(exclusive), tuple(shared), matched)
    return sets


class Received(NamedTuple):
    """Receipts of the places of a set under elements, ``(K,) + batch + (places,)``:
    the unit, 1 where it arrives with the opposite sign, and whether a place receives
    another unit than its own, or its opposite.
    """

    images: Tensor
    flipped: Tensor
    changed: Tensor


class UnitDensities:
    """The matrices ``A`` of every set of units for some draws: exact if units are
    independent under the base, by means and deviations for any other base.

    >>> from pyro_symmetric.distributions.unit_densities import UnitDensities
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(2)})
    >>> base = dist.Normal(torch.tensor([0.0, 10.0]), 1.0).to_event(1)
    >>> action = ps.groups.Action(group, ["w"])
    >>> units = UnitDensities(base, action, torch.tensor([[0.0, 10.0]]))
    >>> units.exclusive_matrix("unit")[0, 0]  # last: 10 * 10 - 10**2 / 2
    tensor([[  0., -50.],
            [  0.,  50.]])

    :param value: draws, ``(L,) + batch_shape + (D,)``.
    :param group: permutations and signs, a part of the action's group; by default all
        of them.
    :ivar sets: name -> where the units of each set lie.
    :ivar draws: the draws by site, in the group's view; ``loc``, ``scale``: means and
        deviations of the base.
    :ivar blocks: name -> means ``(n, d)`` and precisions ``(n, d, d)`` of units with
        correlated weights.
    :ivar shared_sites: the sites that several sets move.
    """

    def __init__(
        self,
        base: Distribution,
        action: Action,
        value: Tensor,
        group: Group | None = None,
    ):
        self.group = group or action.group.finite
        self.sets = unit_sets(self.group, action.sites)
        self.value = value
        self.batch = value.shape[1:-1]
        self.draws = sites_of(action, value)
        self.loc, self.scale = _site_moments(base, action, value)
        self.blocks = unit_blocks(base, action, self.group)
        shared = [axis.site for units in self.sets.values() for axis in units.shared]
        self.shared_sites = tuple(dict.fromkeys(shared))

    def log_order(self, names: Iterable[str]) -> float:
        """Return the log of the number of permutations and signs of some sets."""
        total = 0.0
        signs = 0
        for name in names:
            units = self.group[name]
            if "permute" in units.moves:
                total += units.copies * math.lgamma(units.size + 1)
            if "flip" in units.moves:
                signs += units.count
        return total + math.log(2) * signs

    def log_ratio(self, elements: Element) -> Tensor:
        r"""Return :math:`\log q(g \cdot w) - \log q(w)`, ``(K,) + batch``, with
        gradient.

        On sites that one set moves alone it is gathered from the set's matrix, at the
        places that any element changes; on shared sites the weights are moved.
        """
        shape = (elements.batch_shape[0], *self.batch)
        total = self.value.new_zeros(shape, dtype=torch.float64)
        signs = elements.signs
        traced = torch._C._get_tracing_state() is not None  # other elements will follow
        moving = traced
        for name in self.sets:  # in their order, or sums would depend on the hash seed
            if name not in elements.group.units:
                continue
            received = self._received(name, elements, signs.get(name))
            changed = received.changed.flatten(0, -2).any(0)
            changed = torch.ones_like(changed) if traced else changed
            if not changed.any():
                continue
            moving = True
            if not self.sets[name].exclusive:
                continue
            places = changed.nonzero()[:, 0]
            densities = self.exclusive_matrix(name, places)[:, 0]
            # flipped units follow the others
            column = (changed.cumsum(0) - 1)[received.images]
            column = column + len(places) * received.flipped
            column = column[..., places].movedim(0, -1)
            moved = densities.movedim(0, -2).flatten(-2).gather(-1, column)
            stayed = densities[0].diagonal(dim1=-2, dim2=-1).sum(-1)
            total = total + moved.sum(-2).movedim(-1, 0) - stayed
        if self.shared_sites and moving:
            total = total + self._shared_ratio(elements).double()
        return total

    def _received(self, name: str, elements: Element, signs: Tensor | None) -> Received:
        shape = (elements.batch_shape[0], *self.batch)
        images = elements.images(name).expand(*shape, -1)
        changed = images != torch.arange(images.shape[-1], device=images.device)
        flipped = torch.zeros_like(images)
        if signs is not None:
            signs = signs.flatten(len(elements.batch_shape)).expand(*shape, -1)
            flipped = (signs.gather(-1, images) < 0).long()
            changed = changed | (flipped == 1)
        return Received(images, flipped, changed)

    def _shared_ratio(self, elements: Element) -> Tensor:
        """Return the part of the log-ratio from sites that several sets move."""
        ratio = self.value.new_zeros(elements.batch_shape[0], *self.batch)
        for site in self.shared_sites:
            before = self.draws[site]
            dims = self.dims(site)
            after = elements.on_site(site, before, dims)
            # half of (b - m)^2 - (a - m)^2, with fewer digits lost
            distance = after + before - 2 * self.loc[site]
            change = -0.5 * (after - before) * distance / self.scale[site].square()
            ratio = ratio + change.flatten(-dims).sum(-1)
        return ratio

    def exclusive_matrix(self, name: str, places: Tensor | None = None) -> Tensor:
        """Return the part of ``A`` that no other set concerns, for some places and
        units, or all.
        """

        def products(level: Level) -> list[Product]:
            return [self.exclusive_product(name, level, places)]

        levels = (Level(self.value.dtype), Level(torch.float64))
        return refined(products, levels, self.is_permuted(name)).densities

    def exclusive_product(
        self, name: str, level: Level, places: Tensor | None = None
    ) -> Product:
        """Return the exclusive part of ``A`` at one precision, with its two factors."""
        chosen = slice(None) if places is None else places
        along = []
        for axis in self.sets[name].exclusive:
            along.append(self.along(axis, self.draws).of(chosen))
        signs = self.possible_signs(name)
        if name not in self.blocks:
            return product_of(along, signs, level)
        # whose precisions couple all weights of a unit: there is no sketch
        loc, precision = (part[chosen].to(level.dtype) for part in self.blocks[name])
        linear = (precision @ loc.unsqueeze(-1))[..., 0]
        of_units = []
        for sign in signs:
            values = [weights.signed(sign).to(level.dtype) for weights in along]
            value = concatenate(values)
            square = value.unsqueeze(-1) * value.unsqueeze(-2)
            of_units.append(concatenate([value, square.flatten(-2)]))
        of_places = concatenate([linear, -0.5 * precision.flatten(-2)])
        return multiplied(of_places, of_units)

    def along(self, axis: Axis, draws: Weights) -> AxisWeights:
        """Return the weights of all units along an axis, of these draws."""
        parts = (draws, self.loc, self.scale)
        dims = self.dims(axis.site)
        value, loc, scale = (rows(part[axis.site], axis, dims) for part in parts)
        value = value.nan_to_num(0.0).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
        return AxisWeights(value, loc, scale, axis.exponent % 2 == 1)

    def possible_signs(self, name: str) -> tuple[int, ...]:
        """Return the signs that a unit of a set may have."""
        return (1, -1) if "flip" in self.group[name].moves else (1,)

    def is_permuted(self, name: str) -> bool:
        """Return whether the units of a set can be permuted."""
        return "permute" in self.group[name].moves

    def dims(self, site: str) -> int:
        """Return the number of axes of a site."""
        return self.draws[site].dim() - 1 - len(self.batch)


# matrices as products -----------------------------------------------------------------


class Level(NamedTuple):
    """Accuracy of a matrix: its precision, and whether by sketches alone."""

    dtype: torch.dtype
    sketched: bool = False


class AxisWeights(NamedTuple):
    """The weights of units along one axis, and the base's normals of these weights.

    :param value: of the draws' units, ``(L,) + batch + (units, d)``.
    :param loc: means of the places' weights, ``batch + (places, d)``; ``scale``: their
        deviations.
    :param odd: whether a unit's sign flips these weights.
    :param mean_square: of weights that are expectations themselves.
    """

    value: Tensor
    loc: Tensor
    scale: Tensor
    odd: bool
    mean_square: Tensor | None = None

    @property
    def square(self) -> Tensor:
        """The squares of the weights."""
        return self.value.square() if self.mean_square is None else self.mean_square

    def of(self, numbers: Tensor | slice) -> AxisWeights:
        """Return the weights of some units, and places of the same numbers."""
        return self._changed(lambda part: part[..., numbers, :])

    def sketch(self) -> AxisWeights:
        """Return the weights, at most ``SKETCH``, that separate the places most."""
        if self.loc.shape[-1] <= SKETCH:
            return self
        sampled = slice(None, None, max(1, self.loc.shape[-2] // 64))  # places
        loc = self.loc[..., sampled, :]
        apart = (loc - loc.mean(-2, keepdim=True)) / self.scale[..., sampled, :]
        separation = apart.square().flatten(0, -2).sum(0)
        columns = separation.topk(SKETCH).indices
        return self._changed(lambda part: part.index_select(-1, columns))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> AxisWeights:
        value, loc, scale = map(change, (self.value, self.loc, self.scale))
        square = self.mean_square
        changed_square = None if square is None else change(square)
        return AxisWeights(value, loc, scale, self.odd, changed_square)

    def signed(self, sign: int) -> Tensor:
        """Return the weights of units with a sign."""
        return sign * self.value if self.odd else self.value


class Product(NamedTuple):
    """A part of ``A``, and its factors.

    :param densities: ``(signs, L) + batch + (places, units)``.
    :param of_places: a row for each place; ``of_units``: for each unit with sign 1.
    """

    densities: Tensor
    of_places: Tensor
    of_units: Tensor

    def size(self, best: Tensor) -> Tensor:
        """Return the sum of absolute terms of each place's best unit: times the machine
        epsilon it bounds the rounding error."""
        return (self.of_places * rows_of(self.of_units, best)).abs().sum(-1)


def multiplied(of_places: Tensor, of_units: Sequence[Tensor]) -> Product:
    """Multiply the places' factor with the units', one for each sign."""
    products = [of_places @ factor.mT for factor in of_units]
    # stacking copies them, which takes half as long as the product
    densities = torch.stack(products) if len(products) > 1 else products[0].unsqueeze(0)
    return Product(densities, of_places, of_units[0])


def product_of(
    along: Sequence[AxisWeights], signs: Sequence[int], level: Level
) -> Product:
    r"""Return :math:`\sum_a (w_a m_a / s_a^2 - w_a^2 / 2 s_a^2)` for all pairs."""
    of_places = []
    of_units: list[list[Tensor]] = [[] for _ in signs]
    dtype = level.dtype
    for weights in along:
        weights = weights.sketch() if level.sketched else weights
        precision = weights.scale.to(dtype).square().reciprocal()
        of_places += [weights.loc.to(dtype) * precision, -0.5 * precision]
        for factors, sign in zip(of_units, signs, strict=True):
            factors += [weights.signed(sign).to(dtype), weights.square.to(dtype)]
    return multiplied(concatenate(of_places), [*map(concatenate, of_units)])


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the last axis; leading axes broadcast."""
    # several times faster than torch's
    shape = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


class Matrix(NamedTuple):
    """The matrix ``A`` of a set of units, up to a constant for each place.

    :param densities: the matrix, one for either sign if units have signs.
    :param best: the best unit of each place.
    :param certain: whether that one is certain.
    """

    densities: Tensor
    best: Tensor
    certain: Tensor


def refined(
    products: Callable[[Level], Sequence[Product]],
    levels: Sequence[Level],
    permuted: bool,
    expected: bool = False,
) -> Matrix:
    """Compute a matrix at one level after the other, until all places are certain or
    rounding doesn't matter.

    :param products: the parts of the matrix.
    :param permuted: whether units can be permuted.
    :param expected: whether it depends on an expectation; then no place is certain.
    """
    for level in levels:
        parts = products(level)
        densities = functools.reduce(torch.add, [part.densities for part in parts])
        with torch.no_grad():
            best, certain = best_columns(densities, permuted)
            sizes = functools.reduce(torch.add, [part.size(best) for part in parts])
            rounding = torch.finfo(level.dtype).eps * sizes
            certain = certain & (rounding < 1.0)
            if expected:
                certain = torch.zeros_like(certain)
            harmless = rounding * ~certain <= MAX_ROUNDING  # false of NaN
            if certain.all() or (harmless.all() and not level.sketched):
                break
    return Matrix(densities, best, certain)


# any base as normals ------------------------------------------------------------------


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Split flat vectors into the values that the group moves, by site in its view:
    unconstrained coordinates, or constrained values where elements move those; of a
    simplex the centred logarithms, which are closer to normal."""
    values = action.layout.unflatten(flat)
    for site in action.nonlinear_sites:
        value = action.layout.transforms[site](values[site])
        if site in action.simplex_sites:
            logs = value.clamp(min=torch.finfo(flat.dtype).tiny).log()
            value = logs - logs.mean(-1, keepdim=True)
        values[site] = value
    return action.group.viewed(values)


def mean_field_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    """Return the means and deviations of a product of normals, None of any other
    base.
    """
    while isinstance(base, Independent):
        base = base.base_dist
    return (base.loc, base.scale) if isinstance(base, Normal) else None


def _site_moments(
    base: Distribution, action: Action, value: Tensor
) -> tuple[Weights, Weights]:
    """Return means and deviations by site, of the base's batch shape: the base's own if
    it has some, else of draws.
    """
    moments = mean_field_moments(base)
    with torch.no_grad():
        with contextlib.suppress(NotImplementedError):
            moments = moments or (base.mean, base.stddev)
        if moments is None or action.nonlinear_sites:
            draws = sites_of(action, base.sample(torch.Size([FIT_DRAWS])))
            tiny = torch.finfo(value.dtype).tiny ** 0.25  # its inverse square is finite
            scale = map_values(lambda v: v.std(0).clamp(min=tiny), draws)
            return map_values(lambda v: v.mean(0), draws), scale
    loc, scale = (sites_of(action, moment) for moment in moments)
    return loc, scale


def unit_blocks(
    base: Distribution, action: Action, group: Group
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the means and precisions of the sets that share no site, if their units
    are the blocks of the base.
    """
    if not isinstance(base, UnitBlocks) or action.nonlinear_sites:
        return {}
    blocks = {}
    entries = sites_of(action, torch.arange(action.dim, device=base.loc.device))
    for name, units in unit_sets(group, action.sites).items():
        if units.shared:
            continue
        along = []
        for axis in units.exclusive:
            along.append(rows(entries[axis.site], axis, entries[axis.site].dim()))
        positions = torch.cat(along, -1)
        precisions = base.precisions(positions)
        if precisions is not None:
            blocks[name] = base.loc[positions].double(), precisions
    return blocks
