"""A group of stacks as one of the sites in them: without the exchanges of whole sites, with all that is continuous.

Units of one set may lie in several sites of a stack. What lies in the same ones becomes a set of its own, so that each
of its axes is one of a site. Signs, scales, shifts and mixtures are the same as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from pyro_symmetric.discovery.slices import narrowed
from pyro_symmetric.groups import Axis, Group, Units

Pieces = dict[str, list[tuple[str, torch.Tensor]]]  # set of units -> its pieces: (name, numbers ``(copies, size)``)


def apart(group: Group) -> Group:
    """The subgroup that exchanges no sites, as a group without stacks; the group itself, if it has none."""
    if not group.stacks:
        return group
    pieces: Pieces = {}
    units: list[Units] = []
    for name, one in group.units.items():
        pieces[name] = pieces_of(group, one)
        for piece, numbers in pieces[name]:
            own = tuple(a for axis in one.axes for a in plain_axes(group, axis, numbers.flatten()))
            parent = _parent(one, numbers, pieces)
            if own:
                units.append(Units(piece, numbers.shape[1], own, parent, len(numbers), one.moves))
    return Group(units, group.plain_shapes)


def pieces_of(group: Group, one: Units) -> list[tuple[str, torch.Tensor]]:
    """Sets of units that lie in the same sites of each stack: name and numbers of the units, ``(copies, size)``."""
    where = [axis.index // _stride(group, axis) for axis in one.axes if axis.site in group.stacks and axis.dim == 0]
    if not where:
        return [(one.name, torch.arange(one.count, device="cpu").reshape(one.copies, one.size))]
    kinds = torch.cat(where).T.unique(dim=0, return_inverse=True)[1].reshape(one.copies, one.size)
    found = []
    for kind in kinds.unique().tolist():
        numbers = (kinds == kind).reshape(-1).nonzero()[:, 0]
        copies = int((kinds == kind).any(1).sum())
        found.append((f"{one.name}/{kind}", numbers.reshape(copies, -1)))
    return found


def every_axis(group: Group, name: str) -> list[Axis]:
    """All axes of some units, site by site."""
    every = [(axis, numbers) for _, numbers in pieces_of(group, group[name]) for axis in group[name].axes]
    return [plain for axis, numbers in every for plain in plain_axes(group, axis, numbers.flatten())]


def plain_axes(group: Group, axis: Axis, numbers: torch.Tensor) -> Iterator[Axis]:
    """The rest of an axis for some of its units, site by site.

    Units that are whole sites have no axis of a site.

    :param numbers: of the units, all of which lie in the same sites of each stack.
    """
    index, sites = axis.index[:, numbers], group.stacks.get(axis.site)
    if sites is None:
        yield replace(axis, index=index)
    elif axis.dim:
        for site in sites:
            yield replace(axis, site=site, dim=axis.dim - 1, index=index)
    elif axis.span > 1:
        stride = _stride(group, axis)
        for number in (index[:, 0] // stride).unique().tolist():
            rows = index[index[:, 0] // stride == number] % stride
            one = replace(axis, site=sites[number], index=rows, span=axis.span - 1)
            yield narrowed(one, group.plain_shapes[one.site])


def _stride(group: Group, axis: Axis) -> int:
    """The number of positions in one site of an axis that begins with the first of a stack."""
    return math.prod(group.site_shapes[axis.site][1 : axis.span])


def _parent(one: Units, numbers: torch.Tensor, pieces: Pieces) -> str | None:
    """The piece that permutes the copies of another, in order; None if there is none, or but one copy in each."""
    copies = numbers[:, 0] // one.size
    own = pieces[one.parent] if one.parent is not None else []
    return next((name for name, outer in own if outer.shape[1] > 1 and torch.equal(outer.flatten(), copies)), None)
