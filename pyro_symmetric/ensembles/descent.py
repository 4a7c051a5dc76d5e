"""One pass over the data by mini-batches: the loop that trains ensembles and guides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, eq=False)
class Batches:
    """Mini-batches for several losses, each of which goes through the data in a random order of its own, pass after
    pass; rows that don't fill a batch at a pass's end are left out of that pass.

    :param order: rows in this pass's order, ``(M, N)``.
    """

    num_rows: int
    batch_size: int
    count: int
    order: Tensor | None = None
    position: int = 0

    def next(self, generator: torch.Generator) -> tuple[Tensor, Batches]:
        """The next rows ``(M, B)``, on the generator's device, and the batches after them."""
        order, end = self.order, self.position + self.batch_size
        if order is None or end > self.num_rows:
            device, end = generator.device, self.batch_size
            order = torch.rand(self.count, self.num_rows, generator=generator, device=device).argsort(-1)
        return order[:, end - self.batch_size : end], replace(self, order=order, position=end)


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
            rows, batches = batches.next(generator)
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
    """Mini-batches for so many losses; ``None`` if one holds all rows."""
    return None if batch_size >= num_rows else Batches(num_rows, batch_size, count)
