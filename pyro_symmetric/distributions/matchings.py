r"""Matchings of the rows of a matrix of log-densities ``A`` to its columns: draws of them, and the sum over all.

Draws come from the doubly stochastic scaling of :math:`e^A` (Sinkhorn & Knopp 1967), row by row without replacement.
The permanent, :math:`\sum_{p \in S_n} \exp \sum_j A_{j\,p(j)}`, is made of subsets of columns by size: with
:math:`f_t(S)` the sum over all ways to give the first ``t`` rows the ``t`` columns of ``S``,

.. math:: f_t(S) = \sum_{i \in S} e^{A_{t i}} f_{t-1}(S \setminus i),

all terms positive, so that nothing cancels in log space (unlike Ryser's formula). It takes :math:`n\,2^{n-1}` terms.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

FLOOR = -40.0  # log-densities further than this below the best of their row count alike; e^-40 leaves room in float32
SPREAD = 1e-4  # what each row spreads evenly over all columns, so that no matching has probability zero
TAIL = 6  # the least certain rows, matched together by all their permutations
# n 2^(n-1) terms: 10 million at 20, which is what a machine holds and a person waits for.
LARGEST_PERMANENT = 20


def doubly_stochastic(densities: Tensor, iterations: int = 12, dtype: torch.dtype | None = None) -> Tensor:
    """Sinkhorn's scaling of ``exp(densities)``, ``batch + (n, n)``; the rows add up to one exactly."""
    kernel = densities.log_softmax(-1).log_softmax(-2).to(dtype or densities.dtype).clamp(min=FLOOR).exp()
    columns = torch.ones_like(kernel[..., :1])
    for _ in range(iterations):
        columns = (kernel.mT @ (kernel @ columns).reciprocal()).reciprocal()
    scaled = kernel * columns.mT
    return scaled / scaled.sum(-1, keepdim=True)


def draw_matchings(densities: Tensor, count: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Draw the identity and ``count`` matchings: the most certain rows first, the last ones by all their permutations.

    :param densities: ``A``, ``(1 or count + 1,) + batch + (n, n)``.
    :param dtype: that suffices for the probabilities.
    :return: the column that each row takes, ``(count + 1,) + batch + (n,)``, and log-probabilities.
    """
    n, shape = densities.shape[-1], (count + 1, *densities.shape[1:])
    early = max(0, n - TAIL)
    chances = (1 - SPREAD) * doubly_stochastic(densities, dtype=dtype) + SPREAD / n
    order = chances.square().sum(-1).argsort(-1, descending=True)
    chances = chances.gather(-2, order[..., :early].unsqueeze(-1).expand(*order.shape[:-1], early, n))
    order = order.expand(shape[:-1])
    taken = order.clone()  # by the rows in this order; by the identity, each row's own column
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


def log_permanent(densities: Tensor) -> Tensor:
    """Logarithm of the permanent of ``exp(densities)``, ``batch_shape + (n, n)``, differentiable; ``n`` at most 20."""
    n = densities.shape[-1]
    if n > LARGEST_PERMANENT:
        raise ValueError(f"the matrix has width {n}; permanents are computed up to {LARGEST_PERMANENT}")
    total = densities.new_zeros(*densities.shape[:-2], 1)
    for row, (columns, previous) in enumerate(_subsets(n, densities.device)):
        total = torch.logsumexp(total[..., previous] + densities[..., row, :][..., columns], -1)
    return total[..., 0]


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _subsets(n: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For each size ``t``: the columns of every subset, ``(C(n, t), t)``, and where the subset without it stood."""
    masks = torch.arange(2**n, device=device)
    member = ((masks[:, None] >> torch.arange(n, device=device)) & 1).bool()
    size, place = member.sum(-1), torch.zeros_like(masks)
    levels = []
    for t in range(n + 1):
        own = (size == t).nonzero()[:, 0]
        if t:
            columns = member[own].nonzero()[:, 1].reshape(-1, t)
            levels.append((columns, place[own[:, None] ^ (1 << columns)]))
        place[own] = torch.arange(len(own), device=device)
    return levels
