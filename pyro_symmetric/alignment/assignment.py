"""Linear assignment problems, and the signs that maximise their scores."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_symmetric.weights import ByName

# Assignment problems of at most so many rows are solved by enumeration, all at once.
ENUMERATED = 5

# Names of units whose signs multiply a score -> the score.
ScoresBySigns = dict[frozenset[str], Tensor]


def assign(scores: Tensor) -> Tensor:
    r"""Solve linear assignment problems: :math:`\arg\max_\pi \sum_i S_{i \pi(i)}`.

    A constant added to a row or a column changes no assignment, but it slows SciPy's
    solver: up to ten times at width 2048, where all features are positive, as
    deviations are. So row and column minima are subtracted first. Threads don't pay:
    the solver holds the interpreter for small problems and is bound by memory for large
    ones.

    :param scores: ``(..., n, n)``, finite, as 0 times infinity is NaN.
    :return: LongTensor ``(..., n)``.
    """
    n = scores.shape[-1]
    units = torch.arange(n, device=scores.device)
    if n == 1:
        return torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    if n <= ENUMERATED:
        permutations = list(itertools.permutations(range(n)))
        orders = torch.tensor(permutations, device=scores.device)
        chosen = one_hot(orders, n).flatten(1).to(scores.dtype)
        totals = scores.flatten(-2) @ chosen.mT
        return orders[totals.argmax(-1)]
    costs = scores.mean(-2, keepdim=True) - scores
    costs -= costs.amin(-1, keepdim=True)
    costs -= costs.amin(-2, keepdim=True)
    best = costs.argmin(-1)
    images = best.reshape(-1, n)
    # If the best columns of all rows differ, they are the solution.
    unsolved = (images.sort(-1).values != units).any(-1)
    if unsolved.any():
        hard = costs.reshape(-1, n, n)[unsolved].double().cpu().numpy()
        solved = np.stack([linear_sum_assignment(cost)[1] for cost in hard])
        images[unsolved] = torch.as_tensor(solved, device=scores.device).long()
    return images.reshape(best.shape)


class Signed(NamedTuple):
    """The largest sum of scores, and the signs that reach it, by name."""

    scores: Tensor
    signs: ByName


def best_signs(scores: ScoresBySigns) -> Signed:
    """Maximise the sum of scores over the signs that multiply them, elementwise."""
    tied = next((names for names in scores if len(names) > 1), None)
    if tied is not None:
        return _best_by_cases(scores, min(tied))
    terms = []
    signs = {}
    for names, value in scores.items():
        terms.append(value.abs() if names else value)
        for name in names:
            signs[name] = torch.where(value < 0, -1.0, 1.0).double()
    return Signed(torch.stack(terms).sum(0), signs)


def _best_by_cases(scores: ScoresBySigns, name: str) -> Signed:
    """Do the same by trying both signs of some units, plus and minus."""
    if_plus: ScoresBySigns = {}
    if_minus: ScoresBySigns = {}
    for names, value in scores.items():
        remaining = names - {name}
        add_to(if_plus, remaining, value)
        add_to(if_minus, remaining, -value if name in names else value)
    plus = best_signs(if_plus)
    minus = best_signs(if_minus)
    flipped = minus.scores > plus.scores
    signs = {name: torch.where(flipped, -1.0, 1.0).double()}
    for inner, sign in plus.signs.items():
        signs[inner] = torch.where(flipped, minus.signs[inner], sign)
    return Signed(torch.maximum(plus.scores, minus.scores), signs)


def add_to(totals: ScoresBySigns, signs: frozenset[str], value: Tensor) -> None:
    """Add a score to the total under some signs."""
    totals[signs] = totals[signs] + value if signs in totals else value
