r"""Random matchings of the rows of a matrix of log-densities ``A`` to its columns.

Rows of which one column is far ahead take it. The others draw from the doubly stochastic scaling of :math:`e^A`
(Sinkhorn & Knopp 1967), one after the other without replacement.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

FLOOR = -40.0  # log-densities further than this below the best of their row count alike; e^-40 leaves room in float32
SPREAD = 1e-4  # what each row spreads evenly over all columns, so that no matching has probability zero
TAIL = 6  # the least certain rows, matched together by all their permutations
SURE = 30.0  # nats by which the best column of a row is ahead of all others if none of these is looked at
ELSEWHERE = 2e-9  # the share of uniform matchings beside sure rows, so that no matching has probability zero


def over_signs(densities: Tensor) -> Tensor:
    """The matrices of a set of units summed over the signs of each unit, if they have any."""
    return densities.logsumexp(0) if len(densities) > 1 else densities[0]


def leading(densities: Tensor, permuted: bool = True) -> tuple[Tensor, Tensor]:
    """The best column of each row, ``(L,) + batch + (n,)``, and if there is no other, whose sign is known, too.

    None is sure unless each row has a best column of its own: then each other matching is worse by the margins.
    """
    best = densities.amax(0) if len(densities) > 1 else densities[0]
    own = torch.arange(densities.shape[-1], device=densities.device)
    column, sure = own.expand(best.shape[:-1]), torch.ones(best.shape[:-1], dtype=torch.bool, device=own.device)
    if permuted:
        highest = best.amax(-1)
        if not torch.equal(best.diagonal(dim1=-2, dim2=-1), highest):  # at a base's draws it often is, and this slow
            column = best.argmax(-1)
        others = best.scatter(-1, column.unsqueeze(-1), -math.inf).amax(-1)
        sure = (highest - others > SURE) & (column.sort(-1).values == own).all(-1, keepdim=True)
    if len(densities) > 1:
        both = densities.take_along_dim(column.expand(2, *column.shape).unsqueeze(-1), -1)[..., 0]
        sure = sure & ((both[0] - both[1]).abs() > SURE)
    return column, sure


def doubly_stochastic(densities: Tensor, iterations: int = 12, dtype: torch.dtype | None = None) -> Tensor:
    """Sinkhorn's scaling of ``exp(densities)``, ``batch + (n, n)`` (Sinkhorn & Knopp 1967); rows sum to one exactly."""
    kernel = densities.log_softmax(-1).log_softmax(-2).to(dtype or densities.dtype).clamp(min=FLOOR).exp()
    columns = torch.ones_like(kernel[..., :1])
    for _ in range(iterations):
        columns = (kernel.mT @ (kernel @ columns).reciprocal()).reciprocal()
    scaled = kernel * columns.mT
    return scaled / scaled.sum(-1, keepdim=True)


