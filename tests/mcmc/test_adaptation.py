"""Dual averaging and the windows of warm-up."""

import math

import pytest
import torch

from pyro_symmetric.mcmc.kernels.adaptation import DualAveraging, window_ends


@pytest.mark.stochastic
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
