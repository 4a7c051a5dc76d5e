"""The leapfrog method, and the first guess of a step size."""

import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc.integrator import find_step_size, leapfrog
from pyro_symmetric.mcmc.mass import DenseMass, DiagonalMass, Mass

UNIT = DiagonalMass(torch.ones(2, dtype=torch.float64))
COVARIANCE = torch.tensor([[0.5, 0.3], [0.3, 2.0]], dtype=torch.float64)
MASSES = [
    DiagonalMass(torch.tensor([0.5, 2.0], dtype=torch.float64)),
    DenseMass(COVARIANCE, torch.linalg.cholesky(COVARIANCE)),
]


def start(chains: int) -> tuple[Tensor, Tensor]:
    return torch.randn(chains, 2, dtype=torch.float64), torch.randn(chains, 2, dtype=torch.float64)


@pytest.mark.parametrize("mass", MASSES)
def test_leapfrog_is_reversible(banana, mass: Mass):
    z, p = start(6)
    step = torch.tensor(0.05, dtype=torch.float64)
    z1, p1, _, gradient1 = leapfrog(banana, z, p, banana.value_and_grad(z)[1], step, mass, 20)
    assert not torch.allclose(z1, z, atol=0.1)
    for sign in (-1, 1):  # turn the momentum round, or go back in time by a negative step
        z2, p2, _, _ = leapfrog(banana, z1, sign * p1, gradient1, -sign * step, mass, 20)
        assert torch.allclose(z2, z, atol=1e-10)
        assert torch.allclose(p2, sign * p, atol=1e-10)


@pytest.mark.parametrize("mass", MASSES)
def test_leapfrogs_energy_error_is_of_second_order(banana, mass: Mass):
    z, p = start(20)
    energy, gradient = banana.value_and_grad(z)

    def error(step: float, steps: int) -> float:
        _, p1, energy1, _ = leapfrog(banana, z, p, gradient, torch.tensor(step).double(), mass, steps)
        return (energy1 + mass.kinetic(p1) - energy - mass.kinetic(p)).abs().mean().item()

    errors = [error(0.02 / 2**k, 10 * 2**k) for k in range(3)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_leapfrog_preserves_volume(banana):
    step, mass = torch.tensor(0.1, dtype=torch.float64), MASSES[1]

    def flow(state: Tensor) -> Tensor:
        here = state[None, :2]
        z1, p1, _, _ = leapfrog(banana, here, state[None, 2:], banana.value_and_grad(here)[1], step, mass, 5)
        return torch.cat([z1[0], p1[0]])

    state, h = torch.randn(4, dtype=torch.float64), 1e-5
    columns = [(flow(state + h * e) - flow(state - h * e)) / (2 * h) for e in torch.eye(4, dtype=torch.float64)]
    assert torch.linalg.det(torch.stack(columns, -1)).item() == pytest.approx(1.0, abs=1e-6)


def test_every_chain_may_have_its_own_direction(banana):
    z, p = start(2)
    gradient = banana.value_and_grad(z)[1]
    steps = torch.tensor([[0.1], [-0.1]], dtype=torch.float64)
    both = leapfrog(banana, z, p, gradient, steps, UNIT, 3)
    for chain in range(2):
        one = slice(chain, chain + 1)
        alone = leapfrog(banana, z[one], p[one], gradient[one], steps[chain, 0], UNIT, 3)
        assert all(torch.allclose(a[one], b) for a, b in zip(both, alone, strict=True))


def test_step_size_is_found_on_either_side(gaussian):
    potential = gaussian(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False)
    z = potential.sample(2000)
    energy, gradient = potential.value_and_grad(z)
    mass = DiagonalMass(torch.ones(3, dtype=torch.float64))
    found = [
        find_step_size(potential, z, energy, gradient, torch.tensor(first).double(), mass, 0.8).item()
        for first in (1e-4, 50.0)
    ]
    assert all(0.1 < step < 2 for step in found)  # the smallest deviation is 0.5: steps are stable below 1
