r"""The permanent of a matrix of log-densities: the sum over all matchings of units to positions.

.. math:: \log \operatorname{perm}(e^A) = \log \sum_{p \in S_n} \exp \sum_j A_{j\,p(j)}

:func:`log_permanent` is exact. It adds up subsets of columns by size: with :math:`f_t(S)` the sum over all ways to give
the first ``t`` rows the ``t`` columns of ``S``,

.. math:: f_t(S) = \sum_{i \in S} e^{A_{t i}} f_{t-1}(S \setminus i),

all terms positive, so that nothing cancels in log space (unlike Ryser's formula). It takes :math:`n\,2^{n-1}` terms.

:func:`bethe_permanent` brackets it at any width, :math:`\operatorname{bethe}(e^A) \le \operatorname{perm}(e^A) \le
2^{n/2} \operatorname{bethe}(e^A)`, where

.. math:: \log \operatorname{bethe}(e^A) = \max_P \sum_{ji} P_{ji} A_{ji} - P_{ji} \log P_{ji}
   + (1 - P_{ji}) \log (1 - P_{ji})

over doubly stochastic matrices ``P``. References: the lower side, Gurvits 2011 (arXiv 1106.2844); the upper side, Anari
& Rezaei 2019 (arXiv 1811.02933); the maximum by belief propagation, Vontobel 2013 (arXiv 1107.4196), where the function
is shown to be concave.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# n 2^(n-1) terms: 10 million at 20, which is what a machine holds and a person waits for.
LARGEST_PERMANENT = 20


def log_permanent(scores: Tensor) -> Tensor:
    """Logarithm of the permanent of ``exp(scores)``, differentiable.

    :param scores: ``batch_shape + (n, n)``, ``n`` at most 20.
    :return: ``batch_shape``.
    """
    n = scores.shape[-1]
    if n > LARGEST_PERMANENT:
        raise ValueError(f"the matrix has width {n}; permanents are computed up to {LARGEST_PERMANENT}")
    total = scores.new_zeros(*scores.shape[:-2], 1)
    for row, (columns, previous) in enumerate(_subsets(n, scores.device)):
        total = torch.logsumexp(total[..., previous] + scores[..., row, :][..., columns], -1)
    return total[..., 0]


@functools.lru_cache(maxsize=8)
def _subsets(n: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For each size ``t``: the columns of every subset, ``(C(n, t), t)``, and where the subset without it stood."""
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        return _subset_tables(n, device)


def _subset_tables(n: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    masks = torch.arange(2**n, device=device)
    member = ((masks[:, None] >> torch.arange(n, device=device)) & 1).bool()
    size = member.sum(-1)
    place = torch.zeros_like(masks)
    levels = []
    for t in range(n + 1):
        own = (size == t).nonzero()[:, 0]
        if t:
            columns = member[own].nonzero()[:, 1].reshape(-1, t)
            levels.append((columns, place[own[:, None] ^ (1 << columns)]))
        place[own] = torch.arange(len(own), device=device)
    return levels


@dataclass(frozen=True)
class BethePermanent:
    r"""A bracket of :math:`\log\operatorname{perm}(e^A)`, valid whether or not the iterations have converged.

    :param lower: the Bethe value of ``marginals``, ``batch_shape``.
    :param upper: that value, plus what the maximum can lie above it at most, plus ``(n/2) log 2``.
    :param marginals: the doubly stochastic ``P``, ``batch_shape + (n, n)``; close to the probabilities that position
        ``j`` receives unit ``i``, and the gradient of the Bethe value.
    """

    lower: Tensor
    upper: Tensor
    marginals: Tensor


@torch.no_grad()
def bethe_permanent(scores: Tensor, iterations: int = 300, tolerance: float = 1e-6) -> BethePermanent:
    """Bracket the log-permanent of ``exp(scores)`` by belief propagation; in float64, without gradient.

    :param scores: ``batch_shape + (n, n)``, positions by units.
    :param iterations: at most so many rounds of messages.
    :param tolerance: stop when the bracket, ``(n/2) log 2`` left out, is narrower than this everywhere.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; it must be at least 1")
    scores = scores.double()
    n = scores.shape[-1]
    if n == 1:
        return BethePermanent(scores[..., 0, 0], scores[..., 0, 0], torch.ones_like(scores))
    from_units = torch.zeros_like(scores)
    for step in range(iterations):
        # Log-odds that a position, and then a unit, would rather have one another than anything else.
        from_positions = -_log_sum_of_others(scores + from_units, -1)
        update = -_log_sum_of_others(scores + from_positions, -2)
        from_units = 0.5 * (from_units + update) if step else update  # damped, as it may oscillate
        if step % 10 == 9 or step == iterations - 1:
            marginals = _made_doubly_stochastic(torch.sigmoid(scores + from_positions + from_units))
            value, slack = _bethe_value(scores, marginals)
            if not bool((slack >= tolerance).any()):  # what isn't a number won't converge
                break
    return BethePermanent(value, value + slack + 0.5 * n * math.log(2), marginals)


def _made_doubly_stochastic(matrix: Tensor) -> Tensor:
    """A doubly stochastic matrix close to one that nearly is; every entry stays positive."""
    matrix = matrix.clamp(min=1e-290)
    for _ in range(10):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    rows, columns = matrix.sum(-1), matrix.sum(-2)
    matrix = matrix / torch.maximum(rows.amax(-1), columns.amax(-1))[..., None, None]
    short_rows, short_columns = (1 - matrix.sum(-1)).clamp(min=0), (1 - matrix.sum(-2)).clamp(min=0)
    missing = short_rows.sum(-1)[..., None, None].clamp(min=1e-290)
    return matrix + short_rows.unsqueeze(-1) * (short_columns.unsqueeze(-2) / missing)


def _bethe_value(scores: Tensor, marginals: Tensor) -> tuple[Tensor, Tensor]:
    """The Bethe value of ``marginals``, and how far the maximum can lie above it.

    The function is concave, so its maximum lies under its tangent plane; the highest point of that over the doubly
    stochastic matrices is a linear assignment problem, which any feasible dual bounds from above.
    """
    log_p = marginals.log()
    log_q = _log_sum_of_others(log_p, -1)  # of 1 - P, without cancellation
    value = (marginals * (scores - log_p) + log_q.exp() * log_q).sum((-2, -1))
    slope = scores - log_p - log_q - 2
    columns = (marginals * slope).sum(-2, keepdim=True)
    rows = (slope - columns).amax(-1, keepdim=True)
    columns = (slope - rows).amax(-2, keepdim=True)
    highest = rows.sum((-2, -1)) + columns.sum((-2, -1))
    return value, (highest - (marginals * slope).sum((-2, -1))).clamp(min=0)


def _log_sum_of_others(values: Tensor, dim: int) -> Tensor:
    """For each entry the log-sum-exp of all other entries along ``dim``, without cancellation."""
    top, where = values.max(dim, keepdim=True)
    rest = values.scatter(dim, where, -torch.inf)
    others = torch.logsumexp(rest, dim, keepdim=True)  # for the largest entry: all others
    whole = torch.logaddexp(top, others)
    # log(e^whole - e^value) for the entries below the largest, each at most half of the whole
    less = whole + torch.log1p(-(values - whole).exp().clamp(max=0.5))
    return torch.where(values == top, others, less) if values.shape[dim] > 1 else torch.full_like(values, -torch.inf)
