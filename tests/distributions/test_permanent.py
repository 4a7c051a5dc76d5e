"""Permanents against the sum over all permutations."""

import itertools
import math

import pytest
import torch

from pyro_symmetric.distributions.permanent import log_permanent


def by_enumeration(scores: torch.Tensor) -> torch.Tensor:
    n = scores.shape[-1]
    permutations = torch.tensor(list(itertools.permutations(range(n))))
    return torch.logsumexp(scores[..., torch.arange(n), permutations].sum(-1), -1)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_log_permanent_equals_enumeration(n: int, scale: float) -> None:
    scores = scale * torch.randn(4, 3, n, n, dtype=torch.float64)
    torch.testing.assert_close(log_permanent(scores), by_enumeration(scores))


def test_log_permanent_of_equal_entries_is_a_factorial() -> None:
    assert float(log_permanent(torch.zeros(16, 16, dtype=torch.float64))) == pytest.approx(math.lgamma(17))


def test_its_gradient_is_the_probability_of_each_match() -> None:
    scores = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(log_permanent(scores), scores)[0]
    other = torch.autograd.grad(by_enumeration(scores), scores)[0]
    torch.testing.assert_close(gradient, other)
    torch.testing.assert_close(gradient.sum(0), torch.ones(5, dtype=torch.float64))


def test_a_wide_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="width 21"):
        log_permanent(torch.zeros(21, 21))
