"""Batches of elements, put together and taken apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.placement import together

# Log-scales that are closer than this are the same.
SAME_SCALE = 1e-9


def replaced(
    element: Element,
    permutations: Mapping[str, Tensor] | None = None,
    signs: Mapping[str, Tensor] | None = None,
    log_scales: Mapping[str, Tensor] | None = None,
) -> Element:
    """The same element with some of its numbers replaced."""
    new: list[Mapping[str, Tensor]] = [permutations or {}, signs or {}, log_scales or {}, {}]
    parts = [{**own, **other} for own, other in zip(element.parts, new, strict=True)]
    fit = (v.shape == (*element.batch_shape, *element.group[n].shape) for part in new for n, v in part.items())
    if all(fit):
        return Element._of_parts(element.group, parts, element.batch_shape)
    return _built(element.group, parts, element.batch_shape)


def some(element: Element, rows: Tensor) -> Element:
    """Some elements of a batch ``(B,)``, whose numbers are in order."""
    return element if len(rows) == element.batch_shape[0] else element.select(rows)


def put(element: Element, rows: Tensor, other: Element) -> Element:
    """A batch ``(B,)`` in which some elements are those of another batch."""
    if len(rows) == element.batch_shape[0]:
        return other
    parts = [
        {name: value.index_copy(0, rows.to(value.device), theirs[name]) for name, value in mine.items()}
        for mine, theirs in zip(element.parts, other.parts, strict=True)
    ]
    return Element._of_parts(element.group, parts, element.batch_shape)


def joined(elements: Sequence[Element]) -> Element:
    """Several batches as one."""
    parts = [
        {name: torch.cat([part[name] for part in every]) for name in every[0]}
        for every in zip(*(one.parts for one in elements), strict=True)
    ]
    shape = (sum(one.batch_shape[0] for one in elements), *elements[0].batch_shape[1:])
    return Element._of_parts(elements[0].group, parts, shape)


def shaped(element: Element, group: Group, shifts: Mapping[str, Tensor], shape: Sequence[int]) -> Element:
    """A batch ``(B,)`` and shifts of as many, as elements of a larger group, of another batch shape."""
    parts = [
        {name: value.reshape(*shape, *group[name].shape) for name, value in part.items()}
        for part in (*element.parts[:3], shifts)
    ]
    return _built(group, parts, shape)


def on_device(element: Element, device: torch.device | None) -> Element:
    """The same elements on a device, in one copy."""
    if device is None:
        return element
    values = iter(together([value for part in element.parts for value in part.values()], device))
    parts = [{name: next(values) for name in part} for part in element.parts]
    return Element._of_parts(element.group, parts, element.batch_shape)


def differing(names: Collection[str], one: Element, other: Element) -> tuple[Tensor, Tensor]:
    """Members whose permutations or signs differ, and those whose scales do, bool of the batch's shape each."""
    batch = len(one.batch_shape)
    rearranged, scaled = torch.zeros(2, *one.batch_shape, dtype=torch.bool, device="cpu").unbind()
    for name in names:
        for mine, theirs in zip(one.parts[:2], other.parts[:2], strict=True):
            if name in mine:
                rearranged = rearranged | (mine[name] != theirs[name]).flatten(batch).any(-1).cpu()
        if name in one.log_scales:
            far = (one.log_scales[name] - other.log_scales[name]).abs() > SAME_SCALE
            scaled = scaled | far.flatten(batch).any(-1).cpu()
    return rearranged, scaled


def at_home(element: Element) -> Element:
    """The same frame, its permutations and signs counted from those that most members have, of several the first's.

    With :math:`h` the commonest element every :math:`g` becomes :math:`h^{-1} g`, so that the commonest stay as they
    came.
    """
    finite = [*element.permutations.values(), *(value.long() for value in element.signs.values())]
    if not finite:
        return element
    rows = torch.cat([value.flatten(1) for value in finite], 1)
    _, kind, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    first = element.select(int((counts[kind] == counts.max()).nonzero()[0]))
    commonest = Element(element.group, first.permutations, first.signs, device=rows.device)
    return commonest.inverse() @ element


def _built(group: Group, parts: Sequence[Mapping[str, Tensor]], shape: Sequence[int]) -> Element:
    permutations, signs, log_scales, shifts = parts
    return Element(group, permutations, signs, log_scales, shifts, shape)
