"""The parameters that are cut into slices with rows and columns of their own, by what reads them.

A parameter of which operators only read slices, all of which are read, is cut at the ends of these. A stack of matrices
is known by an axis along which products go side by side, or of which the data choose entries; a stack of vectors by two
axes that meet units which lie along both together. Either shows when labels that don't depend on it have gone through
the whole network once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.scaling.facts import Facts, Leaf
from pyro_symmetric.discovery.scaling.slices import Slices

# Units of slices are found entry by entry: parameters with more entries than this aren't cut.
SLICED_LIMIT = 2**24

aten = torch.ops.aten
_SAME = (aten.alias, aten.clone, aten.detach, aten.lift_fresh_copy)
_TAKING = (aten.slice, aten.select, aten.split, aten.split_with_sizes)


def planned(facts: Facts, node: torch.fx.Node, site: str) -> Slices | None:
    """The slices of a parameter that are known before labels reach it."""
    shape = tuple(node.meta["val"].shape)
    if site in facts.plan:
        return facts.plan[site]
    cuts = _cuts(node) if len(shape) > 1 and node.meta["val"].numel() <= SLICED_LIMIT else {}
    if len(cuts) != 1:
        return None
    ((axis, ends),) = cuts.items()
    return Slices.at(axis, sorted(ends), shape) if len(ends) > 2 else None


def stacked(facts: Facts) -> dict[str, Slices | None]:
    """Stacks of matrices, and what else (their biases) lies along the same axes, after a first walk; and vectors that
    weigh units of several heads, each head by one of its own.
    """
    leaves = [
        leaf
        for leaf in facts.leaves.values()
        if sum(n > 1 for n in leaf.shape) > 1
        and leaf.slices is None
        and not leaf.buffer
        and leaf.site not in facts.plan
        and leaf.site not in facts.kernels
    ]
    alike = bool(facts.stacks) and any(_may_be_a_stack(leaf) for leaf in leaves)
    if not alike and not facts.crossed:
        return {}
    _, unit = facts.classes()
    marked = np.unique(unit[np.concatenate([atoms.reshape(-1) for atoms in facts.stacks])]) if alike else unit[:0]
    crossed = [(unit[first], unit[second]) for first, second in facts.crossed]
    found: dict[str, Slices | None] = {}
    weighed: dict[str, Slices | None] = {}
    for leaf in leaves:
        axes = [i for i, atoms in enumerate(leaf.labels) if len(atoms) > 1 and np.isin(unit[atoms], marked).all()]
        if not axes:
            if (axis := _crossing(leaf, unit, crossed)) is not None:
                weighed[leaf.site] = Slices.at(axis, range(leaf.shape[axis] + 1), leaf.shape)
            continue
        if int(np.prod(leaf.shape)) > SLICED_LIMIT:
            if _may_be_a_stack(leaf):
                facts.lost[f"{leaf.site} (its slices have more than {SLICED_LIMIT} entries)"] = None
            continue
        found[leaf.site] = Slices.at(axes[0], range(leaf.shape[axes[0]] + 1), leaf.shape)
    return weighed | (found if any(_may_be_a_stack(facts.leaves[site]) for site in found) else {})


# small steps --------------------------------------------------------------------------------------------------------


def _crossing(leaf: Leaf, unit: Array, crossed: Sequence[tuple[Array, Array]]) -> int | None:
    """The first of two axes of a leaf that meet units which lie along both together; None if no two do."""
    along = [(i, unit[atoms]) for i, atoms in enumerate(leaf.labels) if len(atoms) > 1]
    for (axis, mine), (_, theirs) in itertools.combinations(along, 2):
        if any(np.isin(mine, first).all() and np.isin(theirs, second).all() for first, second in crossed):
            return axis
    return None


def _may_be_a_stack(leaf: Leaf) -> bool:
    """True if a parameter has three axes; embeddings of places have one of length one in front."""
    return len(leaf.shape) > 2 and leaf.shape[0] > 1


def _cuts(node: torch.fx.Node) -> dict[int, set[int]]:
    """Axis -> where the slices end that operators read; nothing if something else is read, or not all is."""
    waiting, shape = [node], node.meta["val"].shape
    read: list[tuple[int, int, int]] = []
    while waiting:
        for user in waiting.pop().users:
            packet = getattr(user.target, "overloadpacket", None)
            if packet in _SAME:
                waiting.append(user)
                continue
            taken = _taken(user, packet, shape) if packet in _TAKING else None
            if taken is None:
                return {}
            read += taken
    cuts: dict[int, set[int]] = {}
    for axis, start, end in read:
        cuts.setdefault(axis, {0, shape[axis]}).update((start, end))
    for axis in cuts:
        covered = np.zeros(shape[axis], dtype=bool)
        for own, start, end in read:
            covered[start:end] |= own == axis
        if not covered.all():
            return {}
    return cuts


def _taken(user: torch.fx.Node, packet: Any, shape: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """The stretches ``(axis, start, end)`` that an operator takes; None if there are none, or if they have gaps."""
    target: Any = user.target
    names = [argument.name for argument in target._schema.arguments]
    given: dict[str, Any] = {a.name: a.default_value for a in target._schema.arguments}
    given |= dict(zip(names, user.args, strict=False)) | dict(user.kwargs)
    axis = given["dim"] % len(shape)
    length = shape[axis]
    if packet is aten.select:
        place = given["index"] % length
        return [(axis, place, place + 1)]
    if packet is aten.slice:
        own = range(length)[given["start"] : given["end"]]
        return [(axis, own.start, own.stop)] if given["step"] == 1 and len(own) else None
    sizes: Any = given.get("split_size", given.get("split_sizes"))
    sizes = [sizes] * -(-length // sizes) if isinstance(sizes, int) else sizes
    ends = np.minimum(np.cumsum([0, *sizes]), length).tolist()
    return [(axis, start, end) for start, end in itertools.pairwise(ends)]
