"""The best scale of a unit is the minimum that SciPy finds, and never worse than the present one."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from pyro_symmetric.alignment.costs.rescale import Side, best_scale, equal_norm_scale


def scanned(sides, gamma, k):
    """The maximum by a fine grid, polished by SciPy."""

    def loss(t):
        value = gamma * t
        for side in sides:
            power = np.exp(side.exponent * t)
            value += power * float(side.linear[k]) + power**2 * float(side.quadratic[k])
        return -value

    grid = np.linspace(-8, 8, 4001)
    best = grid[np.argmin(loss(grid))]
    return -minimize_scalar(loss, bounds=(best - 0.01, best + 0.01), method="bounded", options={"xatol": 1e-10}).fun


@pytest.mark.parametrize("exponents", [(1, -1), (1, -1, 2), (2, -1)])
def test_two_sided_scales_reach_the_scanned_optimum(exponents):
    torch.manual_seed(1)
    n = 60
    # Of all signs: with both inner products positive the quartic may have three positive roots.
    sides = [
        Side(e, torch.randn(n, dtype=torch.float64) * 2, -(0.1 + torch.rand(n, dtype=torch.float64))) for e in exponents
    ]
    value, _ = best_scale(sides, 0.0, torch.zeros(n, dtype=torch.float64), 60)
    expected = torch.tensor([scanned(sides, 0.0, k) for k in range(n)], dtype=torch.float64)
    found = (value - expected).abs() < 1e-8
    assert found.double().mean() >= (1.0 if exponents == (1, -1) else 0.95)
    assert bool((value <= expected + 1e-8).all())


def test_one_sided_scales_are_projections():
    linear, quadratic = torch.tensor([3.0, -3.0]), torch.tensor([-0.5, -0.5])
    value, t = best_scale([Side(1, linear, quadratic)], 0.0, torch.tensor([0.3, 0.3]), 5)
    torch.testing.assert_close(t.exp()[0], torch.tensor(3.0))
    torch.testing.assert_close(value[0], torch.tensor(4.5))
    assert t[1] == 0.3  # the best scale would be zero: the present one stays


def test_the_scale_of_a_unit_that_is_zero_on_one_side_stays_unless_the_other_side_asks():
    sides = [Side(1, torch.tensor([0.0, 2.0]), torch.tensor([0.0, -1.0])), Side(-1, torch.zeros(2), torch.zeros(2))]
    _, t = best_scale(sides, 0.0, torch.zeros(2), 20)
    assert t.tolist() == [0.0, 0.0]  # 2 / (2 * 1) = 1 is best for the second, too


def test_the_log_determinant_of_a_divergence_counts():
    sides = [Side(1, torch.randn(20, dtype=torch.float64), -(0.2 + torch.rand(20, dtype=torch.float64)))]
    value, _ = best_scale(sides, 4.0, torch.zeros(20, dtype=torch.float64), 60)
    expected = torch.tensor([scanned(sides, 4.0, k) for k in range(20)], dtype=torch.float64)
    torch.testing.assert_close(value, expected, atol=1e-7, rtol=0)


def test_no_result_is_worse_than_the_present_scale():
    torch.manual_seed(2)
    sides = [Side(e, torch.randn(5000), -torch.rand(5000)) for e in (1, -1)]
    present = torch.randn(5000)
    value, t = best_scale(sides, 0.0, present, 3)

    def at(t):
        return sum((s.exponent * t).exp() * s.linear + (2 * s.exponent * t).exp() * s.quadratic for s in sides)

    assert bool((value >= at(present) - 1e-5 * at(present).abs()).all())
    torch.testing.assert_close(value, at(t), rtol=1e-4, atol=1e-4)


def test_equal_norms_are_equal_and_dead_units_stay():
    t = equal_norm_scale(-1, torch.tensor([4.0, 0.0]), torch.tensor([1.0, 9.0]))
    torch.testing.assert_close(torch.exp(-t[0]) * torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
    assert t[1].tolist() == [0.0, 0.0]
