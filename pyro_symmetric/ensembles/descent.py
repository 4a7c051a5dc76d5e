"""One pass over the data by mini-batches: the loop that trains ensembles and guides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pyro_symmetric.mcmc.kernels.randomness import Batches


def descend(
    losses: Callable[[Tensor | None], Tensor],
    optimizer: Optimizer,
    steps: range,
    batches: Batches | None,
    generator: torch.Generator,
    schedule: LRScheduler | None = None,
    watch: Callable[[int], None] | None = None,
) -> Tensor:
    """Take these steps down several losses that share nothing; the mean of each, taken before each step, ``(M,)``.

    :param losses: rows of a mini-batch, LongTensor ``(M, B)``, or ``None`` for all data -> losses ``(M,)``.
    :param batches: where rows come from; ``None``: every step sees all data.
    :param watch: called with a step's number when it is done.
    """
    total = torch.zeros((), device=generator.device)
    for step in steps:
        rows = None
        if batches is not None:
            found, batches = batches.next(generator)
            rows = found["data"] if found else None
        values = losses(rows)
        optimizer.zero_grad()
        values.sum().backward()  # the losses share nothing, so the gradient of their sum is each one's own
        optimizer.step()
        if schedule is not None:
            schedule.step()
        total = torch.add(total, values.detach(), alpha=1 / len(steps))
        if watch is not None:
            watch(step)
    return total


def batches_of(num_rows: int, batch_size: int, count: int) -> Batches | None:
    """Mini-batches for so many losses, each in an order of its own; ``None`` if one holds all rows."""
    return None if batch_size >= num_rows else Batches({"data": (num_rows, batch_size)}, count)
