"""Sets of units to enumerate, so that all others can be matched exactly.

With all sets of units but one held fixed, the best permutation and signs of that one
solve an assignment problem. So a group needn't be enumerated whole, but the sets of a
*cover* alone: of every two sets that are coupled (that share a site) one belongs to it.
Given an element of these, all others are matched one by one. The cover of a chain of
layers is every second layer:

>>> from pyro_symmetric.alignment.covers import cover_of
>>> shapes = {"in": (4, 3), "mid": (50, 4), "out": (2, 50)}
>>> axes = {"in": ("a", None), "mid": ("b", "a"), "out": (None, "b")}
>>> weights = {site: torch.zeros(shape) for site, shape in shapes.items()}
>>> cover_of(ps.Group.declare(axes, weights), ("in", "mid", "out"))  # 24 elements
('a',)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from pyro_symmetric.alignment.terms import (
    family_of,
    group_inside,
    is_simple,
    terms_of,
)
from pyro_symmetric.arguments import Names
from pyro_symmetric.groups import Group

# The most elements of a cover; and of a cover inside a pair of units.
MOST_ELEMENTS = 5_100
MOST_INSIDE = 24

Cover = tuple[str, ...]


@lru_cache(maxsize=4096)
def cover_of(
    group: Group, sites: Names, most_elements: int = MOST_ELEMENTS
) -> Cover | None:
    """Return the roots to enumerate, those of fewest elements.

    :return: ``None`` if all covers have too many elements.
    """
    log_orders = {root: log_count(family_of(group, root)) for root in group.roots}
    conflicts = []
    for root in group.roots:
        if not _is_matched_exactly(group, root, sites):
            conflicts.append(frozenset([root]))
        for term in terms_of(group, root, sites):
            for coupled in sorted(term.coupled):
                pair = frozenset([root, coupled])
                if pair not in conflicts:
                    conflicts.append(pair)
    return _least_cover(conflicts, log_orders, math.log(most_elements) + 1e-9)


def log_count(group: Group) -> float:
    """Return the log of the number of permutations with signs, as they are listed;
    infinite if units rotate.
    """
    if group.names("rotate"):
        return math.inf
    log = sum(group[name].count for name in group.names("flip")) * math.log(2.0)
    for name in group.names("permute"):
        log += group[name].copies * math.lgamma(group[name].size + 1)
    return log


def _is_matched_exactly(group: Group, root: str, sites: Names) -> bool:
    """Return whether the best step of a root that is coupled to no other is found."""
    if is_simple(group, root):
        return True
    inside = group_inside(group, root, sites)
    return cover_of(inside.group, tuple(inside.sites.values()), MOST_INSIDE) is not None


def _least_cover(
    conflicts: Collection[frozenset[str]],
    log_orders: Mapping[str, float],
    log_most: float,
) -> Cover | None:
    """Return the set of least log-order that holds a root of each conflict."""
    if not conflicts:
        return ()
    least = None
    for root in sorted(next(iter(conflicts))):
        remaining = [conflict for conflict in conflicts if root not in conflict]
        rest_most = log_most - log_orders[root]
        if rest_most < 0:
            continue
        cover = _least_cover(remaining, log_orders, rest_most)
        if cover is not None:
            log_most = log_orders[root] + sum(log_orders[name] for name in cover)
            least = (root, *cover)
    return least
