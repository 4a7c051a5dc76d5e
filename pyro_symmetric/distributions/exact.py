"""The symmetrised log-density itself: all terms of the sum over the orbit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions.modes import Modes
from pyro_symmetric.distributions.normals import Normals, is_mean_field, normals_of
from pyro_symmetric.distributions.orbit import (
    CHUNK_NUMBERS,
    Bound,
    OrbitEstimator,
    Suggestion,
    in_chunks,
    log_mean_exp,
    log_prob_on_orbit,
)
from pyro_symmetric.distributions.permanent import LARGEST_PERMANENT
from pyro_symmetric.distributions.unit_scores import ExactScores
from pyro_symmetric.distributions.unit_sets import log_order_of, nested_order
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.weights import Weights

# Exact sums that cost about as much as an estimate: group elements to enumerate, each of which needs the density of
# all weights, and terms of permanents, each a single number; reports can afford more of both.
LISTED, TERMS = 30, 5_000
LISTED_TO_REPORT, TERMS_TO_REPORT = 1_000, 200_000


@dataclass(frozen=True)
class ExactOrbit(OrbitEstimator):
    r"""The whole sum over the orbit, for groups small enough: the ruler for every other estimator.

    In general by enumeration, ``|G|`` evaluations of ``q``. For a mean-field base, the sum over one set of units is a
    permanent (:mod:`~pyro_symmetric.distributions.permanent`) of numbers that are sums over the units' signs:
    :math:`n\,2^{n-1}` terms instead of :math:`n!\,2^n`, up to width 20. Of units inside others, the permanent of the
    outer ones is made of those of the inner ones. Sets that share no site (one hidden layer; every second layer of a
    deep network, given the others) are summed so, and only the rest is enumerated.

    :param limit: the largest number of elements to enumerate.
    """

    limit: int = field(default=100_000, repr=False)
    bound: ClassVar[Bound] = "exact"

    def __post_init__(self) -> None:
        arguments.whole("limit", self.limit, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        if isinstance(base, Modes):
            return base.mixed([self.log_prob(component, action, value) for component in base.components])
        summed, enumerated = _divided(action.group.finite, is_mean_field(base, action))
        order = enumerated.order()
        if order > self.limit:
            how = f", besides permanents of the units {list(summed.units)}," if summed.units else ""
            raise ValueError(
                f"ExactOrbit would enumerate exp({enumerated.log_order():.1f}) group elements{how} more than its limit "
                f"of {self.limit}; use a bound such as SinkhornImportance(16), or raise the limit"
            )
        if summed.units and value.numel():
            return self._by_permanents(base, action, value, summed, enumerated)
        return self._by_enumeration(base, action, value)

    def _by_enumeration(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        group = action.group.finite
        batch_dims = max(value.dim() - 1, len(base.batch_shape))
        everywhere = (slice(None), *([None] * batch_dims))
        own = base.log_prob(value)[None]
        if group.order() == 1:
            return own[0]
        # The identity comes first; its term is the density itself, not what a bijection there and back makes of it.
        others = group.enumerate().to(value.device).select(slice(1, None)).select(everywhere)
        return log_mean_exp(torch.cat([own, log_prob_on_orbit(base, action, value, others)]))

    def _by_permanents(
        self, base: Distribution, action: Action, value: Tensor, summed: Group, enumerated: Group
    ) -> Tensor:
        r"""``log mean_e mean_s q(s·e·w)``, ``e`` over the enumerated group, ``s`` over that which is summed."""
        own = base.log_prob(value)
        flat = value.expand(*own.shape, value.shape[-1]).reshape(-1, value.shape[-1])
        normals = normals_of(base, action, own.shape).each(Tensor.double)
        elements = enumerated.enumerate().to(value.device).select((slice(None), None))

        def score(part: slice) -> Tensor:
            chosen = elements.select(part)
            return in_chunks(lambda rows: _summed_over(summed, normals, action, flat, rows, chosen), len(flat), few, -1)

        # What is held for one element and one draw: a few copies of it, and the largest level of each permanent.
        levels = sum(math.comb(u.size, u.size // 2) * u.size * u.copies**2 for u in summed.units.values())
        few = CHUNK_NUMBERS // (4 * flat.shape[-1] + levels)
        terms = in_chunks(score, enumerated.order(), few // max(1, len(flat)))
        total = torch.logsumexp(terms, 0) - math.log(enumerated.order())
        return total.to(own.dtype).reshape(own.shape)

    @classmethod
    def suggested(cls, group: Group, mean_field: bool, training: bool) -> Suggestion | None:
        summed, enumerated = _divided(group, mean_field)
        listed = math.exp(min(enumerated.log_order(), 700.0))
        terms = listed * sum(u.copies**2 * u.size * 2.0 ** (u.size - 1) for u in summed.units.values())
        if listed > (LISTED if training else LISTED_TO_REPORT) or terms > (TERMS if training else TERMS_TO_REPORT):
            return None
        how = f"all {listed:.0f} elements of the group can be added up"
        if summed.units:
            besides = f" for each of {listed:.0f} elements of the other units" if listed > 1.5 else ""
            how = f"the permanents of {list(summed.units)} have {terms:.0f} terms{besides}"
        return Suggestion(cls(), f"{how}: exact, without chance")


# small steps --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _divided(group: Group, mean_field: bool) -> tuple[Group, Group]:
    """The part of a group that permanents sum over, and that which is left to enumerate."""
    names = summable(group) if mean_field else ()
    rest = [name for name in group.units if name not in names]
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        return group.without(rest) if rest else group, group.without(names) if names else group


def summable(group: Group, widest: int = LARGEST_PERMANENT) -> tuple[str, ...]:
    """Sets of units, with all that lies inside them, of which no two share a site, chosen from the largest on.

    Left out are sets with units that meet others of the set otherwise than by lying inside them (inputs and outputs of
    a grouped convolution), or that lie along two axes of a site.

    :param widest: leave out sets of more units.
    """
    chosen: dict[str, set[str]] = {}
    trees = {name: nested_order(group, [name]) for name in group.units}
    for name in sorted(trees, key=lambda name: -log_order_of(group, trees[name])):
        tree = trees[name]
        sites = {axis.site for part in tree for axis in group.axes(part)}
        apart = all(sites.isdisjoint(others) for others in chosen.values())
        narrow = all(group[part].size <= widest or "permute" not in group[part].moves for part in tree)
        if log_order_of(group, tree) > 0 and apart and narrow and _is_nested(group, tree, sites):
            chosen |= dict.fromkeys(tree, sites)
    return tuple(name for name in group.units if name in chosen)


def _is_nested(group: Group, tree: list[str], sites: set[str]) -> bool:
    """Whether all positions of each site are moved along one axis, and by units of which each lies in the next."""
    for site in sites:
        here = [(dim, name, axis) for dim, ms in group.members(site).items() for name, axis in ms if name in tree]
        if len({dim for dim, _, _ in here}) > 1 or len({name for _, name, _ in here}) < len(here):
            return False
        for i, (_, one, first) in enumerate(here):
            for _, other, second in here[:i]:
                inside = one in group.ancestors(other) or other in group.ancestors(one)
                if not inside and bool(torch.isin(first.index, second.index).any()):
                    return False
    return True


def _summed_over(
    group: Group, normals: Normals, action: Action, flat: Tensor, rows: slice, elements: Element
) -> Tensor:
    """``log mean_s q(s·e·w)`` over a group of nested units, for elements ``e``, ``(E, 1)``, and some draws."""
    draws, count = flat[rows].double(), elements.batch_shape[0]
    normals, total = normals.rows(rows, count), draws.new_zeros(())
    moved: Weights = {}
    for site, piece in action.unflatten(draws).items():
        shape, loc, scale = action.shapes[site], normals.loc[site], normals.scale[site]
        own_dims = None if shape == group.site_shapes.get(site) else len(shape)
        value = group.view(site, elements.on_site(site, piece, own_dims))
        moved[site] = value.expand(count, len(draws), *loc.shape[1:]).flatten(0, 1)
        terms = torch.distributions.Normal(loc, scale, validate_args=False).log_prob(moved[site])
        total = total + terms.reshape(count, len(draws), -1).sum(-1)
    scores = ExactScores(group, normals, moved)
    return total + scores.gain().reshape(count, len(draws)) - log_order_of(group, scores.sets)
