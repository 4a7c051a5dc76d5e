"""The symmetrised log-density itself: all terms of the sum over the orbit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyro_symmetric import arguments
from pyro_symmetric.distributions.normals import (
    Normals,
    blocks_of,
    is_mean_field,
    laid_out,
    mean_field_moments,
    sites_of,
    unit_entries,
)
from pyro_symmetric.distributions.orbit import (
    CHUNK_NUMBERS,
    BaseKind,
    Bound,
    OrbitEstimator,
    in_chunks,
    log_mean_exp,
    log_prob_on_orbit,
)
from pyro_symmetric.distributions.permanent import LARGEST_PERMANENT
from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.distributions.unit_densities import ExactUnitDensities
from pyro_symmetric.distributions.unit_sets import log_order_of, unit_sets
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group

# Exact sums that cost about as much as an estimate: group elements to enumerate, each of which needs the density of
# all weights, and terms of permanents, each a single number; reports can afford more of both. Of two layers of 8 and 4
# overlapping units, an estimate by four matchings takes twice as long as the sum, and misses a nat.
LISTED, TERMS = 30, 25_000
LISTED_TO_REPORT, TERMS_TO_REPORT = 1_000, 200_000
# Elements, and their products with the entries of a covariance, that a normal's densities are cheap enough for; of any
# other base, with the numbers of a draw; of independent units, the elements of those sets that permanents leave. Six
# units of a bent normal take four times as long as an estimate by 16 matchings.
LISTED_NORMALS, LISTED_ENTRIES = 720, 5_000_000
LISTED_OTHERS, LISTED_BESIDE, LISTED_NUMBERS = 720, 120, 100_000


@dataclass(frozen=True)
class ExactOrbit(OrbitEstimator):
    r"""The whole sum over the orbit, for groups small enough: the ruler for every other estimator.

    In general by enumeration, ``|G|`` evaluations of ``q``. If units are independent under the base (mean-field, or
    unit blocks), the sum over one set of units is a
    permanent (:mod:`~pyro_symmetric.distributions.permanent`) of numbers that are sums over the units' signs:
    :math:`n\,2^{n-1}` terms instead of :math:`n!\,2^n`, up to width 20. Of units inside others, the permanent of the
    outer ones is made of those of the inner ones. Sets that share no site (one hidden layer; every second layer of a
    deep network, given the others) are summed so, and only the rest is enumerated.

    Value and gradient have no chance in them: the gradient is that of :math:`\log \bar q`.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(2)})
    >>> base = dist.Normal(torch.tensor([-3.0, 3.0]), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.groups.Action(group, ["w"]), ps.ExactOrbit())
    >>> w = torch.tensor([-3.0, 3.0])
    >>> round(float(base.log_prob(w) - orbit.log_prob(w)), 3)  # log 2!
    0.693

    :param limit: the largest number of elements to enumerate.
    """

    limit: int = field(default=100_000, repr=False)
    bound: ClassVar[Bound] = "exact"

    def __post_init__(self) -> None:
        arguments.whole("limit", self.limit, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        summed, enumerated = _divided(action.group.finite, _independent_units(base, action))
        order = enumerated.order()
        if order > self.limit:
            how = f", besides permanents of the units {list(summed.units)}," if summed.units else ""
            raise ValueError(
                f"ExactOrbit would enumerate exp({enumerated.log_order():.1f}) group elements{how} more than its limit "
                f"of {self.limit}; use a bound such as SinkhornImportance(16), or raise the limit"
            )
        own = base.log_prob(value)
        if value.numel() == 0:
            return own
        dtype = own.dtype
        if summed.units:
            # A permanent is told beside log q, and both may be a thousand times the sum of the two: all in float64.
            base, value = _in_double(base), value.double()
            own = base.log_prob(value)
        # The identity comes first; its term is the density itself, not what a bijection there and back makes of it.
        elements = enumerated.enumerate().to(value.device)
        terms = own[None]
        if order > 1:
            others = elements.select(slice(1, None)).select((slice(None), *([None] * own.dim())))
            terms = torch.cat([terms, log_prob_on_orbit(base, action, value, others)])
        if summed.units:
            terms = terms + _gains(base, action, value.expand(*own.shape, -1), summed, elements)
        return log_mean_exp(terms).to(dtype)

    @classmethod
    def suggested(cls, group: Group, base: BaseKind, training: bool) -> ExactOrbit | None:
        summed, enumerated = _divided(group, _independent_sets(group, base))
        listed, most = math.exp(min(enumerated.log_order(), 700.0)), LISTED if training else LISTED_TO_REPORT
        numbers = max(1, sum(shape.numel() for shape in group.site_shapes.values()))
        if base in ("normal", "unit blocks"):
            most = max(most, min(LISTED_NORMALS, LISTED_ENTRIES // numbers**2))
        else:
            most = max(most, min(LISTED_OTHERS if base == "other" else LISTED_BESIDE, LISTED_NUMBERS // numbers))
        terms = listed * sum(u.copies**2 * u.size * 2.0 ** (u.size - 1) for u in summed.units.values())
        if listed > most * (1 + 1e-9) or terms > (TERMS if training else TERMS_TO_REPORT):
            return None
        return cls()


# small steps --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _divided(group: Group, independent: tuple[str, ...]) -> tuple[Group, Group]:
    """The part of a group that permanents sum over, and that which is left to enumerate.

    Permanents sum over sets of units with all that lies inside them, of which no two share a site, chosen from the
    largest on. Left out are sets with units that meet others of the set otherwise than by lying inside them (inputs and
    outputs of a grouped convolution), or that lie along two axes of a site.

    :param independent: sets of units whose densities a base tells unit by unit.
    """
    chosen: dict[str, set[str]] = {}
    families = [family for family in map(group.family, group.units) if set(family) <= set(independent)]
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        for family in sorted(families, key=lambda family: -log_order_of(group, family)):
            sites = {axis.site for part in family for axis in group.axes(part)}
            apart = all(sites.isdisjoint(others) for others in chosen.values())
            narrow = all(group[part].size <= LARGEST_PERMANENT or "permute" not in group[part].moves for part in family)
            if log_order_of(group, family) > 0 and apart and narrow:
                alone = group.without(other for other in group.units if other not in family)
                if not any(one.waits for one in unit_sets(alone, tuple(sites), torch.device("cpu")).values()):
                    chosen |= dict.fromkeys(family, sites)
        rest = [name for name in group.units if name not in chosen]
        return group.without(rest) if rest else group, group.without(chosen) if chosen else group


def _independent_sets(group: Group, base: BaseKind) -> tuple[str, ...]:
    """The sets of units that are independent under any base of a kind."""
    if base == "mean field":
        return tuple(group.units)
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        sets = unit_sets(group, tuple(group.site_shapes), torch.device("cpu"))
    return tuple(name for name, one in sets.items() if base == "unit blocks" and one.is_plain and not one.waits)


def _in_double(base: Distribution) -> Distribution:
    """A base of independent units in float64."""
    if isinstance(base, UnitBlocks):
        return base.double()
    loc, scale = (moment.double() for moment in mean_field_moments(base) or ())
    return Independent(Normal(loc, scale, validate_args=False), 1)


def _independent_units(base: Distribution, action: Action) -> tuple[str, ...]:
    """The sets of units whose densities are told unit by unit, all else being given."""
    if is_mean_field(base, action):
        return tuple(action.group.finite.units)
    if not isinstance(base, UnitBlocks) or action.nonlinear_sites:
        return ()
    return tuple(
        name for name, units in _entries_alone(action).items() if base.are_independent(units.to(base.loc.device))
    )


@functools.lru_cache(maxsize=64)
def _entries_alone(action: Action) -> dict[str, Tensor]:
    """Set of units -> the entries of each, ``(n, d)``, as if there were no other sets."""
    group = action.group.finite
    found: dict[str, Tensor] = {}
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        for name in group.units:
            alone = group.without(other for other in group.units if other != name)
            if tuple(group.family(name)) == (name,):
                found |= unit_entries(action, alone, torch.device("cpu"))
    return found


def _gains(base: Distribution, action: Action, value: Tensor, group: Group, elements: Element) -> Tensor:
    r"""``log mean_s q(s·e·w) - log q(e·w)`` over a group of nested units, ``(E,) + batch_shape``, float64."""
    flat = value.reshape(-1, value.shape[-1]).double()
    moments = [laid_out(moment, base, value.shape[:-1]).double() for moment in mean_field_moments(base) or ()]
    blocks = blocks_of(base, action, group)

    def gain(chosen: Element, rows: slice) -> Tensor:
        moved = action(flat[rows], chosen.select((slice(None), None)))
        draws = sites_of(action, moved.flatten(0, 1))
        sites = [sites_of(action, m if len(m) == 1 else m[rows].repeat(len(moved), 1)) for m in moments]
        loc, scale = sites or ({}, {})
        densities = ExactUnitDensities(group, Normals(loc, scale, blocks), draws)
        return (densities.gain() - log_order_of(group, densities.sets)).reshape(moved.shape[:2])

    def some(part: slice) -> Tensor:
        return in_chunks(lambda rows: gain(elements.select(part), rows), len(flat), few, -1)

    # What is held for one element and one draw: a few copies of it, and the largest level of each permanent.
    levels = sum(math.comb(u.size, u.size // 2) * u.size * u.copies**2 for u in group.units.values())
    few = CHUNK_NUMBERS // (4 * flat.shape[-1] + levels)
    return in_chunks(some, elements.batch_shape[0], few // len(flat)).reshape(-1, *value.shape[:-1])
