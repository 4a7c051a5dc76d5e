"""The few classical tests that the comparisons need, for many samples at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIMULATIONS = 9_999
_CHUNK_ENTRIES = 2**22


def chi_square_uniform(counts: Tensor, *, simulations: int = SIMULATIONS) -> tuple[Tensor, str, Tensor]:
    """Pearson's test that ``counts`` ``batch_shape + (n,)`` come from a uniform multinomial, of equal totals.

    If the expected count is under 5 (the usual rule of Cochran), the p-value is the rank of the statistic among those
    of ``simulations`` uniform multinomial draws (Davison & Hinkley 1997, section 4.2.1): exact in size, at least ``1 /
    (simulations + 1)``.

    :returns: the statistics ``batch_shape``, ``"chi-square"`` or ``"simulated multinomial"``, the p-values
        ``batch_shape``.
    """
    counts = counts.double().cpu()
    n, draws = counts.shape[-1], float(counts.sum(-1).max())
    expected = draws / n
    statistic = ((counts - expected) ** 2).sum(-1) / expected
    if expected >= 5:
        upper = torch.special.gammaincc(torch.tensor((n - 1) / 2, dtype=torch.float64, device="cpu"), statistic / 2)
        return statistic, "chi-square", upper
    reached = torch.zeros_like(statistic)
    total = round(draws)
    step = max(1, _CHUNK_ENTRIES // max(n, total))
    for start in range(0, simulations, step):
        rows = min(step, simulations - start)
        cells = torch.randint(n, (rows, total), device="cpu") + n * torch.arange(rows, device="cpu")[:, None]
        simulated = torch.bincount(cells.reshape(-1), minlength=rows * n).reshape(rows, n).double()
        drawn = (((simulated - expected) ** 2).sum(1) / expected).sort().values
        reached += rows - torch.searchsorted(drawn, statistic * (1 - 1e-12))
    return statistic, "simulated multinomial", (reached + 1) / (simulations + 1)


def kolmogorov_smirnov(x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, float]:
    """Two-sample Kolmogorov-Smirnov tests of ``x[first[t]]`` against ``y[second[t]]``, for all ``t``, two-sided and
    exact.

    :param x: samples in rows, ``(rows, h)``.
    :param y: samples of the same size, ``(rows, h)``.
    :param first: which rows of ``x``, ``(T,)``.
    :param second: which rows of ``y``, ``(T,)``.
    :returns: statistics ``(T,)``, p-values ``(T,)`` (conservative if values are tied), the smallest possible
        p-value.
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
    return steps.double() / h, table[steps], float(table[-1])


def _exact_table(h: int) -> Tensor:
    r"""P(D >= d / h) for d = 0 .. h, two samples of size h (Gnedenko & Korolyuk 1951): reflections of a bridge,

    .. math:: 2 \sum_{k \ge 1} (-1)^{k-1} \binom{2h}{h - kd} \Big/ \binom{2h}{h}.
    """
    top = torch.lgamma(torch.tensor(h + 1.0, dtype=torch.float64, device="cpu"))
    table = [torch.ones(1, dtype=torch.float64, device="cpu")]
    first = 1
    while (
        first <= h
    ):  # d in octaves: as d doubles, half as many terms count (those beyond kd = 9 sqrt(h) are under 1e-35)
        last = min(2 * first, h + 1)
        d = torch.arange(first, last, dtype=torch.float64, device="cpu")
        k = torch.arange(1, max(1, math.ceil(9 * math.sqrt(h) / first)) + 1, dtype=torch.float64, device="cpu")[:, None]
        shift = (k * d).clamp(max=h)
        ratio = (2 * top - torch.lgamma(h - shift + 1) - torch.lgamma(h + shift + 1)).exp()
        signed = torch.where(k % 2 == 1, ratio, -ratio).where(k * d <= h, 0.0)
        table.append((2 * signed.sum(0)).clamp(0, 1))
        first = last
    return torch.cat(table)


def holm(p_values: Tensor) -> Tensor:
    """p-values ``(T,)``, adjusted by Holm's method (1979), in the given order."""
    ordered, order = p_values.sort()
    factors = torch.arange(p_values.numel(), 0, -1, dtype=p_values.dtype, device=p_values.device)
    adjusted = torch.empty_like(p_values)
    adjusted[order] = (ordered * factors).cummax(0).values.clamp(max=1) if p_values.numel() else ordered
    return adjusted


def holm_rejections(p_values: Tensor, level: float) -> int:
    """Number of hypotheses that Holm's method rejects at ``level``."""
    return int((holm(p_values) <= level).sum())
