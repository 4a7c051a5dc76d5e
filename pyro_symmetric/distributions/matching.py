r"""Proposals of ``SinkhornImportance``: random matchings of a draw's units to the
places of the base's units.

Under a product of normals with means ``m`` and deviations ``s``, the log-density of a
draw whose units are permuted is a sum over places, :math:`\log q(p \cdot w) = \sum_j
A_{j\,p(j)} + \dots`, of the log-densities of unit ``i`` in place ``j``, up to a
constant for each place,

.. math:: A_{ji} = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big)

over the unit's weights ``a``, incoming and outgoing; units with signs have a matrix for
either sign. The importance weights are gathered from the same matrices.

*One set of units.* Places whose best unit is far ahead of all others are certain: they
take it. The others draw one after the other, without replacement, from the doubly
stochastic scaling of :math:`e^A`, summed over the signs (Sinkhorn & Knopp 1967); then
signs are drawn, given the matching.

*Several sets* are drawn in turn, each given those before: units inside others (rows of
an attention head) uniformly; sets whose places are all certain, by a sketch of their
weights; then the rest. A set yet to be drawn that moves the same weights along another
axis takes part by its expectation under its own doubly stochastic matrix, weighted by
``TRUST``; where no set is known, units are compared by their weights in ascending
order, or by magnitudes if a set has signs. Signs of which nothing is known are those of
a leading singular vector, up to a common sign, which is drawn.

Any base but a product of normals and of unit blocks is matched by its means and
deviations. The proposal depends on the orbit of the draw alone: at :math:`h \cdot w` it
is that at ``w``, moved along.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Axis, Element, Units, rows
from pyro_symmetric.weights import Weights, map_values

SKETCH = 256  # weights of a unit in its sketch
# to which normals are fitted if a base has no moments, or if constrained values are
# permuted
FIT_DRAWS = 256
# The weight of the expectation of undrawn sets. At 1, early draws are confident
# mistakes: the identity then has a tiny probability and the bound a heavy tail; of two
# layers of 64 overlapping units it finds less than half as much.
TRUST = 0.3
MAX_ROUNDING = 2e-3  # nats; a matrix with larger rounding errors is computed in float64
# up to which a matrix is computed in float64 at once: cheaper than bounding the
# rounding
FEW_PRODUCTS = 2**16
# to which weights are clamped, those of draws that aren't finite; its square is finite
LARGEST_WEIGHT = 1e12
# below the largest of their row log-densities count alike; e^-40 leaves room in float32
LOG_FLOOR = -40.0
# probability that each row spreads evenly over all columns: no matching has probability
# zero
SPREAD = 1e-4
# the least certain rows, matched jointly by enumerating their permutations
ENUMERATED_ROWS = 6
ORIENTING_STEPS = 20  # of power iteration
CERTAIN = 30.0  # nats by which the best column of a certain row is ahead of all others
# of uniform matchings among those with certain rows: no matching has probability zero
UNIFORM_SHARE = 2e-9


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    r"""Draw the identity and ``count`` elements for each draw: sets of units are
    matched, or drawn uniformly.

    :return: elements of batch shape ``(count + 1,) + batch``, and their
        :math:`\log(|G|\,\tau)`: the log-probabilities of the matched sets times the
        number of these sets' elements.
    """
    group = units.group
    value = units.value
    shape = (count + 1, *units.batch)
    options: dict[str, Any] = {
        "batch_shape": shape,
        "device": value.device,
        "dtype": value.dtype,
    }
    left = [name for name, one in units.sets.items() if one.matched]
    log_tau = value.new_full(shape, units.log_order(left), dtype=torch.float64)
    permutations = {}
    signs = {}
    if others := units.sets.keys() - set(left):
        uniform = group.without(left).sample(
            shape, device=value.device, dtype=value.dtype
        )
        for move, numbers in uniform.numbers.items():  # the first is the identity
            numbers[0] = (
                torch.arange(numbers.shape[-1], device=value.device)
                if move == "permute"
                else 1.0
            )
        permutations = dict(uniform.permutations)
        signs = dict(uniform.signs)
        units.place(others, Element(group, permutations, signs, **options))

    def match(name: str, densities: Tensor, best: Tensor, certain: Tensor) -> Tensor:
        """Draw a set and put it in place; return the log-probabilities."""
        images, flips, log_prob = draw_set(
            group[name],
            densities,
            count,
            best,
            certain,
            value.dtype,
            functools.partial(units.log_odds_up_to_a_sign, name, densities),
        )
        permutations[name] = images
        if flips is not None:
            signs[name] = flips.to(value)
        units.drawn.add(name)
        if not units.shared:
            return log_prob
        identity = torch.arange(images.shape[-1], device=images.device)
        if not (images == identity).all() or (
            flips is not None and not (flips > 0).all()
        ):
            element = Element(group, permutations, signs, **options)
            # If all proposals are alike, as with units far apart, one serves the sets
            # to come.
            alike = all(
                bool((v == v[:1]).all())
                for v in (*permutations.values(), *signs.values())
            )
            units.place([name], element.select(slice(0, 1)) if alike else element)
        return log_prob

    before: list[str] = []
    while units.shared and left != before:  # a certain set may make others certain
        before = list(left)
        for name in before:
            densities, best, certain = units.matrix(name, quick=True)
            if certain.all():
                log_tau = log_tau + match(name, densities, best, certain)
                left.remove(name)
            elif len(densities) == 1:
                units.best[name] = best, certain
    for name in left if units.shared else ():
        units.expect(name)
    while left:
        name = units.next_to_draw(left)
        log_tau = log_tau + match(name, *units.matrix(name))
        left.remove(name)
    return Element(group, permutations, signs, **options), log_tau


# densities ----------------------------------------------------------------------------


class UnitSet(NamedTuple):
    """The axes of a set of units, on sites that it alone moves and on shared ones; and
    whether it is matched.
    """

    exclusive: tuple[Axis, ...]
    shared: tuple[Axis, ...]
    matched: bool


def unit_sets(group: Group, sites: Iterable[str]) -> dict[str, UnitSet]:
    """Return the sets of units that move some sites. Those inside others aren't
    matched, nor those that share places with a matched set before them."""
    sets = {}
    taken: set[tuple[str, int, int]] = set()
    for name, one in group.units.items():
        axes = [axis for axis in group.axes(name) if axis.site in sites]
        places = {
            (axis.site, axis.dim, int(place))
            for axis in axes
            for place in axis.index.flatten()
        }
        matched = one.parent is None and one.copies == 1 and taken.isdisjoint(places)
        taken |= places if matched else set()
        if axes:
            movers = {
                axis.site: sum(map(len, group.members(axis.site).values()))
                for axis in axes
            }
            exclusive = tuple(axis for axis in axes if movers[axis.site] == 1)
            shared = tuple(axis for axis in axes if movers[axis.site] > 1)
            sets[name] = UnitSet(exclusive, shared, matched)
    return sets


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode in which it is filled
def _sets_of_action(
    action: Action, group: Group | None
) -> tuple[Group, dict[str, UnitSet]]:
    group = group or action.group.finite
    return group, unit_sets(group, action.sites)


class Matrix(NamedTuple):
    """The matrix ``A`` of a set of units.

    :param densities: the matrix, one for either sign if units have signs.
    :param best: the best unit of each place.
    :param certain: whether that one is certain.
    """

    densities: Tensor
    best: Tensor
    certain: Tensor


class Product(NamedTuple):
    """A part of ``A``, ``densities``, and the two factors whose product it is."""

    densities: Tensor
    of_places: Tensor
    of_units: Tensor


class DrawnSet(NamedTuple):
    """Matchings of a set of units: the unit that each place takes, ``(count + 1,) +
    batch + (n,)``, the units' signs, if they have some, and log-probabilities.
    """

    images: Tensor
    signs: Tensor | None
    log_prob: Tensor


class UnitDensities:
    """The matrices ``A`` of every set of units for some draws: exact if units are
    independent under the base, by means and deviations for any other base.

    :param value: draws, ``(L,) + batch_shape + (D,)``.
    :param group: permutations and signs, a part of the action's group; by default all
        of them.
    :ivar placed: the draws by site, in the group's view, with the sets in ``drawn`` put
        in place.
    :ivar best: name -> the best unit of each place of an undrawn set, and whether it is
        certain.
    :ivar expected: name -> of an undrawn set the probabilities that a place receives a
        unit, and the same times the unit's expected sign.
    :ivar unsigned: names of undrawn sets of whose signs nothing is known.
    :ivar blocks: name -> means ``(n, d)`` and precisions ``(n, d, d)`` of units with
        correlated weights.
    """

    def __init__(
        self,
        base: Distribution,
        action: Action,
        value: Tensor,
        group: Group | None = None,
    ):
        self.group, self.sets = _sets_of_action(action, group)
        self.value = value
        self.batch = value.shape[1:-1]
        self.draws = sites_of(action, value)
        self.loc, self.scale = _site_moments(base, action, value)
        self.blocks = unit_blocks(base, action, self.group)
        self.shared = {
            axis.site: None for one in self.sets.values() for axis in one.shared
        }
        self.placed = dict(self.draws)
        self.drawn = set[str]()
        self.best: dict[str, tuple[Tensor, Tensor]] = {}
        self.expected: dict[str, tuple[Tensor, Tensor]] = {}
        self.unsigned = set[str]()
        self._products: dict[Any, Any] = {}

    def log_order(self, names: Iterable[str]) -> float:
        """Return the log of the number of permutations and signs of some sets."""
        sets = [self.group[name] for name in names]
        permutations = sum(
            one.copies * math.lgamma(one.size + 1)
            for one in sets
            if "permute" in one.moves
        )
        return permutations + math.log(2) * sum(
            one.count for one in sets if "flip" in one.moves
        )

    def log_ratio(self, elements: Element) -> Tensor:
        r"""Return :math:`\log q(g \cdot w) - \log q(w)`, ``(K,) + batch``, with
        gradient.

        On sites that one set moves alone it is gathered from the set's matrix, at the
        places that any element changes; on shared sites the weights are moved.
        """
        shape = (elements.batch_shape[0], *self.batch)
        signs = elements.signs
        total = self.value.new_zeros(shape, dtype=torch.float64)
        # the elements other than the identity
        moving = self.value.new_zeros(shape[0], dtype=torch.bool)
        for name in self.sets:  # in their order, or sums would depend on the hash seed
            if name not in elements.group.units:
                continue
            images = elements.images(name).expand(*shape, -1)
            changed = images != torch.arange(images.shape[-1], device=images.device)
            flipped = torch.zeros_like(images)
            if name in signs:
                sign = signs[name].flatten(len(elements.batch_shape)).expand(*shape, -1)
                flipped = (sign.gather(-1, images) < 0).long()
                changed = changed | (flipped == 1)
            moving = moving | changed.flatten(1).any(1)
            changed = changed.flatten(0, -2).any(0)
            if torch._C._get_tracing_state() is not None:  # other elements will follow
                moving = torch.ones_like(moving)
                changed = torch.ones_like(changed)
            if not self.sets[name].exclusive or not changed.any():
                continue
            places = changed.nonzero()[:, 0]
            densities = self.exclusive_matrix(name, places)[:, 0]
            # flipped units follow the others
            column = (changed.cumsum(0) - 1)[images] + len(places) * flipped
            column = column[..., places].movedim(0, -1)
            moved = densities.movedim(0, -2).flatten(-2).gather(-1, column)
            total = (
                total
                + moved.sum(-2).movedim(-1, 0)
                - densities[0].diagonal(dim1=-2, dim2=-1).sum(-1)
            )
        if self.shared and moving.any():
            index = moving.nonzero()[:, 0]
            elements = elements.select(index)
            ratio = self.value.new_zeros(len(index), *self.batch)
            for site in self.shared:
                before = self.draws[site]
                dims = self._dims(site)
                after = elements.on_site(site, before, dims)
                change = (
                    -0.5
                    * (after - before)
                    * (after + before - 2 * self.loc[site])
                    / self.scale[site].square()
                )
                ratio = ratio + change.flatten(-dims).sum(-1)
            total = total.index_add(0, index, ratio.double())
        return total

    # matrices: one, or two where units have signs, ``(signs, L) + batch + (places, unit

    def matrix(self, name: str, quick: bool = False) -> Matrix:
        """Return ``A`` of a set, up to a constant a place; the best unit of each place,
        and whether it is certain.

        :param quick: compute it by a sketch. Undrawn sets then take part where their
            places are certain; otherwise by their expectation, and no place is certain.
        """
        one = self.sets[name]
        dtype = self.value.dtype
        sizes = [self.draws[axis.site].numel() for axis in one.exclusive + one.shared]
        levels = [(torch.float64, False)]
        if self.group[name].count * sum(sizes) > FEW_PRODUCTS:
            wide = (
                max(sizes)
                > SKETCH * self.group[name].count * self.value[..., 0].numel()
            )
            sketch = [(dtype, True)] if wide or quick else []
            levels = [*sketch, (dtype, False), *levels]
        parts = [axes for axes in (one.exclusive, one.shared) if axes]
        return self._refined(name, parts, levels[:1] if quick else levels, quick=quick)

    def exclusive_matrix(self, name: str, places: Tensor | None = None) -> Tensor:
        """Return the part of ``A`` that no other set concerns, for some places and
        units, or all.
        """
        levels = [(self.value.dtype, False), (torch.float64, False)]
        axes = (self.sets[name].exclusive,)
        return self._refined(name, axes, levels, places).densities

    def _refined(
        self,
        name: str,
        parts: Sequence[tuple[Axis, ...]],
        levels: Sequence[tuple[torch.dtype, bool]],
        places: Tensor | None = None,
        quick: bool = False,
    ) -> Matrix:
        """Compute a matrix at one level after the other, a precision and whether to
        sketch, until all places are certain or rounding doesn't matter. Places that
        depend on an expectation are never certain."""
        in_expectation = not quick and any(
            self._undrawn(axis) for axes in parts for axis in axes
        )
        for dtype, sketched in levels:
            products = [
                self._product(name, axes, dtype, sketched, places, quick)
                for axes in parts
            ]
            densities = sum(
                (product.densities for product in products[1:]), products[0].densities
            )
            with torch.no_grad():
                best, certain = best_columns(
                    densities, "permute" in self.group[name].moves
                )
                sizes = [
                    (p * u.take_along_dim(best.unsqueeze(-1), -2)).abs().sum(-1)
                    for _, p, u in products
                ]
                rounding = torch.finfo(dtype).eps * sum(sizes[1:], sizes[0])
                certain = (
                    torch.zeros_like(certain)
                    if in_expectation
                    else certain & (rounding < 1.0)
                )
                if certain.all():
                    break
                # false of NaN
                if not sketched and (rounding * ~certain <= MAX_ROUNDING).all():
                    break
        return Matrix(densities, best, certain)

    def _product(
        self,
        name: str,
        axes: tuple[Axis, ...],
        dtype: torch.dtype,
        sketched: bool,
        places: Tensor | None,
        quick: bool,
    ) -> Product:
        """Return the part of ``A`` from some axes: the product of a factor of the
        places and one of the units, and these factors."""
        # whose precisions couple all weights of a unit
        sketched = sketched and name not in self.blocks
        key = (name, dtype, sketched)
        kept = axes is self.sets[name].exclusive and places is None
        if kept and key in self._products:
            return self._products[key]
        signs = (1, -1) if "flip" in self.group[name].moves else (1,)
        of_places = []
        of_units = [list[Tensor]() for _ in signs]
        along = list(self._weights_along(axes, sketched, quick))
        if not along and not quick and axes is self.sets[name].shared:
            along = list(self._profiles_along(axes))
        for parity, *parts in along:
            parts = (
                parts if places is None else [part[..., places, :] for part in parts]
            )
            value, square, loc, scale = (part.to(dtype) for part in parts)
            precision = scale.square().reciprocal()
            of_places += [loc * precision, -0.5 * precision]
            for factors, sign in zip(of_units, signs, strict=True):
                factors += [sign**parity * value, square]
        if not of_places:  # nothing is known yet
            number = self.group[name].count if places is None else len(places)
            of_places = [self.value.new_zeros(number, 0, dtype=dtype)]
            of_units = [
                [self.value.new_zeros(1, *self.batch, number, 0, dtype=dtype)]
                for _ in signs
            ]
        elif name in self.blocks:
            blocks = (
                self.blocks[name]
                if places is None
                else [part[places] for part in self.blocks[name]]
            )
            loc, precision = (part.to(dtype) for part in blocks)
            of_places = [
                (precision @ loc.unsqueeze(-1))[..., 0],
                -0.5 * precision.flatten(-2),
            ]
            values = [concatenate(factors[::2]) for factors in of_units]
            of_units = [
                [value, (value.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-2)]
                for value in values
            ]
        place_factor = concatenate(of_places)
        unit_factors = [concatenate(factors) for factors in of_units]
        products = [place_factor @ factor.mT for factor in unit_factors]
        result = Product(
            torch.stack(products) if len(signs) > 1 else products[0][None],
            place_factor,
            unit_factors[0],
        )
        if kept and not torch.is_grad_enabled():
            self._products[key] = result
        return result

    def _weights_along(
        self, axes: Sequence[Axis], sketched: bool, quick: bool
    ) -> Iterator[tuple[Any, ...]]:
        """Yield for each axis its units' weights and their squares, ``(L,) + batch +
        (n, d)``, means and deviations.

        Other sets along the site are in place if they are drawn, else at their certain
        places (``quick``) or averaged over; axes of which neither is known are left
        out. Of wide sites between two sets, and of all if ``sketched``, the weights are
        those that separate the base's units.
        """
        for axis in axes:
            parts = (part[axis.site] for part in (self.placed, self.loc, self.scale))
            value, loc, scale = (
                rows(part, axis, self._dims(axis.site)) for part in parts
            )
            columns = None
            undrawn = self._undrawn(axis)
            wide = loc.shape[-1] > SKETCH
            other = undrawn[0][0] if undrawn else ""
            between = (undrawn or wide) and self._is_between(axis.site)
            if undrawn and not (
                between and other in (self.best if quick else self.expected)
            ):
                continue
            if other in self.unsigned and axis.exponent % 2:
                continue  # entries of any sign: their magnitudes say more
            if undrawn and quick:
                best, certain = self.best[other]
                columns = certain.flatten(0, -2).all(0).nonzero()[:, 0]
            if wide and (sketched or between):
                columns = _sketch(loc, scale, columns)
            if columns is not None:
                loc, scale = (part.index_select(-1, columns) for part in (loc, scale))
            if undrawn and quick:
                value = value.take_along_dim(best[..., columns].unsqueeze(-2), -1)
            elif columns is not None and not undrawn:
                value = value.index_select(-1, columns)
            value = value.nan_to_num(0.0).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
            square = value.square()
            if undrawn and not quick:
                of_places = slice(None) if columns is None else columns
                mix, signed = (
                    part[..., of_places, :].to(value).mT
                    for part in self.expected[other]
                )
                square = TRUST * square @ mix
                value = TRUST * value @ (signed if undrawn[0][1].exponent % 2 else mix)
            yield axis.exponent % 2, value, square, loc, scale

    def _profiles_along(self, axes: Sequence[Axis]) -> Iterator[tuple[Any, ...]]:
        """Yield for each axis its units' weights in ascending order, their squares, and
        the means in ascending order.

        Of a site that several sets move no order is known at first: the sorted weights
        of a unit don't depend on that of other sets, nor do their magnitudes on signs.
        Of more than :data:`SKETCH`, quantiles serve.
        """
        for axis in axes:
            sets = itertools.chain(*self.group.members(axis.site).values())
            signed = any("flip" in self.group[units].moves for units, _ in sets)
            value, loc, scale = (
                rows(part[axis.site], axis, self._dims(axis.site))
                for part in (self.placed, self.loc, self.scale)
            )
            value = value.nan_to_num(0.0).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
            if signed:
                value, loc = value.abs(), loc.abs()
            count = loc.shape[-1]
            places = torch.linspace(0, count - 1, min(count, SKETCH), device=loc.device)
            value, loc = (
                part.sort(-1).values.index_select(-1, places.long())
                for part in (value, loc)
            )
            spread = scale.square().mean(-1, keepdim=True).sqrt().expand_as(loc)
            parity = 0 if signed else axis.exponent % 2
            yield parity, value, value.square(), loc, spread

    def _is_between(self, site: str) -> bool:
        """Return whether a site is a matrix whose rows are one set of units and whose
        columns are another.
        """
        shape = self.group.view_shapes[site]
        members = self.group.members(site)
        return len(shape) == len(members) == 2 and all(
            own[0][1].fills(shape[d]) for d, own in members.items()
        )

    def _dims(self, site: str) -> int:
        return self.draws[site].dim() - 1 - len(self.batch)

    def _undrawn(self, axis: Axis) -> list[tuple[str, Axis]]:
        """Return the units along other axes of the same site that aren't drawn."""
        members = self.group.members(axis.site).items()
        return [
            own
            for dim, pairs in members
            if dim != axis.dim
            for own in pairs
            if own[0] not in self.drawn
        ]

    # other sets -----------------------------------------------------------------------

    def expect(self, name: str) -> None:
        """Note the expectation of an undrawn set, given all that is known of others."""
        densities = self.matrix(name).densities
        mix = torch.eye(
            densities.shape[-1], dtype=densities.dtype, device=densities.device
        ).expand_as(densities[0])
        if "permute" in self.group[name].moves:
            mix = doubly_stochastic(sum_over_signs(densities), 6)
        self.expected[name] = (
            mix,
            mix
            if len(densities) == 1
            else mix * ((densities[0] - densities[1]) / 2).tanh(),
        )
        if _says_nothing_of_signs(densities):
            self.unsigned.add(name)

    # signs of sets that meet ----------------------------------------------------------

    def next_to_draw(self, names: Sequence[str]) -> str:
        """Return the first set of which signs are known, or that meets a drawn one."""
        for name in names:
            if name not in self.unsigned or self._meets_drawn(name):
                return name
        return names[0]

    def _meets_drawn(self, name: str) -> bool:
        """Return whether a set moves the same weights as a drawn set with signs."""
        for axis in self.sets[name].shared:
            for pairs in self.group.members(axis.site).values():
                for other, _ in pairs:
                    if other in self.drawn and "flip" in self.group[other].moves:
                        return True
        return False

    def log_odds_up_to_a_sign(
        self, name: str, densities: Tensor, images: Tensor
    ) -> Tensor | None:
        """Return the log-odds of the sign of each place's unit, up to a sign that all
        share, in a matching; None if densities tell more.

        Inner products of the weights of two units don't depend on what other sets do;
        those that agree in sign with that of the means speak for equal signs.
        """
        if name not in self.unsigned or not _says_nothing_of_signs(densities):
            return None
        agreement = densities.new_zeros(())
        for axis in self.sets[name].shared:
            if axis.exponent % 2 == 0:
                continue
            value, loc, scale = (
                rows(part[axis.site], axis, self._dims(axis.site))
                for part in (self.placed, self.loc, self.scale)
            )
            value = value.nan_to_num(0.0).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
            value = value.take_along_dim(images.unsqueeze(-1), -2)
            noise = scale.square() @ (loc.square() + scale.square()).mT
            products = (value @ value.mT) * (loc @ loc.mT)
            agreement = agreement + products / (noise + noise.mT)
        return _signs_that_agree(agreement) if agreement.dim() else None

    def place(self, names: Iterable[str], element: Element) -> None:
        """Put drawn sets in place on the sites that undrawn sets share."""
        self.drawn.update(names)
        sites = {
            axis.site
            for name, one in self.sets.items()
            if name not in self.drawn
            for axis in one.shared
        }
        self.placed |= {
            site: element.on_site(site, self.draws[site], self._dims(site))
            for site in sites
        }


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the last axis; leading axes broadcast."""
    # several times faster than torch's
    shape = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


def _sketch(loc: Tensor, scale: Tensor, columns: Tensor | None) -> Tensor:
    """Select the weights, at most ``SKETCH``, that separate the base's units most, from
    some columns or all.
    """
    some = slice(None, None, max(1, loc.shape[-2] // 64))
    loc = loc.detach()[..., some, :]
    scale = scale.detach()[..., some, :]
    separation = ((loc - loc.mean(-2, keepdim=True)) / scale).square()
    separation = separation.reshape(-1, separation.shape[-1]).sum(0)
    columns = (
        torch.arange(len(separation), device=separation.device)
        if columns is None
        else columns
    )
    return columns[separation[columns].topk(min(SKETCH, len(columns))).indices]


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
    blocks = {}
    if isinstance(base, UnitBlocks) and not action.nonlinear_sites:
        entries = sites_of(action, torch.arange(action.dim, device=base.loc.device))
        for name, one in unit_sets(group, action.sites).items():
            axes = one.exclusive + one.shared
            units = torch.cat(
                [
                    rows(entries[axis.site], axis, entries[axis.site].dim())
                    for axis in axes
                ],
                -1,
            )
            precisions = None if one.shared else base.precisions(units)
            if precisions is not None:
                blocks[name] = base.loc[units].double(), precisions
    return blocks


# random matchings ---------------------------------------------------------------------


def sum_over_signs(densities: Tensor) -> Tensor:
    """Return the log of the densities summed over the sign of each unit, if units have
    signs.
    """
    return densities.logsumexp(0) if len(densities) > 1 else densities[0]


def best_columns(densities: Tensor, permuted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the best column of each row, ``(L,) + batch + (n,)``, and whether it, and
    its sign, are certain.

    No row is certain unless each has a best column of its own: then every other
    matching is worse by the margins.
    """
    highest = densities.amax(0) if len(densities) > 1 else densities[0]
    identity = torch.arange(densities.shape[-1], device=densities.device)
    best = identity.expand(highest.shape[:-1])
    certain = torch.ones(highest.shape[:-1], dtype=torch.bool, device=identity.device)
    if permuted:
        first = highest.amax(-1)
        if not torch.equal(
            highest.diagonal(dim1=-2, dim2=-1), first
        ):  # at draws of the base often equal; argmax is slow
            best = highest.argmax(-1)
            certain = (best.sort(-1).values == identity).all(-1, keepdim=True)
        second = highest.scatter(-1, best.unsqueeze(-1), -math.inf).amax(-1)
        certain = certain & (first - second > CERTAIN)
    if len(densities) > 1:
        both = densities.take_along_dim(best.expand(2, *best.shape).unsqueeze(-1), -1)[
            ..., 0
        ]
        certain = certain & ((both[0] - both[1]).abs() > CERTAIN)
    return best, certain


