import numpy as np
import pytest
import torch
from scipy import stats

from pyro_symmetric.compare._tests import chi_square_uniform, holm, kolmogorov_smirnov


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 333])
def test_kolmogorov_smirnov_equals_scipys_exact_test(size):
    x, y = torch.randn(4, size), torch.randn(4, size) + torch.tensor([0.0, 0.1, 0.5, 3.0])[:, None]
    first, second = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    first, second = first.reshape(-1), second.reshape(-1)
    p_values, floor = kolmogorov_smirnov(x, y, first, second)
    for i, j, p_value in zip(first, second, p_values, strict=True):
        expected = stats.ks_2samp(x[i].numpy(), y[j].numpy(), method="exact")
        assert float(p_value) == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
        assert floor <= float(p_value) + 1e-15


def test_ties_are_counted_once():
    x = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    y = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    zero = torch.zeros(1, dtype=torch.long)
    assert kolmogorov_smirnov(x, y, zero, zero)[0].tolist() == pytest.approx([1.0])  # of a statistic of 1 / 4
    assert kolmogorov_smirnov(x, x, zero, zero)[0].tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("counts", [[20, 30, 25], [5, 5, 5, 5], [100, 0]])
def test_chi_square_equals_scipy(counts):
    p_value = chi_square_uniform(torch.tensor([counts, counts[::-1]]))
    expected = stats.chisquare(counts)
    assert p_value.tolist() == pytest.approx([expected.pvalue] * 2)


@pytest.mark.stochastic
def test_few_draws_are_tested_by_simulation():
    # 4 draws on 3 units; exact by enumeration of the 81 outcomes. 9,999 simulations: 5 deviations are under 0.025.
    counts = torch.tensor([3, 1, 0])
    both = torch.stack([counts, torch.tensor([2, 1, 1])])
    outcomes = np.stack(np.meshgrid(*[range(3)] * 4), -1).reshape(-1, 4)
    tables = np.stack([(outcomes == unit).sum(1) for unit in range(3)], 1)
    statistics = ((tables - 4 / 3) ** 2).sum(1) / (4 / 3)
    found = stats.chisquare(both.double().numpy(), axis=1).statistic
    for statistic, p_value in zip(found, chi_square_uniform(both).tolist(), strict=True):
        assert p_value == pytest.approx((statistics >= statistic - 1e-9).mean(), abs=0.025)
    assert chi_square_uniform(torch.tensor([1, 1, 1, 1])) == 1.0


def test_holm_equals_the_step_down_definition():
    p_values = torch.tensor([0.01, 0.04, 0.03, 0.005], dtype=torch.float64)
    torch.testing.assert_close(holm(p_values), torch.tensor([0.03, 0.06, 0.06, 0.02], dtype=torch.float64))
    assert holm(torch.zeros(0)).numel() == 0
