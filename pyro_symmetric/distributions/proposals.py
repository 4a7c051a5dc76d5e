r"""Proposals of ``SinkhornImportance``: random matchings of a draw's units to the
places of the base's units, from the log-densities of
:mod:`~pyro_symmetric.distributions.unit_densities`.

*One set of units* is matched as :mod:`~pyro_symmetric.distributions.random_matchings`
does, by the densities summed over the signs; then signs are drawn, given the matching.

*Several sets* are drawn in turn, each given those before: units inside others (rows of
an attention head) uniformly; sets whose places are all certain; then the rest. A set
yet to be drawn that moves the same weights along another axis takes part by its
expectation under its own doubly stochastic matrix, weighted by ``TRUST``; where no set
is known, units are compared by their weights in ascending order, or by magnitudes if a
set has signs. Signs of which nothing is known are those of a leading singular vector,
up to a common sign, which is drawn.

The proposal depends on the orbit of the draw alone: at :math:`h \cdot w` it is that at
``w``, moved along.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_symmetric.distributions.random_matchings import (
    doubly_stochastic,
    draw_matchings,
    rows_of,
    sign_log_odds,
    sum_over_signs,
)
from pyro_symmetric.distributions.unit_densities import (
    SKETCH,
    AxisWeights,
    Level,
    Matrix,
    Product,
    UnitDensities,
    product_of,
    refined,
)
from pyro_symmetric.groups.axes import Axis
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.weights import ByName

# The weight of the expectation of undrawn sets. At 1, early draws are confident
# mistakes: the identity then has a tiny probability and the bound a heavy tail; of two
# layers of 64 overlapping units it finds less than half as much.
TRUST = 0.3
# up to which a matrix is computed in float64 at once: cheaper than bounding the
# rounding
FEW_PRODUCTS = 2**16
ORIENTING_STEPS = 20  # of power iteration


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    r"""Draw the identity and ``count`` elements for each draw: sets of units are
    matched, or drawn uniformly.

    :return: elements of batch shape ``(count + 1,) + batch``, and their
        :math:`\log(|G|\,\tau)`: the logarithm of the probability of the matched sets
        times the number of their elements.
    """
    matching = Matching(units, count)
    if units.shared_sites:
        matching.draw_certain()
        for name in matching.undrawn:
            matching.expect(name)
    while matching.undrawn:
        name = matching.following()
        matching.draw(name, matching.matrix(name))
    return matching.element(), matching.log_tau


class Expectation(NamedTuple):
    """The probabilities that a place receives a unit of an undrawn set, ``(L,) + batch
    + (places, units)``, and the same times the unit's expected sign.
    """

    chances: Tensor
    signed: Tensor


class Matching:
    """Sets of units, drawn in turn: what is drawn so far, and what is known of others.

    Two layers share the matrix between them: its columns are units of the first, its
    rows of the second. To match the second layer one must know which column is which.

    :ivar undrawn: the names of the sets to match, in their order.
    :ivar log_tau: the logarithm of the probability of the sets matched so far times
        the number of all matched sets' elements, ``(count + 1,) + batch``.
    :ivar placed: the draws by site, with the drawn sets in place.
    :ivar expected: name -> what is expected of an undrawn set.
    :ivar unsigned: names of undrawn sets of whose signs nothing is known.
    """

    def __init__(self, units: UnitDensities, count: int):
        self.units = units
        self.count = count
        self.shape = (count + 1, *units.batch)
        self.undrawn = [name for name in units.sets if units.sets[name].matched]
        log_order = units.log_order(self.undrawn)
        self.log_tau = units.value.new_full(self.shape, log_order, dtype=torch.float64)
        self.permutations: ByName = {}
        self.signs: ByName = {}
        self.placed = dict(units.draws)
        self.expected: dict[str, Expectation] = {}
        self.unsigned: set[str] = set()
        self._exclusive: dict[tuple[str, Level], Product] = {}
        if len(self.undrawn) < len(units.sets):
            self._draw_uniformly()

    def element(self) -> Element:
        """Return the elements of what is drawn so far; units of undrawn sets stay."""
        value = self.units.value
        return Element(
            self.units.group,
            self.permutations,
            self.signs,
            batch_shape=self.shape,
            device=value.device,
            dtype=value.dtype,
        )

    # draws ----------------------------------------------------------------------------

    def _draw_uniformly(self) -> None:
        """Draw the sets that aren't matched."""
        value = self.units.value
        group = self.units.group.without(self.undrawn)
        uniform = group.sample(self.shape, device=value.device, dtype=value.dtype)
        for move, numbers in uniform.numbers.items():  # the first is the identity
            if move == "permute":
                numbers[0] = torch.arange(numbers.shape[-1], device=value.device)
            else:
                numbers[0] = 1.0
        self.permutations = dict(uniform.permutations)
        self.signs = dict(uniform.signs)
        self._place()

    def draw_certain(self) -> None:
        """Draw the sets whose places are all certain; each may make others certain."""
        before: list[str] = []
        while self.undrawn != before:
            before = list(self.undrawn)
            for name in before:
                matrix = self.quick_matrix(name)
                if matrix.certain.all():
                    self.draw(name, matrix)

    def following(self) -> str:
        """Return the first set of which signs are known, or that meets a drawn one."""
        for name in self.undrawn:
            if name not in self.unsigned or self._meets_drawn(name):
                return name
        return self.undrawn[0]

    def _meets_drawn(self, name: str) -> bool:
        """Return whether a set moves the same weights as a drawn set with signs."""
        for axis in self.units.sets[name].shared:
            for pairs in self.units.group.members(axis.site).values():
                if any(neighbour in self.signs for neighbour, _ in pairs):
                    return True
        return False

    def draw(self, name: str, matrix: Matrix) -> None:
        """Draw the permutations of a set, and signs given these; put it in place."""
        densities, best, certain = matrix
        units = self.units.group[name]
        images = best.expand(*self.shape, -1)
        log_prob = densities.new_zeros((), dtype=torch.float64)
        if "permute" in units.moves and units.size > 1:
            dtype = self.units.value.dtype
            drawn = draw_matchings(densities, self.count, best, certain, dtype)
            images, log_prob = drawn
        self.permutations[name] = images
        if len(densities) > 1:
            log_prob = log_prob + self._draw_signs(name, densities)
        self.log_tau = self.log_tau + log_prob
        self.undrawn.remove(name)
        # The first proposal is the identity: if all are alike, as with units far apart,
        # the draws are in place.
        numbers = (*self.permutations.values(), *self.signs.values())
        alike = all(bool((value == value[:1]).all()) for value in numbers)
        if self.units.shared_sites and not alike:
            self._place()

    def _draw_signs(self, name: str, densities: Tensor) -> Tensor:
        """Draw the signs of a matched set; return their log-probabilities."""
        images = self.permutations[name]
        log_odds = None
        if name in self.unsigned and torch.equal(densities[0], densities[1]):
            log_odds = self._log_odds_up_to_a_sign(name, images)
        if log_odds is None:
            log_odds = sign_log_odds(densities, images)
            signs = _drawn_signs(log_odds)
            log_prob = logsigmoid(log_odds * signs).sum(-1)
        else:
            common = torch.randint_like(log_odds[..., :1], 2).mul_(2).sub_(1)
            signs = _drawn_signs(common * log_odds)
            either = [logsigmoid(sign * log_odds * signs).sum(-1) for sign in (1, -1)]
            log_prob = torch.logaddexp(*either).double() - math.log(2)
        of_units = torch.empty_like(signs).scatter_(-1, images, signs)
        self.signs[name] = of_units.to(self.units.value)
        return log_prob

    def _log_odds_up_to_a_sign(self, name: str, images: Tensor) -> Tensor | None:
        """Return the log-odds of the sign of each place's unit, up to a sign that all
        share, in a matching; None if no weights have signs.

        Inner products of the weights of two units don't depend on what other sets do;
        those that agree in sign with that of the means speak for equal signs.
        """
        agreements = []
        for axis in self.units.sets[name].shared:
            value, loc, scale, odd, _ = self.units.along(axis, self.placed)
            if odd:
                value = rows_of(value, images)
                noise = scale.square() @ (loc.square() + scale.square()).mT
                products = (value @ value.mT) * (loc @ loc.mT)
                agreements.append(products / (noise + noise.mT))
        if not agreements:
            return None
        return _signs_that_agree(functools.reduce(torch.add, agreements))

    def _place(self) -> None:
        """Put what is drawn in place, on the sites that undrawn sets share."""
        element = self.element()
        shared = [self.units.sets[name].shared for name in self.undrawn]
        for site in {axis.site for axes in shared for axis in axes}:
            draws = self.units.draws[site]
            self.placed[site] = element.on_site(site, draws, self.units.dims(site))

    # matrices -------------------------------------------------------------------------

    def quick_matrix(self, name: str) -> Matrix:
        """Return a sketch of ``A``, by the weights that no undrawn set moves."""
        products = functools.partial(self._products, name, self._known(name))
        level = Level(torch.float64)
        if self._is_large(name):
            level = Level(self.units.value.dtype, sketched=True)
        return refined(products, [level], self.units.is_permuted(name))

    def matrix(self, name: str) -> Matrix:
        """Return ``A``, given the expectation of undrawn sets, or else by weights in
        ascending order.
        """
        shared = self.units.sets[name].shared
        known = self._known(name) or [self._profile(axis) for axis in shared]
        expected = any(self._undrawn_along(axis) for axis in shared)
        products = functools.partial(self._products, name, known)
        permuted = self.units.is_permuted(name)
        return refined(products, self._levels(name), permuted, expected)

    def expect(self, name: str) -> None:
        """Note the expectation of an undrawn set, given all that is known of others."""
        densities = self.matrix(name).densities
        count = densities.shape[-1]
        identity = torch.eye(count, dtype=densities.dtype, device=densities.device)
        chances = identity.expand_as(densities[0])
        if self.units.is_permuted(name):
            chances = doubly_stochastic(sum_over_signs(densities), 6)
        signed = chances
        if len(densities) > 1:
            signed = chances * ((densities[0] - densities[1]) / 2).tanh()
            if torch.equal(densities[0], densities[1]):
                self.unsigned.add(name)
        self.expected[name] = Expectation(chances, signed)

    def _levels(self, name: str) -> Sequence[Level]:
        """Return the levels at which a matrix is computed until it is good enough."""
        if not self._is_large(name):
            return (Level(torch.float64),)
        dtype = self.units.value.dtype
        levels = (Level(dtype), Level(torch.float64))
        draws = self.units.value[..., 0].numel() * self.units.group[name].count
        wide = max(self._site_sizes(name)) > SKETCH * draws
        return (Level(dtype, sketched=True), *levels) if wide else levels

    def _is_large(self, name: str) -> bool:
        """Return whether a matrix takes more than a few products."""
        entries = sum(self._site_sizes(name))
        return self.units.group[name].count * entries > FEW_PRODUCTS

    def _site_sizes(self, name: str) -> list[int]:
        units = self.units.sets[name]
        axes = units.exclusive + units.shared
        return [self.units.draws[axis.site].numel() for axis in axes]

    def _products(
        self, name: str, known: Sequence[AxisWeights], level: Level
    ) -> list[Product]:
        """Return the parts of ``A`` from exclusive and from shared sites."""
        products = []
        if self.units.sets[name].exclusive:
            # precisions that couple all weights of a unit have no sketch
            sketched = level.sketched and name not in self.units.blocks
            key = (name, level._replace(sketched=sketched))
            if key not in self._exclusive:
                self._exclusive[key] = self.units.exclusive_product(*key)
            products.append(self._exclusive[key])
        if known:
            signs = self.units.possible_signs(name)
            products.append(product_of(known, signs, level))
        if not products:
            count = self.units.group[name].count
            number = len(self.units.possible_signs(name))
            nothing = self.units.value.new_zeros(count, 1, dtype=level.dtype)
            units = nothing.expand(1, *self.units.batch, -1, -1)
            densities = (nothing @ units.mT).expand(number, *units.shape[:-1], count)
            products.append(Product(densities, nothing, units))
        return products

    def _known(self, name: str) -> list[AxisWeights]:
        """Return the weights of a set along shared axes, as far as they are known."""
        known = []
        for axis in self.units.sets[name].shared:
            weights = self.units.along(axis, self.placed)
            undrawn = self._undrawn_along(axis)
            if not undrawn:
                known.append(weights)
                continue
            neighbour, neighbour_axis = undrawn[0]
            if neighbour not in self.expected or not self._is_between(axis.site):
                continue
            if neighbour in self.unsigned and weights.odd:
                continue  # entries of any sign: their magnitudes say more
            chances, signed = self.expected[neighbour]
            signed = signed if neighbour_axis.exponent % 2 else chances
            value = TRUST * weights.value @ signed.to(weights.value).mT
            square = TRUST * weights.square @ chances.to(weights.value).mT
            known.append(weights._replace(value=value, mean_square=square))
        return known

    def _profile(self, axis: Axis) -> AxisWeights:
        """Return the weights of units along an axis in ascending order, and the means
        in ascending order.

        Of a site that several sets move no order is known at first: the sorted weights
        of a unit don't depend on that of other sets, nor do their magnitudes on signs.
        """
        sets = itertools.chain(*self.units.group.members(axis.site).values())
        signed = any("flip" in self.units.group[name].moves for name, _ in sets)
        value, loc, scale, odd, _ = self.units.along(axis, self.placed)
        if signed:
            value = value.abs()
            loc = loc.abs()
        value = value.sort(-1).values
        loc = loc.sort(-1).values
        spread = scale.square().mean(-1, keepdim=True).sqrt().expand_as(loc)
        return AxisWeights(value, loc, spread, odd and not signed)

    def _is_between(self, site: str) -> bool:
        """Return whether a site is a matrix whose rows are one set of units and whose
        columns are another.
        """
        shape = self.units.group.view_shapes[site]
        members = self.units.group.members(site)
        if not len(shape) == len(members) == 2:
            return False
        return all(pairs[0][1].fills(shape[dim]) for dim, pairs in members.items())

    def _undrawn_along(self, axis: Axis) -> list[tuple[str, Axis]]:
        """Return the undrawn units along other axes of the same site."""
        undrawn = []
        for dim, pairs in self.units.group.members(axis.site).items():
            if dim != axis.dim:
                undrawn += [pair for pair in pairs if pair[0] in self.undrawn]
        return undrawn


def _drawn_signs(log_odds: Tensor) -> Tensor:
    """Draw signs, the first of them those of the identity."""
    positive = torch.rand_like(log_odds) < log_odds.sigmoid()
    signs = torch.where(positive, 1.0, -1.0).to(log_odds)
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
