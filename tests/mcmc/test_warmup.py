"""What warm-up of the Hamiltonian kernels learns, against plain sums over draws and acceptances that are given."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pyro_symmetric.mcmc import HMC
from pyro_symmetric.mcmc.kernels.adaptation import DualAveraging, window_ends
from pyro_symmetric.mcmc.kernels.kernel import State

C, D = 40, 3


@pytest.fixture
def density(gaussian):
    return gaussian(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False)


def fed(kernel, density, state: State, draws: np.ndarray, acceptances: np.ndarray, num_warmup: int) -> list[State]:
    """The states that ``adapt`` makes of draws ``(S, C, D)`` and acceptances ``(S, C)`` that no step has made."""
    states = []
    for iteration, (z, acceptance) in enumerate(zip(draws, acceptances, strict=True)):
        z, acceptance = torch.tensor(z), torch.tensor(acceptance)
        energy, gradient = density.energy_and_gradient(z)
        state = replace(state, z=z, energy=energy, gradient=gradient, statistics={"acceptance_rate": acceptance})
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
    states, expected = fed(kernel, density, state, draws, acceptances, 15), DualAveraging.start(torch.tensor(0.1))
    for number, after in enumerate(states):
        expected = expected.update(torch.tensor(acceptances[number].mean()), 0.7)
        step = expected.log_average if number == 14 else expected.log_step
        assert after.tuning.step_size.item() == pytest.approx(step.exp().item())
    assert states[-1].tuning.step_size.dtype == torch.float64
    assert not states[-1].tuning.blind


@pytest.mark.parametrize(("stuck", "led"), [(0, False), (1, False), (2, True), (40, True)])
def test_while_the_mass_is_unknown_stuck_chains_lead_the_step_if_two_of_forty_are(density, generator, stuck, led):
    count = 30
    acceptances = np.random.default_rng(1).uniform(0.6, 1.0, size=(count, C))
    acceptances[:, :stuck] *= 0.02
    kernel = HMC(None, step_size=0.1, target_accept=0.8)
    start = kernel.init(density, torch.zeros(C, D, dtype=torch.float64), 1000, generator)
    for blind in (True, False):
        state = replace(start, tuning=replace(start.tuning, blind=blind))
        states = fed(kernel, density, state, np.zeros((count, C, D)), acceptances, 1000)
        expected, recent, leads = DualAveraging.start(torch.tensor(0.1).double()), np.ones(C), 0
        for number, after in enumerate(states):
            recent = 0.8 * recent + 0.2 * acceptances[number]  # of about the last five iterations
            second_worst = np.sort(recent)[1]  # a twentieth of the chains is below it at most
            leads += (lead := blind and second_worst < 0.1)
            pooled = second_worst if lead else acceptances[number].mean()
            expected = expected.update(torch.tensor(pooled), 0.8)
            assert after.tuning.step_size.item() == pytest.approx(expected.log_step.exp().item())
        assert (leads > 10) == (led and blind)
        assert leads > 10 or leads == 0


def test_a_new_mass_matrix_starts_the_search_of_the_step_anew(density, generator):
    draws, acceptances = numbers(200)
    end = window_ends(200)[1][0]
    kernel = HMC(None, step_size=0.1)
    states = fed(kernel, density, kernel.init(density, torch.tensor(draws[0]), 200, generator), draws, acceptances, 200)
    assert states[end - 2].tuning.averaging.count == end - 1
    assert states[end - 1].tuning.averaging.count == 0
    assert torch.equal(states[end - 1].tuning.averaging.log_step.exp(), states[end - 1].tuning.step_size.log().exp())


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
