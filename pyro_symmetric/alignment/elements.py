"""Batches of elements, put together and taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group


def replaced(
    element: Element,
    permutations: Mapping[str, Tensor] | None = None,
    signs: Mapping[str, Tensor] | None = None,
    log_scales: Mapping[str, Tensor] | None = None,
) -> Element:
    """The same element with some of its numbers replaced."""
    return Element(
        element.group,
        {**element.permutations, **(permutations or {})},
        {**element.signs, **(signs or {})},
        {**element.log_scales, **(log_scales or {})},
        element.shifts,
        element.batch_shape,
    )


def some(element: Element, rows: Tensor) -> Element:
    """Some elements of a batch ``(B,)``, whose numbers are in order."""
    return element if len(rows) == element.batch_shape[0] else element.select(rows)


def put(element: Element, rows: Tensor, other: Element) -> Element:
    """A batch ``(B,)`` in which some elements are those of another batch."""
    if len(rows) == element.batch_shape[0]:
        return other

    def both(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.index_copy(0, rows.to(value.device), theirs[name]) for name, value in mine.items()}

    parts = [both(getattr(element, kind), getattr(other, kind)) for kind in ("permutations", "signs", "log_scales")]
    return Element(element.group, parts[0], parts[1], parts[2], element.shifts, element.batch_shape)


def joined(elements: list[Element]) -> Element:
    """Several batches as one."""
    parts = [
        {name: torch.cat([getattr(one, kind)[name] for one in elements]) for name in getattr(elements[0], kind)}
        for kind in ("permutations", "signs", "log_scales")
    ]
    shape = (sum(one.batch_shape[0] for one in elements), *elements[0].batch_shape[1:])
    return Element(elements[0].group, parts[0], parts[1], parts[2], elements[0].shifts, shape)


def shaped(element: Element, group: Group, shifts: Mapping[str, Tensor], shape: Sequence[int]) -> Element:
    """A batch ``(B,)`` and shifts of as many, as elements of a larger group, of another batch shape."""
    parts = [
        {name: value.reshape(*shape, *group[name].shape) for name, value in part.items()}
        for part in (element.permutations, element.signs, element.log_scales, shifts)
    ]
    return Element(group, parts[0], parts[1], parts[2], parts[3], batch_shape=shape)
