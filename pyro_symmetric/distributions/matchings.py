r"""Doubly stochastic matrices, and random matchings drawn from them.

A matrix of log-densities :math:`A_{ji}` (position ``j`` receives unit ``i``) is scaled to a doubly stochastic one,
:math:`S = \operatorname{diag}(u)\, e^A \operatorname{diag}(v)` (Sinkhorn & Knopp 1967): the matching of least relative
entropy to ``A`` whose rows and columns sum to one. Permutations are drawn from it row by row without replacement, the
most certain rows first; the last few rows, the least certain ones, are matched exactly, by all their permutations:

.. math:: \tau(p) = \prod_{j \text{ early}} \frac{S_{j\,p(j)}}{\sum_{i \text{ not taken by an earlier row}} S_{ji}}
   \;\cdot\; \frac{\exp \sum_{j \text{ late}} A_{j\,p(j)}}{\operatorname{perm} (e^{A})_{\text{late}}}

The draws of all samples and proposals are made at once. Few rows choose one after the other, each the column that
leads a race of its own (the largest of :math:`S_{ji} / E_{ji}`, with independent exponential :math:`E`) among those
that are free. Of many, each has a stream of independent draws of its own from
:math:`S_j` and takes the first that no earlier row takes. So all rows can choose at the same time: of those that chose
the same column the earliest keeps it, the others draw again, from the columns that no earlier row holds. A row that is
displaced later resumes its stream. That ends after a few rounds, in what the loop over rows would have given.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from pyro_symmetric.distributions.orbit import in_chunks
from pyro_symmetric.distributions.permanent import log_permanent

# Log-densities further than this below the best of their row or column count alike; e^-40 leaves room in float32.
FLOOR = -40.0
# Alternations of rows and columns; if units overlap so much that this isn't enough, the matrix is nearly flat.
ITERATIONS = 12
# What each row spreads evenly over all columns, so that no matching has probability zero.
SPREAD = 1e-4
# Rows that are matched exactly, by enumeration. On random bases of width 12 the estimate's error fell threefold.
TAIL = 6
# Up to this width sums over matchings are made term by term; beyond, a good guess stands for them.
SUMMED = 3
# Columns up to which rows choose one after the other: fewer operations than the rounds of many take, and none waits.
FEW = 24
# Draws that each row makes before it looks which columns are left; most rows need no more.
STREAM = 8
# Numbers that may be held at once while probabilities of many matchings are computed.
CHUNK_NUMBERS = 2**24


def doubly_stochastic(densities: Tensor, iterations: int = ITERATIONS, centred: bool = False) -> Tensor:
    """Sinkhorn's scaling of ``exp(densities)``.

    :param densities: log-densities, ``batch_shape + (n, n)``; constants added to rows or columns don't matter.
    :param iterations: alternations of rows and columns; more come closer to column sums of one. Row sums are exact.
    :param centred: whether constants of rows and columns are gone already.
    :return: nonnegative, of the same shape.
    """
    if densities.is_cuda:
        centre = densities if centred else densities.log_softmax(-1).log_softmax(-2)
        return scaled_in_logarithms(centre, iterations)
    densities = densities if centred else without_constants(densities)
    densities = densities - densities.amax(-1, keepdim=True)
    kernel = densities.clamp(min=FLOOR).exp()
    columns = kernel.new_ones(*kernel.shape[:-2], kernel.shape[-1], 1)
    transposed = kernel.mT
    for _ in range(iterations):
        rows = (kernel @ columns).reciprocal_()
        columns = (transposed @ rows).reciprocal_()
    scaled = kernel * columns.mT
    return scaled / scaled.sum(-1, keepdim=True)


def scaled_in_logarithms(densities: Tensor, iterations: int) -> Tensor:
    """Nearly what :func:`doubly_stochastic` gives, in half as many operations, each of which takes exponentials.

    :param densities: without constants of rows and columns.
    """
    densities = densities.log_softmax(-1).clamp(min=FLOOR)
    for _ in range(iterations - 1):
        densities = densities.log_softmax(-2).log_softmax(-1)
    return densities.log_softmax(-2).softmax(-1)


def without_constants(densities: Tensor) -> Tensor:
    """Log-densities without constants of rows, and then of columns: the largest of each column is 0."""
    densities = densities - densities.amax(-1, keepdim=True)
    return densities - densities.amax(-2, keepdim=True)


def soft_permanent(densities: Tensor) -> Tensor:
    r"""Nearly the log-sum over all matchings, ``batch_shape + (n, n)`` -> ``batch_shape``.

    Up to width 3 the sum itself; beyond, the Bethe value at Sinkhorn's matrix, which doesn't exceed the sum (Gurvits
    2011, arXiv 1106.2844), and meets it if one matching stands out:

    .. math:: \sum_{ji} S_{ji} A_{ji} - S_{ji} \log S_{ji} + (1 - S_{ji}) \log (1 - S_{ji})
    """
    n = densities.shape[-1]
    if n <= SUMMED:
        return log_permanent(densities)
    matrix = doubly_stochastic(densities)
    free = (1 - matrix).clamp(min=0)
    return (matrix * densities - torch.xlogy(matrix, matrix) + torch.xlogy(free, free)).sum((-2, -1))


def with_spread(matrix: Tensor) -> Tensor:
    """The row distributions that matchings are drawn from: mixed with a little of the uniform one."""
    return matrix * (1 - SPREAD) + SPREAD / matrix.shape[-1]


def certain_first(rows: Tensor) -> Tensor:
    """The rank of each row in order of falling certainty (collision probability), ``batch_shape + (n,)``; of many rows
    32-bit."""
    rank = torch.linalg.vector_norm(rows, dim=-1).argsort(-1, descending=True).argsort(-1)
    return rank if rows.shape[-1] <= FEW else rank.int()


def draw_matchings(densities: Tensor, rows: Tensor, rank: Tensor) -> Tensor:
    """Random permutations: row by row without replacement in the given order, the last rows exactly.

    :param densities: log-densities ``A``, ``(L, N, n, n)`` with ``L`` 1 (shared by all proposals) or ``K``.
    :param rows: distributions of each row, likewise.
    :param rank: place of each row in the order, ``(K, N, n)``.
    :return: ``(K, N, n)``: the column that each row takes.
    """
    late, tables = _tail(rank.shape[-1], rank.device)
    choice = draw_rows(rows, rank, late)

    def matched(part: slice) -> Tensor:
        own = densities[part] if len(densities) > 1 else densities
        where, columns, sums = _late_sums(own, rank[part], choice[part], late, tables)
        total = sums.softmax(-1).cumsum(-1)
        uniform = torch.rand(*total.shape[:-1], 1, dtype=total.dtype, device=total.device)
        drawn = torch.searchsorted(total, _below(uniform, total[..., -1:]), right=True)[..., 0]
        return choice[part].scatter(-1, where, columns.gather(-1, tables[drawn]))

    return in_chunks(matched, len(rank), CHUNK_NUMBERS // (rank.shape[1] * TAIL * len(tables)))


def draw_rows(rows: Tensor, rank: Tensor, undrawn: int = 0) -> Tensor:
    """Row by row without replacement, to the last: ``(K, N, n)``. There may be more columns than rows.

    :param undrawn: how many rows at the end may take what is left in any order.
    """
    if undrawn == rank.shape[-1]:
        return torch.arange(undrawn, device=rank.device).expand(rank.shape)
    if rows.shape[-1] <= FEW:
        return _one_by_one(rows, rank.long(), undrawn)
    stream = _draw_each(rows, rank.shape)
    choice = stream[0]
    held = rank.new_full((*rank.shape[:-1], rows.shape[-1]), rank.shape[-1])
    for candidates in stream:
        # held[c]: rank of the earliest row that has chosen column c so far; it only falls, as earlier rows only gain.
        choice = torch.where(held.gather(-1, choice) < rank, candidates, choice)
        held = held.scatter_reduce(-1, choice, rank, "amin")
    return _settle(rows, rank, choice, held)


def _one_by_one(rows: Tensor, rank: Tensor, undrawn: int) -> Tensor:
    """Each row in turn takes the free column that leads its race."""
    count, columns = rank.shape[-1], rows.shape[-1]
    race = rows / rows.new_empty(*rank.shape, columns).exponential_()
    race = race.gather(-2, rank.argsort(-1).unsqueeze(-1).expand(*rank.shape, columns))
    taken = []
    for place in range(count - undrawn):
        taken.append(race[..., place, :].argmax(-1, keepdim=True))
        race.scatter_(-1, taken[-1].unsqueeze(-2).expand(*rank.shape, 1), -1.0)
    if undrawn:
        taken.append(race[..., -1, :].topk(undrawn).indices)
    return torch.cat(taken, -1).gather(-1, rank)


def _draw_each(rows: Tensor, shape: torch.Size) -> Tensor:
    """The first independent draws of every row's stream: ``(STREAM, K, N, n)``."""
    count, batch, n = shape
    total = rows.cumsum(-1)
    uniform = torch.rand(len(rows), batch, n, STREAM * count // len(rows), dtype=rows.dtype, device=rows.device)
    drawn = torch.searchsorted(total, _below(uniform, total[..., -1:]), right=True)
    return drawn.unflatten(-1, (STREAM, -1)).permute(3, 0, 4, 1, 2).reshape(STREAM, *shape)


def _settle(rows: Tensor, rank: Tensor, choice: Tensor, held: Tensor) -> Tensor:
    """Let rows without a column go on, drawing from the columns that no earlier row holds, until all have one."""
    batch, n = held.shape[1:]
    while True:
        k, b, j = (held.gather(-1, choice) < rank).nonzero(as_tuple=True)
        if len(k) == 0:
            return choice
        own_rank = rank[k, b, j]
        weight = rows[k if len(rows) > 1 else 0, b, j] * (held[k, b] > own_rank[:, None])
        total = weight.cumsum(-1)
        uniform = torch.rand(len(k), 1, dtype=rows.dtype, device=rows.device)
        picked = torch.searchsorted(total, _below(uniform, total[:, -1:]), right=True)[:, 0]
        choice[k, b, j] = picked
        held = held.view(-1).scatter_reduce(0, (k * batch + b) * n + picked, own_rank, "amin").view_as(held)


def _below(uniform: Tensor, total: Tensor) -> Tensor:
    """``uniform * total``, never rounded up to ``total``: so that no column of weight zero is drawn."""
    return uniform * (total * (1 - 4 * torch.finfo(total.dtype).eps))


# the late rows ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _tail(n: int, device: torch.device) -> tuple[int, Tensor]:
    """The number of late rows, and all their permutations, the identity first."""
    late = min(TAIL, n)
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        return late, torch.tensor(list(itertools.permutations(range(late))), device=device)


@functools.lru_cache(maxsize=16)
def _cells(late: int, device: torch.device) -> Tensor:
    """The entries of a matrix of the late rows that each of their permutations takes, one after the other."""
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        places = torch.tensor(list(itertools.permutations(range(late))), device=device)
        return (places + late * torch.arange(late, device=device)).flatten()


def _late_sums(
    densities: Tensor, rank: Tensor, choice: Tensor, late: int, tables: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The late rows and their columns, ``(K, N, late)``, and the log-density of each of their matchings."""
    n = rank.shape[-1]
    where = rank.argsort(-1)[..., n - late :]
    columns = choice.gather(-1, where)
    block = densities.expand(*rank.shape, n).gather(-2, where.unsqueeze(-1).expand(*where.shape, n))
    block = block.gather(-1, columns.unsqueeze(-2).expand(*where.shape, late)).double()
    cells = _cells(late, tables.device)
    taken = block.flatten(-2).gather(-1, cells.expand(*block.shape[:-2], -1))
    return where, columns, taken.unflatten(-1, (-1, late)).sum(-1)


# probabilities ------------------------------------------------------------------------------------------------------


def log_probability(densities: Tensor, rows: Tensor, rank: Tensor, choice: Tensor) -> Tensor:
    r"""Log-probability :math:`\log\tau(p)` of matchings.

    :param densities: as in :func:`draw_matchings`, ``(L, N, n, n)``.
    :param rows: likewise.
    :param rank: ``(K, N, n)``.
    :param choice: ``(K, N, n)``.
    :return: ``(K, N)``, float64.
    """
    n = rank.shape[-1]
    late, tables = _tail(n, rank.device)

    def probability(part: slice) -> Tensor:
        some_densities, some_rows = (m[part] if len(m) > 1 else m for m in (densities, rows))
        some_rank, chosen = rank[part], choice[part]
        _, _, sums = _late_sums(some_densities, some_rank, chosen, late, tables)
        last = sums.log_softmax(-1)[..., 0]  # of the first table, by which all late rows keep their columns
        if late == n:
            return last
        return last + (log_row_choices(some_rows, some_rank, chosen) * (some_rank < n - late)).sum(-1)

    return in_chunks(probability, len(rank), CHUNK_NUMBERS // (rank.shape[1] * max(n * n, TAIL * len(tables))))


def log_row_choices(rows: Tensor, rank: Tensor, choice: Tensor) -> Tensor:
    """For each row the log-probability of its column among those that no earlier row takes, ``(K, N, n)``."""
    held = rank.new_full((*rank.shape[:-1], rows.shape[-1]), rank.shape[-1])
    taken_by = held.scatter_(-1, choice, rank)  # rank of the row that takes each column
    free = taken_by.unsqueeze(-2) >= rank.unsqueeze(-1)
    return (_picked(rows, choice) / (rows * free).sum(-1)).log()


def _picked(matrix: Tensor, choice: Tensor) -> Tensor:
    return matrix.expand(*choice.shape, matrix.shape[-1]).gather(-1, choice.unsqueeze(-1)).squeeze(-1)
