"""ChEES: its criterion's slope against numerical differentiation, the length it learns, its invariant distribution."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_symmetric.mcmc.chees import ChEES, LengthTuning, criterion_slope, radical_inverse
from pyro_symmetric.mcmc.hmc import Trajectory
from pyro_symmetric.mcmc.mass import DiagonalMass


def test_the_halton_sequence_fills_the_unit_interval():
    assert [radical_inverse(k) for k in range(1, 8)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]
    assert sorted(radical_inverse(k) for k in range(1, 64)) == [k / 64 for k in range(1, 64)]


def test_the_slope_is_the_derivative_of_the_criterion_per_cost():
    # Harmonic motion is known in closed form: z' = z cos t + v sin t in units of the deviations. All are accepted.
    torch.manual_seed(0)
    deviations = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    z = torch.randn(40, 3, dtype=torch.float64) * deviations
    p = torch.randn(40, 3, dtype=torch.float64) / deviations
    mass = DiagonalMass(deviations**2)  # exactly the target's, so that the motion in whitened units has frequency 1
    ones = torch.ones(40, dtype=torch.float64)
    centre = torch.randn(40, 3, dtype=torch.float64)

    def arrive(time: float) -> tuple[Tensor, Tensor]:
        at = z * math.cos(time) + deviations**2 * p * math.sin(time)
        return at, p * math.cos(time) - z / deviations**2 * math.sin(time)

    def criterion(longest: float, share: float) -> float:
        x, x1, m = z / deviations, arrive(share * longest)[0] / deviations, centre / deviations
        change = (x1 - m).square().sum(-1) - (x - m).square().sum(-1)
        return 0.25 * change.square().mean().item() / longest

    longest, share, h = 1.3, 0.7, 1e-5
    slope = criterion_slope(mass, centre, z, Trajectory(*arrive(share * longest), ones), share * longest, longest)
    numeric = (criterion(longest * math.exp(h), share) - criterion(longest * math.exp(-h), share)) / (2 * h)
    assert slope.item() == pytest.approx(numeric, rel=1e-6)


def test_lost_trajectories_do_not_count():
    torch.manual_seed(0)
    z, p = torch.randn(5, 3), torch.randn(5, 3)
    acceptance = torch.tensor([1.0, 0.5, 0.0, 0.8, 0.0])
    mass, centre = DiagonalMass(torch.ones(3)), torch.randn(5, 3)
    end = torch.randn(5, 3)
    spoilt_z, spoilt_p = end.clone(), p.clone()
    spoilt_z[2], spoilt_p[4] = torch.nan, torch.inf
    clean = criterion_slope(mass, centre, z, Trajectory(end, p, acceptance), 1.0, 2.0)
    spoilt = criterion_slope(mass, centre, z, Trajectory(spoilt_z, spoilt_p, acceptance), 1.0, 2.0)
    assert torch.isfinite(spoilt)
    assert torch.equal(clean, spoilt)
    assert criterion_slope(mass, centre, z, Trajectory(end * torch.nan, p, 0 * acceptance), 1.0, 2.0) == 0


def test_the_length_climbs_along_the_slope_within_its_limits():
    start = LengthTuning.start(torch.tensor(1.0), torch.zeros(2, 3))
    low, high = torch.tensor(-0.04).double(), torch.tensor(0.12).double()
    for sign, limit in ((1.0, high), (-1.0, low)):
        length = start
        for _ in range(20):
            slope = torch.tensor(sign * 3.0, dtype=torch.float64)
            length = replace(length, slope=slope).update(low, high)
            assert sign * length.log_length > 0
        assert length.log_length == limit


def test_the_centre_is_an_average_weighted_to_the_last_draws():
    length, draws = LengthTuning.start(torch.tensor(1.0), torch.zeros(1, 1)), torch.arange(1.0, 7.0) ** 2
    for number, draw in enumerate(draws, 1):
        length = replace(length, iteration=number).recentred(draw.reshape(1, 1))
    weights = torch.arange(1.0, 7.0)
    assert length.centre.item() == pytest.approx((weights @ draws / weights.sum()).item(), rel=1e-5)


def test_the_length_learnt_on_a_gaussian_is_about_half_a_turn(gaussian, drive):
    # Scales that the mass matrix removes. The longest trajectory that is worth its cost lasts between a quarter and
    # the whole of a turn; three seeds gave 3.8 to 4.8.
    potential = gaussian(torch.logspace(-2, 2, 50, dtype=torch.float64), rotated=False)
    z = torch.randn(32, 50, dtype=torch.float64)
    _, statistics, state = drive(ChEES(None), potential, z, 300, 5)
    assert math.pi / 2 < state.tuning.length.log_length.exp() < 2 * math.pi
    assert 0.6 < statistics["acceptance_rate"].mean() < 0.95


def test_trajectories_that_are_too_short_grow(gaussian, drive):
    # Rotated: correlations remain that the mass matrix can't hold. Three seeds went from 1 to 3.5 or more.
    potential = gaussian(torch.logspace(-1.5, 1.5, 20, dtype=torch.float64))
    z = torch.randn(32, 20, dtype=torch.float64)
    state = drive(ChEES(None, trajectory_length=1.0), potential, z, 300, 1)[2]
    assert state.tuning.length.log_length.exp() > 2


def test_nothing_is_learnt_after_warm_up_or_where_it_is_switched_off(gaussian, drive):
    potential = gaussian(torch.ones(3, dtype=torch.float64))
    z = potential.sample(8)
    state = drive(ChEES(None, trajectory_length=2.0, adapt_length=False), potential, z, 60, 5)[2]
    assert state.tuning.length.log_length.exp().item() == pytest.approx(2.0)
    alone = drive(ChEES(None, trajectory_length=2.0), potential, z[:1], 60, 5)[2]
    assert alone.tuning.length.log_length.exp().item() == pytest.approx(2.0)


def test_chains_that_start_in_the_target_stay_in_it(gaussian):
    # 20,000 exact draws, three transitions with a coarse step. Kolmogorov-Smirnov at 1e-4 for each of 3 coordinates and
    # for the energy: false alarms 4e-4.
    potential = gaussian(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64))
    kernel = ChEES(None, step_size=0.8, trajectory_length=4.0)
    state = kernel.init(potential, potential.sample(20_000), 0)
    rates = []
    for _ in range(3):
        state = kernel.step(potential, state)
        rates.append(state.statistics["acceptance_rate"].mean().item())
    assert 0.3 < sum(rates) / 3 < 0.97
    x = potential.standardise(state.z)
    for coordinate in range(3):
        assert stats.kstest(x[:, coordinate].numpy(), "norm").pvalue > 1e-4
    assert stats.kstest((2 * potential(state.z)).numpy(), "chi2", args=(3,)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [({"trajectory_length": -1.0}, "trajectory_length is -1.0"), ({"max_steps": 0}, "max_steps is 0")],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ChEES(None, **options)
