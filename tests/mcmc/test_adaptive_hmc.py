"""The criterion of AdaptiveHMC against a naive sum, the length that it learns against
quadrature, its invariant law.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate

from pyro_symmetric.mcmc.kernels.hmc import (
    BINS_PER_OCTAVE,
    FADING,
    RATE,
    AdaptiveHMC,
    TrajectoryLength,
)
from pyro_symmetric.mcmc.kernels.kernel import Mass

from .conftest import GaussianPotential, drive


def test_an_iteration_is_judged_by_whitened_distances_from_each_chains_own_centre(
    generator,
):
    density = GaussianPotential(torch.ones(3, dtype=torch.float64))
    deviations = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    kernel = AdaptiveHMC(
        None,
        step_size=1.4,
        max_steps=64,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    state = kernel.init(density, density.sample(40), 10, generator)
    length = replace(state.tuning.length, centre=density.sample(40))
    state = replace(
        state, tuning=replace(state.tuning, mass=Mass(deviations**2), length=length)
    )
    after = kernel.adapt(density, kernel.step(density, state), 0, 10)
    assert (after.z == state.z).any()  # what was refused counts as no move
    total = 0.0
    for chain in range(40):
        ends = (z[chain] for z in (state.z, after.z))
        squares = [
            (((z - length.centre[chain]) / deviations) ** 2).sum().item() for z in ends
        ]
        total += (squares[1] - squares[0]) ** 2 / 4
    squares, times, counts = after.tuning.length.curve.sum(1).tolist()
    assert squares == pytest.approx(total / 40, rel=1e-6)
    assert times == pytest.approx(1.4 * after.statistics["n_steps"][0].item())
    assert counts == 1


def test_the_sums_of_the_curve_fade():
    length = TrajectoryLength.start(5.0, torch.zeros(2, 3))
    square = torch.tensor(3.0, dtype=torch.float64)
    for _ in range(40):
        length = length.record(torch.tensor(2.0), square)
    sums = torch.tensor([3.0, 2.0, 1.0]).double() * (1 - FADING**40) / (1 - FADING)
    assert torch.allclose(length.curve.sum(1), sums)


def test_a_length_is_learnt_anew_for_each_mass_matrix_and_ends_at_its_average(
    generator,
):
    density = GaussianPotential(torch.tensor([0.1, 1.0, 9.0], dtype=torch.float64))
    kernel = AdaptiveHMC(None)
    state = kernel.init(density, density.sample(8), 40, generator)
    changes = 0
    for iteration in range(40):
        mass = state.tuning.mass
        state = kernel.adapt(density, kernel.step(density, state), iteration, 40)
        length = state.tuning.length
        if state.tuning.mass is not mass:
            changes += 1
            assert length.updates == 0
            assert not length.curve.any()
    assert changes > 0
    assert length.updates > 0
    assert length.log_length == length.log_average


def curve(square: Callable[[float], float], longest: float) -> TrajectoryLength:
    """A curve that is known at 2,000 times up to the longest."""
    length = TrajectoryLength.start(longest, torch.zeros(2, 3))
    for k in torch.randperm(2000).tolist():
        time = (k + 0.5) / 2000 * longest
        length = length.record(
            torch.tensor(time), torch.tensor(square(time), dtype=torch.float64)
        )
    return length


@pytest.mark.parametrize("period", [1.0, 8.0])
def test_the_advice_is_the_length_of_the_most_effective_draws_for_their_cost(period):
    # A turn of a Gaussian: g(t) = sin^2, at most 1, here with frequencies of which
    # quadrature knows the best length.
    def square(time: float) -> float:
        return math.sin(time / period) ** 2

    lengths = np.geomspace(0.2, 40, 400)
    means = np.array(
        [
            integrate.quad(square, 0, longest, limit=200)[0] / longest
            for longest in lengths
        ]
    )
    best = lengths[int(np.argmax(means / (2 - means) / lengths))]
    assert best == pytest.approx(1.79 * period, rel=0.02)
    torch.manual_seed(0)
    # To the nearest bin, half a doubling wide, whose upper edge it is.
    assert (
        abs(math.log2(curve(square, 5 * period).best_log_length().exp().item() / best))
        < 0.5
    )


@pytest.mark.parametrize(
    ("step", "whole"), [(0.15, 11), (0.3, 5), (0.6, 2), (0.7, 2), (1.2, 1)]
)
def test_the_advice_counts_whole_steps(step, whole):
    # A turn of a Gaussian again. Times are rounded up to whole steps, so that few bins
    # are tried, and squares and costs are sums over the steps.
    number = np.arange(1, math.ceil(5 / step) + 1)
    squares, means = (
        np.sin(number * step) ** 2,
        np.cumsum(np.sin(number * step) ** 2) / number,
    )
    worth = means / (2 * squares.max() - means) / (np.cumsum(number * step) / number)
    assert number[worth.argmax()] == whole

    def rounded(time: float) -> float:
        return math.ceil(time / step) * step

    length = TrajectoryLength.start(5.0, torch.zeros(2, 3))
    for k in np.random.default_rng(0).permutation(2000):
        time = rounded((k + 0.5) / 2000 * 5)
        length = length.record(
            torch.tensor(time), torch.tensor(math.sin(time) ** 2, dtype=torch.float64)
        )
    # To the nearest bin, half a doubling wide.
    assert abs(math.log2(length.best_log_length().exp().item() / (whole * step))) < 0.5


def test_what_gains_more_than_in_proportion_to_time_advises_the_longest_that_was_tried():
    torch.manual_seed(0)
    advice = curve(lambda time: time**1.5, 10.0).best_log_length().exp()
    assert 10 <= advice < 10 * math.sqrt(2)
    assert TrajectoryLength.start(
        1.5, torch.zeros(2, 3)
    ).best_log_length().exp() == pytest.approx(1.5)


@pytest.mark.stochastic
def test_the_length_learnt_on_a_gaussian_is_about_a_quarter_of_a_turn():
    # Scales that the mass matrix removes. In theory 1.79 for short steps and 1.2 for
    # those of 0.6, which it takes; the curve's bins are half a doubling wide. 20 seeds
    # gave 1.31 to 1.98.
    density = GaussianPotential(
        torch.logspace(-2, 2, 50, dtype=torch.float64), rotated=False
    )
    z = torch.randn(32, 50, dtype=torch.float64)
    _, statistics, state = drive(AdaptiveHMC(None), density, z, 300, 5)
    assert (
        1.57 / math.sqrt(2) < state.tuning.length.log_length.exp() < 1.57 * math.sqrt(2)
    )
    assert 0.8 < statistics["acceptance_rate"].mean() < 0.97


def test_a_single_chain_learns_no_length():
    density = GaussianPotential(torch.ones(3, dtype=torch.float64))
    alone = drive(AdaptiveHMC(None), density, density.sample(1), 60, 5)[2]
    assert alone.tuning.length.log_length.exp().item() == pytest.approx(math.pi)


@pytest.mark.parametrize(
    ("best", "highest", "expected", "average"),
    [
        (0.7, 9.0, 0.7 + math.log(2) / BINS_PER_OCTAVE, 0.7),
        (5.0, 9.0, 1.0 + RATE, 5.0),
        (-3.0, 9.0, 1.0 - RATE, -3.0),
        (5.0, 1.05, 1.05, 1.05),
    ],
)
def test_the_length_moves_slowly_to_one_bin_beyond_the_best_below_a_limit(
    best, highest, expected, average, monkeypatch
):
    """The average starts with the best, and keeps below the limit. All numbers are
    logarithms.
    """
    best, highest = torch.tensor([best, highest], dtype=torch.float64)
    monkeypatch.setattr(TrajectoryLength, "best_log_length", lambda _: best)
    found = TrajectoryLength.start(math.e, torch.zeros(2, 1)).update(highest)
    assert found.log_length.item() == pytest.approx(expected)
    assert found.log_average.item() == pytest.approx(average)
