"""Dual averaging, pooled variances and the windows of warm-up."""

import math

import pytest
import torch

from pyro_symmetric.mcmc.adaptation import DualAveraging, PooledVariance, window_ends


@pytest.mark.parametrize("target", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("start", [1e-3, 10.0])
def test_dual_averaging_finds_the_step_whose_acceptance_is_the_target(target, start):
    # Acceptance exp(-step) plus noise of deviation 0.1: the average over 2000 iterations, weighted to the last ones, is
    # off by 0.03 with a chance under 1e-4.
    average = DualAveraging.start(torch.tensor(start))
    for _ in range(2000):
        acceptance = (-average.log_step.exp()).exp() + 0.1 * torch.randn((), dtype=torch.float64)
        average = average.update(acceptance, target)
    assert math.exp(-average.log_average.exp().item()) == pytest.approx(target, abs=0.03)


def test_dual_averaging_moves_against_the_error():
    average = DualAveraging.start(torch.tensor(0.1))
    low, high = average.update(torch.tensor(0.0), 0.8), average.update(torch.tensor(1.0), 0.8)
    assert low.log_step < high.log_step


def test_pooled_variance_is_the_mean_within_chain_variance():
    draws = torch.randn(30, 4, 5, dtype=torch.float64) * torch.arange(1.0, 6.0) + 100 * torch.arange(4.0)[:, None]
    running = PooledVariance.start(draws[0])
    for draw in draws:
        running = running.update(draw)
    expected = draws.var(0).mean(0)  # within chains: the distance of 100 between chains must not enter
    share = 4 * 29 / (4 * 29 + 5)
    assert torch.allclose(running.variance(), share * expected + (1 - share) * 1e-3)


def test_pooled_variance_of_one_draw_is_one():
    running = PooledVariance.start(torch.randn(3, 2)).update(torch.randn(3, 2))
    assert running.variance().tolist() == [1.0, 1.0]


def test_windows_are_stans():
    assert window_ends(1000) == (75, (100, 150, 250, 450, 950))


@pytest.mark.parametrize("num_warmup", [*range(0, 200, 7), 500, 1234])
def test_windows_lie_within_warmup_and_leave_time_to_adapt_the_step(num_warmup):
    begin, ends = window_ends(num_warmup)
    assert (len(ends) > 0) == (num_warmup >= 20)
    assert list(ends) == sorted(set(ends))
    if ends:
        assert 0 < begin < ends[0]
        assert ends[-1] == num_warmup - (50 if num_warmup >= 150 else int(0.1 * num_warmup))
