"""The best scale of a unit is the maximum that SciPy finds, and never worse than the present one."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from pyro_symmetric.alignment.costs.multipliers import balanced, best_scale, score_at


def scanned(linear, norms, k):
    """The maximum by a fine grid, polished by SciPy."""

    def loss(t):
        return -sum(
            np.exp(e * t) * float(a[k]) - 0.5 * np.exp(2 * e * t) * float(norms[e][k]) for e, a in linear.items()
        )

    grid = np.linspace(-8, 8, 4001)
    best = grid[np.argmin(loss(grid))]
    return -minimize_scalar(loss, bounds=(best - 0.01, best + 0.01), method="bounded", options={"xatol": 1e-10}).fun


@pytest.mark.parametrize("exponents", [(1, -1), (1, -1, 2), (2, -1)])
def test_two_sided_scales_reach_the_scanned_optimum(exponents):
    torch.manual_seed(1)
    n = 60
    # Of all signs: with both inner products positive the quartic may have three positive roots.
    linear = {e: 2 * torch.randn(n, dtype=torch.float64) for e in exponents}
    norms = {e: 0.2 + 2 * torch.rand(n, dtype=torch.float64) for e in exponents}
    starts = [torch.zeros(n, dtype=torch.float64), balanced({e: torch.ones(n) for e in exponents}, norms)]
    reported, t = best_scale(linear, norms, starts, 60)
    value = score_at(linear, norms, t)
    torch.testing.assert_close(reported, value)
    expected = torch.tensor([scanned(linear, norms, k) for k in range(n)], dtype=torch.float64)
    found = (value - expected).abs() < 1e-8
    assert found.double().mean() >= (1.0 if exponents == (1, -1) else 0.95)
    assert bool((value <= expected + 1e-8).all())


def test_one_sided_scales_are_projections():
    linear, norms = {1: torch.tensor([3.0, -3.0])}, {1: torch.tensor([1.0, 1.0])}
    _, t = best_scale(linear, norms, [torch.tensor([0.3, 0.3])], 5)
    torch.testing.assert_close(t.exp()[0], torch.tensor(3.0))
    torch.testing.assert_close(score_at(linear, norms, t)[0], torch.tensor(4.5))
    assert t[1] == 0.3  # the best scale would be zero: the present one stays


def test_the_scale_of_a_unit_that_is_zero_on_one_side_stays_unless_the_other_side_asks():
    linear, norms = (
        {1: torch.tensor([0.0, 2.0]), -1: torch.zeros(2)},
        {1: torch.tensor([0.0, 2.0]), -1: torch.zeros(2)},
    )
    assert best_scale(linear, norms, [torch.zeros(2)], 20)[1].tolist() == [0.0, 0.0]  # 2 / 2 = 1 is best for the second


def test_no_result_is_worse_than_the_present_scale():
    torch.manual_seed(2)
    linear = {e: torch.randn(5000) for e in (1, -1)}
    norms = {e: 2 * torch.rand(5000) for e in (1, -1)}
    present = torch.randn(5000)
    value = score_at(linear, norms, best_scale(linear, norms, [present], 3)[1])
    before = score_at(linear, norms, present)
    assert bool((value >= before - 1e-5 * before.abs()).all())


def test_balanced_scales_make_norms_equal_and_dead_units_stay():
    reference, source = torch.tensor([[4.0], [0.0]]), torch.tensor([[1.0, 9.0]])
    t = balanced({-1: reference}, {-1: source})
    torch.testing.assert_close(torch.exp(-t[0]) * torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
    assert t[1].tolist() == [0.0, 0.0]