def doubly_stochastic(
    densities: Tensor, iterations: int = 12, dtype: torch.dtype | None = None
) -> Tensor:
    """Scale ``exp(densities)``, ``batch + (n, n)``, to a doubly stochastic matrix
    (Sinkhorn & Knopp 1967); rows sum to one exactly."""
    kernel = (
        densities.log_softmax(-1)
        .log_softmax(-2)
        .to(dtype or densities.dtype)
        .clamp(min=LOG_FLOOR)
        .exp()
    )
    columns = torch.ones_like(kernel[..., :1])
    for _ in range(iterations):
        columns = (kernel.mT @ (kernel @ columns).reciprocal()).reciprocal()
    scaled = kernel * columns.mT
    return scaled / scaled.sum(-1, keepdim=True)


def draw_set(
    units: Units,
    densities: Tensor,
    count: int,
    best: Tensor,
    certain: Tensor,
    dtype: torch.dtype,
    log_odds_in: Callable[[Tensor], Tensor | None],
) -> DrawnSet:
    """Draw the identity and ``count`` permutations of one set of units, and signs given
    these.

    :param log_odds_in: the log-odds of the sign at each place in a matching, up to a
        common sign, which is then drawn; None if densities tell more.
    """
    shape = (count + 1, *best.shape[1:])
    images = best.expand(shape)
    log_prob = densities.new_zeros((), dtype=torch.float64)
    if "permute" in units.moves and units.size > 1:
        images, log_prob = draw_matchings(densities, count, best, certain, dtype)
    if len(densities) == 1:
        return DrawnSet(images, None, log_prob)
    log_odds = log_odds_in(images)
    if log_odds is not None:
        common = torch.randint_like(log_odds[..., :1], 2).mul_(2).sub_(1)
        signs = _drawn_signs(common * log_odds)
        either = [logsigmoid(sign * log_odds * signs).sum(-1) for sign in (1, -1)]
        log_prob = log_prob + torch.logaddexp(*either) - math.log(2)
    else:
        both = densities.expand(2, *shape[:-1], -1, -1).gather(
            -1, images.expand(2, *shape).unsqueeze(-1)
        )
        log_odds = (both[0] - both[1])[..., 0]
        signs = _drawn_signs(log_odds)
        log_prob = log_prob + logsigmoid(log_odds * signs).sum(-1)
    of_units = torch.empty_like(signs).scatter_(-1, images, signs)
    return DrawnSet(images, of_units, log_prob)


