"""Parameters of branches that are alike, as one leaf: a stack of sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from pyro_symmetric.discovery.branches import Branches
from pyro_symmetric.discovery.facts import Facts, Leaf
from pyro_symmetric.discovery.labels import Array
from pyro_symmetric.discovery.slices import Slices, narrowed
from pyro_symmetric.discovery.structure import solve
from pyro_symmetric.groups import Axis
from pyro_symmetric.groups.stacks import stack_name
from pyro_symmetric.groups.views import View


@dataclass(frozen=True, eq=False)
class Stack:
    """Sites of branches that are alike, as one leaf.

    :param sites: the sites, in the order of the stack.
    :param shape: the stack's shape. The leaf's is the same, or has the first two axes of it (or of each branch) as one.
    """

    sites: tuple[str, ...]
    shape: torch.Size

    def axis(self, axis: Axis, leaf_shape: Sequence[int]) -> Axis:
        """An axis of the leaf as one of the stack."""
        if len(leaf_shape) == len(self.shape) and tuple(leaf_shape) == tuple(self.shape):
            return axis
        more = len(self.shape) - len(leaf_shape)
        joined = 2 - more  # axes of the leaf that are the first two of the stack, in the same order of entries
        if axis.dim >= joined:
            return replace(axis, dim=axis.dim + more)
        run = range(max(joined, axis.dim + axis.span))
        lifted = View(torch.Size(leaf_shape), [0 if dim in run else dim for dim in range(len(leaf_shape))]).lift(axis)
        return narrowed(replace(lifted, dim=0, span=len(run) + more), self.shape)


def joined_leaves(facts: Facts, sets: Sequence[Branches], units: Sequence[Array]) -> dict[str, Stack]:
    """Make one leaf of the parameters of branches that are alike; name of the stack -> its sites.

    :param units: for each set of branches the atoms of the branches.
    """
    found: dict[str, Stack] = {}
    for sites in _alike(facts, sets):
        leaves = [facts.leaves[site] for site in sites]
        whole = [_innermost(sets, site) for site in sites]
        owners = [owner for owner in dict.fromkeys(whole) if owner is not None]
        name, slots = stack_name(sites), len(sites) // max(1, len(owners))
        each = [leaves[k : k + slots] for k in range(0, len(leaves), slots)]
        shape = tuple(leaves[0].shape)
        joined = shape if slots == 1 else (slots * shape[0], *shape[1:])
        labels = [
            np.stack([np.concatenate([leaf.labels[dim] for leaf in (row[:1] if dim else row)]) for row in each])
            for dim in range(len(shape))
        ]
        first = leaves[0]
        if owners:
            along = np.concatenate([units[number][k : k + 1] for number, k in owners])
            slices = Slices.at(0, range(len(owners) + 1), (len(owners), *joined))
            stack = Leaf(name, (len(owners), *joined), (along, *labels), first.buffer, slices)
        else:
            stack = Leaf(name, joined, tuple(own[0] for own in labels), first.buffer)
        _replace(facts, sites, stack)
        found[name] = Stack(sites, torch.Size((len(sites), *shape)))
    return found


def idle_sites(facts: Facts, stacks: Mapping[str, Stack]) -> set[str]:
    """The sites of stacks whose branches have turned out to be different, so that none is exchanged."""
    if not stacks:
        return set()
    structure = solve(facts)
    found: set[str] = set()
    for name, stack in stacks.items():
        leaf = facts.leaves[name]
        if leaf.slices is not None:
            cells = structure.cell[structure.unit_class[leaf.labels[0]]]
            found |= set() if np.isin(cells, list(structure.cells)).any() else set(stack.sites)
    return found


# small steps --------------------------------------------------------------------------------------------------------


def _replace(facts: Facts, sites: Sequence[str], stack: Leaf) -> None:
    leaves = {stack.site if site == sites[0] else site: leaf for site, leaf in facts.leaves.items()}
    facts.leaves = {site: stack if site == stack.site else leaf for site, leaf in leaves.items() if site not in sites}
    if sites[0] in facts.kernels:
        facts.kernels.add(stack.site)
    if sites[0] in facts.epsilons:
        facts.epsilons[stack.site] = facts.epsilons[sites[0]]


def _alike(facts: Facts, sets: Sequence[Branches]) -> list[tuple[str, ...]]:
    """Sites of branches that are alike, those of outer branches together."""
    group: dict[str, list[str]] = {}
    for own in sets:
        for sites in zip(*own.sites, strict=True):
            merged = list(dict.fromkeys(s for site in sites for s in group.get(site, [site])))
            group |= dict.fromkeys(merged, merged)
    order = {site: number for number, site in enumerate(facts.leaves)}
    each = {tuple(sorted(sites, key=partial(_path, sets))) for sites in group.values()}
    return sorted(each, key=lambda sites: min(order[site] for site in sites))


def _path(sets: Sequence[Branches], site: str) -> tuple[int, ...]:
    """The branches that a site lies in, outer ones first; what is exchanged by unit comes last."""
    inside = [(-len(own.nodes[0]), k) for own in sets for k, sites in enumerate(own.sites) if site in sites]
    return tuple(k for _, k in sorted(inside))


def _innermost(sets: Sequence[Branches], site: str) -> tuple[int, int] | None:
    """The number of the smallest set of branches that are exchanged as wholes, and the branch, of a site."""
    inside = [
        (len(own.nodes[0]), number, k)
        for number, own in enumerate(sets)
        if not own.by_unit
        for k, sites in enumerate(own.sites)
        if site in sites
    ]
    return min(inside)[1:] if inside else None
