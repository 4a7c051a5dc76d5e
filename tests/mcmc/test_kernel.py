"""What all kernels share: how they print, which settings they refuse, and what an energy that is no number does."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, SGLD, ChEES, CyclicalSG, pSGLD
from pyro_symmetric.mcmc.integrator import energy_error, find_step_size
from pyro_symmetric.mcmc.mass import DiagonalMass
from pyro_symmetric.models import BayesianModel


def a_model() -> None: ...


@pytest.mark.parametrize("kernel", [HMC, NUTS, ChEES, SGLD, pSGLD, SGHMC, CyclicalSG])
def test_help_lists_every_setting_with_its_default_and_none_twice(kernel):
    lines = kernel.__doc__.splitlines()
    for field in fields(kernel):
        begin = [i for i, line in enumerate(lines) if line.startswith(f":param {field.name}:")]
        assert len(begin) == 1, field.name
        words = " ".join([lines[begin[0]], *itertools.takewhile(lambda l: l.startswith(" "), lines[begin[0] + 1 :])])
        assert field.name == "model" or words.endswith(f"Default: ``{field.default!r}``.")
        assert words.count("Default:") == (field.name != "model")


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (HMC(a_model), "HMC(a_model)"),
        (NUTS(a_model, mass="low-rank", rank=4), "NUTS(a_model, mass='low-rank', rank=4)"),
        (ChEES(BayesianModel(nn.Linear(2, 1))), "ChEES(BayesianModel)"),
        (SGLD(a_model, batch_size=32), "SGLD(a_model, batch_size=32)"),
        (pSGLD(a_model, 0.01, damping=1e-3), "pSGLD(a_model, step_size=0.01, damping=0.001)"),
        (SGHMC(a_model, noise_estimate=torch.ones(2)), "SGHMC(a_model, noise_estimate=[1.0, 1.0])"),
        (CyclicalSG(a_model, cycle_length=50), "CyclicalSG(a_model, cycle_length=50)"),
    ],
)
def test_a_kernel_prints_its_model_and_what_was_set(kernel, text):
    assert repr(kernel) == text


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (HMC, {"max_steps": 10.5}),
        (HMC, {"num_steps": 2.5}),
        (NUTS, {"max_treedepth": 2.5}),
        (NUTS, {"rank": 1.5}),
        (ChEES, {"max_steps": 0.5}),
        (SGLD, {"num_steps": 1.5}),
        (SGHMC, {"batch_size": 0}),
        (CyclicalSG, {"cycle_length": 99.5}),
    ],
)
def test_counts_must_be_whole(kind, options):
    ((name, value),) = options.items()
    with pytest.raises((TypeError, ValueError), match=f"{name} is {value}; it must be (a whole number|at least 1)"):
        kind(a_model, **options)


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kernel", [HMC(None, num_steps=3), NUTS(None), ChEES(None)], ids=lambda k: type(k).__name__)
def test_energies_that_are_no_numbers_are_never_moved_to(toy, kernel, lost):
    # Beyond 1 there is no number, not even minus infinity, which would look like a place of endless mass.
    potential = toy(lambda z: torch.where(z.abs() < 1, 0.5 * z.square(), lost).sum(-1))
    z = 2 * torch.rand(40, 1, dtype=torch.float64) - 1
    state = replace(kernel, step_size=0.7).init(potential, z, 0)
    for _ in range(5):
        state = kernel.step(potential, state)
        assert torch.isfinite(state.potential).all()
        assert (state.z.abs() < 1).all()
    assert (state.z != z).any(-1).float().mean() > 0.5
    assert torch.equal(energy_error(torch.tensor(lost), torch.tensor(1.0)), torch.tensor(torch.inf))


def test_the_first_step_size_stays_clear_of_where_there_are_no_numbers(toy):
    potential = toy(lambda z: torch.where(z.abs() < 1, 0.5 * z.square(), -torch.inf).sum(-1))
    z = torch.zeros(200, 1, dtype=torch.float64)
    energy, gradient = potential.value_and_grad(z)
    mass = DiagonalMass(torch.ones(1, dtype=torch.float64))
    step = find_step_size(potential, z, energy, gradient, torch.tensor(0.1).double(), mass, 0.8)
    assert step < 2  # a standard normal momentum stays within with a chance of 0.8 for a step of 0.78
