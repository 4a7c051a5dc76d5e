"""Microcanonical dynamics against its differential equation, and the integrator's own laws."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor

from pyro_symmetric.mcmc.kernels.integrator import PhasePoint
from pyro_symmetric.mcmc.kernels.mass import Mass
from pyro_symmetric.mcmc.kernels.mclmc import directed, isokinetic, kicked, refreshed

COVARIANCE = torch.tensor([[0.5, 0.3], [0.3, 2.0]], dtype=torch.float64)
MASSES = {
    "diagonal": Mass.of(torch.tensor([0.5, 2.0], dtype=torch.float64)),
    "dense": Mass.of(COVARIANCE),
}
each_mass = pytest.mark.parametrize("mass", MASSES.values(), ids=list(MASSES))


def start(density, chains: int, mass: Mass, spread: float = 1.0) -> PhasePoint:
    z, noise = torch.randn(2, chains, 2, dtype=torch.float64)
    z = spread * z
    return PhasePoint(z, directed(mass.momentum(noise), mass), *density.energy_and_gradient(z))


def seconds(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def trajectory(density, at: PhasePoint, step: Tensor, mass: Mass, num_steps: int) -> tuple[PhasePoint, Tensor]:
    change = torch.zeros_like(at.energy)
    for _ in range(num_steps):
        at, more = isokinetic(density.energy_and_gradient, at, step.expand(len(change), 1), mass)
        change = change + more
    return at, change


def unit(dim: int) -> Mass:
    return Mass.of(torch.ones(dim, dtype=torch.float64))


@pytest.mark.parametrize("dim", [2, 3, 50])
def test_a_kick_solves_its_differential_equation(dim):
    torch.manual_seed(dim)
    mass, time = unit(dim), 0.7
    momentum = directed(torch.randn(1, dim, dtype=torch.float64), mass)
    gradient = 2 * torch.randn(1, dim, dtype=torch.float64)
    g = gradient[0].numpy()

    def flow(_: float, state: np.ndarray) -> np.ndarray:
        u = state[:-1]
        turning = -math.sqrt(dim) / (dim - 1) * (g - u * (u @ g))
        return np.append(turning, -math.sqrt(dim) * (u @ g))  # the energy's change against a fixed gradient

    first = np.append(momentum[0].numpy() / math.sqrt(dim), 0.0)
    exact = integrate.solve_ivp(flow, (0, time), first, rtol=1e-11, atol=1e-12).y[:, -1]
    found, change = kicked(momentum, gradient, seconds(time), mass)
    np.testing.assert_allclose(found[0].numpy() / math.sqrt(dim), exact[:-1], atol=1e-9)
    assert change.item() == pytest.approx(exact[-1], abs=1e-8)


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_a_kick_contracts_directions_as_it_says(dim):
    torch.manual_seed(dim)
    gradient = torch.randn(1, dim, dtype=torch.float64)
    u = torch.nn.functional.normalize(torch.randn(dim, dtype=torch.float64), dim=0)
    basis = torch.linalg.svd(u[None]).Vh[1:]  # of the sphere's tangent space at u

    def turned(step: Tensor) -> Tensor:
        momentum = math.sqrt(dim) * torch.nn.functional.normalize(u + step @ basis, dim=0)[None]
        return kicked(momentum, gradient, seconds(0.4), unit(dim))[0][0] / math.sqrt(dim)

    jacobian = torch.autograd.functional.jacobian(turned, torch.zeros(dim - 1, dtype=torch.float64))
    volume = 0.5 * torch.linalg.slogdet(jacobian.mT @ jacobian).logabsdet
    change = kicked(math.sqrt(dim) * u[None], gradient, seconds(0.4), unit(dim))[1]
    assert change.item() == pytest.approx(-volume.item(), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kicks_of_all_sizes_keep_the_length_and_stay_finite(dtype):
    torch.manual_seed(0)
    mass = Mass.of(torch.ones(10, dtype=dtype))
    momentum = directed(torch.randn(200, 10, dtype=dtype), mass)
    gradient = torch.randn(200, 10, dtype=dtype) * torch.logspace(-12, 12, 200, dtype=dtype)[:, None]
    found, change = kicked(momentum, gradient, torch.ones(200, 1, dtype=dtype), mass)
    assert torch.allclose(found.norm(dim=-1), torch.full((200,), math.sqrt(10.0), dtype=dtype), rtol=1e-4)
    assert torch.isfinite(change).all()
    down = -torch.nn.functional.normalize(gradient[-1], dim=0) * math.sqrt(10.0)
    assert torch.allclose(found[-1], down, atol=1e-3)  # a large force wins
    still, nothing = kicked(momentum, 0 * gradient, torch.ones(200, 1, dtype=dtype), mass)
    assert torch.allclose(still, momentum)
    assert nothing.abs().max() == 0


@pytest.mark.parametrize(
    ("dtype", "sign", "most"),
    [(torch.float32, 1, 30), (torch.float64, 1, 300), (torch.float32, -1, 4), (torch.float64, -1, 12)],
)
def test_a_kick_by_a_strong_force_changes_the_energy_as_it_should(dtype, sign, most):
    """Directions along the force stay, and the change is ``(D - 1) log(cosh δ ± sinh δ) = ±(D - 1) δ``; those against
    a stronger force are lost in rounding."""
    dim, delta = 4, torch.linspace(0.1, most, 50, dtype=dtype)
    gradient = torch.zeros(50, dim, dtype=dtype)
    gradient[:, 0] = -delta * (dim - 1) / math.sqrt(dim)
    momentum = torch.zeros_like(gradient)
    momentum[:, 0] = sign * math.sqrt(dim)
    found, change = kicked(momentum, gradient, torch.ones(50, 1, dtype=dtype), Mass.of(torch.ones(dim, dtype=dtype)))
    torch.testing.assert_close(found, momentum, rtol=2e-3, atol=0)
    torch.testing.assert_close(change, sign * (dim - 1) * delta, rtol=2e-3, atol=0)


@each_mass
def test_trajectories_are_reversible(banana, mass):
    torch.manual_seed(1)
    first = start(banana, 6, mass, spread=0.3)  # forces under which a way back isn't lost in rounding
    end, change = trajectory(banana, first, seconds(0.05), mass, 20)
    assert not torch.allclose(end.z, first.z, atol=0.1)
    back, other = trajectory(banana, end._replace(momentum=-end.momentum), seconds(0.05), mass, 20)
    assert torch.allclose(back.z, first.z, atol=1e-9)
    assert torch.allclose(back.momentum, -first.momentum, atol=1e-9)
    assert torch.allclose(other, -change, atol=1e-9)


@each_mass
def test_the_energy_error_of_a_trajectory_is_of_second_order(banana, mass):
    torch.manual_seed(2)
    first = start(banana, 40, mass, spread=0.3)

    def error(step: float, steps: int) -> float:
        return trajectory(banana, first, seconds(step), mass, steps)[1].abs().mean().item()

    errors = [error(0.004 / 2**k, 50 * 2**k) for k in range(3)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)
    one = [error(0.004 / 2**k, 1) for k in range(3)]  # of a step: its square goes with the sixth power
    assert one[1] / one[2] == pytest.approx(8, rel=0.1)


@each_mass
def test_a_trajectory_is_that_of_whitened_coordinates(gaussian, mass):
    torch.manual_seed(3)
    density = gaussian(torch.tensor([0.3, 4.0], dtype=torch.float64))
    whitener = mass.whiten(torch.eye(2, dtype=torch.float64)).mT  # W
    plain = type(density)(torch.ones(2, dtype=torch.float64))
    plain.energy = lambda x: density.energy(x @ torch.linalg.inv(whitener).mT)
    first = start(density, 5, mass)
    at = first.z @ whitener.mT
    directions = mass.velocity(first.momentum) @ whitener.mT
    end, change = trajectory(density, first, seconds(0.3), mass, 7)
    same = PhasePoint(at, directions, *plain.energy_and_gradient(at))
    other, other_change = trajectory(plain, same, seconds(0.3), unit(2), 7)
    assert torch.allclose(end.z @ whitener.mT, other.z, atol=1e-9)
    assert torch.allclose(change, other_change, atol=1e-9)


@each_mass
def test_refreshed_directions_are_uniform_and_forget_at_the_rate_of_the_length(mass):
    torch.manual_seed(4)
    momentum = directed(mass.momentum(torch.randn(1, 2, dtype=torch.float64)), mass).expand(100_000, 2)
    spread = seconds(math.sqrt(math.expm1(2 * 30.0)))
    found = refreshed(momentum, torch.randn(100_000, 2, dtype=torch.float64), spread, mass)
    assert torch.allclose(2 * mass.kinetic(found), torch.tensor(2.0).double())
    angles = torch.atan2(*mass.whiten(mass.velocity(found)).unbind(-1))
    moments = torch.stack([angles.sin(), angles.cos(), (2 * angles).sin(), (2 * angles).cos()]).mean(1)
    assert moments.abs().max() < 5 * math.sqrt(0.5 / 100_000)  # fails in one of 400,000 runs
