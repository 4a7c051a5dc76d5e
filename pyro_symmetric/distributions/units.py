r"""Log-densities of one unit's weights under another unit's factors: what matchings of units are made from.

For a base density whose weights are independent normals, and a factor that moves units, the log-density of a moved draw
is a sum over positions, :math:`\log q(p \cdot w) = \sum_j A_{j\,p(j)} + \dots`, with

.. math:: A_{ji} = \sum_{a} \log \mathcal N(w_{i,a} \mid m_{j,a}, s_{j,a})
   = \sum_a \Big( w_{i,a} \frac{m_{j,a}}{s_{j,a}^2} - \frac{w_{i,a}^2}{2 s_{j,a}^2} \Big) + c_j ,

over all weights ``a`` of a unit, incoming and outgoing: an inner product of features of the draw, :math:`(w, w^2)`,
with features of the base. Where a weight lies between two factors (a matrix between two hidden layers), the features of
the draw are first moved by the other factor's permutation, or averaged over a doubly stochastic matrix in its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric.distributions.normals import Normals
from pyro_symmetric.distributions.unit_sets import UnitSets
from pyro_symmetric.symmetry.factor import Axis
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.weights import Weights

# Entries of a matrix further than this below the best of their row are never drawn.
COMPETING = 50.0
# Rounding errors, in nats, beyond which a matrix is computed again in float64.
ROUNDING = 2e-3


@dataclass(frozen=True, eq=False)
class Neighbour:
    """Another moved axis of a term's site: along which dimension, by which factor, where its units lie, and whether
    their signs flip it."""

    dim: int
    factor: str
    index: Tensor
    flips: bool


@dataclass(frozen=True, eq=False)
class Term:
    """One axis of a factor and what else moves the same site."""

    axis: Axis
    plain: bool  # whether unit i simply is position i
    flips: bool  # whether the units' signs flip it
    others: tuple[Neighbour, ...]


@dataclass(frozen=True, eq=False)
class Placement:
    """How a neighbouring factor enters: by drawn elements, or by what to expect of them.

    :param where: LongTensor ``(L, N, n)``, the unit at each position; or a matrix ``(L, N, n, n)``, its probabilities.
    :param signs: for drawn elements the signs of the units, ``(L, N, n)``; for a matrix the expected signs times the
        probabilities. None where there are no signs.
    """

    where: Tensor
    signs: Tensor | None = None

    @property
    def drawn(self) -> bool:
        return not self.where.is_floating_point()


@dataclass(frozen=True, eq=False)
class UnitScores:
    """The matrix ``A`` of one factor, ``(L, N, n, n)``, positions by units.

    :param even: what doesn't depend on the units' signs.
    :param odd: what changes its sign with them; None where they have none.
    """

    even: Tensor
    odd: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Summed over the signs of each unit, up to a constant."""
        if self.odd is None:
            return self.even
        size = self.odd.abs()
        return self.even + size + torch.log1p((-2 * size).exp())

    def expected_placement(self, matrix: Tensor) -> Placement:
        """What to expect of the factor, given its doubly stochastic matrix."""
        return Placement(matrix, None if self.odd is None else matrix * self.odd.tanh())


