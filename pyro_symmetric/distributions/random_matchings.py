r"""Random matchings of the rows of a matrix to its columns: rows are places, columns
are units.

Rows whose best column is far ahead of all others are certain: they take it. The others
draw one after the other, without replacement, from the doubly stochastic scaling of
:math:`e^A` (Sinkhorn & Knopp 1967), the most certain first; the last ones are drawn
jointly, by enumerating their permutations.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# below the largest of their row log-densities count alike; e^-40 leaves room in float32
LOG_FLOOR = -40.0
# probability that each row spreads evenly over all columns: no matching has probability
# zero
SPREAD = 1e-4
# the least certain rows, matched jointly by enumerating their permutations
ENUMERATED_ROWS = 6
CERTAIN = 30.0  # nats by which the best column of a certain row is ahead of all others
# of uniform matchings among those with certain rows: no matching has probability zero
UNIFORM_SHARE = 2e-9


def rows_of(matrix: Tensor, rows: Tensor) -> Tensor:
    """Select rows of matrices, ``batch + (number,)``; leading axes broadcast.

    A gather takes half as long as ``take_along_dim``, which wraps every index.
    """
    shape = np.broadcast_shapes(matrix.shape[:-2], rows.shape[:-1])
    index = rows.unsqueeze(-1).expand(*shape, -1, matrix.shape[-1])
    return matrix.expand(*shape, -1, -1).gather(-2, index)


def columns_of(matrix: Tensor, columns: Tensor) -> Tensor:
    """Select columns of matrices, as :func:`rows_of` does rows."""
    shape = np.broadcast_shapes(matrix.shape[:-2], columns.shape[:-1])
    index = columns.unsqueeze(-2).expand(*shape, matrix.shape[-2], -1)
    return matrix.expand(*shape, -1, -1).gather(-1, index)


def sum_over_signs(densities: Tensor) -> Tensor:
    """Return the log of the densities summed over the sign of each unit, if units have
    signs.
    """
    return densities.logsumexp(0) if len(densities) > 1 else densities[0]


def best_columns(densities: Tensor, permuted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the best column of each row, ``(L,) + batch + (n,)``, and whether it, and
    its sign, are certain.

    No row is certain unless each has a best column of its own: then every other
    matching is worse by the margins.
    """
    signed = len(densities) > 1
    highest = densities.amax(0) if signed else densities[0]
    identity = torch.arange(densities.shape[-1], device=densities.device)
    best = identity.expand(highest.shape[:-1])
    certain = torch.ones_like(best, dtype=torch.bool)
    if permuted:
        first = highest.amax(-1)
        # at draws of the base often equal; argmax is slow
        if not torch.equal(highest.diagonal(dim1=-2, dim2=-1), first):
            best = highest.argmax(-1)
            certain = (best.sort(-1).values == identity).all(-1, keepdim=True)
        without_best = highest.scatter(-1, best.unsqueeze(-1), -math.inf)
        margin = first - without_best.amax(-1)
        certain = certain & (margin > CERTAIN)
    if signed:
        log_odds = sign_log_odds(densities, best)
        certain = certain & (log_odds.abs() > CERTAIN)
    return best, certain


def sign_log_odds(densities: Tensor, columns: Tensor) -> Tensor:
    """Return the log-odds of the signs of the columns that rows take."""
    index = columns.expand(2, *columns.shape).unsqueeze(-1)
    densities = densities.expand(2, *columns.shape, -1)
    plus, minus = densities.gather(-1, index)[..., 0]
    return plus - minus


def doubly_stochastic(
    densities: Tensor, iterations: int = 12, dtype: torch.dtype | None = None
) -> Tensor:
    """Scale ``exp(densities)``, ``batch + (n, n)``, to a doubly stochastic matrix
    (Sinkhorn & Knopp 1967); rows sum to one exactly."""
    logs = densities.log_softmax(-1).log_softmax(-2).to(dtype or densities.dtype)
    kernel = logs.clamp(min=LOG_FLOOR).exp()
    columns = torch.ones_like(kernel[..., :1])
    for _ in range(iterations):
        columns = (kernel.mT @ (kernel @ columns).reciprocal()).reciprocal()
    scaled = kernel * columns.mT
    return scaled / scaled.sum(-1, keepdim=True)


class Drawn(NamedTuple):
    """The column that each row takes, ``(count + 1,) + batch + (n,)``, and
    log-probabilities. The first matching is the identity, which isn't drawn."""

    columns: Tensor
    log_prob: Tensor


def draw_matchings(
    densities: Tensor,
    count: int,
    best: Tensor,
    certain: Tensor,
    dtype: torch.dtype | None = None,
) -> Drawn:
    """Draw the identity and ``count`` matchings: certain rows take their best column,
    the others are drawn.

    With probability ``UNIFORM_SHARE`` a matching is uniform instead; a uniform draw
    that keeps the certain rows is rejected.

    :param densities: ``A``, ``(signs, 1 or count + 1) + batch + (n, n)``.
    :param best: the best column of each row, and whether it is ``certain``, as
        :func:`best_columns` returns them.
    :param dtype: the precision of the probabilities.
    """
    n = best.shape[-1]
    shape = (count + 1, *best.shape[1:-1])
    identity = torch.arange(n, device=best.device)
    uncertain = int((~certain).sum(-1).amax())
    if 2 * uncertain > n:
        return draw_all(sum_over_signs(densities), count, identity, dtype)
    rows = certain.long().argsort(-1)[..., :uncertain]
    images = best.expand(*shape, -1).clone()
    log_prob = torch.zeros(shape, dtype=torch.float64, device=best.device)
    if uncertain:
        columns = best.gather(-1, rows)
        block = columns_of(rows_of(densities, rows), columns)
        at_home = columns.unsqueeze(-2) == rows.unsqueeze(-1)
        drawn = draw_all(sum_over_signs(block), count, at_home.long().argmax(-1), dtype)
        taken = columns.expand(*shape, -1).gather(-1, drawn.columns)
        images.scatter_(-1, rows.expand(*shape, -1), taken)
        log_prob = drawn.log_prob
    images[0] = identity
    log_prob = log_prob + math.log1p(-UNIFORM_SHARE)
    uniform = torch.rand(shape, device=best.device) < UNIFORM_SHARE
    if uniform.any():
        uniform[0] = False
        uniform_images = torch.rand(images.shape, device=best.device).argsort(-1)
        images = torch.where(uniform.unsqueeze(-1), uniform_images, images)
        log_prob = log_prob.masked_fill(uniform, math.inf)
    drawn_rows = torch.zeros_like(certain).scatter_(-1, rows, True)
    # a certain row takes another column: only uniform draws do
    possible = ((images == best) | drawn_rows).all(-1)
    log_uniform = math.log(UNIFORM_SHARE) - math.lgamma(n + 1)
    return Drawn(images, log_prob.masked_fill(~possible, log_uniform))


