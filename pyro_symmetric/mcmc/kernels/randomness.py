"""A kernel's random draws: numbers and mini-batches, all of a generator that is named, none of a global one.

Every chain draws its own rows. Chains that shared their mini-batches would share the noise of their gradients, and
would no longer be independent: their agreement would say less than R-hat and pooled means take it to say. A gather for
each chain costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Numbers of rows up to which orders are kept as they are used. Beyond, they are the largest part of a
# stochastic-gradient sampler's state.
FEW_ROWS = 2**16
DRAWN = 2**18  # normal numbers that are drawn at once, at most, if one step's are fewer


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).normal_(generator=generator)


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers uniform in [0, 1) in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).uniform_(generator=generator)


def normals(like: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Standard normal numbers in the shape of ``like`` for each of so many steps, drawn many at a time if they are few.

    Those of a step are overwritten once the next ones are drawn.
    """
    most = min(count, max(1, DRAWN // max(1, like.numel())))
    drawn = like.new_empty(most, *like.shape)
    for begin in range(0, count, most):
        yield from drawn[: count - begin].normal_(generator=generator)


@dataclass(frozen=True, eq=False)
class Batches:
    """A stream of mini-batches.

    Without replacement every chain goes through the data in its own random order, pass after pass; rows that don't
    fill a batch at a pass's end are left out of that pass. That leaves less gradient noise than independent batches.
    With replacement each row of each batch is drawn independently, as the theory of stochastic-gradient samplers
    assumes.

    :param row_counts: name -> (rows there are, rows in a batch), as ``Density.row_counts``.
    :param orders: name -> rows in this pass's order, ``(C, N)``; of many rows int32.
    :param positions: name -> where in the pass the next batch begins.
    """

    row_counts: Mapping[str, tuple[int, int]]
    num_chains: int
    replacement: bool = False
    orders: Mapping[str, Tensor] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)

    def next(self, generator: torch.Generator) -> tuple[dict[str, Tensor] | None, Batches]:
        """The next batch, name -> LongTensor ``(C, B)`` (``None`` if all data are used), and the stream after it.

        :param generator: what random numbers come from, on the device where the rows' numbers are wanted.
        """
        if not self.row_counts or self.replacement:
            return independent_rows(self.row_counts, self.num_chains, generator), self
        orders, positions, rows = dict(self.orders), dict(self.positions), {}
        for name, (total, size) in self.row_counts.items():
            if name not in orders or positions[name] + size > total:
                shuffled = torch.rand(self.num_chains, total, generator=generator, device=generator.device).argsort(-1)
                orders[name] = shuffled.int() if shuffled.numel() > FEW_ROWS else shuffled
                positions[name] = 0
            rows[name] = orders[name][:, positions[name] : positions[name] + size].long()
            positions[name] += size
        return rows, replace(self, orders=orders, positions=positions)


def independent_rows(
    row_counts: Mapping[str, tuple[int, int]], num_chains: int, generator: torch.Generator
) -> dict[str, Tensor] | None:
    """A batch drawn with replacement, name -> LongTensor ``(C, B)``; ``None`` if all data are used."""
    return {
        name: torch.randint(total, (num_chains, size), generator=generator, device=generator.device)
        for name, (total, size) in row_counts.items()
    } or None