class UnitDensities:
    """The matrices ``A`` of every set of units, for one base density and one batch of draws.

    :param sets: whose units they are.
    :param base: the normals; leading dimension 1 where all draws share them.
    :param draws: site -> ``(N, *site_shape)``.
    """

    def __init__(self, sets: UnitSets, base: Normals, draws: Weights):
        self.sets = sets
        self.group = sets.permutations
        device = next(iter(draws.values())).device
        self._terms = _terms_of(sets, tuple(draws), device)
        self._base = base
        self._draws = draws
        self._free_scores: dict[str, UnitScores] = {}
        self._centred: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors that have anything to move."""
        return tuple(self._terms)

    def neighbours(self, name: str) -> set[str]:
        """The factors that share a site with this one; itself, where it moves two axes of one."""
        return {other.factor for term in self._terms[name] for other in term.others}

    def is_alone(self, name: str) -> bool:
        """Whether no other factor moves any of its sites, and it moves each of them along one axis."""
        sites = {term.axis.site for term in self._terms[name]}
        moving = [other for other, terms in self._terms.items() if sites & {term.axis.site for term in terms}]
        return moving == [name] and len(sites) == len(self._terms[name])

    def terms(self, name: str) -> tuple[Term, ...]:
        """The axes along which the factor moves sites."""
        return self._terms[name]

    @torch.no_grad()
    def scores(self, name: str, placements: Mapping[str, Placement]) -> UnitScores | None:
        """The matrix ``A`` of one factor, up to a constant for each position; without gradient.

        :param placements: of the neighbours. Sites that lie between this factor and one that isn't placed don't count.
        :return: ``L`` is 1 or that of the placements; None if no site counts.
        """
        if self.neighbours(name):
            return self._scores(name, placements)
        return self.free_scores(name)

    @torch.no_grad()
    def free_scores(self, name: str) -> UnitScores:
        """The same for a factor without neighbours, computed once."""
        if name not in self._free_scores:
            scores = self._scores(name, {})
            if scores is None:
                raise ValueError(f"factor {name!r} moves no site of the draws")
            self._free_scores[name] = scores
        return self._free_scores[name]

    @torch.no_grad()
    def centred(self, site: str) -> tuple[Tensor, Tensor, Tensor]:
        """Draws and means of a site, centred so that squares cancel less, and precisions; without gradient.

        The centre is one number for all positions that are exchanged, and zero where signs are flipped.
        """
        if site not in self._centred:
            loc = self._base.loc[site]
            centre: Tensor | float = 0.0
            if not self.sets.is_flipped(site):
                centre = loc.mean([dim + 1 for dim in self.group.members(site)], keepdim=True)
            precision = self._base.scale[site].square().reciprocal_()
            self._centred[site] = (self._draws[site] - centre, loc - centre, precision)
        return self._centred[site]

    def _scores(self, name: str, placements: Mapping[str, Placement]) -> UnitScores | None:
        scores, squares = self._summed_terms(name, placements, None)
        if scores is not None and squares is not None and _rounding_error(scores.total, squares) > ROUNDING:
            scores, _ = self._summed_terms(name, placements, torch.float64)
        return scores

    def _summed_terms(
        self, name: str, placements: Mapping[str, Placement], dtype: torch.dtype | None
    ) -> tuple[UnitScores | None, Tensor | None]:
        """The matrix, computed in the given precision, and the part of it that other parts cancel."""
        even: Tensor | None = None
        odd: Tensor | None = None
        squares: Tensor | None = None
        for term in self._terms[name]:
            if any(other.factor not in placements for other in term.others):
                continue
            linear, quadratic = self._term_scores(term, placements, dtype)
            squares = quadratic if squares is None else squares + quadratic
            even = quadratic if even is None else even + quadratic
            if term.flips:
                odd = linear if odd is None else odd + linear
            else:
                even = even + linear
        if even is None:
            return None, None
        # Where no flipped site counts yet, signs are open: expected to be zero, not plus one.
        odd = torch.zeros_like(even) if odd is None and name in self.sets.sign_of else odd
        # A draw that isn't finite is matched anyhow; its density says what it is.
        finite = [part if part is None else part.nan_to_num(0.0, 0.0, -1e30) for part in (even, odd)]
        return UnitScores(finite[0], finite[1]), squares  # type: ignore[arg-type]

    def _term_scores(
        self, term: Term, placements: Mapping[str, Placement], dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        value, loc, precision = (part.to(dtype or part.dtype) for part in self.centred(term.axis.site))
        linear, quadratic = value[None], value.square()[None]
        for other in term.others:
            linear = _placed(linear, other, placements[other.factor], other.flips)
            quadratic = _placed(quadratic, other, placements[other.factor], False)
        linear, quadratic = unit_view(linear, term, 2).mT, unit_view(quadratic, term, 2).mT
        return unit_view(loc * precision, term, 1) @ linear, -0.5 * (unit_view(precision, term, 1) @ quadratic)


def pair_log_densities(units: UnitDensities, name: str) -> Tensor:
    """The matrix ``A`` of one factor, constants included and differentiable: ``(N, n, n)``.

    Every site that the factor moves must be moved along one axis only, or the others be moved in the draws already.
    """
    total: Tensor | None = None
    for term in units.terms(name):
        site = term.axis.site
        value, loc, scale = units._draws[site], units._base.loc[site], units._base.scale[site]
        precision = scale.square().reciprocal()
        features = torch.cat([unit_view(part, term, 1) for part in (value, value.square())], -1)
        against = torch.cat([unit_view(part, term, 1) for part in (loc * precision, -0.5 * precision)], -1)
        constant = -0.5 * loc.square() * precision - scale.log() - 0.5 * math.log(2 * math.pi)
        score = against @ features.mT + unit_view(constant, term, 1).sum(-1, keepdim=True)
        total = score if total is None else total + score
    if total is None:
        raise ValueError(f"factor {name!r} moves no site of the draws")
    return total


def independent_factors(group: PermutationGroup, widest: int | None = None) -> tuple[str, ...]:
    """Factors of which no two share a site, chosen from the largest on; none where factors are nested.

    Left out, too, are factors of sites along which an axis spans several, as in grouped convolutions.

    :param widest: leave out factors of more units.
    """
    if any(group.factor(name).parent is not None for name in group.factors):
        return ()
    spanned = {axis.site for name in group.factors for axis in group.factor(name).axes if axis.span > 1}
    chosen: dict[str, set[str]] = {}
    for name in sorted(group.factors, key=lambda name: -group.factors[name]):
        axes = group.factor(name).axes
        sites = {axis.site for axis in axes}
        plain = sites.isdisjoint(spanned)
        along_one = len({(axis.site, axis.dim) for axis in axes}) == len(sites)
        apart = all(sites.isdisjoint(others) for others in chosen.values())
        if group.factors[name] > 1 and group.factors[name] <= (widest or math.inf) and along_one and apart and plain:
            chosen[name] = sites
    return tuple(chosen)


def unit_view(value: Tensor, term: Term, lead: int) -> Tensor:
    """``lead dims + site`` -> ``lead dims + (n, everything else of a unit)``."""
    dim = lead + term.axis.dim
    if term.plain:
        return value.movedim(dim, lead).flatten(lead + 1) if value.dim() > lead + 1 else value.unsqueeze(-1)
    blocks, n = term.axis.index.shape
    picked = value.index_select(dim, term.axis.index.reshape(-1)).unflatten(dim, (blocks, n))
    return picked.movedim(dim + 1, lead).flatten(lead + 1)


def _rounding_error(scores: Tensor, squares: Tensor) -> float:
    """About how far rounding may have moved the entries that compete: those near the best of their row, if several."""
    competing = scores >= scores.amax(-1, keepdim=True) - COMPETING
    competing &= competing.sum(-1, keepdim=True) > 1
    return float((squares.abs() * competing).amax()) * torch.finfo(scores.dtype).eps


# small steps --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _terms_of(sets: UnitSets, sites: tuple[str, ...], device: torch.device) -> dict[str, tuple[Term, ...]]:
    """The terms of every set; sites without draws are buffers, which have no density."""
    group = sets.permutations
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        return {
            name: tuple(_term(sets, name, axis, device) for axis in group.factor(name).axes if axis.site in sites)
            for name in group.factors
        }


def _term(sets: UnitSets, name: str, axis: Axis, device: torch.device) -> Term:
    length = sets.permutations.site_shapes[axis.site][axis.dim]
    plain = len(axis.index) == 1 and torch.equal(axis.index[0].cpu(), torch.arange(length))
    others = tuple(
        Neighbour(dim, other, member.index.to(device), sets.flips(other, axis.site, dim))
        for dim, members in sets.permutations.members(axis.site).items()
        for other, member in members
        if dim != axis.dim
    )
    return Term(replace(axis, index=axis.index.to(device)), plain, sets.flips(name, axis.site, axis.dim), others)


def _placed(value: Tensor, other: Neighbour, placement: Placement, flips: bool) -> Tensor:
    """A site's features with a neighbour's units where they are placed, with their signs where these flip them."""
    signs = placement.signs if flips else None
    if placement.drawn:
        return _permuted(value, other.dim, other.index, placement.where, signs)
    return _mixed(value, other.dim, other.index, placement.where if signs is None else signs)


def _apart(value: Tensor, dim: int, index: Tensor) -> Tensor:
    """Bring the units along axis ``dim`` of the site (two leading dims) to the end: ``(L, N, ..., blocks, n)``."""
    picked = value.index_select(dim + 2, index.reshape(-1)).unflatten(dim + 2, tuple(index.shape))
    return picked.movedim((dim + 2, dim + 3), (-2, -1))


def _together(units: Tensor, value: Tensor, dim: int, index: Tensor) -> Tensor:
    """Undo :func:`_apart`; positions that the factor doesn't move keep their value."""
    moved = units.movedim((-2, -1), (dim + 2, dim + 3)).flatten(dim + 2, dim + 3)
    if index.numel() == value.shape[dim + 2] and torch.equal(index.reshape(-1), torch.arange(index.numel()).to(index)):
        return moved
    whole = value.expand(*moved.shape[:2], *value.shape[2:]).clone()
    return whole.index_copy_(dim + 2, index.reshape(-1), moved)


def _permuted(value: Tensor, dim: int, index: Tensor, images: Tensor, signs: Tensor | None) -> Tensor:
    units = _apart(value, dim, index)
    lead = torch.broadcast_shapes(units.shape[:2], images.shape[:2])
    between = [1] * (units.dim() - 3)
    if signs is not None:
        units = units * signs.reshape(*signs.shape[:2], *between, signs.shape[-1]).to(units.dtype)
    where = images.reshape(*images.shape[:2], *between, images.shape[-1])
    where = where.expand(*lead, *units.shape[2:-1], images.shape[-1])
    return _together(units.expand(*lead, *units.shape[2:]).gather(-1, where), value, dim, index)


def _mixed(value: Tensor, dim: int, index: Tensor, matrix: Tensor) -> Tensor:
    units = _apart(value, dim, index)
    flat = units.flatten(2, -2) if units.dim() > 3 else units.unsqueeze(2)
    mixed = flat @ matrix.mT.to(flat.dtype)  # a neighbour may have been matched in double precision
    return _together(mixed.reshape(*mixed.shape[:2], *units.shape[2:]), value, dim, index)
