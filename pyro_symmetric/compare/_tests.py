"""The few classical tests that the comparisons need, for many samples at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric._process import drawn_seed

SIMULATIONS = 9_999
_CHUNK_ENTRIES = 2**22


def chi_square_uniform(counts: Tensor) -> Tensor:
    """Pearson's test that ``counts`` ``batch_shape + (n,)`` come from a uniform multinomial, of equal totals.

    If the expected count is under 5 (the usual rule of Cochran), the p-value is the rank of the statistic among those
    of simulated uniform multinomial draws (Davison & Hinkley 1997, section 4.2.1): exact in size.

    :returns: the p-values ``batch_shape``.
    """
    from scipy.stats import chisquare  # which takes a quarter of a second to load

    statistic, upper = map(np.asarray, chisquare(counts.double().cpu().numpy(), axis=-1))
    n, draws = counts.shape[-1], int(counts.sum(-1).max())
    if draws >= 5 * n:
        return torch.from_numpy(upper)
    simulated = np.random.default_rng(drawn_seed()).multinomial(draws, np.full(n, 1 / n), size=SIMULATIONS)
    drawn = np.sort(chisquare(simulated, axis=1).statistic)
    reached = SIMULATIONS - np.searchsorted(drawn, statistic * (1 - 1e-12))
    return torch.from_numpy(np.asarray((reached + 1) / (SIMULATIONS + 1)))


def kolmogorov_smirnov(x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, float]:
    """Two-sample Kolmogorov-Smirnov tests of ``x[first[t]]`` against ``y[second[t]]``, for all ``t``, two-sided and
    exact. (SciPy's takes a millisecond each.)

    :param x: samples in rows, ``(rows, h)``.
    :param y: samples of the same size, ``(rows, h)``.
    :param first: which rows of ``x``, ``(T,)``.
    :param second: which rows of ``y``, ``(T,)``.
    :returns: p-values ``(T,)`` (conservative if values are tied), and the smallest possible one.
    """
    h = x.shape[-1]
    x, y = x.sort(-1).values.contiguous(), y.sort(-1).values.contiguous()
    # F_x - F_y is largest just at, and smallest just before, a value of x.
    at = torch.searchsorted(x, x, right=True)
    before = torch.searchsorted(x, x, right=False)
    steps = torch.empty_like(first)
    size = max(1, _CHUNK_ENTRIES // h)
    for start in range(0, first.numel(), size):
        part = slice(start, start + size)
        a, other, values = first[part], y[second[part]], x[first[part]]
        above = (at[a] - torch.searchsorted(other, values, right=True)).amax(-1)
        below = (torch.searchsorted(other, values, right=False) - before[a]).amax(-1)
        steps[part] = torch.maximum(above, below)
    table = _exact_table(h).to(x.device)
    return table[steps], float(table[-1])


def _exact_table(h: int) -> Tensor:
    r"""P(D >= d / h) for d = 0 .. h, two samples of size h (Gnedenko & Korolyuk 1951): reflections of a bridge,

    .. math:: 2 \sum_{k \ge 1} (-1)^{k-1} \binom{2h}{h - kd} \Big/ \binom{2h}{h}.
    """
    top = math.lgamma(h + 1)
    shifts = torch.arange(1, h + 1, dtype=torch.float64, device="cpu")
    total = torch.zeros(h, dtype=torch.float64, device="cpu")
    for k in range(1, min(h, math.ceil(9 * math.sqrt(h))) + 1):  # terms beyond kd = 9 sqrt(h) are under 1e-35
        shift = k * shifts[: h // k]
        ratio = (2 * top - torch.lgamma(h - shift + 1) - torch.lgamma(h + shift + 1)).exp()
        total[: h // k] += ratio if k % 2 else -ratio
    return torch.cat([total.new_ones(1), (2 * total).clamp(0, 1)])


def holm(p_values: Tensor) -> Tensor:
    """p-values ``(T,)``, adjusted by Holm's method (1979), in the given order."""
    ordered, order = p_values.sort()
    factors = torch.arange(p_values.numel(), 0, -1, dtype=p_values.dtype, device=p_values.device)
    adjusted = torch.empty_like(p_values)
    adjusted[order] = (ordered * factors).cummax(0).values.clamp(max=1) if p_values.numel() else ordered
    return adjusted
