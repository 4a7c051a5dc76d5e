"""Does a group change a function of the weights? If so, which moves of which units do.

The function may be a network's outputs (:mod:`~pyro_symmetric.discovery.verify`) or a log-density
(:mod:`~pyro_symmetric.discovery.model_check`). Each says by itself what an element changes, and whether that is more
than rounding; the elements that are tried, and the search for the moves that break the invariance, are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pyro_symmetric.errors import Error
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import MOVES, Move

Part = tuple[Move, str]  # one move of some units
T = TypeVar("T")
BITS = 20  # a wrong move passes less than once in two to the power of so many times


class InconclusiveError(Error, ValueError):
    """Nothing can be told about an invariance: the function isn't one of the weights alone, or can't be evaluated."""


class Change(NamedTuple):
    """The effect of an element on a function.

    :param broken: whether the change is larger than rounding explains.
    :param size: the change; infinite outside of a support.
    :param sites: of a density, the sites whose own density changes.
    """

    broken: bool
    size: float
    sites: tuple[str, ...] = ()


class BrokenMove(NamedTuple):
    """A move of some units that changes the function.

    :param move: ``"permute"``, ``"flip"``, ``"scale"`` or ``"shift"``.
    :param name: the name of the units.
    :param change: the largest change, infinite outside of a support.
    :param sites: the sites whose own density, given the others, changed. Empty for outputs, and if discrete sites were
        summed out.
    :param remedy: the axis with which, or without which, a declaration holds, in words; empty if there is none.
    """

    move: Move
    name: str
    change: float
    sites: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of a check that a function is invariant under a group; true if it is.

    :param function: the function in words.
    :param broken: the moves that change it.
    :param error: the largest change that was seen: of an output, relative to the largest output; of a log-density, in
        nats.
    :param tolerance: the relative change that passes as rounding: of an output, or of each site's log-density.
    :param unit: what the changes are measured in, in words.
    """

    function: str
    broken: tuple[BrokenMove, ...]
    error: float
    tolerance: float
    unit: str

    def __bool__(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        if self:
            return (
                f"{self.function}: invariant under the group; the largest change seen is {self.error:.1e} {self.unit}"
            )
        lines = [f"{self.function}: not invariant under the units {[found.name for found in self.broken]}"]
        for one in self.broken:
            changed = f"; what changes is the density of {', '.join(map(repr, one.sites))}" if one.sites else ""
            remedy = f". It would hold {one.remedy}" if one.remedy else ""
            size = f"a change of {one.change:.3g} {self.unit} when they {one.move}"
            lines.append(f"units {one.name!r}: {size}{changed}{remedy}")
        return "\n".join([*lines, f"a relative change of up to {self.tolerance:.1g} would pass as rounding"])


def broken_moves(
    group: Group, change: Callable[[Element], Change], trials: int | None = None
) -> tuple[tuple[BrokenMove, ...], float]:
    """Try random elements, and if one changes the function, single moves until those that do are known.

    :param change: the effect of an element.
    :param trials: how many elements; by default so many that a wrong move passes less than once in a million times.
    :return: the moves that change it, and the largest change that all of them together made.
    """

    broke: list[Element] = []  # the first that did; others may break a clamp, say, more rarely

    def worst(parts: Sequence[Part], trials: int | None = None) -> Change:
        """The effect of the first element that changes the function, or the largest effect of all."""
        found = Change(False, 0.0)
        for element in chain([only(one, parts) for one in broke], elements_to_try(group, parts, trials)):
            found = max(found, change(element), key=lambda one: (one.broken, one.size))
            if found.broken:
                broke[:] = broke or [element]
                break
        return found

    parts = parts_of(group)
    whole = worst(parts, trials)
    wrong = guilty(parts, lambda own: worst(own).broken) if whole.broken else []
    alone = [worst([part]) for part in wrong]
    broken = (BrokenMove(*part, one.size, one.sites) for part, one in zip(wrong, alone, strict=True))
    return tuple(broken), whole.size


def guilty(parts: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """The parts that fail by themselves, of those that fail together; if no half of them does, all."""
    if len(parts) <= 1:
        return list(parts)
    half = len(parts) // 2
    found = [part for side in (parts[:half], parts[half:]) if fails(side) for part in guilty(side, fails)]
    return found or list(parts)


# elements that are tried ----------------------------------------------------------------------------------------------


def parts_of(group: Group) -> list[Part]:
    """Every move of every set of units that elements hold."""
    return [(move, name) for move in MOVES for name in group.names(move)]


def elements_to_try(group: Group, parts: Collection[Part], trials: int | None = None) -> Iterator[Element]:
    """Random elements that make all of these moves at once: if none changes a function, no move does.

    Permutations of the first are cycles of all units of a copy, so that it leaves no unit where it is. The others are
    uniform. Elements that change nothing are a subgroup, so that each finds a wrong move in half of all cases or more:
    of n units that are exchanged, in all but two of (n over n / 2). (That of even permutations is left aside: no
    network minds whether a permutation is even.) Random scales and shifts meet no subgroup at all. Of a few flips of
    single units, each element has one, which finds a wrong one for certain.

    :param trials: how many; by default so many that a wrong move passes less than once in a million times.
    """
    single = [name for move, name in parts if move == "flip" and group[name].count == 1]
    several = [part for part in parts if part[0] in ("permute", "flip") and group[part[1]].count > 1]
    bits = [_bits(group, *part) for part in several]
    enough = max(math.ceil(BITS / min(bits, default=BITS)), min(BITS, len(single)))
    for i in range(enough if trials is None else trials):
        element = group.sample(dtype=torch.float64)
        permutations, signs = element.permutations, element.signs
        if i == 0:
            permutations = {n: torch.empty_like(p).scatter_(-1, p, p.roll(1, -1)) for n, p in permutations.items()}
        for j, name in enumerate(single if i < len(single) < BITS else ()):
            signs[name] = torch.full_like(signs[name], -1.0 if i == j else 1.0)
        yield only(Element(group, permutations, signs, element.log_scales, element.shifts), parts)


def _bits(group: Group, move: Move, name: str) -> float:
    """A wrong move passes one random element with probability at most ``2 ** -bits``.

    Flips of units that are exchanged are wrong together.
    """
    around = (name, *group.ancestors(name)) if move == "flip" else (name,)
    alike = math.prod(group[own].size for own in around if "permute" in group[own].moves)
    return max(1.0, (alike - 1) / 2)


def only(element: Element, parts: Collection[Part]) -> Element:
    """The same element without all moves but these."""
    permutations, signs, log_scales, shifts = (
        {name: value for name, value in numbers.items() if (move, name) in parts}
        for move, numbers in zip(MOVES, element.parts, strict=True)
    )
    return Element(element.group, permutations, signs, log_scales, shifts, element.batch_shape, dtype=torch.float64)


def difference(before: list[Tensor] | None, after: list[Tensor] | None) -> float:
    """The largest change of an entry, relative to the largest finite entry of the same output."""
    if before is None or after is None:
        return 0.0 if before is after else float("inf")
    if [x.shape for x in before] != [y.shape for y in after]:
        return float("inf")
    worst = 0.0
    for x, y in zip(before, after, strict=True):
        if not x.numel():
            continue
        if not (x.is_floating_point() or x.is_complex()):
            x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        size = torch.where(x.isfinite(), x, 0).abs().max().clamp_min(torch.finfo(x.dtype).tiny)
        worst = max(worst, float((torch.where(same, 0, x - y).abs().max() / size).nan_to_num(nan=float("inf"))))
    return worst