def draw_all(
    densities: Tensor, count: int, identity: Tensor, dtype: torch.dtype | None = None
) -> Drawn:
    """Draw matchings of all rows: the most certain rows first, the last ones by
    enumerating their permutations.

    :param identity: the column that each row takes in the first matching.
    """
    n = densities.shape[-1]
    shape = (count + 1, *densities.shape[1:-1])
    early = max(0, n - ENUMERATED_ROWS)
    order = torch.arange(n, device=densities.device).expand(shape)
    taken = identity.expand(shape).clone()
    log_prob = torch.zeros(shape[:-1], dtype=torch.float64, device=densities.device)
    if early:
        scaled = doubly_stochastic(densities, dtype=dtype)
        chances = (1 - SPREAD) * scaled + SPREAD / n
        certainty = chances.square().sum(-1)
        order = certainty.argsort(-1, descending=True)
        chances = rows_of(chances, order[..., :early])
        order = order.expand(shape)
        taken = taken.gather(-1, order)  # by the rows in this order
        if count:
            drawn = _without_replacement(chances, count)
            taken[1:, ..., :early] = drawn
            taken[1:, ..., early:] = _left_over(drawn, n)
        # Each row's probability is normalised over the columns that earlier rows leave.
        chances = columns_of(chances, taken)
        share = chances.diagonal(dim1=-2, dim2=-1) / chances.triu().sum(-1)
        log_prob = share.log().sum(-1, dtype=torch.float64)
    late = _draw_late(densities, order[..., early:], taken[..., early:])
    taken[..., early:] = late.columns
    columns = taken.gather(-1, order.argsort(-1))
    return Drawn(columns, log_prob + late.log_prob)


def _left_over(drawn: Tensor, n: int) -> Tensor:
    """Return the columns of ``n`` that rows haven't drawn, ascending."""
    remains = drawn.new_ones(*drawn.shape[:-1], n).scatter_(-1, drawn, 0)
    return remains.topk(n - drawn.shape[-1]).indices.sort(-1).values


def _draw_late(densities: Tensor, rows: Tensor, columns: Tensor) -> Drawn:
    """Draw in which of all orders the last rows take the columns that are left; order 0
    keeps them as they are."""
    number = rows.shape[-1]
    block = columns_of(rows_of(densities, rows), columns)
    orders = _orders(number, densities.device)
    entries = orders + number * torch.arange(number, device=densities.device)
    log_densities = block.flatten(-2)[..., entries].sum(-1)
    log_probs = log_densities.log_softmax(-1)
    minus_gumbel = torch.empty_like(log_probs).exponential_().log_()
    chosen = (log_probs - minus_gumbel).argmax(-1)
    chosen[0] = 0
    log_prob = log_probs.gather(-1, chosen.unsqueeze(-1))[..., 0]
    return Drawn(columns.gather(-1, orders[chosen]), log_prob)


def _without_replacement(chances: Tensor, count: int) -> Tensor:
    """Draw a column for each row, no column twice, as if one row after the other:
    ``(1 or count + 1,) + batch + (rows, n)`` -> ``(count,) + batch + (rows,)``.

    All rows draw at once. Of those that want the same column the first keeps it; the
    others draw again, among the columns that no earlier row holds, until each row has
    its own.
    """
    batch = chances.shape[1:-2]
    size, n = chances.shape[-2:]
    shared = len(chances) == 1
    times = count if shared else 1
    drawn = torch.multinomial(chances.reshape(-1, n), times, replacement=True)
    drawn = drawn.reshape(len(chances), -1, size, times)
    choice = drawn[0].movedim(-1, 0) if shared else drawn[1:, ..., 0]
    chances = chances[-count:].reshape(-1, choice.shape[1], size, n)
    chances = chances.expand(count, -1, -1, -1)
    index = torch.arange(size, device=chances.device)
    while True:
        # the first row that wants each column
        holder = index.new_full((*choice.shape[:2], n), size)
        holder = holder.scatter_reduce(-1, choice, index.expand_as(choice), "amin")
        held_by_earlier = holder.gather(-1, choice) < index
        late = held_by_earlier.nonzero(as_tuple=True)
        matching, draw, row = late
        if len(row) == 0:
            return choice.reshape(count, *batch, size)
        unheld = holder[matching, draw] > row.unsqueeze(-1)
        remaining = chances[late] * unheld
        rates = remaining / torch.empty_like(remaining).exponential_()
        choice = choice.index_put(late, rates.argmax(-1))


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _orders(n: int, device: torch.device) -> Tensor:
    return torch.tensor(list(itertools.permutations(range(n))), device=device)
