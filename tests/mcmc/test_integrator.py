"""The leapfrog method, and the first guess of a step size."""

import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc import HMC
from pyro_symmetric.mcmc.kernels.integrator import (
    PhasePoint,
    energy_error,
    leapfrog,
)
from pyro_symmetric.mcmc.kernels.mass import Mass

UNIT = Mass.of(torch.ones(2, dtype=torch.float64))
COVARIANCE = torch.tensor([[0.5, 0.3], [0.3, 2.0]], dtype=torch.float64)
MASSES = [
    Mass.of(torch.tensor([0.5, 2.0], dtype=torch.float64)),
    Mass.of(COVARIANCE),
]


def start(density, chains: int) -> PhasePoint:
    z, momentum = torch.randn(2, chains, 2, dtype=torch.float64)
    return PhasePoint(z, momentum, *density.energy_and_gradient(z))


def followed(density, at: PhasePoint, step: Tensor, mass: Mass, num_steps: int) -> PhasePoint:
    for _ in range(num_steps):
        at = leapfrog(density.energy_and_gradient, at, step, mass)
    return at


@pytest.mark.parametrize("mass", MASSES)
def test_leapfrog_is_reversible(banana, mass: Mass):
    first = start(banana, 6)
    step = torch.tensor(0.05, dtype=torch.float64)
    end = followed(banana, first, step, mass, 20)
    assert not torch.allclose(end.z, first.z, atol=0.1)
    for sign in (-1, 1):  # turn the momentum round, or go back in time by a negative step
        back = followed(banana, end._replace(momentum=sign * end.momentum), -sign * step, mass, 20)
        assert torch.allclose(back.z, first.z, atol=1e-10)
        assert torch.allclose(back.momentum, sign * first.momentum, atol=1e-10)


@pytest.mark.parametrize("mass", MASSES)
def test_leapfrogs_energy_error_is_of_second_order(banana, mass: Mass):
    first = start(banana, 20)

    def error(step: float, steps: int) -> float:
        end = followed(banana, first, torch.tensor(step).double(), mass, steps)
        return (end.total_energy(mass) - first.total_energy(mass)).abs().mean().item()

    errors = [error(0.02 / 2**k, 10 * 2**k) for k in range(3)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_leapfrog_preserves_volume(banana):
    step, mass = torch.tensor(0.1, dtype=torch.float64), MASSES[1]

    def flow(state: Tensor) -> Tensor:
        here = state[None, :2]
        end = followed(
            banana,
            PhasePoint(here, state[None, 2:], *banana.energy_and_gradient(here)),
            step,
            mass,
            5,
        )
        return torch.cat([end.z[0], end.momentum[0]])

    state, h = torch.randn(4, dtype=torch.float64), 1e-5
    columns = [(flow(state + h * e) - flow(state - h * e)) / (2 * h) for e in torch.eye(4, dtype=torch.float64)]
    assert torch.linalg.det(torch.stack(columns, -1)).item() == pytest.approx(1.0, abs=1e-6)


def test_a_step_size_is_found_from_either_side(gaussian, generator):
    density = gaussian(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False)
    z, kernel, found = density.sample(2000), HMC(None, target_accept=0.8), []
    for first in (1e-4, 50.0):
        state = kernel.init(density, z, 0, generator)
        found.append(kernel._with_step(density, state, torch.full_like(z[:, 0], first)).tuning.step_size)
        assert torch.equal(found[-1], found[-1][:1].expand(2000))
        assert ((found[-1] > 0.1) & (found[-1] < 2)).all()  # the smallest deviation is 0.5: steps are stable below 1


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 0.0), (torch.float64, 64.0)])
def test_what_rounding_may_hide_of_huge_energies_counts_as_none(dtype, hidden):
    # The last place of an energy of 2 ** 30 in single precision is 64.
    before = torch.tensor([2.0**30, 2.0**30, 1e4, 1e4], dtype=dtype)
    moved = torch.tensor([64.0, 2.0**20, 2.0**-8, -3.0], dtype=dtype)
    expected = torch.tensor([hidden, 2.0**20, 2.0**-8, -3.0], dtype=dtype)
    assert torch.allclose(energy_error(before + moved, before), expected, atol=1e-3)


def test_each_chain_finds_the_step_that_it_would_find_alone(generator):
    """Chains of the same Gaussian, each in its own unit of length: steps go with the unit."""

    class Units:
        units = torch.tensor([1e-6, 1.0, 1e4], dtype=torch.float64)[:, None]

        def energy_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return 0.5 * (z / self.units).square().sum(-1), z / self.units**2

    density = Units()
    z = density.units * torch.ones(3, 2, dtype=torch.float64)
    state = HMC(None, target_accept=0.8).init(density, z, 100, generator)
    ratio = state.tuning.step_size / density.units[:, 0]
    assert ((ratio > 0.1) & (ratio < 16)).all()  # steps of at least 2 are unstable
