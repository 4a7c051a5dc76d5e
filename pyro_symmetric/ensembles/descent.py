"""One pass over the data by mini-batches: the loop that trains ensembles and guides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer


def descend(
    losses: Callable[[Tensor | None], Tensor],
    optimizer: Optimizer,
    num_rows: int,
    batch_size: int,
    generator: torch.Generator,
    *,
    count: int = 1,
    most: int | None = None,
    after: Callable[[], None] = lambda: None,
) -> Tensor:
    """Take the steps of one pass down several losses that share nothing; the mean of each, taken before each step,
    ``(count,)``. Each goes through the data in a random order of its own; rows that don't fill a batch are left out.

    :param losses: rows of a mini-batch, LongTensor ``(count, batch_size)``, or ``None`` for all data -> losses.
    :param most: steps, if they are fewer than those of a pass.
    :param after: called after each step.
    """
    steps, order = num_rows // batch_size, None
    steps = steps if most is None else min(steps, most)
    if batch_size < num_rows:
        order = torch.rand(count, num_rows, generator=generator, device=generator.device).argsort(-1)
    total = torch.zeros((), device=generator.device)
    for step in range(steps):
        values = losses(None if order is None else order[:, step * batch_size : (step + 1) * batch_size])
        optimizer.zero_grad()
        values.sum().backward()  # the losses share nothing, so the gradient of their sum is each one's own
        optimizer.step()
        total = torch.add(total, values.detach(), alpha=1 / steps)
        after()
    return total
