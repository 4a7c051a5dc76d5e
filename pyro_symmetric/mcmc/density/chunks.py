"""Chains evaluated in parts: as many at once as memory holds, and fewer if one of them is outside of the support."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.targets import Rows

Evaluate = Callable[[Tensor, Rows | None], tuple[Tensor, ...]]


def in_chunks(evaluate: Evaluate, z: Tensor, rows: Rows | None, size: int | None) -> tuple[Tensor, ...]:
    """Evaluate so many chains at once; ``None``: all."""
    if size is None or len(z) <= size:
        return evaluate(z, rows)
    cuts = [slice(start, start + size) for start in range(0, len(z), size)]
    return _joined([evaluate(z[cut], _cut(rows, cut)) for cut in cuts])


def sparing(evaluate: Evaluate, z: Tensor, rows: Rows | None) -> tuple[Tensor, ...]:
    """Evaluate, and halve if a matrix is singular, until its chain is alone: that one is outside of the support."""
    try:
        return evaluate(z, rows)
    except torch.linalg.LinAlgError:
        if len(z) == 1:
            return torch.full_like(z[:, 0], torch.inf), torch.zeros_like(z)
        halves = slice(0, len(z) // 2), slice(len(z) // 2, None)
        return _joined([sparing(evaluate, z[half], _cut(rows, half)) for half in halves])


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(values) for values in zip(*parts, strict=False))  # energies alone, if no more were asked for


def _cut(rows: Rows | None, chains: slice) -> Rows | None:
    return None if rows is None else {name: index[chains] for name, index in rows.items()}