def _says_nothing_of_signs(densities: Tensor) -> bool:
    """Return whether units have signs, and densities are those of either sign."""
    return len(densities) > 1 and torch.equal(densities[0], densities[1])


def _drawn_signs(log_odds: Tensor) -> Tensor:
    """Draw signs, the first of them those of the identity."""
    drawn = torch.rand_like(log_odds) < log_odds.sigmoid()
    signs = torch.where(drawn, 1.0, -1.0).to(log_odds)
    signs[0] = 1.0
    return signs


def _signs_that_agree(agreement: Tensor) -> Tensor:
    """Return the log-odds of signs, given those of all others in the leading
    eigenvector, which is found by power iteration.

    :param agreement: ``(n, n)``, how much speaks for equal signs of two units.
    """
    agreement = agreement - agreement.diagonal(dim1=-2, dim2=-1).diag_embed()
    sizes = agreement.abs().sum(-1)
    positive = agreement + sizes.diag_embed()
    longest = sizes.argmax(-1)[..., None, None]
    vector = positive.take_along_dim(longest, -2).mT
    for _ in range(ORIENTING_STEPS):
        vector = positive @ (vector / vector.norm(dim=-2, keepdim=True))
    return (agreement @ vector.sign())[..., 0].nan_to_num(0.0)  # of zeros


