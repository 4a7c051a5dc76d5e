"""Random numbers of a generator that is named: kernels draw all of theirs here, and none from a global generator."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).normal_(generator=generator)


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers uniform in [0, 1) in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).uniform_(generator=generator)
