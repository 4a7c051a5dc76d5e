"""Does a group change a function of the weights? If so, which moves of which units do.

The function may be a network's outputs (:mod:`~pyro_symmetric.discovery.outputs`) or a log-density
(:mod:`~pyro_symmetric.discovery.densities`). Each says by itself what an element changes, and whether that is more than
rounding; the search for the moves that break the invariance is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch

from pyro_symmetric.errors import Error
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import MOVES, Move

Part = tuple[Move, str]  # one move of some units
T = TypeVar("T")
BITS = 20  # a wrong move passes less than once in two to the power of so many times
DONE = {"permute": "permuted", "flip": "flipped", "scale": "rescaled", "shift": "shifted"}


class InconclusiveError(Error, ValueError):
    """Nothing can be told about an invariance: the function isn't one of the weights alone, or can't be evaluated.

    >>> def model():
    ...     w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    ...     pyro.sample("y", dist.Normal(w.sum() + torch.randn(()), 1.0), obs=torch.tensor(0.0))
    >>> try:
    ...     ps.verify_model(ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)}), model)
    ... except ps.discovery.InconclusiveError:
    ...     print("the density changes by itself")
    the density changes by itself
    """


class Change(NamedTuple):
    """The effect of an element on a function.

    :param broken: whether the change is larger than rounding explains.
    :param size: the change; infinite outside of a support.
    :param sites: of a density, the sites whose own density changes.
    """

    broken: bool
    size: float
    sites: tuple[str, ...] = ()


class FunctionOfWeights(Protocol):
    """A function of weights that knows how precise its values are."""

    name: str  # the function in words
    unit: str  # what its changes are measured in, in words

    @property
    def tolerance(self) -> float:
        """The largest change that passes as rounding."""

    def change(self, element: Element) -> Change:
        """The effect of an element on the function."""


@dataclass(frozen=True)
class BrokenMove:
    """A move of some units that changes the function.

    :param move: ``"permute"``, ``"flip"``, ``"scale"`` or ``"shift"``.
    :param name: the name of the units.
    :param change: the largest change: of an output, relative to the largest output; of a log-density, in nats (infinite
        outside of a support).
    :param unit: what the change is measured in, in words.
    :param sites: the sites whose own density, given the others, changed. Empty for outputs, and if discrete sites were
        summed out.
    :param remedy: the axis with which, or without which, a declaration holds, in words; empty if there is none.
    """

    move: Move
    name: str
    change: float
    unit: str = ""
    sites: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        text = f"units {self.name!r}: a change of {self.change:.3g} {self.unit} when they are {DONE[self.move]}"
        if self.sites:
            text += f"; what changes is the density of {', '.join(map(repr, self.sites))}"
        return text + (f". It would hold {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Verification:
    """The result of a check that a function is invariant under a group; true if it is.

    :param function: the function in words.
    :param broken: the moves that change it.
    :param error: the largest change that was seen: of an output, relative to the largest output; of a log-density, in
        nats.
    :param tolerance: the relative change that passes as rounding: of an output, or of each site's log-density.
    :param unit: what the error is measured in, in words.
    """

    function: str
    broken: tuple[BrokenMove, ...]
    error: float
    tolerance: float
    unit: str = ""

    def __bool__(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        if self:
            return (
                f"{self.function}: invariant under the group; the largest change seen is {self.error:.1e} {self.unit}"
            )
        head = f"{self.function}: not invariant under the units {[found.name for found in self.broken]}"
        return "\n".join(
            [head, *map(str, self.broken), f"a relative change of up to {self.tolerance:.1g} would pass as rounding"]
        )

    def require(self) -> None:
        """:raises ValueError: if the function isn't invariant, with all that is known about it."""
        if not self:
            raise ValueError(
                f"{self}\nDo the prior, the likelihood, or buffers such as running statistics treat units differently, "
                "or is the declaration wrong?"
            )