def draw_matchings(
    densities: Tensor,
    count: int,
    best: Tensor,
    certain: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the identity and ``count`` matchings: certain rows take their best column,
    the others are drawn.

    With probability ``UNIFORM_SHARE`` a matching is uniform instead; a uniform draw
    that keeps the certain rows is rejected.

    :param densities: ``A``, ``(signs, 1 or count + 1) + batch + (n, n)``.
    :param best: the best column of each row, and whether it is ``certain``, as
        :func:`best_columns` returns them.
    :param dtype: the precision of the probabilities.
    :return: the column that each row takes, ``(count + 1,) + batch + (n,)``, and
        log-probabilities.
    """
    n = best.shape[-1]
    shape = (count + 1, *best.shape[1:])
    identity = torch.arange(n, device=best.device)
    number = int((~certain).sum(-1).amax())
    if 2 * number > n:
        return draw_all(sum_over_signs(densities), count, identity, dtype)
    drawn_rows = certain.long().argsort(-1)[..., :number]
    columns = best.gather(-1, drawn_rows)
    images = best.expand(shape).clone()
    log_tau = torch.zeros(shape[:-1], dtype=torch.float64, device=best.device)
    if number:
        block = densities.take_along_dim(
            drawn_rows.expand(len(densities), *drawn_rows.shape).unsqueeze(-1), -2
        )
        block = block.take_along_dim(
            columns.expand(len(densities), *columns.shape).unsqueeze(-2), -1
        )
        own = (columns.unsqueeze(-2) == drawn_rows.unsqueeze(-1)).long().argmax(-1)
        taken, log_tau = draw_all(sum_over_signs(block), count, own, dtype)
        taken = columns.expand(*shape[:-1], -1).gather(-1, taken)
        images.scatter_(-1, drawn_rows.expand(*shape[:-1], -1), taken)
    images[0] = identity
    log_tau = log_tau + math.log1p(-UNIFORM_SHARE)
    uniform = torch.rand(shape[:-1], device=best.device) < UNIFORM_SHARE
    if uniform.any():
        uniform[0] = False
        uniform_images = torch.rand(images.shape, device=best.device).argsort(-1)
        images = torch.where(uniform.unsqueeze(-1), uniform_images, images)
        log_tau = log_tau.masked_fill(uniform, math.inf)
    free = torch.zeros_like(certain).scatter_(-1, drawn_rows, True)
    # a certain row takes another column: only uniform draws do
    outside = ~((images == best) | free).all(-1)
    return images, log_tau.masked_fill(
        outside, math.log(UNIFORM_SHARE) - math.lgamma(n + 1)
    )


def draw_all(
    densities: Tensor, count: int, identity: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Draw matchings of all rows: the most certain rows first, the last ones by
    enumerating their permutations.

    :param identity: the column that each row takes in the first matching, which isn't
        drawn.
    """
    n = densities.shape[-1]
    shape = (count + 1, *densities.shape[1:])
    early = max(0, n - ENUMERATED_ROWS)
    order = torch.arange(n, device=densities.device).expand(shape[:-1])
    taken = identity.expand(shape[:-1]).clone()
    log_tau = order.new_zeros(shape[:-2], dtype=torch.float64)
    if early:
        chances = (1 - SPREAD) * doubly_stochastic(densities, dtype=dtype) + SPREAD / n
        order = chances.square().sum(-1).argsort(-1, descending=True)
        chances = chances.gather(
            -2, order[..., :early].unsqueeze(-1).expand(*order.shape[:-1], early, n)
        )
        order = order.expand(shape[:-1])
        taken = taken.gather(-1, order)  # by the rows in this order
        if count:
            taken[1:, ..., :early] = _without_replacement(chances, count)
            free = torch.ones_like(taken).scatter_(-1, taken[..., :early], 0)
            taken[1:, ..., early:] = free[1:].topk(n - early).indices.sort(-1).values
        # Each row's probability is normalised over the columns that earlier rows leave
        # free.
        free = chances.expand(count + 1, *chances.shape[1:])
        free = free.gather(-1, taken.unsqueeze(-2).expand(*shape[:-2], early, n))
        log_tau = (
            (free.diagonal(dim1=-2, dim2=-1) / free.triu().sum(-1))
            .log()
            .sum(-1, dtype=torch.float64)
        )
    # The last rows take the remaining columns in one of all orders; order 0 is the one
    # in ``taken``.
    orders = _orders(n - early, densities.device)
    late = torch.arange(n - early, device=densities.device)
    block = densities.expand(shape).take_along_dim(order[..., early:].unsqueeze(-1), -2)
    block = block.take_along_dim(taken[..., early:].unsqueeze(-2), -1)
    log_probs = (
        block.flatten(-2)[..., orders + (n - early) * late].sum(-1).log_softmax(-1)
    )
    chosen = (log_probs - torch.empty_like(log_probs).exponential_().log_()).argmax(-1)
    chosen[0] = 0
    taken[..., early:] = taken[..., early:].gather(-1, orders[chosen])
    return taken.gather(-1, order.argsort(-1)), log_tau + log_probs.gather(
        -1, chosen.unsqueeze(-1)
    )[..., 0]


def _without_replacement(chances: Tensor, count: int) -> Tensor:
    """Draw a column for each row, no column twice, as if one row after the other:
    ``(L,) + batch + (rows, n)`` -> ``(count,) + batch + (rows,)``.

    All rows draw at once. Of those that want the same column the first keeps it; the
    others draw again, among the columns that no earlier row holds, until each row has
    its own.
    """
    shared, size, n = len(chances) == 1, *chances.shape[-2:]
    drawn = torch.multinomial(
        chances.reshape(-1, n), count if shared else 1, replacement=True
    )
    drawn = drawn.reshape(*chances.shape[:-1], -1)
    choice = drawn[0].movedim(-1, 0) if shared else drawn[1:, ..., 0]
    batch = choice.shape[1:-1]
    choice = choice.reshape(count, -1, size)
    chances, index = (
        chances.reshape(len(chances), -1, size, n),
        torch.arange(size, device=chances.device),
    )
    while True:
        # the first row that wants each column
        holder = index.new_full((*choice.shape[:2], n), size)
        holder = holder.scatter_reduce(-1, choice, index.expand_as(choice), "amin")
        k, draw, row = (holder.gather(-1, choice) < index).nonzero(as_tuple=True)
        if len(k) == 0:
            return choice.reshape(count, *batch, size)
        left = chances[0 if shared else k + 1, draw, row] * (
            holder[k, draw] > row.unsqueeze(-1)
        )
        choice = choice.index_put(
            (k, draw, row), (left / torch.empty_like(left).exponential_()).argmax(-1)
        )


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _orders(n: int, device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.permutations(range(n))), device=device)
