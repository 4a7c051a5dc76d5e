"""Moves: what units may do. Groups and elements ask a move what they need to know.

An element holds the numbers of each move, one row a batch entry, in which the units
follow one another: one number a unit, or, for rotations, a matrix a copy. A move says
what these numbers are, which are neutral, how they are drawn, inverted and multiplied,
and how they follow units that others carry around.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group
    from pyro_symmetric.groups.units import Units

Move = Literal["permute", "flip", "scale", "shift", "rotate"]
ORTHOGONAL = 1e-4  # largest entry of R R' - I that float32 rotations may have


class MoveKind:
    """Move of units, as a group needs to know it.

    :ivar argument: what :meth:`Group.element` and :class:`Element` call its numbers.
    :ivar wanted: what these numbers must be, in words.
    :ivar finite: whether a unit can do finitely many such moves.
    :ivar compact: whether one can average over them.
    :ivar contains: moves of the same units that are among these, and no moves besides.
    """

    argument: ClassVar[str]
    wanted: ClassVar[str] = "finite numbers"
    finite: ClassVar[bool] = False
    compact: ClassVar[bool] = False
    contains: ClassVar[frozenset[Move]] = frozenset()

    def holders(self, group: Group) -> Mapping[str, Units]:
        """Return the units for which an element holds numbers, in their order."""
        return group.units

    def shape(self, units: Units) -> tuple[int, ...]:
        """Return the shape of one element's numbers of some units."""
        return units.shape

    def neutral(self, units: Units, dtype: torch.dtype, device: Any) -> Tensor:
        """Return the numbers of the neutral element, expandable to the shape."""
        return torch.zeros((), dtype=dtype, device=device).expand(self.shape(units))

    def draw(
        self, shape: tuple[int, ...], spread: float, dtype: torch.dtype, **options: Any
    ) -> Tensor:
        """Draw numbers: uniformly over a compact move, else normal."""
        return spread * torch.randn(shape, dtype=dtype, **options)

    def inverse(self, group: Group, numbers: Tensor) -> Tensor:
        """Return the numbers of inverse moves."""
        return -numbers

    def product(self, group: Group, second: Tensor, first: Tensor) -> Tensor:
        """Return the numbers of ``first`` and then ``second``."""
        return second + first

    def followed(self, group: Group, numbers: Tensor, images: Tensor) -> Tensor:
        """Return the numbers where units find them that moved to their images."""
        return numbers

    def valid(self, numbers: Tensor) -> Tensor:
        """Return whether numbers are what they must be."""
        return torch.isfinite(numbers)

    def dimension(self, units: Units) -> int:
        """Return how many real numbers the moves depend on."""
        return 0 if self.finite else units.count


