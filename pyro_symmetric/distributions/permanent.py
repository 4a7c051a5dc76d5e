r"""The permanent of a matrix of log-densities: the sum over all matchings of units to positions.

.. math:: \log \operatorname{perm}(e^A) = \log \sum_{p \in S_n} \exp \sum_j A_{j\,p(j)}

:func:`log_permanent` is exact. It adds up subsets of columns by size: with :math:`f_t(S)` the sum over all ways to give
the first ``t`` rows the ``t`` columns of ``S``,

.. math:: f_t(S) = \sum_{i \in S} e^{A_{t i}} f_{t-1}(S \setminus i),

all terms positive, so that nothing cancels in log space (unlike Ryser's formula). It takes :math:`n\,2^{n-1}` terms.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# n 2^(n-1) terms: 10 million at 20, which is what a machine holds and a person waits for.
LARGEST_PERMANENT = 20


def log_permanent(densities: Tensor) -> Tensor:
    """Logarithm of the permanent of ``exp(densities)``, differentiable.

    :param densities: ``batch_shape + (n, n)``, ``n`` at most 20.
    :return: ``batch_shape``.
    """
    n = densities.shape[-1]
    if n > LARGEST_PERMANENT:
        raise ValueError(f"the matrix has width {n}; permanents are computed up to {LARGEST_PERMANENT}")
    total = densities.new_zeros(*densities.shape[:-2], 1)
    for row, (columns, previous) in enumerate(_subsets(n, densities.device)):
        total = torch.logsumexp(total[..., previous] + densities[..., row, :][..., columns], -1)
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
