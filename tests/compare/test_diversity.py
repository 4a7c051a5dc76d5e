import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from pyro_symmetric.compare import (
    mutual_information,
    pairwise_mutual_information,
)
from pyro_symmetric.compare.diversity import functional_collapse


def test_mutual_information_equals_its_definition_as_a_divergence():
    # I = mean over members of KL(p_s || mean), another formula than the difference of entropies
    p = torch.randn(5, 7, 3, dtype=torch.float64).softmax(-1)
    divergence = (p * (p.log() - p.mean(0).log())).sum(-1).mean(0)
    torch.testing.assert_close(mutual_information(p), divergence)


def test_pairs_equal_a_naive_loop_over_pairs():
    p = torch.randn(6, 9, 4).mul(2).softmax(-1)
    found = pairwise_mutual_information(p)
    for i in range(6):
        for j in range(6):
            expected = float(mutual_information(p[[i, j]]).mean())
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-7)
    assert torch.equal(found, found.T)


def test_collapse_equals_the_correlation_over_pairs_in_scipy():
    within, outside = (torch.randn(7, n, 3).mul(2).softmax(-1) for n in (5, 8))
    found = functional_collapse(within, outside)
    rows, columns = np.triu_indices(7, 1)
    x, y = (pairwise_mutual_information(p).numpy()[rows, columns] for p in (within, outside))
    np.testing.assert_array_equal([found.within, found.outside], [x, y])
    assert found.correlation == pytest.approx(pearsonr(x, y).statistic)
    assert found.rank_correlation == pytest.approx(spearmanr(x, y).statistic)


def test_copies_of_one_member_have_collapsed():
    p = torch.randn(1, 6, 3).softmax(-1).expand(4, -1, -1)
    found = functional_collapse(p, p)
    assert float(torch.cat([found.within, found.outside]).max()) < 1e-6
    assert math.isnan(found.correlation)
    with pytest.raises(ValueError, match="holds 4 members and ood_probabilities 3"):
        functional_collapse(p, p[:3])