class Permute(MoveKind):
    """Permutations of the units of each copy; elements hold images."""

    argument = "permutations"
    finite = compact = True

    def neutral(self, units: Units, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.arange(units.size, device=device).expand(units.shape)

    def draw(
        self, shape: tuple[int, ...], spread: float, dtype: torch.dtype, **options: Any
    ) -> Tensor:
        # Sorting uniform keys gives uniform permutations up to ties; float64 keys make
        # ties too rare to matter.
        return torch.rand(shape, dtype=torch.float64, **options).argsort(-1)

    def inverse(self, group: Group, numbers: Tensor) -> Tensor:
        return numbers.argsort(-1)

    def product(self, group: Group, second: Tensor, first: Tensor) -> Tensor:
        return first.gather(-1, second)

    def valid(self, numbers: Tensor) -> Tensor:
        return numbers.sort(-1).values == torch.arange(
            numbers.shape[-1], device=numbers.device
        )


class Flip(MoveKind):
    """Signs of units."""

    argument = "signs"
    wanted = "1 and -1"
    finite = compact = True

    def neutral(self, units: Units, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.ones((), dtype=dtype, device=device).expand(units.shape)

    def draw(
        self, shape: tuple[int, ...], spread: float, dtype: torch.dtype, **options: Any
    ) -> Tensor:
        return torch.randint(0, 2, shape, dtype=dtype, **options).mul_(2).sub_(1)

    def inverse(self, group: Group, numbers: Tensor) -> Tensor:
        return numbers.reciprocal()

    def product(self, group: Group, second: Tensor, first: Tensor) -> Tensor:
        return second * first

    def followed(self, group: Group, numbers: Tensor, images: Tensor) -> Tensor:
        return numbers.gather(-1, images)

    def valid(self, numbers: Tensor) -> Tensor:
        return numbers.abs() == 1


class Scale(MoveKind):
    """Positive multipliers of units, by their logarithms."""

    argument = "log_scales"

    def followed(self, group: Group, numbers: Tensor, images: Tensor) -> Tensor:
        return numbers.gather(-1, images)


class Shift(MoveKind):
    """Constants that are added to units; they act before all other moves."""

    argument = "shifts"


class Rotate(MoveKind):
    """Orthogonal maps of the units of each copy, of either determinant.

    Permutations and signs of the same units are among them. Only units around these
    carry them along, copy by copy.
    """

    argument = "rotations"
    wanted = "orthogonal matrices"
    compact = True
    contains: ClassVar[frozenset[Move]] = frozenset({"permute", "flip"})

    def holders(self, group: Group) -> Mapping[str, Units]:
        return {name: group.units[name] for name in group.names("rotate")}

    def shape(self, units: Units) -> tuple[int, ...]:
        return (*units.shape, units.size)

    def neutral(self, units: Units, dtype: torch.dtype, device: Any) -> Tensor:
        matrix = torch.eye(units.size, dtype=dtype, device=device)
        return matrix.expand(self.shape(units))

    def draw(
        self, shape: tuple[int, ...], spread: float, dtype: torch.dtype, **options: Any
    ) -> Tensor:
        normal = torch.randn(shape, dtype=dtype, **options)
        q, r = torch.linalg.qr(normal)
        return q * r.diagonal(dim1=-2, dim2=-1).sgn().unsqueeze(-2)

    def inverse(self, group: Group, numbers: Tensor) -> Tensor:
        return self._by_copy(group, lambda _, matrices: matrices.mT, numbers)

    def product(self, group: Group, second: Tensor, first: Tensor) -> Tensor:
        dtype = torch.promote_types(second.dtype, first.dtype)
        numbers = second.to(dtype), first.to(dtype)
        return self._by_copy(group, lambda _, a, b: a @ b, *numbers)

    def followed(self, group: Group, numbers: Tensor, images: Tensor) -> Tensor:
        def carried(name: str, matrices: Tensor) -> Tensor:
            slot = group.slots[name]
            size = group[name].size
            copies = (images[..., slot] - slot.start)[..., ::size] // size
            index = copies[..., None, None].expand_as(matrices)
            return matrices.gather(-3, index)

        return self._by_copy(group, carried, numbers)

    def valid(self, numbers: Tensor) -> Tensor:
        still = torch.eye(numbers.shape[-1], dtype=numbers.dtype, device=numbers.device)
        return (numbers @ numbers.mT - still).abs() < ORTHOGONAL

    def dimension(self, units: Units) -> int:
        return units.count * (units.size - 1) // 2

    def along(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Turn units ``(copies, size)``, in rows ``batch + (count, entries)``."""
        blocks = rows.unflatten(-2, matrices.shape[-3:-1])
        return (matrices @ blocks).flatten(-3, -2)

    def _by_copy(
        self, group: Group, change: Callable[..., Tensor], *numbers: Tensor
    ) -> Tensor:
        pieces = []
        for name, slot in group.number_slots("rotate").items():
            unit_set = group[name]
            shape = (unit_set.copies, unit_set.size, unit_set.size)
            matrices = (value[..., slot].unflatten(-1, shape) for value in numbers)
            pieces.append(change(name, *matrices).flatten(-3))
        return torch.cat(pieces, -1)


def polar(scores: Tensor) -> Tensor:
    """Return the polar factor: of all orthogonal matrices, the one whose products with
    the scores ``(..., n, n)`` have the largest sum.
    """
    left_vectors, _, right_vectors = torch.linalg.svd(scores)
    return left_vectors @ right_vectors


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # the cache outlives the mode in which it is filled
def skew_basis(n: int) -> Tensor:
    """Return the skew matrices of all planes, ``(n (n - 1) / 2, n, n)``."""
    first, second = torch.triu_indices(n, n, 1, device="cpu")
    entries = torch.eye(n * n, dtype=torch.float64, device="cpu").view(n, n, n, n)
    return entries[first, second] - entries[second, first]


MOVES: dict[Move, MoveKind] = {
    "permute": Permute(),
    "flip": Flip(),
    "scale": Scale(),
    "shift": Shift(),
    "rotate": Rotate(),
}
FINITE: tuple[Move, ...] = tuple(move for move in MOVES if MOVES[move].finite)
COMPACT: tuple[Move, ...] = tuple(move for move in MOVES if MOVES[move].compact)
