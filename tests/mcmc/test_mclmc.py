"""Microcanonical samplers against known laws: what they leave invariant, what they
learn, and how biased they are.
"""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.mcmc import MCLMC
from pyro_symmetric.mcmc.kernels.kernel import Mass
from pyro_symmetric.mcmc.kernels.mclmc import (
    CORRELATION,
    GRADIENTS,
    LARGEST_RATIO,
    kick,
    normalise,
)
from pyro_symmetric.posterior.diagnostics import energy_error, sampler_failures

from .conftest import GaussianPotential, ToyPotential, drive


def test_moments_of_a_gaussian():
    torch.manual_seed(0)
    density = GaussianPotential(torch.logspace(-1, 1, 20, dtype=torch.float64))
    draws, statistics, _ = drive(MCLMC(None), density, 3 * density.sample(32), 300, 200)
    standard = density.standardise(draws)
    assert (standard.mean((0, 1)).abs() < 0.15).all()
    variances = standard.square().mean((0, 1))
    assert (variances > 0.75).all()  # of which 0.06 are the bias
    assert (variances < 1.19).all()
    assert not statistics["diverging"].any()


@pytest.mark.stochastic
@pytest.mark.parametrize("asked", [5e-4, 5e-5])
@pytest.mark.parametrize("dim", [5, 300])
def test_warm_up_finds_the_step_of_the_energy_error_that_was_asked(dim, asked):
    """The error of few dimensions has heavy tails: with 64 chains its mean has a
    deviation of 0.1 (20 seeds).
    """
    torch.manual_seed(0)
    density = GaussianPotential(torch.ones(dim, dtype=torch.float64))
    kernel = MCLMC(None, energy_error=asked)
    _, statistics, _ = drive(kernel, density, density.sample(64), 200, 100)
    assert 0.6 < statistics["energy_error"].mean() < 1.6


def test_the_bias_of_variances_is_as_documented_and_shrinks_with_what_is_asked():
    found = {}
    for asked in (5e-2, 5e-4, 5e-6):
        torch.manual_seed(0)
        density = GaussianPotential(torch.ones(100, dtype=torch.float64))
        draws, _, _ = drive(
            MCLMC(None, energy_error=asked), density, density.sample(32), 200, 120
        )
        found[asked] = abs(draws.square().mean().item() - 1)
    assert 0.01 < found[5e-4] < 0.03
    assert found[5e-2] > 2 * found[5e-4]
    assert found[5e-6] < 0.4 * found[5e-4]


def test_the_length_makes_draws_as_correlated_as_the_rule_says():
    torch.manual_seed(0)
    density = GaussianPotential(torch.ones(50, dtype=torch.float64))
    # small steps, whose rounding to whole ones doesn't matter
    kernel = MCLMC(None, energy_error=1e-5)
    draws, _, state = drive(kernel, density, density.sample(32), 400, 200)
    correlation = (draws[:, 1:] * draws[:, :-1]).mean() / draws.square().mean()
    assert correlation.item() == pytest.approx(CORRELATION, abs=0.08)
    # x'' = -x - x' / L: the correlation after L is e^(-1/2) (cos wL + sin wL / (2 w
    # L)), w^2 = 1 - 1 / (4 L^2)
    assert state.tuning.length.log_step.exp().item() == pytest.approx(1.33, rel=0.15)


def test_statistics_say_what_an_iteration_cost():
    torch.manual_seed(0)
    density = GaussianPotential(torch.ones(4, dtype=torch.float64))
    kernel = MCLMC(None, step_size=0.25)
    state = kernel.init(
        density,
        density.sample(3),
        0,
        torch.Generator(torch.empty(0).device).manual_seed(0),
    )
    density.batches.clear()
    state = kernel.step(density, state)
    assert state.statistics["n_steps"].tolist() == [len(density.batches)] * 3
    assert len(density.batches) % GRADIENTS == 0


@pytest.mark.parametrize(("step", "steps"), [(0.24, 4), (0.3, 3), (0.35, 3), (0.6, 2)])
def test_an_iteration_takes_the_whole_number_of_steps_nearest_to_its_length(
    step, steps, generator
):
    density = GaussianPotential(torch.ones(4, dtype=torch.float64))
    kernel = MCLMC(None, step_size=step)
    state = kernel.init(density, density.sample(3), 0, generator)
    found = kernel.step(density, state).statistics["n_steps"]
    assert found.tolist() == [GRADIENTS * steps] * 3


