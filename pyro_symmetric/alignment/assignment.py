r"""Linear assignment problems, one or many: :math:`\max_\pi \sum_i S_{i \pi(i)}`, by SciPy's shortest augmenting paths.

Threads don't pay: SciPy's solver holds the interpreter for small problems and is bound by memory for large ones.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

# Up to so many rows all permutations are compared, for all problems at once.
ENUMERATED = 4


def assign(scores: Tensor) -> Tensor:
    """The permutations with the largest sums of scores, ``(..., n, n)`` -> LongTensor ``(..., n)``.

    Row ``i`` is given column ``p[i]``. What is common to a row or a column changes no choice, but costs the solver
    time: up to ten times at width 2048, where all features are positive, as deviations are. So it is taken off first.
    """
    n = scores.shape[-1]
    if n == 1:
        return torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    if n <= ENUMERATED:
        every = torch.tensor(list(permutations(range(n))), device=scores.device)
        return every[scores[..., torch.arange(n, device=scores.device), every].sum(-1).argmax(-1)]
    costs = scores.mean(-2, keepdim=True) - scores
    costs -= costs.amin(-1, keepdim=True)
    costs -= costs.amin(-2, keepdim=True)
    # Where the best columns of all rows differ there is nothing to solve.
    best = costs.argmin(-1)
    found = best.reshape(-1, n)
    open_ = (found.sort(-1).values != torch.arange(n, device=scores.device)).any(-1)
    if bool(open_.any()):
        solved = [linear_sum_assignment(cost)[1] for cost in costs.reshape(-1, n, n)[open_].double().cpu().numpy()]
        found[open_] = torch.as_tensor(np.stack(solved), dtype=torch.long, device=scores.device)
    return found.reshape(best.shape)
