"""Which moves of which units change a function of the weights: elements to try, and the search for the guilty.

The function may be a network's outputs (:mod:`~pyro_symmetric.discovery.verify`), or a log-density
(:mod:`~pyro_symmetric.discovery.model_check`); each says by itself what counts as a change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import MOVES, Move, Units

Part = tuple[Move, str]  # one move of some units


def parts_of(group: Group) -> list[Part]:
    """Every move of every set of units."""
    return [(move, name) for move in MOVES for name in group.names(move)]


def drawn(group: Group, parts: Collection[Part], dtype: torch.dtype | None = None) -> Element:
    """A random element of these parts; all else stays."""
    return _only(group.sample(dtype=dtype), parts)


def tried(group: Group, parts: Collection[Part], dtype: torch.dtype | None = None) -> list[Element]:
    """A few elements that move all of these parts at once: if none changes the function, no part does.

    None is the identity, not even of two units, and every copy of units inside others gets another permutation or
    another flip than its neighbour. The last one is random.
    """
    elements = group.sample((3,), dtype=dtype)
    for numbers, chosen in ((elements.permutations, _permutations), (elements.signs, _flips)):
        for name, own in numbers.items():
            own[:2] = chosen(group[name])
    chosen_only = _only(elements, parts)
    return [chosen_only.select(i) for i in range(3)]


def guilty(parts: Sequence[Part], fails: Callable[[Sequence[Part]], bool]) -> list[Part]:
    """Of parts that fail together those that fail by themselves; if no half of them does, all."""
    if len(parts) <= 1:
        return list(parts)
    half = len(parts) // 2
    found = [part for side in (parts[:half], parts[half:]) if fails(side) for part in guilty(side, fails)]
    return found or list(parts)


# small steps --------------------------------------------------------------------------------------------------------


def _only(element: Element, parts: Collection[Part]) -> Element:
    numbers = (element.permutations, element.signs, element.log_scales, element.shifts)
    chosen = (
        {name: value for name, value in own.items() if (move, name) in parts}
        for move, own in zip(MOVES, numbers, strict=True)
    )
    real = next((value.dtype for own in numbers[1:] for value in own.values()), None)
    permutations, signs, log_scales, shifts = chosen
    return Element(element.group, permutations, signs, log_scales, shifts, element.batch_shape, dtype=real)


def _permutations(units: Units) -> Tensor:
    """A cycle in every copy; an exchange in every second: ``(2,) + units.shape``."""
    own = torch.arange(units.size).repeat(2, units.copies, 1)
    own[0] = own[0].roll(1, -1)
    own[1, ::2, :2] = own[1, ::2, :2].flip(-1)
    return own.reshape(2, *units.shape)


def _flips(units: Units) -> Tensor:
    """The flip of the first unit of every second copy; those of all: ``(2,) + units.shape``."""
    own = torch.ones(2, units.copies, units.size)
    own[0, ::2, 0] = -1.0
    own[1] = -1.0
    return own.reshape(2, *units.shape)
