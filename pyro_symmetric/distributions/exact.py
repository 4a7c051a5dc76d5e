"""The symmetrised log-density itself: all terms of the sum over the orbit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyro_symmetric import arguments
from pyro_symmetric.distributions.estimators import SinkhornImportance
from pyro_symmetric.distributions.matching import seats_of
from pyro_symmetric.distributions.orbit import (
    CHUNK_NUMBERS,
    OrbitEstimator,
    in_chunks,
    log_mean_exp,
    log_prob_on_orbit,
    mean_field_moments,
    unit_blocks,
    units_of,
)
from pyro_symmetric.distributions.permanent import LARGEST_PERMANENT, log_permanent
from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group


@dataclass(frozen=True)
class ExactOrbit(OrbitEstimator):
    r"""The whole sum over the orbit, for groups small enough: the ruler for every other estimator.

    In general by enumeration, ``|G|`` evaluations of ``q``. If units are independent under the base (mean-field, or
    unit blocks), the sum over one set of units is a permanent
    (:mod:`~pyro_symmetric.distributions.permanent`) of numbers that are sums over the units' signs:
    :math:`n\,2^{n-1}` terms instead of :math:`n!\,2^n`, up to width 20. Sets that share no site (one hidden layer;
    every second layer of a deep network, given the others) are summed so, and only the rest is enumerated.

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
    bound: ClassVar[Literal["upper", "exact"]] = "exact"

    def __post_init__(self) -> None:
        arguments.whole("limit", self.limit, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        summed, enumerated = divided(action.group.finite, independent_sets(base, action))
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


# small steps --------------------------------------------------------------------------------------------------------


def independent_sets(base: Distribution, action: Action) -> tuple[str, ...]:
    """The sets of units whose densities are told unit by unit, all else being given."""
    if action.nonlinear_sites:
        return ()
    group = action.group.finite
    return tuple(group.units if mean_field_moments(base) is not None else unit_blocks(base, action, group))


@functools.lru_cache(maxsize=64)
def divided(group: Group, independent: tuple[str, ...]) -> tuple[Group, Group]:
    """The part of a group that permanents sum over, sets of which no two share a site; and the rest."""
    chosen: dict[str, set[str]] = {}
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        for name in sorted(independent, key=lambda name: -group[name].size):
            own, sites = group.without(other for other in group.units if other != name), set(group.site_shapes)
            seats = seats_of(own, frozenset(sites)).get(name, ())
            sites = {seat.axis.site for seat in seats}
            narrow = group[name].size <= LARGEST_PERMANENT or "permute" not in group[name].moves
            nested = group[name].copies > 1 or bool(group.children(name))
            apart = all(map(sites.isdisjoint, chosen.values())) and all(seat.lone for seat in seats)
            if sites and narrow and apart and not nested:
                chosen[name] = sites
        rest = [name for name in group.units if name not in chosen]
        return group.without(rest) if rest else group, group.without(chosen) if chosen else group


def _in_double(base: Distribution) -> Distribution:
    """A base of independent units in float64."""
    if isinstance(base, UnitBlocks):
        return base.double()
    loc, scale = (moment.double() for moment in mean_field_moments(base) or ())
    return Independent(Normal(loc, scale, validate_args=False), 1)


def _gains(base: Distribution, action: Action, value: Tensor, group: Group, elements: Element) -> Tensor:
    r"""``log mean_s q(s·e·w) - log q(e·w)`` over sets that share no site, ``(E,) + batch_shape``, float64."""
    flat = value.reshape(-1, value.shape[-1])

    def gain(part: slice) -> Tensor:
        moved = action(flat, elements.select(part).select((slice(None), None)))
        units = units_of(base, action, moved, value.shape[:-1], group)
        total = torch.zeros((), dtype=torch.float64, device=flat.device)
        for name, pairs in ((name, units.alone(name)) for name in units.seats):
            permuted = "permute" in group[name].moves
            summed = log_permanent(pairs.total) if permuted else pairs.total.diagonal(dim1=-2, dim2=-1).sum(-1)
            total = total + summed - pairs.at_rest
        return total - units.log_order

    # What is held for one element: copies of the draws, and the largest level of each permanent.
    levels = sum(math.comb(one.size, one.size // 2) * one.size for one in group.units.values())
    few = CHUNK_NUMBERS // (len(flat) * (4 * flat.shape[-1] + levels))
    return in_chunks(gain, elements.batch_shape[0], few).reshape(-1, *value.shape[:-1])


# the default ----------------------------------------------------------------------------------------------------------

# Numbers that an exact sum may handle for a draw, in training and for a report; elements that may be listed.
TERMS, TERMS_TO_REPORT, LISTED = 50_000, 500_000, 720


def usual_estimator(base: Distribution, action: Action, training: bool = True) -> OrbitEstimator:
    """Choose the exact sum where it costs about as much as an estimate, else matched units.

    :param training: whether it is evaluated once a step; otherwise for a report, which takes more elements.
    """
    return _usual(action.group.finite, independent_sets(base, action), training)


@functools.lru_cache(maxsize=256)
def _usual(group: Group, independent: tuple[str, ...], training: bool) -> OrbitEstimator:
    summed, enumerated = divided(group, independent)
    numbers = sum(shape.numel() for shape in group.site_shapes.values())
    terms = numbers + sum(one.size * 2.0 ** (one.size - 1) for one in summed.units.values())
    listed = math.exp(min(enumerated.log_order(), 700.0))
    cheap = listed <= LISTED * (1 + 1e-9) and listed * terms <= (TERMS if training else TERMS_TO_REPORT)
    return ExactOrbit() if cheap else SinkhornImportance(4 if training else 16)