def test_a_chain_that_leaves_the_support_goes_back_and_turns_round(generator):
    def energy(z):
        return torch.where(z[:, 0] > 0.1, torch.inf, 0.5 * z.square().sum(-1))

    density = ToyPotential(energy)
    kernel = MCLMC(None, step_size=0.25)
    z = torch.zeros(40, 3, dtype=torch.float64)
    momentum = torch.ones_like(z)
    momentum[:20] = -1.0
    state = replace(kernel.init(density, z, 0, generator), momentum=momentum)
    after = kernel.step(density, state)
    back = after.statistics["diverging"]
    assert 0 < back.sum() < 40
    assert torch.equal(after.z[back], state.z[back])
    assert torch.equal(after.momentum[back], -state.momentum[back])
    assert after.statistics["energy_error"][back].isnan().all()
    assert torch.equal(after.statistics["lp"][back], -state.energy[back])


def test_a_model_of_one_coordinate_is_refused():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="coordinate"):
        ps.sample(MCLMC(model), num_samples=1, num_warmup=1, progress=False)


@pytest.mark.parametrize(
    ("ratio", "status"),
    [
        (0.5, "pass"),
        (1.9, "pass"),
        (3.0, "warn"),
        (20.0, "fail"),
        (float("nan"), "unknown"),
    ],
)
def test_energy_errors_are_judged_by_what_was_asked(ratio, status):
    ratios = torch.full((3, 8), ratio)
    ratios[0, 0] = torch.nan  # an iteration that was taken back
    assert energy_error(ratios).status == status
    told = [
        finding.name
        for finding in sampler_failures({"energy_error": ratios}, subsampled=False)
    ]
    assert told == (["energy error"] if status == "fail" else [])


def test_the_margin_of_an_energy_error_is_bounded_below(generator):
    """It is one minus the error, in units of what was asked; a trajectory that left the
    support has no error.
    """
    density = GaussianPotential(torch.ones(2))
    kernel = MCLMC(None)
    state = kernel.init(density, torch.zeros(4, 2), 10, generator)
    errors = torch.tensor([0.0, 1.0, torch.nan, 1e9])
    margins = kernel.acceptance(replace(state, statistics={"energy_error": errors}))
    assert margins[:2].tolist() == [1.0, 0.0]
    assert margins[2] == margins[3] == 1 - LARGEST_RATIO


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_kicks_along_the_gradient_change_the_energy_by_what_the_direction_allows(sign):
    """Of steps up to where ``cosh`` overflows in single precision: a rounded angle must
    not make the sphere of directions contract by more than it can.
    """
    torch.manual_seed(0)
    chains, dim, time = 2000, 5, 0.3
    mass = Mass(torch.rand(chains, dim) + 0.5)
    gradient = torch.randn(chains, dim) * torch.logspace(-3, 4, chains)[:, None]
    momentum = normalise(sign * gradient, mass)
    turned, change = kick(momentum, gradient, torch.full((chains, 1), time), mass)
    norm = (2 * mass.kinetic(gradient)).sqrt()
    largest = norm * time * dim**0.5  # (D - 1) delta
    assert turned.isfinite().all()
    assert ((change / largest).abs() < 1.01).all()


def test_a_kick_is_the_formula_of_the_flow():
    torch.manual_seed(0)
    chains, dim, time = 50, 4, 0.2
    mass = Mass(torch.ones(chains, dim, dtype=torch.float64))
    gradient = torch.randn(chains, dim, dtype=torch.float64)
    momentum = normalise(torch.randn(chains, dim, dtype=torch.float64), mass)
    times = torch.full((chains, 1), time, dtype=torch.float64)
    turned, change = kick(momentum, gradient, times, mass)
    norm = gradient.norm(dim=1, keepdim=True)
    e, u = -gradient / norm, momentum / dim**0.5
    c = (e * u).sum(1, keepdim=True)
    delta = time * dim**0.5 * norm / (dim - 1)
    stretch = delta.cosh() + c * delta.sinh()
    expected = (u + e * (delta.sinh() + c * (delta.cosh() - 1))) / stretch
    torch.testing.assert_close(turned, dim**0.5 * expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(change, (dim - 1) * stretch[:, 0].log())