def verified(group: Group, function: FunctionOfWeights, trials: int | None = None) -> Verification:
    """Try random elements, and if one changes the function, single moves until those that do are known.

    :param trials: how many; by default so many that a wrong move passes less than once in a million times.
    """

    def change(parts: Sequence[Part], trials: int | None = None) -> Change:
        """The effect of the first element that changes the function, or the largest effect of all."""
        worst = Change(False, 0.0)
        for element in tried(group, parts, trials):
            worst = max(worst, function.change(element), key=lambda one: (one.broken, one.size))
            if worst.broken:
                break
        return worst

    whole, broken = change(parts_of(group), trials), list[BrokenMove]()
    for part in guilty(parts_of(group), lambda parts: change(parts).broken) if whole.broken else ():
        found = change([part])
        broken.append(BrokenMove(*part, found.size, function.unit, found.sites))
    return Verification(function.name, tuple(broken), whole.size, function.tolerance, function.unit)


def guilty(parts: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """The parts that fail by themselves, of those that fail together; if no half of them does, all."""
    if len(parts) <= 1:
        return list(parts)
    half = len(parts) // 2
    found = [part for side in (parts[:half], parts[half:]) if fails(side) for part in guilty(side, fails)]
    return found or list(parts)


def parts_of(group: Group) -> list[Part]:
    """Every move of every set of units that elements hold."""
    return [(move, name) for move in MOVES for name in group.names(move)]


def tried(group: Group, parts: Collection[Part], trials: int | None = None) -> Iterator[Element]:
    """Random elements that move all of these parts at once: if none changes the function, no part does.

    Permutations of the first are cycles of all units of a copy, so that it leaves no unit where it is. The others are
    uniform. Elements that change nothing are a subgroup, so that each finds a wrong move in half of all cases or more.
    Of a few flips of single units, each element has one, which finds a wrong one for certain.

    :param trials: how many; by default so many that a wrong move passes less than once in a million times.
    """
    number, single = _enough(group, parts)
    for i in range(number if trials is None else trials):
        element = group.sample(dtype=torch.float64)
        if i == 0:
            drawn = element.permutations
            cycles = {name: torch.empty_like(own).scatter_(-1, own, own.roll(1, -1)) for name, own in drawn.items()}
            element = Element(group, cycles, element.signs, element.log_scales, element.shifts)
        for j, name in enumerate(single if i < len(single) < BITS else ()):
            element.signs[name].fill_(-1.0 if i == j else 1.0)
        yield only(element, parts)


def only(element: Element, parts: Collection[Part]) -> Element:
    """The same element without all moves but these."""
    chosen = (
        {name: value for name, value in numbers.items() if (move, name) in parts}
        for move, numbers in zip(MOVES, element.parts, strict=True)
    )
    permutations, signs, log_scales, shifts = chosen
    return Element(element.group, permutations, signs, log_scales, shifts, element.batch_shape, dtype=torch.float64)


def _enough(group: Group, parts: Collection[Part]) -> tuple[int, list[str]]:
    """Number of elements that a wrong move passes less than once in a million times; and the single units that flip.

    Few are enough for large sets: a proper subgroup holds a random cycle of n units, and then a uniform permutation,
    with a probability of two over (n over n / 2) at most. (That of even permutations is left aside: no network minds
    whether a permutation is even.) Random scales and shifts meet no subgroup at all.
    """
    bits, single = [float(BITS)], []
    for move, name in parts:
        one = group[name]
        if move == "permute" and one.size > 1:
            n = min(one.size, 64)  # larger sets tell no more
            bits.append(math.log2(max(2, math.comb(n, n // 2) // 2)))
        elif move == "flip" and one.count == 1:
            single.append(name)
        elif move == "flip":  # those of units that are exchanged are wrong together
            alike = math.prod(
                group[own].size for own in (name, *group.ancestors(name)) if "permute" in group[own].moves
            )
            bits.append(max(1, alike - 1))
    return max(math.ceil(BITS / min(bits)), min(BITS, len(single))), single
