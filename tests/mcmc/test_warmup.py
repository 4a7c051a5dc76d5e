"""Results of the warm-up of Hamiltonian kernels, against plain sums over draws and acceptances that are given."""

import math
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import norm

from pyro_symmetric.mcmc import HMC, NUTS, sample
from pyro_symmetric.mcmc.kernels.kernel import State, stranded
from pyro_symmetric.mcmc.kernels.learning import LARGEST_GAIN, Pace, StepSearch, newton_gain
from pyro_symmetric.mcmc.kernels.warmup import window_ends

C, D = 40, 3


@pytest.fixture
def density(gaussian):
    return gaussian(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False)


def fed(kernel, density, state: State, draws: np.ndarray, acceptances: np.ndarray, num_warmup: int) -> list[State]:
    """The states that warm-up makes of draws ``(S, C, D)`` and acceptances ``(S, C)`` that no step has made."""
    states = []
    for iteration, (z, acceptance) in enumerate(zip(draws, acceptances, strict=True)):
        z, acceptance = torch.tensor(z), torch.tensor(acceptance)
        energy, gradient = density.energy_and_gradient(z)
        tuning = kernel._learnt(state.tuning, acceptance).noted(z, state.momentum, energy, gradient)
        state = replace(state, z=z, energy=energy, gradient=gradient, tuning=tuning)
        state = kernel.adapt(density, state, iteration, num_warmup)
        states.append(state)
    return states


