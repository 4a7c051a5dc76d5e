"""Which estimator of the symmetrised log-density suits a guide and a group, and why."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoNormal

from pyro_symmetric import arguments
from pyro_symmetric.distributions import ExactOrbit, OrbitEstimator, SinkhornImportance
from pyro_symmetric.distributions.exact import without
from pyro_symmetric.distributions.permanent import LARGEST_PERMANENT
from pyro_symmetric.distributions.units import independent_factors
from pyro_symmetric.symmetry.finite import AnyFiniteGroup, FiniteGroup, finite_part
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.rescaling import SignGroup
from pyro_symmetric.symmetry.weight_symmetry import WeightSymmetry

# Exact sums that cost about as much as the estimate: group elements to enumerate, each of which needs the density of
# all weights, and terms of permanents, each a single number; reports can afford more of both.
LISTED, TERMS = 30, 5_000
LISTED_TO_REPORT, TERMS_TO_REPORT = 1_000, 200_000


class Suggestion(NamedTuple):
    """An estimator, and the reason for it."""

    estimator: OrbitEstimator
    reason: str

    def __repr__(self) -> str:
        return f"{self.estimator!r}: {self.reason}"


def suggest_estimator(
    guide: Any, group: AnyFiniteGroup | SignGroup | WeightSymmetry, *, training: bool = True
) -> Suggestion:
    """The estimator that suits a guide and a group, and why.

    >>> suggest_estimator(AutoDiagonalNormal, find_symmetry(net, x)).reason

    :param guide: the guide to symmetrise, or its class.
    :param group: what to average over.
    :param training: whether it is evaluated once a step; otherwise for a report, where time matters less than nats.
    """
    group = finite_part(group)
    kind = guide if isinstance(guide, type) else getattr(guide, "base_class", type(guide))
    if not issubclass(kind, AutoGuide):
        raise TypeError(f"guide is {arguments.shown(guide)}; it must be an automatic guide, or the class of one")
    arguments.flag("training", training)
    mean_field = issubclass(kind, AutoDiagonalNormal | AutoNormal)
    listed, terms, how = _exact_terms(group, mean_field)
    if listed <= (LISTED if training else LISTED_TO_REPORT) and terms <= (TERMS if training else TERMS_TO_REPORT):
        return Suggestion(ExactOrbit(), f"{how}: exact, without chance")
    k = 4 if training else 16
    reason = (
        f"the group has exp({group.log_order():.1f}) elements, too many to add up; elements proposed by matching units "
        f"find most of those nats at any width, of which InfoNCE(K) can see no more than log K"
    )
    permutations = group.permutations if isinstance(group, FiniteGroup) else group
    if any(permutations.factor(name).parent is not None for name in permutations.factors):
        reason += "; of nested factors only the outer ones are averaged over"
    if any(axis.span > 1 for name in permutations.factors for axis in permutations.factor(name).axes):
        reason += "; inputs within the groups of grouped convolutions are not averaged over"
    if not mean_field:
        reason += f"; {kind.__name__} is matched by its means and deviations, so take a larger K where units overlap"
    return Suggestion(SinkhornImportance(k), reason)


def _exact_terms(group: AnyFiniteGroup, mean_field: bool) -> tuple[float, float, str]:
    """How many elements the exact sum enumerates, how many terms its permanents have, and that in words."""
    if isinstance(group, PermutationGroup) and mean_field:
        summed = independent_factors(group, LARGEST_PERMANENT)
        if summed:
            listed = _count(without(group, summed).log_order())
            terms = listed * sum(n * 2.0 ** (n - 1) for n in (group.factors[name] for name in summed))
            besides = f" for each of {listed:.0f} elements of the other factors" if listed > 1.5 else ""
            return listed, terms, f"the permanents of {list(summed)} have {terms:.0f} terms{besides}"
    listed = _count(group.log_order())
    return listed, 0.0, f"all {listed:.0f} elements of the group can be added up"


def _count(log_order: float) -> float:
    return math.exp(min(log_order, 700.0))
