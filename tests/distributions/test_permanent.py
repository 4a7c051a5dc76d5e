"""Permanents against the sum over all permutations, and the Bethe bracket against permanents."""

import itertools
import math

import pytest
import torch

from pyro_symmetric.distributions.permanent import bethe_permanent, log_permanent


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


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 8.0, 60.0])
@pytest.mark.parametrize("iterations", [1, 300])
def test_the_bethe_bracket_holds_converged_or_not(n: int, scale: float, iterations: int) -> None:
    scores = scale * torch.randn(40, n, n, dtype=torch.float64)
    exact, bethe = by_enumeration(scores), bethe_permanent(scores, iterations)
    assert bool((bethe.lower <= exact + 1e-9 * (1 + exact.abs())).all())
    assert bool((bethe.upper >= exact - 1e-9 * (1 + exact.abs())).all())


def test_both_ends_of_the_bracket_are_reached() -> None:
    """The upper one by 2 × 2 blocks of equal entries, the lower one by a single matching."""
    blocks = torch.full((6, 6), -200.0, dtype=torch.float64)
    for i in range(0, 6, 2):
        blocks[i : i + 2, i : i + 2] = 0.0
    bethe = bethe_permanent(blocks)
    assert float(bethe.upper) == pytest.approx(3 * math.log(2), abs=1e-3)
    single = bethe_permanent(200 * torch.eye(6, dtype=torch.float64))
    assert float(single.lower) == pytest.approx(1200.0, abs=1e-6)


def test_converged_brackets_are_as_wide_as_the_theorem_says() -> None:
    bethe = bethe_permanent(torch.randn(3, 40, 40, dtype=torch.float64))
    torch.testing.assert_close(bethe.upper - bethe.lower, torch.full((3,), 20 * math.log(2), dtype=torch.float64))
    torch.testing.assert_close(bethe.marginals.sum(-1), torch.ones(3, 40, dtype=torch.float64))


@pytest.mark.stochastic
@pytest.mark.parametrize("n", [6, 8])
def test_the_bethe_value_is_the_maximum_over_doubly_stochastic_matrices(n: int) -> None:
    """Climbed from Pyro's OneOneMatching, which takes the value at one doubly stochastic matrix: a lower bound."""
    from pyro.distributions import OneOneMatching

    scores = torch.randn(n, n, dtype=torch.float64)
    pyros = float(OneOneMatching(scores, bp_iters=500).log_partition_function)
    potentials = scores.clone().requires_grad_()  # Sinkhorn's scaling maps them onto the matrices, Pyro's first
    climber = torch.optim.LBFGS([potentials], max_iter=200, tolerance_change=0, line_search_fn="strong_wolfe")

    def value() -> torch.Tensor:
        logs = potentials
        for _ in range(200):
            logs = logs - logs.logsumexp(-1, keepdim=True)
            logs = logs - logs.logsumexp(-2, keepdim=True)
        p = logs.exp()
        return (p * (scores - logs) + torch.special.xlogy(1 - p, 1 - p)).sum()

    def closure() -> torch.Tensor:
        climber.zero_grad()
        (-value()).backward()
        return -value().detach()

    assert float(value().detach()) == pytest.approx(pyros, abs=1e-6)
    climber.step(closure)
    highest, found = float(value().detach()), bethe_permanent(scores, 1000)
    # What is left to climb is within the slack that was said, and small even if the maximum is at a corner.
    slack = float(found.upper - found.lower) - 0.5 * n * math.log(2)
    assert -1e-6 < highest - float(found.lower) < slack + 1e-6
    assert highest - float(found.lower) < 0.01
    assert pyros < float(found.lower) < float(log_permanent(scores))
