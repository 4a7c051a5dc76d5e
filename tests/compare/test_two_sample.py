import numpy as np
import pytest
import torch

from pyro_symmetric.compare import common_frame
from pyro_symmetric.compare.mmd import mmd, mmd_test
from pyro_symmetric.groups.group import Group


def two_normals(m, n, shift=0.0, dimension=3):
    return {"0.w": torch.randn(m, dimension)}, {"0.w": torch.randn(n, dimension) + shift}


def test_the_p_value_is_the_rank_of_the_largest_standardised_discrepancy():
    """By its definition: each order's discrepancies, by ``mmd`` under the kernels of the pooled sample."""
    p, q = two_normals(9, 6, 0.5)
    torch.manual_seed(1)
    found = mmd_test(p, q, num_permutations=19)
    torch.manual_seed(1)
    orders = torch.rand(20, 15, dtype=torch.float64).argsort(1)
    orders[0] = torch.arange(15)
    pooled = torch.cat([p["0.w"], q["0.w"]])
    table = []
    for order in orders:  # the first nine places are p's
        sides = ({"0.w": pooled[order.argsort()[places]]} for places in (slice(9), slice(9, None)))
        table.append(mmd(*sides, bandwidths=found).parts["0"]["squared"])
    table = np.stack(table)
    np.testing.assert_allclose(found.parts["0"]["squared"], table[0], atol=1e-6)
    scores = ((table - table.mean(0)) / table.std(0)).max(1)
    assert found.p_value == pytest.approx(float((scores >= scores[0] - 1e-9).mean()))


@pytest.mark.stochastic
def test_a_difference_in_dependence_alone_is_found():
    # equal marginals, correlation 0.95 against 0: with 100 samples each a p-value over 0.05 is out of the question
    x = torch.randn(100, 1)
    p = {"w": torch.cat([x, 0.95 * x + (1 - 0.95**2) ** 0.5 * torch.randn(100, 1)], 1)}
    result = mmd_test(p, {"w": torch.randn(100, 2)}, num_permutations=199)
    assert result.rejected
    assert "different at level 0.05" in result.verdict


@pytest.mark.stochastic
def test_the_layer_that_differs_is_named_and_the_other_is_not():
    # the null layer's adjusted p-value is at most the level in 2 of 10,000 seeds
    p = {"0.w": torch.randn(60, 4), "2.w": torch.randn(60, 3)}
    q = {"0.w": torch.randn(60, 4), "2.w": torch.randn(60, 3) + 1}
    result = mmd_test(p, q, level=2e-4, num_permutations=9_999)
    assert result.parts["2"]["p_value"] == result.p_value <= 2e-4
    assert result.parts["0"]["p_value"] > 2e-4
    assert "1 of 2 layers, first of all '2'" in result.verdict


@pytest.mark.stochastic
def test_a_frame_found_from_both_samples_keeps_the_level_however_unequal_they_are():
    # Overlapping units, 12 draws against 40: the frame follows the larger sample, but never knows whose draw is whose.
    # 30 repetitions at level 0.1: over 9 rejections with probability 0.0005.
    group = Group.declare({"w": ("unit", None)}, {"w": torch.zeros(4, 2)})
    rejected = 0
    for _ in range(30):
        p, q = ({"w": torch.randn(count, 4, 2)} for count in (12, 40))
        rejected += mmd_test(*common_frame(p, q, group), level=0.1, num_permutations=39).rejected
    assert rejected <= 9
