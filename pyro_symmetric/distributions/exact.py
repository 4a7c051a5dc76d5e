"""The symmetrised log-density itself: all terms of the sum over the orbit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions.estimators import (
    CHUNK_NUMBERS,
    OrbitEstimator,
    SinkhornImportance,
    in_chunks,
    log_mean_exp,
    log_prob_on_orbit,
)
from pyro_symmetric.distributions.matching import UnitDensities, mean_field_moments, sets_of, unit_blocks
from pyro_symmetric.distributions.matchings import over_signs
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group

# Numbers that an exact sum may handle for a draw, in training and for a report; elements that may be listed.
TERMS, TERMS_TO_REPORT, LISTED = 50_000, 500_000, 720
# n 2^(n-1) terms: 10 million at 20, which is what a machine holds and a person waits for.
LARGEST_PERMANENT = 20


@dataclass(frozen=True)
class ExactOrbit(OrbitEstimator):
    r"""The whole sum over the orbit, for groups small enough: the ruler for every other estimator.

    In general by enumeration, ``|G|`` evaluations of ``q``. If units are independent under the base (mean-field, or
    unit blocks), the sum over one set of units is a permanent of numbers that are sums over the units' signs:
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
        # The identity comes first; its term is the density itself, not what a bijection there and back makes of it.
        elements = enumerated.enumerate().to(value.device).select((slice(None), *([None] * own.dim())))
        terms = own[None]
        if order > 1:
            units = UnitDensities(base, action, value.expand(1, *own.shape, -1))
            others = elements.select(slice(1, None))
            terms = torch.cat([terms, log_prob_on_orbit(base, action, value, others, units, own)])
        if summed.units:
            terms = terms + _gains(base, action, value.expand(*own.shape, -1), summed, elements)
        return log_mean_exp(terms).to(own.dtype)


def _gains(base: Distribution, action: Action, value: Tensor, group: Group, elements: Element) -> Tensor:
    r"""``log mean_s q(s·e·w) - log q(e·w)`` over sets that share no site, ``(E,) + batch_shape``, float64."""

    def gain(part: slice) -> Tensor:
        units = UnitDensities(base, action, action(value, elements.select(part)), group)
        total = torch.zeros((), dtype=torch.float64, device=value.device)
        for name in units.sets:
            densities = units.of_lone(name)
            turned, at_rest = over_signs(densities.double()), densities[0].diagonal(dim1=-2, dim2=-1).sum(-1)
            permuted = "permute" in group[name].moves
            summed = log_permanent(turned) if permuted else turned.diagonal(dim1=-2, dim2=-1).sum(-1)
            total = total + summed - at_rest
        return total - units.log_order(units.sets)

    # What is held for one element: copies of the draws, and the largest level of each permanent.
    levels = sum(math.comb(one.size, one.size // 2) * one.size for one in group.units.values())
    few = CHUNK_NUMBERS // (value.shape[:-1].numel() * (4 * value.shape[-1] + levels))
    return in_chunks(gain, elements.batch_shape[0], few)


def independent_sets(base: Distribution, action: Action) -> tuple[str, ...]:
    """The sets of units whose densities are told unit by unit, all else being given."""
    group = action.group.finite
    if action.nonlinear_sites:
        return ()
    return tuple(group.units if mean_field_moments(base) is not None else unit_blocks(base, action, group))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode that it is filled in
def divided(group: Group, independent: tuple[str, ...]) -> tuple[Group, Group]:
    """The part of a group that permanents sum over, sets of which no two share a site; and the rest."""
    chosen: dict[str, set[str]] = {}
    for name in sorted(independent, key=lambda name: -group[name].size):
        own = group.without(other for other in group.units if other != name)
        found = sets_of(own, group.site_shapes).get(name)
        sites = {axis.site for axis in found.lone} if found and found.matched and not found.shared else set()
        narrow = group[name].size <= LARGEST_PERMANENT or "permute" not in group[name].moves
        if sites and narrow and len(group.family(name)) == 1 and all(map(sites.isdisjoint, chosen.values())):
            chosen[name] = sites
    rest = [name for name in group.units if name not in chosen]
    return group.without(rest) if rest else group, group.without(chosen) if chosen else group


def log_permanent(densities: Tensor) -> Tensor:
    """Logarithm of the permanent of ``exp(densities)``, ``batch_shape + (n, n)``, differentiable; ``n`` at most 20."""
    n = densities.shape[-1]
    if n > LARGEST_PERMANENT:
        raise ValueError(f"the matrix has width {n}; permanents are computed up to {LARGEST_PERMANENT}")
    total = densities.new_zeros(*densities.shape[:-2], 1)
    for row, (columns, previous) in enumerate(_subsets(n, densities.device)):
        total = torch.logsumexp(total[..., previous] + densities[..., row, :][..., columns], -1)
    return total[..., 0]


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _subsets(n: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For each size ``t``: the columns of every subset, ``(C(n, t), t)``, and where the subset without it stood."""
    masks = torch.arange(2**n, device=device)
    member = ((masks[:, None] >> torch.arange(n, device=device)) & 1).bool()
    size, place = member.sum(-1), torch.zeros_like(masks)
    levels = []
    for t in range(n + 1):
        own = (size == t).nonzero()[:, 0]
        if t:
            columns = member[own].nonzero()[:, 1].reshape(-1, t)
            levels.append((columns, place[own[:, None] ^ (1 << columns)]))
        place[own] = torch.arange(len(own), device=device)
    return levels


# the default ----------------------------------------------------------------------------------------------------------


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
