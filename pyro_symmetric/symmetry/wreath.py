r"""Factors inside the units of other factors: wreath products, of any depth.

Attention permutes whole heads and, within each head, its rows; a grouped convolution permutes whole groups and the
channels inside each. With :math:`H` units outside and :math:`S_d` inside each the group is the wreath product
:math:`S_d \wr S_H` of order :math:`(d!)^H H!`. Elements act inside first, then outside:

.. math:: (p \cdot w)_{i,j} = w_{\sigma(i),\, c_{\sigma(i)}(j)}

where :math:`\sigma` is the image of the outer factor and :math:`c_k` that of the inner factor in slot :math:`k`, named
after the place that the units come from. Hence ``p @ r`` has :math:`c^{pr}_{k} = c^r_k \circ c^p_{\tau^{-1}(k)}`, with
:math:`\tau` the outer image of ``r``: the inner images of ``p`` move along with the units that ``r`` has moved. Deeper
levels are the same with paths :math:`(k, l, \dots)` in place of :math:`k`, which is how they are computed here: all
inner factors of one kind are stacked, ``batch + (paths, n)``, and one permutation of paths says where each goes.

Elements are unique: an element is the identity only where all its images are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Family:
    """The factors of one kind, one in each slot of each factor of the parent family; a plain factor is a family of one.

    :param names: the factors in the order of their paths, the outermost slot running slowest.
    :param size: the number of units that each permutes.
    :param inner: the families inside its units.
    """

    names: tuple[str, ...]
    size: int
    inner: tuple[Family, ...] = ()


def families(factors: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> tuple[Family, ...]:
    """Sort factors (with ``size``, ``parent``, ``slot``) into families.

    The first factor that names a slot of a parent corresponds to the first of every other slot, and so on.

    :param axes: factor -> its axes, none of which spans several.
    :raises ValueError: if a parent is unknown, or if slots of one parent differ in what they hold.
    """
    children: dict[str, dict[int, list[str]]] = {}
    roots = []
    for name, factor in factors.items():
        if factor.parent is None:
            roots.append(name)
            continue
        if factor.parent not in factors:
            raise ValueError(f"factor {name!r} lies in {factor.parent!r}, but the factors are {list(factors)}")
        size = factors[factor.parent].size
        if factor.slot is None or not 0 <= factor.slot < size:
            raise ValueError(f"factor {name!r} lies in slot {factor.slot} of {factor.parent!r}, which has {size} units")
        _check_inside(factor, axes)
        children.setdefault(factor.parent, {}).setdefault(factor.slot, []).append(name)
    trees = tuple(_family((name,), factors, axes, children) for name in roots)
    reached = sum(map(_count, trees))
    if reached != len(factors):
        raise ValueError("the factors' parents go round in a circle")
    return trees


def compose(tree: Family, mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Images of ``mine @ other`` for the factors of a family and those inside, whose batch shapes must agree."""
    result: dict[str, Tensor] = {}

    def visit(family: Family, came_from: Tensor | None) -> None:
        first, then = _stack(family, other), _stack(family, mine)
        if came_from is not None:
            then = _rows(then, came_from.argsort(-1))
        _unstack(family, first.gather(-1, then), result)
        for child in family.inner:
            visit(child, _paths(came_from, first))

    visit(tree, None)
    return result


def invert(tree: Family, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Images of the inverse, for the factors of a family and those inside."""
    result: dict[str, Tensor] = {}

    def visit(family: Family, came_from: Tensor | None) -> None:
        own = _stack(family, images)
        inverse = own.argsort(-1)
        _unstack(family, inverse if came_from is None else _rows(inverse, came_from), result)
        for child in family.inner:
            visit(child, _paths(came_from, own))

    visit(tree, None)
    return result


# small steps --------------------------------------------------------------------------------------------------------


def _stack(family: Family, images: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([images[name] for name in family.names], -2)


def _unstack(family: Family, stacked: Tensor, result: dict[str, Tensor]) -> None:
    result.update(zip(family.names, stacked.unbind(-2), strict=True))


def _rows(stacked: Tensor, order: Tensor) -> Tensor:
    """Reorder the paths of ``batch + (paths, n)``."""
    return stacked.gather(-2, order.unsqueeze(-1).expand(*order.shape, stacked.shape[-1]))


def _paths(came_from: Tensor | None, own: Tensor) -> Tensor:
    """Where each unit, counted through all paths, came from: ``batch + (paths * n,)``."""
    n = own.shape[-1]
    if came_from is None:
        return own.flatten(-2)
    return (came_from.unsqueeze(-1) * n + _rows(own, came_from)).flatten(-2)


def _family(
    names: tuple[str, ...],
    factors: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    children: Mapping[str, Mapping[int, list[str]]],
) -> Family:
    first = factors[names[0]]
    kinds = len(next(iter(children.get(names[0], {}).values()), []))
    inner = []
    for kind in range(kinds):
        members = []
        for name in names:
            for slot in range(first.size):
                held = children.get(name, {}).get(slot, [])
                if len(held) != kinds:
                    raise ValueError(
                        f"slot {slot} of factor {name!r} holds {len(held)} factors, another slot holds {kinds}; "
                        "units that are exchanged must be alike inside"
                    )
                members.append(held[kind])
        _check_alike(members, factors, axes)
        inner.append(_family(tuple(members), factors, axes, children))
    if not kinds and any(children.get(name) for name in names):
        raise ValueError(f"some of the factors {list(names)} hold factors and some don't; they must be alike inside")
    return Family(names, first.size, tuple(inner))


def _count(family: Family) -> int:
    return len(family.names) + sum(map(_count, family.inner))


def _check_inside(factor: Any, axes: Mapping[str, Sequence[Any]]) -> None:
    """A factor moves only positions of its parent's slot."""
    for axis in axes[factor.name]:
        _places(axis, axes[factor.parent], factor)


def _check_alike(names: Sequence[str], factors: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> None:
    """What moves in one slot must move in the same places of every other slot."""
    looks = []
    for name in names:
        factor = factors[name]
        places = [(a.site, a.dim, _places(a, axes[factor.parent], factor)) for a in axes[name]]
        looks.append((factor.size, sorted((site, dim, found.numpy().tobytes()) for site, dim, found in places)))
    for name, look in zip(names, looks, strict=True):
        if look != looks[0]:
            raise ValueError(
                f"factors {names[0]!r} and {name!r} lie in slots that are exchanged, but move different places in "
                "them; units that are exchanged must be alike inside"
            )


def _places(axis: Any, parent_axes: Sequence[Any], factor: Any) -> Tensor:
    """The index of an axis in terms of (parent axis block) numbers within the slot: sorted blocks, ``(blocks, n)``."""
    offset = 0
    for outer in parent_axes:
        if (outer.site, outer.dim) == (axis.site, axis.dim):
            own, order = outer.index[:, factor.slot].cpu().sort()
            place = torch.searchsorted(own, axis.index.cpu().contiguous()).clamp_max(len(own) - 1)
            if bool((own[place] == axis.index.cpu()).all()):
                found = order[place] + offset
                return found[found[:, 0].argsort()]  # blocks may come in any order
        offset += len(outer.index)
    raise ValueError(
        f"factor {factor.name!r} moves axis {axis.dim} of {axis.site!r} outside slot {factor.slot} of {factor.parent!r}"
    )