def numbers(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    modes = 100 * generator.normal(size=(C, 1))  # the distance between chains says nothing
    draws = modes + generator.normal(size=(count, C, D)) * [0.5, 1.0, 2.0]
    return draws, generator.uniform(0.5, 1, size=(count, C))


def test_each_window_gives_the_variances_within_chains_of_its_own_draws(density, generator):
    count = 200
    begin, ends = window_ends(count)
    assert len(ends) == 2  # so that the second doesn't know the first
    draws, acceptances = numbers(count)
    kernel = HMC(None, step_size=0.1)
    state = kernel.init(density, torch.tensor(draws[0]), count, generator)
    assert state.tuning.blind
    assert torch.equal(state.tuning.mass.variance, torch.ones(D, dtype=torch.float64))
    states = fed(kernel, density, state, draws, acceptances, count)
    assert states[ends[0] - 2].tuning.mass is state.tuning.mass
    for first, end in zip((begin, ends[0]), ends, strict=True):
        tuning, window = states[end - 1].tuning, draws[first:end]
        degrees = C * (len(window) - 1)
        plain = window.var(0, ddof=1).mean(0)
        shrunk = (degrees * plain + 5 * 1e-3) / (degrees + 5)
        assert tuning.mass.variance.numpy() == pytest.approx(shrunk, rel=1e-9)
        assert not tuning.blind
    assert states[-1].tuning.mass is states[ends[-1] - 1].tuning.mass


def test_the_step_follows_the_mean_acceptance_and_ends_at_its_average(density, generator):
    draws, acceptances = numbers(15)  # too few for a window
    kernel = HMC(None, step_size=0.1, target_accept=0.7)
    state = kernel.init(density, torch.tensor(draws[0]), 15, generator)
    states, log_step, sums, gain = (
        fed(kernel, density, state, draws, acceptances, 15),
        math.log(0.1),
        0.0,
        1 / slope(0.7),
    )
    for number, after in enumerate(states, start=1):
        log_step += gain * number**-0.6 * (acceptances[number - 1].mean() - 0.7)
        sums += number * log_step  # weights in proportion to the iteration's number
        expected = 2 * sums / (number * (number + 1)) if number == 15 else log_step
        assert after.tuning.step_size.item() == pytest.approx(math.exp(expected))
    assert states[-1].tuning.step_size.dtype == torch.float64
    assert not states[-1].tuning.blind


# the search for the step size ---------------------------------------------------------------------------------------


def acceptance_curve(log_step):
    """Of many coordinates (Beskos et al. 2013), in units of a step."""
    return 2 * norm.cdf(-0.5 * np.exp(2 * log_step))


def slope(target: float) -> float:
    """The slope of acceptance in the log of the step around a target, by central differences."""
    at = 0.5 * math.log(-2 * norm.ppf(target / 2))
    assert acceptance_curve(at) == pytest.approx(target)
    return (acceptance_curve(at - 1e-5) - acceptance_curve(at + 1e-5)) / 2e-5


@pytest.mark.parametrize("target", [0.2, 0.65, 0.8, 0.9])
def test_the_gain_is_newtons_for_the_acceptance_curve(target):
    assert newton_gain(target) == pytest.approx(1 / slope(target), rel=1e-6)


def test_the_gain_is_bounded_near_one():
    assert newton_gain(0.999) == LARGEST_GAIN


def test_the_search_moves_against_the_error():
    search = StepSearch.start(torch.tensor(0.1), 0.8)
    low, high = search.update(torch.tensor(0.0)), search.update(torch.tensor(1.0))
    assert low.log_step < search.log_step < high.log_step


@pytest.mark.parametrize(("chains", "most"), [(1, 0.02), (4, 0.01), (32, 0.004)])
@pytest.mark.parametrize("target", [0.65, 0.8, 0.9])
def test_fifty_iterations_reach_the_target_without_bias(target, chains, most):
    # Energy errors N(s²/2, s²) with s the square of the step, whose acceptance is the curve's. Averages of 2,000
    # searches, with a standard error of at most 0.0011: a bias of `most` less five of them passes with a chance of
    # 1 - 3e-7 at least. (Stan's dual averaging is off by 0.10, 0.06 and 0.01 for the target 0.65.)
    draw, runs = np.random.default_rng(0), 2000
    start = 0.5 * math.log(-2 * norm.ppf(target / 2)) + draw.uniform(-1.2, 0.7, runs)
    search = StepSearch.start(torch.tensor(start).exp(), target)
    for _ in range(50):
        size = search.log_step.mul(2).clamp(max=8).exp().numpy()[:, None]
        error = size**2 / 2 + size * draw.standard_normal((runs, chains))
        search = search.update(torch.tensor(np.exp(-error.clip(0)).mean(1)))
    assert acceptance_curve(search.log_average.numpy()).mean() == pytest.approx(target, abs=most)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_search_that_follows_finds_a_far_root_and_keeps_up_with_it(factor):
    search, root = StepSearch.start(torch.tensor(1.0), 0.8, follow=True), math.log(factor)
    for iteration in range(100):
        if iteration == 50:
            root += 2.0  # chains arrive where steps may be longer
        search = search.update(torch.tensor(acceptance_curve(search.log_step.item() - root)))
        if iteration in (49, 99):
            assert acceptance_curve(search.log_average.item() - root) == pytest.approx(0.8, abs=0.02)


# the pace of chains that are stuck ----------------------------------------------------------------------------------


def test_chains_that_are_stuck_take_smaller_steps_until_they_have_caught_up():
    pace, limits = Pace.start(torch.zeros(C)), torch.ones(C)
    limits[:3] = 0.01  # of their share; beyond it they don't move
    shares = []
    for iteration in range(60):
        acceptance = torch.where(pace.share <= limits, 0.8, 0.0)
        if iteration > 12:  # from when they are known to be stuck, they don't draw the step down
            assert pace.pooled(acceptance) == pytest.approx(0.8)
        pace = pace.update(acceptance, torch.tensor(0.8))
        shares.append(pace.share)
    shares = torch.stack(shares)
    assert torch.equal(shares[:, 3:], torch.ones(60, C - 3))
    assert (shares[25:, :3] <= 0.01).double().mean(0).min() > 0.4  # when they move as they should, about half the time
    for _ in range(30):
        pace = pace.update(torch.full((C,), 0.8), torch.tensor(0.8))  # they have arrived
    assert torch.equal(pace.share, torch.ones(C))


@pytest.mark.parametrize("chains", [1, 3, 40])
def test_if_most_chains_are_stuck_the_step_is_too_long_for_all(chains):
    pace, acceptance = Pace.start(torch.zeros(chains)), torch.zeros(chains)
    acceptance[: (chains - 1) // 2] = 0.9
    for _ in range(40):
        pace = pace.update(acceptance, torch.tensor(0.8))
    assert torch.equal(pace.share, torch.ones(chains))
    assert torch.allclose(pace.pooled(acceptance), acceptance.mean())


def test_stranded_is_who_stands_still_above_all_that_move():
    began = torch.zeros(5, 2)
    z = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    energy = torch.tensor([9.0, 2.0, 1.0, 3.0, 2.0])
    lost, moving = stranded(began, z, energy)
    assert lost.tolist() == [True, False, False, False, False]  # the other one lies no higher than those that move
    assert moving.tolist() == [False, False, True, True, True]
    z[2] = 0.0
    assert not stranded(began, z, energy)[0].any()  # most stand still: the step is wrong, not the place


def rough_far_out() -> None:
    """A standard normal near 0; beyond 10 its energy is so rough that no step is ever accepted."""
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.factor("rough", torch.where(z.abs() > 10, -1e9 * (1 + (1e9 * z).sin()) - 1e9 * z.abs(), torch.zeros_like(z)))


@pytest.mark.parametrize("kernel", [HMC, NUTS])
def test_a_chain_that_never_moves_continues_from_another_and_is_listed(kernel):
    start = torch.tensor([0.1, -0.3, 20.0, 0.6, -1.0, 0.9], dtype=torch.float64)
    posterior = sample(
        kernel(rough_far_out), num_samples=50, num_warmup=200, num_chains=6, initial={"z": start}, seed=0,
        dtype=torch.float64, engine="torch", progress=False,
    )  # fmt: skip
    assert posterior.metadata["relocated_chains"] == [2]
    assert posterior.samples["z"].abs().max() < 6  # of a normal's 300 draws: one in 1e6 runs exceeds it


def test_a_chain_at_half_pace_takes_half_the_step(density, generator):
    z = torch.zeros(C, D, dtype=torch.float64)
    for kernel in (HMC(None, step_size=0.2, num_steps=3, jitter=0.0), NUTS(None, step_size=0.2, max_treedepth=1)):
        state = kernel.init(density, z, 1000, generator)
        slow = Pace(torch.where(torch.arange(C) < 4, 0.5, 1.0).double(), torch.ones(C).double())
        ends = []
        for pace, step_size in ((slow, 0.2), (slow, 0.1), (Pace.start(z[:, 0]), 0.1)):
            tuning = replace(state.tuning, pace=pace, step_size=z.new_tensor(step_size))
            seeded = torch.Generator(torch.empty(0).device).manual_seed(1)
            ends.append(kernel.step(density, replace(state, tuning=tuning, generator=seeded)))
        assert torch.allclose(ends[0].z[:4], ends[2].z[:4])  # half of 0.2 is 0.1
        assert torch.equal(ends[1].z[4:], ends[2].z[4:])
        assert not torch.allclose(ends[1].z[:4], ends[2].z[:4])
        assert torch.allclose(ends[0].statistics["step_size"][:5], z.new_tensor([0.1, 0.1, 0.1, 0.1, 0.2]))


# windows ------------------------------------------------------------------------------------------------------------


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


def test_a_new_mass_matrix_starts_the_search_of_the_step_anew(density, generator):
    draws, acceptances = numbers(200)
    end = window_ends(200)[1][0]
    kernel = HMC(None, step_size=0.1)
    states = fed(kernel, density, kernel.init(density, torch.tensor(draws[0]), 200, generator), draws, acceptances, 200)
    assert states[end - 2].tuning.search.count == 4  # it follows while the mass matrix is unknown
    assert states[end - 1].tuning.search.count == 0
    assert states[-1].tuning.search.count == 200 - window_ends(200)[1][-1]
    assert states[end - 1].tuning.search.log_step.exp() == pytest.approx(states[end - 1].tuning.step_size.item())


def test_what_isnt_to_be_adapted_stays(density, generator):
    draws, acceptances = numbers(60)
    for options in ({"adapt_step_size": False}, {"adapt_mass": False}):
        kernel = HMC(None, step_size=0.1, **options)
        state = kernel.init(density, torch.tensor(draws[0]), 60, generator)
        last = fed(kernel, density, state, draws, acceptances, 60)[-1].tuning
        assert (last.step_size == 0.1) == ("adapt_step_size" in options)
        assert torch.equal(last.mass.variance, torch.ones(D, dtype=torch.float64)) == ("adapt_mass" in options)
        assert state.tuning.blind == ("adapt_mass" not in options)


def test_a_dense_matrix_that_would_fill_the_memory_is_refused(generator):
    with pytest.raises(ValueError, match="mass is 'dense', but the model has 10001 coordinates"):
        HMC(None, mass="dense").init(None, torch.empty(1, 10_001), 10, generator)
