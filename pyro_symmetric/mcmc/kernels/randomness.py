"""A kernel's random draws: numbers and mini-batches, all of a generator that is named, none of a global one.

Every chain draws its own rows. Chains that shared their mini-batches would share the noise of their gradients, and
would no longer be independent: their agreement would say less than R-hat and pooled means take it to say.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).normal_(generator=generator)


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers uniform in [0, 1) in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).uniform_(generator=generator)


def independent_rows(
    row_counts: Mapping[str, tuple[int, int]], num_chains: int, generator: torch.Generator
) -> dict[str, Tensor] | None:
    """A mini-batch of each chain, name -> LongTensor ``(C, B)`` of rows drawn independently; ``None`` if all data are
    used.

    :param row_counts: name -> (rows there are, rows in a batch), as ``Density.row_counts``.
    """
    return {
        name: torch.randint(total, (num_chains, size), generator=generator, device=generator.device)
        for name, (total, size) in row_counts.items()
    } or None
