"""Results of the warm-up of Hamiltonian kernels, against plain sums over draws and
acceptances that are given.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from pyro_symmetric.mcmc import HMC
from pyro_symmetric.mcmc.kernels.adaptation import (
    StepSizeAdaptation,
    window_ends,
    windows,
)
from pyro_symmetric.mcmc.kernels.kernel import State

from .conftest import GaussianPotential, variances_by_formula

C, D = 40, 3


@pytest.fixture
def density():
    return GaussianPotential(
        torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False
    )


def fed(
    kernel,
    density,
    state: State,
    draws: np.ndarray,
    acceptances: np.ndarray,
    num_warmup: int,
) -> list[State]:
    """The states that warm-up makes of draws ``(S, C, D)`` and acceptances ``(S, C)``
    that no step has made.
    """
    states = []
    for iteration, (z, acceptance) in enumerate(zip(draws, acceptances, strict=True)):
        z, acceptance = torch.tensor(z), torch.tensor(acceptance)
        energy, gradient = density.energy_and_gradient(z)
        state = replace(
            state,
            z=z,
            energy=energy,
            gradient=gradient,
            statistics={"acceptance_rate": acceptance},
        )
        state = kernel.adapt(density, state, iteration, num_warmup)
        states.append(state)
    return states


def numbers(count: int, chains: int = C) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    # the distance between chains says nothing
    modes = 100 * generator.normal(size=(chains, 1))
    draws = modes + generator.normal(size=(count, chains, D)) * [0.5, 1.0, 2.0]
    return draws, generator.uniform(0.5, 1, size=(count, chains))


@pytest.mark.parametrize("chains", [4, C])
def test_each_window_gives_the_variances_within_chains_of_its_own_draws(
    chains, density, generator
):
    count = 200
    begin, ends, early = windows(count, chains)
    assert len(ends) == (4 if chains == C else 2)
    draws, acceptances = numbers(count, chains)
    kernel = HMC(None, step_size=0.1)
    state = kernel.init(density, torch.tensor(draws[0]), count, generator)
    assert state.tuning.blind
    assert torch.equal(state.tuning.mass.variance, torch.ones(chains, D).double())
    states = fed(kernel, density, state, draws, acceptances, count)
    assert states[ends[0] - 2].tuning.mass is state.tuning.mass
    for first, end in zip((begin, *ends[:-1]), ends, strict=True):
        tuning, window = states[end - 1].tuning, draws[first:end]
        expected = variances_by_formula(window)
        assert tuning.mass.variance.numpy() == pytest.approx(expected, rel=1e-9)
        assert tuning.blind == (end in early)
    assert states[-1].tuning.mass is states[ends[-1] - 1].tuning.mass


def test_the_step_follows_the_mean_acceptance_and_ends_at_its_average(
    density, generator
):
    draws, acceptances = numbers(15)  # too few for a window
    kernel = HMC(None, step_size=0.1, target_accept_prob=0.7)
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
        assert after.tuning.step_size.tolist() == pytest.approx(
            [math.exp(expected)] * C
        )
    assert states[-1].tuning.step_size.dtype == torch.float64
    assert not states[-1].tuning.blind


# the search for the step size ---------------------------------------------------------


def acceptance_curve(log_step):
    """Of many coordinates (Beskos et al. 2013), in units of a step."""
    return 2 * norm.cdf(-0.5 * np.exp(2 * log_step))


def slope(target: float) -> float:
    """The slope of acceptance in the log of the step around a target, by central
    differences.
    """
    at = 0.5 * math.log(-2 * norm.ppf(target / 2))
    assert acceptance_curve(at) == pytest.approx(target)
    return (acceptance_curve(at - 1e-5) - acceptance_curve(at + 1e-5)) / 2e-5


@pytest.mark.parametrize("target", [0.2, 0.65, 0.8, 0.9])
def test_the_gain_is_newtons_for_the_acceptance_curve(target):
    assert StepSizeAdaptation.start(torch.ones(()), target).gain == pytest.approx(
        1 / slope(target), rel=1e-6
    )


@pytest.mark.parametrize(("chains", "most"), [(1, 0.02), (4, 0.01), (32, 0.004)])
@pytest.mark.parametrize("target", [0.65, 0.8, 0.9])
def test_fifty_iterations_reach_the_target_without_bias(target, chains, most):
    # Energy errors N(s²/2, s²) with s the square of the step, whose acceptance is the
    # curve's. Averages of 2,000 searches, with a standard error of at most 0.0011: a
    # bias of `most` less five of them passes with a chance of 1 - 3e-7 at least.
    # (Stan's dual averaging is off by 0.10, 0.06 and 0.01 for the target 0.65.)
    draw, runs = np.random.default_rng(0), 2000
    start = 0.5 * math.log(-2 * norm.ppf(target / 2)) + draw.uniform(-1.2, 0.7, runs)
    search = StepSizeAdaptation.start(torch.tensor(start).exp(), target)
    for _ in range(50):
        size = search.log_step.mul(2).clamp(max=8).exp().numpy()[:, None]
        error = size**2 / 2 + size * draw.standard_normal((runs, chains))
        search = search.update(torch.tensor(np.exp(-error.clip(0)).mean(1)))
    assert acceptance_curve(search.log_average.numpy()).mean() == pytest.approx(
        target, abs=most
    )


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_search_that_follows_finds_a_far_root_and_keeps_up_with_it(factor):
    search, root = (
        StepSizeAdaptation.start(torch.tensor(1.0), 0.8, follow=True),
        math.log(factor),
    )
    for iteration in range(100):
        if iteration == 50:
            root += 2.0  # chains arrive where steps may be longer
        search = search.update(
            torch.tensor(acceptance_curve(search.log_step.item() - root))
        )
        if iteration in (49, 99):
            assert acceptance_curve(search.log_average.item() - root) == pytest.approx(
                0.8, abs=0.02
            )


# chains that are stuck, and modes -----------------------------------------------------


def test_until_the_mass_matrix_is_known_each_chain_has_a_step_of_its_own(
    density, generator
):
    """From when it is found anew, after 64 iterations, each follows its own acceptance,
    by gains that stop falling.
    """
    draws, acceptances = numbers(200)
    acceptances[:, :3] = 0.1  # which are stuck
    begin, ends = window_ends(200)
    kernel = HMC(None, step_size=0.1)
    state = kernel.init(density, torch.tensor(draws[0]), 200, generator)
    states = fed(kernel, density, state, draws, acceptances, 200)
    found, later = states[63].tuning.step_size, states[begin - 1].tuning.step_size
    gains = np.minimum(np.arange(1, begin - 63), 4)[:, None] ** -0.6 / slope(0.9)
    expected = np.clip(gains * (acceptances[64:begin] - 0.9), -1, 1).sum(0)
    assert (later / found).log().numpy() == pytest.approx(expected, rel=1e-9)
    assert expected[:3].max() < expected[3:].min() - 3
    for after in states[ends[0] :]:
        steps = after.tuning.step_size
        assert torch.equal(steps[3:], steps[3:4].expand(C - 3))
        assert torch.equal(steps[:3] < steps[3], after.tuning.slowing[:3] < 0)


def test_a_step_that_was_for_a_far_place_is_found_anew_as_the_chain_arrives(
    density, generator
):
    """By the search alone it would grow by a fifth with each iteration, and take a
    hundred to get here.
    """
    kernel, z = HMC(None, step_size=1e-10), density.sample(5)
    state = kernel.init(density, z, 100, generator)
    for iteration in range(20):
        state = kernel.adapt(density, kernel.step(density, state), iteration, 100)
    assert (state.tuning.step_size > 0.05).all()


# windows ------------------------------------------------------------------------------


def test_windows_are_stans():
    assert window_ends(1000) == (75, (100, 150, 250, 450, 950))


def test_many_chains_have_two_early_windows_before_stans():
    assert windows(1000, 15) == (75, (100, 150, 250, 450, 950), ())
    assert windows(1000, 16) == (15, (25, 50, 100, 150, 250, 450, 950), (25, 50))
    assert windows(100, 64) == (15, (25, 50, 90), (25, 50))
    assert windows(99, 64) == (*window_ends(99), ())


def test_while_the_mass_matrix_is_provisional_trajectories_are_short(generator):
    """Without a limit they would have 300 steps here."""
    density = GaussianPotential(torch.ones(D, dtype=torch.float64), rotated=False)
    kernel = HMC(None, step_size=0.01, adapt_step_size=False)
    state = kernel.init(density, density.sample(C), 150, generator)
    steps = []
    for iteration in range(150):
        state = kernel.step(density, state)
        steps.append(int(state.statistics["n_steps"][0]))
        state = kernel.adapt(density, state, iteration, 150)
    assert max(steps[:100]) == 16
    assert max(steps[100:]) > 100


@pytest.mark.parametrize("num_warmup", [*range(0, 200, 7), 500, 1234])
def test_windows_lie_within_warmup_and_leave_time_to_adapt_the_step(num_warmup):
    begin, ends = window_ends(num_warmup)
    assert (len(ends) > 0) == (num_warmup >= 20)
    assert list(ends) == sorted(set(ends))
    if ends:
        assert 0 < begin < ends[0]
        assert ends[-1] == num_warmup - (
            50 if num_warmup >= 150 else int(0.1 * num_warmup)
        )


def test_only_a_chain_that_hardly_accepts_takes_shorter_steps(density, generator):
    draws, acceptances = numbers(200)
    acceptances[:, 0] = 0.05
    acceptances[:, 1] = np.resize([0.0, 1.0, 1.0], 200)  # varies, and accepts enough
    kernel = HMC(None, step_size=0.1)
    state = kernel.init(density, torch.tensor(draws[0]), 200, generator)
    states = fed(kernel, density, state, draws, acceptances, 200)
    first = window_ends(200)[1][0]
    for iteration in range(first, 200):
        step = states[iteration].tuning.step_size
        ratio = (step / step[2]).log()
        slowed = max(0.2 * (0.05 - 0.45) * (iteration + 2 - first), -20.0)
        assert float(ratio[0]) == pytest.approx(slowed, rel=1e-9)
        assert -0.1 <= float(ratio[1]) <= 0
        assert (ratio[2:] == 0).all()


@pytest.mark.parametrize("chains", [4, 64])
def test_a_chain_in_a_narrow_place_does_not_slow_the_others(chains, generator):
    """Its scale is a fiftieth of theirs, in all coordinates."""
    scale = torch.ones(chains, 1, dtype=torch.float64)
    scale[0] = 0.02
    precisions = 1 / scale.square()

    class Places(GaussianPotential):
        def energy_and_gradient(self, z, rows=None):
            return 0.5 * (precisions * z.square()).sum(-1), precisions * z

    density = Places(torch.ones(10, dtype=torch.float64), rotated=False)
    kernel = HMC(None)
    state = kernel.init(density, scale * density.sample(chains), 300, generator)
    for iteration in range(300):
        state = kernel.adapt(density, kernel.step(density, state), iteration, 300)
    steps = state.tuning.step_size
    assert steps[0] < 0.2 * steps[1]
    assert (steps[1:] > 0.9 * steps[1:].median()).all()
    rates = torch.stack(
        [
            (state := kernel.step(density, state)).statistics["acceptance_rate"]
            for _ in range(100)
        ]
    ).mean(0)
    assert rates[0] > 0.3
    assert 0.8 < rates[1:].mean() < 0.97


def test_what_isnt_to_be_adapted_stays(density, generator):
    draws, acceptances = numbers(60)
    for options in ({"adapt_step_size": False}, {"adapt_mass_matrix": False}):
        kernel = HMC(None, step_size=0.1, **options)
        state = kernel.init(density, torch.tensor(draws[0]), 60, generator)
        last = fed(kernel, density, state, draws, acceptances, 60)[-1].tuning
        assert bool((last.step_size == 0.1).all()) == ("adapt_step_size" in options)
        assert torch.equal(last.mass.variance, torch.ones(C, D).double()) == (
            "adapt_mass_matrix" in options
        )
        assert state.tuning.blind == ("adapt_mass_matrix" not in options)
