"""The places of units in weights: the terms whose inner products add up to a score."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import owners
from pyro_symmetric.groups.units import Axis


@dataclass(frozen=True, eq=False)
class Term:
    """Some blocks of one axis of a set of units: the same places in every unit, all multiplied alike.

    :param axis: in the group's view, with the exponent of the scale.
    :param flips: the units, these or riders of theirs, whose signs enter.
    :param scale: the units whose scale enters; None if none does.
    :param depends: names of the units whose places this compares by.
    :param released: the site's group without these units and their riders along this axis.
    :param placed: the same, but with the permutations of these units.
    """

    axis: Axis
    flips: tuple[str, ...]
    scale: str | None
    depends: frozenset[str]
    released: Group
    placed: Group


class Plan:
    """All terms of a group at the sites that are compared.

    :ivar riders: name of the units -> see :meth:`~pyro_symmetric.alignment.costs.protocol.MatchCost.riders`.
    :ivar terms: name of the units -> their terms, in parts that share no multiplier.
    :ivar parts: name of the units -> numbers of the sites on which they, or what lies inside them, act.
    :ivar multiplied: of the sites that scales act on, axis -> the units that multiply each position, and exponents.
    :ivar whole: site -> the group there; of many units few act on one site.
    :ivar finite: site -> its permutations and signs.
    """

    def __init__(self, group: Group, sites: Sequence[str]):
        self.riders = {name: _riders(group, name, sites) for name in group.units}
        self.terms = {name: _components(_all_terms(group, name, self.riders[name], sites)) for name in group.units}
        numbers = {site: number for number, site in enumerate(sites)}
        places = {name: {a.site for n in group.family(name) for a in group.axes(n)} for name in group.units}
        self.parts = {name: sorted(numbers[site] for site in own & set(sites)) for name, own in places.items()}
        scaled = {site: sorted(group.scalings.members(site)) for site in sites}
        self.multiplied = {
            site: {dim: owners(group.scalings, site, dim, "scale") for dim in dims}
            for site, dims in scaled.items()
            if dims
        }
        self.whole = {site: _without(group, site, {}, (), 0) for site in sites}
        self.finite = {site: own.finite for site, own in self.whole.items()}
        self.coupled = cache(partial(_coupled, group, frozenset(sites)))


@lru_cache(maxsize=64)
def plan_of(group: Group, sites: tuple[str, ...]) -> Plan:
    """The plan of a group; worked out once."""
    return Plan(group, sites)


# small steps --------------------------------------------------------------------------------------------------------


def _all_terms(group: Group, name: str, riding: Sequence[str], sites: Collection[str]) -> list[Term]:
    numbers = [number for number, axis in enumerate(group.axes(name)) if axis.site in sites]
    return [term for number in numbers for term in _terms_along(group, name, number, riding)]


def _components(terms: Sequence[Term]) -> list[list[Term]]:
    """Terms in parts that share no sign and no scale; first those that nothing multiplies."""
    parts: list[tuple[set[tuple[str, str]], list[Term]]] = [(set(), [])]
    for term in terms:
        own = {("flip", name) for name in term.flips} | ({("scale", term.scale)} if term.scale else set())
        joined = [part for part in parts if part[0] & own] if own else [parts[0]]
        parts = [part for part in parts if part not in joined]
        every = [t for _, held in joined for t in held]
        parts.append((own.union(*(names for names, _ in joined)), [*every, term]))
        if not own:
            parts.insert(0, parts.pop())
    return [held for _, held in parts if held]


def _terms_along(group: Group, name: str, number: int, riding: Sequence[str]) -> list[Term]:
    axis = group.axes(name)[number]
    here = [(r, a) for r in riding for a in group.axes(r) if (a.site, a.dim) == (axis.site, axis.dim)]
    alike: dict[tuple[tuple[str, ...], str | None, int], list[int]] = {}
    for block, row in enumerate(axis.index):
        entering = [(name, axis), *((rider, own) for rider, own in here if _has(own, row))]
        flips = tuple(n for n, own in entering if "flip" in group[n].moves and own.exponent % 2)
        scales = [(n, own.exponent) for n, own in entering if "scale" in group[n].moves and own.exponent]
        alike.setdefault((flips, *(scales[0] if scales else (None, 0))), []).append(block)
    released = _without(group, axis.site, {name: number}, riding, axis.dim)
    placed = _without(group, axis.site, {name: number}, riding, axis.dim, placed=True)
    depends = _depends(group, name, number, riding)
    return [
        Term(replace(axis, index=axis.index[blocks], exponent=exponent), flips, scale, depends, released, placed)
        for (flips, scale, exponent), blocks in alike.items()
    ]


def _without(
    group: Group, site: str, dropped: Mapping[str, int], riding: Sequence[str], dim: int, placed: bool = False
) -> Group:
    """The moves that act on a site but for one axis of some units and those that ride along it."""
    kept: dict[str, list[Axis]] = {}
    for name, one in group.units.items():
        for number, axis in enumerate(one.axes):
            viewed = group.axes(name)[number]
            if axis.site != site or (name in riding and viewed.dim == dim):
                continue
            if dropped.get(name) == number:
                if not placed or "permute" not in one.moves:
                    continue
                axis = replace(axis, exponent=0)
            kept.setdefault(name, []).append(axis)
    return group.along(site, kept)


def _depends(group: Group, name: str, number: int, riding: Sequence[str]) -> frozenset[str]:
    """All others that have a part in one axis's entries; scales alone are soon put right and don't count."""
    axis = group.axes(name)[number]
    found = set()
    for other, one in group.units.items():
        if other in riding or not one.moves & {"permute", "flip"} or other in group.ancestors(name):
            continue
        if any(_meets(a, axis) for k, a in enumerate(group.axes(other)) if (other, k) != (name, number)):
            found.add(other)
    return frozenset(found - set(group.family(name)[1:]))


def _meets(one: Axis, other: Axis) -> bool:
    """True if some entry lies along both."""
    return one.site == other.site and (one.dim != other.dim or _meet(one, other))


def _meet(one: Axis, other: Axis) -> bool:
    """True if some position of one viewed axis belongs to both."""
    return (one.site, one.dim) == (other.site, other.dim) and bool(
        torch.isin(one.index.reshape(-1), other.index.reshape(-1)).any()
    )


def _has(axis: Axis, row: Tensor) -> bool:
    return bool((axis.index == row).all(-1).any())


def _within(axis: Axis, outer: Sequence[Axis]) -> bool:
    """True if every block of an axis is one of some units around it."""
    mine = [own for own in outer if (own.site, own.dim) == (axis.site, axis.dim)]
    return all(any(_has(own, row) for own in mine) for row in axis.index)


def _riders(group: Group, name: str, sites: Collection[str]) -> tuple[str, ...]:
    """The sets of one unit inside each of these that only multiply.

    If two scales meet in one entry, the later one doesn't ride: it is decided alone.
    """
    taken = [axis for axis in group.axes(name) if axis.exponent and "scale" in group[name].moves]
    found = []
    for child in group.children(name):
        one = group[child]
        axes = [axis for axis in group.axes(child) if axis.site in sites and axis.exponent]
        scaled = axes if "scale" in one.moves else []
        if one.size > 1 or "permute" in one.moves or group.children(child):
            continue
        if all(_within(a, group.axes(name)) for a in axes) and not any(_meet(a, b) for a in scaled for b in taken):
            found.append(child)
            taken += scaled
    return tuple(found)


def _coupled(group: Group, sites: Collection[str], one: str, other: str) -> bool:
    """True if the moves of some units, and of all inside them, matter to the scores of others.

    With ``one == other``, whether the scores are a linearisation: if they lie along two axes of one site. Sets inside
    them that meet along one axis are matched together.
    """
    mine = [(name, axis) for name in group.family(one) for axis in group.axes(name) if axis.site in sites]
    theirs = mine if one == other else [(n, a) for n in group.family(other) for a in group.axes(n) if a.site in sites]
    return any(
        _meets(a, b) and (one != other or a.dim != b.dim or (first == second and a is not b))
        for first, a in mine
        for second, b in theirs
    )
