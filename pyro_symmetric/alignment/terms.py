"""Terms of the scores of units: where units of a group meet, and under which signs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.arguments import Names
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.units import moves_of


@dataclass(frozen=True, eq=False)
class Term:
    """One term of the scores of a set of units.

    It consists of blocks of an axis along which the units lie, under the same signs.

    :param axis: in the group's view.
    :param shape: copies and size of the units.
    :param signs: the units whose signs multiply the term: these, or sets of size one
        inside them.
    :param coupled: the roots whose moves change the term, other than through this axis.
    :param size: the number of entries.
    """

    axis: Axis
    shape: tuple[int, int]
    signs: frozenset[str]
    coupled: frozenset[str]
    size: int


@lru_cache(maxsize=4096)
def family_of(group: Group, root: str) -> Group:
    """Return the group of some units and all inside them alone."""
    return group.only(group.family(root))


@lru_cache(maxsize=4096)
def terms_of(group: Group, root: str, sites: Names) -> tuple[Term, ...]:
    """List the terms of a root's scores at some sites."""
    units = group[root]
    terms = []
    for axis in group.axes(root):
        if axis.site not in sites:
            continue
        blocks_by_signs: dict[frozenset[str], list[int]] = {}
        for block, positions in enumerate(axis.index):
            signs = _signs_at(group, root, axis, positions)
            blocks_by_signs.setdefault(signs, []).append(block)
        coupled = _coupled_roots(group, root, axis)
        shape = group.view_shapes[axis.site]
        entries_each = math.prod(shape) // shape[axis.dim]
        for signs, blocks in blocks_by_signs.items():
            part = replace(axis, index=axis.index[blocks])
            size = part.index.numel() * entries_each
            terms.append(Term(part, (units.copies, units.size), signs, coupled, size))
    return tuple(terms)


def _coupled_roots(group: Group, root: str, axis: Axis) -> frozenset[str]:
    """Return the roots that move the entries along an axis, other than through it."""
    family = group.family(root)
    coupled = set()
    for dim, members in group.members(axis.site).items():
        for name, other_axis in members:
            same_dim = dim == axis.dim
            if same_dim and (name in family or not _overlap(axis, other_axis)):
                continue
            outermost = [name, *group.ancestors(name)][-1]
            coupled.add(outermost)
    return frozenset(coupled)


def _overlap(axis: Axis, other_axis: Axis) -> bool:
    return bool(torch.isin(axis.index, other_axis.index).any())


def _signs_at(group: Group, root: str, axis: Axis, positions: Tensor) -> frozenset[str]:
    """Return the units of a family whose signs multiply a block of an axis."""
    family = group.family(root) if is_simple(group, root) else (root,)
    signs = set()
    for name in family:
        if "flip" not in group[name].moves:
            continue
        for along in _along_same_axis(group, name, axis):
            same_block = (along.index == positions).all(-1)
            if along.exponent % 2 and same_block.any():
                signs.add(name)
    return frozenset(signs)


def _along_same_axis(group: Group, name: str, axis: Axis) -> list[Axis]:
    """Return the axes of some units on the same site and dimension as an axis."""
    place = (axis.site, axis.dim)
    return [along for along in group.axes(name) if (along.site, along.dim) == place]


@lru_cache(maxsize=4096)
def is_simple(group: Group, root: str) -> bool:
    """Return whether units hold no others, or only single ones with their own signs."""
    inner = [group[name] for name in group.family(root)[1:]]
    return all(units.size == 1 and units.parent == root for units in inner)


class Inside(NamedTuple):
    """The group inside one unit of a root, and its site for each of the root's terms.

    A site holds the unit's positions in the term.
    """

    group: Group
    sites: dict[Term, str]


@lru_cache(maxsize=256)
def group_inside(group: Group, root: str, sites: Names) -> Inside:
    """Build the group inside one unit of a root."""
    outer = group[root]
    sites_of_terms = {}
    shapes = {}
    axes: dict[str, list[Axis]] = {name: [] for name in group.family(root)}
    for number, term in enumerate(terms_of(group, root, sites)):
        site = f"{number}: {term.axis.site}"
        sites_of_terms[term] = site
        positions = term.axis.index[:, 0]  # of the first unit
        shape = group.view_shapes[term.axis.site]
        length = shape[term.axis.dim]
        shapes[site] = torch.Size((len(positions), math.prod(shape) // length))
        local_position = torch.full((length,), -1, device="cpu")
        local_position[positions] = torch.arange(len(positions), device="cpu")
        for name in axes:
            per_outer_unit = group[name].count // outer.count
            for along in _along_same_axis(group, name, term.axis):
                index = local_position[along.index[:, :per_outer_unit]]
                index = index[(index >= 0).all(-1)]
                if index.numel():
                    axes[name].append(Axis(site, 0, index, along.exponent))
    units = []
    for name, inner_axes in axes.items():
        inner = group[name]
        if name != root:
            parent = None if inner.parent == root else inner.parent
            copies = inner.count // outer.count // inner.size
            units.append(
                Units(name, inner.size, tuple(inner_axes), parent, copies, inner.moves)
            )
        elif "flip" in outer.moves:
            flip = moves_of("moves", "flip")
            units.append(Units(name, 1, tuple(inner_axes), moves=flip))
    return Inside(Group(units, shapes), sites_of_terms)
