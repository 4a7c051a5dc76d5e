"""The symmetrised log-density itself: all terms of the sum over the orbit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint

from pyro_symmetric import arguments
from pyro_symmetric.distributions.modes import Modes
from pyro_symmetric.distributions.normals import Normals, is_mean_field, normals_of, sites_of
from pyro_symmetric.distributions.orbit import CHUNK_NUMBERS, Action, Bound, log_mean_exp, log_prob_on_orbit
from pyro_symmetric.distributions.permanent import LARGEST_PERMANENT, log_permanent
from pyro_symmetric.distributions.unit_sets import unit_sets
from pyro_symmetric.distributions.units import UnitDensities, independent_factors, pair_log_densities
from pyro_symmetric.symmetry.factored import moved_weights
from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup
from pyro_symmetric.symmetry.weights import Weights


@dataclass(frozen=True)
class ExactOrbit:
    r"""The whole sum over the orbit, for groups small enough: the ruler for every other estimator.

    In general by enumeration, ``|G|`` evaluations of ``q``. For a mean-field base, the sum over one factor is a
    permanent (:mod:`~pyro_symmetric.distributions.permanent`): :math:`n\,2^{n-1}` terms instead of :math:`n!`, up to
    width 20. Factors that share no site (one hidden layer; every second layer of a deep network, given the others) are
    summed so, and only the rest is enumerated.

    :param limit: the largest number of elements to enumerate.
    """

    limit: int = field(default=100_000, repr=False)
    bound: ClassVar[Bound] = "exact"

    def __post_init__(self) -> None:
        arguments.whole("limit", self.limit, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        if isinstance(base, Modes):
            return base.mixed([self.log_prob(component, action, value) for component in base.components])
        group = action.group
        summed: tuple[str, ...] = ()
        if isinstance(group, PermutationGroup) and is_mean_field(base, action):
            summed = independent_factors(group, LARGEST_PERMANENT)
        enumerated = without(group, summed) if summed else group
        order = enumerated.order()
        if order > self.limit:
            how = f", besides permanents of the factors {list(summed)}," if summed else ""
            raise ValueError(
                f"ExactOrbit would enumerate exp({enumerated.log_order():.1f}) group elements{how} more than its limit "
                f"of {self.limit}; use a bound such as SinkhornImportance(16), or raise the limit"
            )
        if summed and value.numel():
            return self._by_permanents(base, action, value, summed, enumerated)
        return self._by_enumeration(base, action, value)

    def _by_enumeration(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        batch_dims = max(value.dim() - 1, len(base.batch_shape))
        everywhere = (slice(None), *([None] * batch_dims))
        own = base.log_prob(value)[None]
        if action.group.order() == 1:
            return own[0]
        # The identity comes first; its term is the density itself, not what a bijection there and back makes of it.
        others = action.group.enumerate().to(value.device).select(slice(1, None)).select(everywhere)
        return log_mean_exp(torch.cat([own, log_prob_on_orbit(base, action, value, others)]))

    def _by_permanents(
        self, base: Distribution, action: Action, value: Tensor, summed: tuple[str, ...], enumerated: PermutationGroup
    ) -> Tensor:
        r"""``log 1/|G| Σ_e q(e·w) Π_f perm(A^f(e·w)) / exp(trace A^f(e·w))``, ``e`` over the enumerated factors."""
        own = base.log_prob(value)
        flat = value.expand(*own.shape, value.shape[-1]).reshape(-1, value.shape[-1])
        normals = normals_of(base, action, own.shape).double()
        permuted = PermutationGroup([action.group.factor(name) for name in summed], action.group.site_shapes)
        elements = enumerated.enumerate().to(value.device).select((slice(None), None))

        def score(part: Permutation, rows: slice) -> Tensor:
            draws = sites_of(action, flat[rows].double())
            return _summed_over(permuted, normals.rows(rows), draws, part)

        # What is held for one element and one draw: a few copies of it, and the largest level of each permanent.
        levels = sum(math.comb(n, n // 2) * n for n in permuted.factors.values())
        at_once = max(1, CHUNK_NUMBERS // (4 * flat.shape[-1] + levels))
        few_rows, few_elements = max(1, min(len(flat), at_once)), max(1, at_once // max(1, len(flat)))
        terms = []
        for start in range(0, enumerated.order(), few_elements):
            part = elements.select(slice(start, start + few_elements))
            rows = [slice(row, row + few_rows) for row in range(0, len(flat), few_rows)]
            whole = len(rows) == 1 and few_elements >= enumerated.order()
            if whole or not torch.is_grad_enabled():
                terms.append(torch.cat([score(part, some) for some in rows], -1))
            else:
                terms.append(torch.cat([checkpoint(score, part, some, use_reentrant=False) for some in rows], -1))
        total = torch.logsumexp(torch.cat(terms), 0) - action.group.log_order()
        return total.to(own.dtype).reshape(own.shape)


def without(group: PermutationGroup, names: Sequence[str]) -> PermutationGroup:
    """The subgroup of the other factors."""
    return PermutationGroup([group.factor(name) for name in group.factors if name not in names], group.site_shapes)


def _summed_over(group: PermutationGroup, normals: Normals, draws: Weights, elements: Permutation) -> Tensor:
    """``log Σ_p q(p·e·w)`` over a group of factors that share no site, for elements ``e`` ``(E, 1)``: ``(E, N)``."""
    rows = len(next(iter(draws.values())))
    moved = moved_weights(elements, draws, (rows,)) if elements.images else {s: v[None] for s, v in draws.items()}
    count, batch = next(iter(moved.values())).shape[:2]
    total: Tensor | float = 0.0
    for site, value in moved.items():
        loc, scale = normals.loc[site], normals.scale[site]
        terms = torch.distributions.Normal(loc, scale, validate_args=False).log_prob(value)
        total = total + terms.reshape(count, batch, -1).sum(-1)
    flat = {site: value.flatten(0, 1) for site, value in moved.items()}
    units = UnitDensities(unit_sets(group), normals.repeated(count), flat)
    for name in units.factors:
        pairs = pair_log_densities(units, name)
        gain = log_permanent(pairs) - pairs.diagonal(dim1=-2, dim2=-1).sum(-1)
        total = total + gain.reshape(count, batch)
    return torch.as_tensor(total)
