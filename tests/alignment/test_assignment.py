"""Assignments are optimal, one or many."""

import itertools

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from pyro_symmetric.alignment.assignment import assign


def total(scores, found):
    return scores.gather(-1, found.unsqueeze(-1)).sum((-1, -2))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_assignments_of_a_batch_are_the_enumerated_optima(n):
    scores = torch.randn(3, 5, n, n)
    every = torch.tensor(list(itertools.permutations(range(n))))
    best = (
        scores[..., torch.arange(n), every].sum(-1).amax(-1)
        if n > 1
        else scores[..., 0, 0]
    )
    torch.testing.assert_close(total(scores, assign(scores)), best)


@pytest.mark.parametrize("n", [100, 150])
def test_large_assignments_are_as_good_as_those_of_the_scores_themselves(n):
    for scores in (
        torch.randn(n, n, dtype=torch.float64),
        100 + torch.rand(n, n, dtype=torch.float64),
    ):
        rows, columns = linear_sum_assignment(scores.numpy(), maximize=True)
        found = assign(scores)
        assert found.sort().values.tolist() == list(range(n))
        assert float(total(scores, found)) == pytest.approx(
            float(scores.numpy()[rows, columns].sum()), rel=1e-12
        )


@pytest.mark.parametrize("n", [3, 5, 6])
def test_scores_that_all_tie_still_give_a_permutation(n):
    assert assign(torch.zeros(2, n, n)).sort(-1).values.tolist() == [list(range(n))] * 2