def draw_matchings(
    densities: Tensor, count: int, column: Tensor, sure: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the identity and ``count`` matchings: rows that are sure take their best column, the others are drawn.

    With probability ``ELSEWHERE`` the matching is uniform instead; a uniform draw that keeps the sure rows is rejected.

    :param densities: ``A``, ``(signs, 1 or count + 1) + batch + (n, n)``.
    :param column: the best of each row, and whether it is ``sure``, as :func:`leading` finds them.
    :param dtype: that suffices for the probabilities.
    :return: the column that each row takes, ``(count + 1,) + batch + (n,)``, and log-probabilities.
    """
    n, shape, own = (
        column.shape[-1],
        (count + 1, *column.shape[1:]),
        torch.arange(column.shape[-1], device=column.device),
    )
    left = int((~sure).sum(-1).amax())
    if 2 * left > n:
        return draw_all(over_signs(densities), count, own, dtype)
    rest = sure.long().argsort(-1)[..., :left]
    columns = column.gather(-1, rest)
    images, log_tau = column.expand(shape).clone(), torch.zeros(shape[:-1], dtype=torch.float64, device=own.device)
    if left:
        block = densities.take_along_dim(rest.expand(len(densities), *rest.shape).unsqueeze(-1), -2)
        block = over_signs(block.take_along_dim(columns.expand(len(densities), *columns.shape).unsqueeze(-2), -1))
        identity = (columns.unsqueeze(-2) == rest.unsqueeze(-1)).long().argmax(-1)
        taken, log_tau = draw_all(block, count, identity, dtype)
        images.scatter_(-1, rest.expand(*shape[:-1], -1), columns.expand(*shape[:-1], -1).gather(-1, taken))
    images[0] = own
    uniform = torch.rand(shape[:-1], device=own.device) < ELSEWHERE
    images[1:] = torch.where(
        uniform[1:].unsqueeze(-1), torch.rand(images[1:].shape, device=own.device).argsort(-1), images[1:]
    )
    free = torch.zeros_like(sure).scatter_(-1, rest, True)
    outside = ~((images == column) | free).all(-1)  # of all matchings that are drawn, only uniform ones can be
    beside = torch.where(outside, math.log(ELSEWHERE) - math.lgamma(n + 1), math.inf)
    uniform[0] = outside[0]
    return images, torch.where(uniform, beside, log_tau + math.log1p(-ELSEWHERE))


def draw_all(
    densities: Tensor, count: int, identity: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Draw matchings of all rows: the most certain rows first, the last ones by all their permutations.

    :param identity: the column that each row takes in the first matching, which isn't drawn.
    """
    n, shape = densities.shape[-1], (count + 1, *densities.shape[1:])
    early = max(0, n - TAIL)
    chances = (1 - SPREAD) * doubly_stochastic(densities, dtype=dtype) + SPREAD / n
    order = chances.square().sum(-1).argsort(-1, descending=True)
    chances = chances.gather(-2, order[..., :early].unsqueeze(-1).expand(*order.shape[:-1], early, n))
    order = order.expand(shape[:-1])
    taken = identity.expand(shape[:-1]).gather(-1, order)  # by the rows in this order
    if early and count:
        taken[1:, ..., :early] = _without_replacement(chances, count)
        free = torch.ones_like(taken).scatter_(-1, taken[..., :early], 0)
        taken[1:, ..., early:] = free[1:].topk(n - early).indices.sort(-1).values
    # The late rows and the columns that are left, in all orders; the first is the one at hand.
    orders, late = _orders(n - early, densities.device), torch.arange(n - early, device=densities.device)
    block = densities.expand(shape).take_along_dim(order[..., early:].unsqueeze(-1), -2)
    block = block.take_along_dim(taken[..., early:].unsqueeze(-2), -1)
    sums = block.flatten(-2)[..., orders + (n - early) * late].sum(-1).log_softmax(-1)
    drawn = (sums - torch.empty_like(sums).exponential_().log_()).argmax(-1)
    drawn[0] = 0
    taken[..., early:] = taken[..., early:].gather(-1, orders[drawn])
    # Of the columns that earlier rows leave free, those that this row and later ones take.
    free = chances.expand(count + 1, *chances.shape[1:]).gather(-1, taken.unsqueeze(-2).expand(*shape[:-2], early, n))
    log_tau = (free.diagonal(dim1=-2, dim2=-1) / free.triu().sum(-1)).log().sum(-1, dtype=torch.float64)
    return taken.gather(-1, order.argsort(-1)), log_tau + sums.gather(-1, drawn.unsqueeze(-1))[..., 0]


def _without_replacement(chances: Tensor, count: int) -> Tensor:
    """Draw a column for each row, no column twice, the first rows first: ``(L,) + batch + (rows, n)`` ->
    ``(count,) + batch + (rows,)``.

    All rows draw at once. Of those that want the same column the first keeps it, the others draw again, among the
    columns that no earlier row holds, until each has one: what the rows would have drawn one after the other.
    """
    shared, size, n = len(chances) == 1, *chances.shape[-2:]
    drawn = torch.multinomial(chances.reshape(-1, n), count if shared else 1, replacement=True)
    drawn = drawn.reshape(*chances.shape[:-1], -1)
    choice = drawn[0].movedim(-1, 0) if shared else drawn[1:, ..., 0]
    batch, choice = choice.shape[1:-1], choice.reshape(count, -1, size)
    chances, own = chances.reshape(len(chances), -1, size, n), torch.arange(size, device=chances.device)
    while True:
        holder = own.new_full((*choice.shape[:2], n), size)
        holder = holder.scatter_reduce(-1, choice, own.expand_as(choice), "amin")
        k, draw, row = (holder.gather(-1, choice) < own).nonzero(as_tuple=True)
        if len(k) == 0:
            return choice.reshape(count, *batch, size)
        left = chances[0 if shared else k + 1, draw, row] * (holder[k, draw] > row.unsqueeze(-1))
        choice = choice.index_put((k, draw, row), (left / torch.empty_like(left).exponential_()).argmax(-1))


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _orders(n: int, device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.permutations(range(n))), device=device)
