"""The leapfrog method and microcanonical dynamics: their own laws, a differential
equation, and first step sizes.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor

from pyro_symmetric.density.density import Uncompiled, fused
from pyro_symmetric.mcmc import HMC, NUTS, AdaptiveHMC
from pyro_symmetric.mcmc.kernels import loops
from pyro_symmetric.mcmc.kernels.hmc import hmc_step
from pyro_symmetric.mcmc.kernels.kernel import (
    DenseMass,
    Mass,
    PhasePoint,
    energy_error,
    leapfrog,
    normal,
)
from pyro_symmetric.mcmc.kernels.mclmc import (
    isokinetic_step,
    kick,
    langevin_step,
    normalise,
)

from .conftest import GaussianPotential, ToyPotential

MASSES = {
    "diagonal": Mass(torch.tensor([0.5, 2.0], dtype=torch.float64)),
    "dense": DenseMass.of(
        torch.tensor([0.5, 2.0], dtype=torch.float64),
        torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64),
    ),
}
each_mass = pytest.mark.parametrize("mass", MASSES.values(), ids=list(MASSES))


def start(density, chains: int, mass: Mass, isokinetic: bool) -> PhasePoint:
    z, noise = torch.randn(2, chains, 2, dtype=torch.float64)
    z, momentum = (
        (0.3 * z, normalise(mass.momentum(noise), mass)) if isokinetic else (z, noise)
    )
    # strong forces lose the way back in rounding
    return PhasePoint(z, momentum, *density.energy_and_gradient(z))


def _in_double(energy, z: Tensor) -> Tensor:
    return energy(z.double()).to(z.dtype)


def seconds(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def leapfrogs(
    density, at: PhasePoint, step: Tensor, mass: Mass, num_steps: int
) -> tuple[PhasePoint, Tensor]:
    """The end of a trajectory, and the energy's change."""
    before = at.total_energy(mass)
    for _ in range(num_steps):
        at = leapfrog(density.energy_and_gradient, at, step, mass)
    return at, at.total_energy(mass) - before


def isokinetics(
    density, at: PhasePoint, step: Tensor, mass: Mass, num_steps: int
) -> tuple[PhasePoint, Tensor]:
    change = torch.zeros_like(at.energy)
    for _ in range(num_steps):
        at, more = isokinetic_step(
            density.energy_and_gradient, at, step.expand(len(change), 1), mass
        )
        change = change + more
    return at, change


each_method = pytest.mark.parametrize("method", [leapfrogs, isokinetics])


@each_mass
@each_method
def test_trajectories_are_reversible(banana, mass, method):
    first = start(banana, 6, mass, method is isokinetics)
    end, change = method(banana, first, seconds(0.05), mass, 20)
    assert not torch.allclose(end.z, first.z, atol=0.1)
    back, other = method(
        banana, end._replace(momentum=-end.momentum), seconds(0.05), mass, 20
    )
    assert torch.allclose(back.z, first.z, atol=1e-9)
    assert torch.allclose(back.momentum, -first.momentum, atol=1e-9)
    assert torch.allclose(other, -change, atol=1e-9)
    if method is leapfrogs:  # which also goes back in time by a negative step
        assert torch.allclose(
            method(banana, end, seconds(-0.05), mass, 20)[0].z, first.z, atol=1e-9
        )


@each_mass
@pytest.mark.parametrize(
    ("method", "step", "local"), [(leapfrogs, 0.02, None), (isokinetics, 0.004, 8)]
)
def test_the_energy_error_of_a_trajectory_is_of_second_order(
    banana, mass, method, step, local
):
    first = start(banana, 40, mass, method is isokinetics)

    def error(halvings: int, time: float) -> float:
        size = step / 2**halvings
        return (
            method(banana, first, seconds(size), mass, max(1, round(time / size)))[1]
            .abs()
            .mean()
            .item()
        )

    errors = [error(k, 0.2) for k in range(3)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)
    if local:  # of a step: its square goes with the sixth power
        assert error(1, 0.0) / error(2, 0.0) == pytest.approx(local, rel=0.1)


def test_leapfrog_preserves_volume(banana):
    def flow(state: Tensor) -> Tensor:
        here = PhasePoint(
            state[None, :2],
            state[None, 2:],
            *banana.energy_and_gradient(state[None, :2]),
        )
        end = leapfrogs(banana, here, seconds(0.1), MASSES["dense"], 5)[0]
        return torch.cat([end.z[0], end.momentum[0]])

    state, h = torch.randn(4, dtype=torch.float64), 1e-5
    columns = [
        (flow(state + h * e) - flow(state - h * e)) / (2 * h)
        for e in torch.eye(4, dtype=torch.float64)
    ]
    assert torch.linalg.det(torch.stack(columns, -1)).item() == pytest.approx(
        1.0, abs=1e-6
    )


@pytest.mark.stochastic
@pytest.mark.parametrize("settings", [{"num_steps": 5}, {"trajectory_length": 1.0}])
def test_numbers_of_steps_are_uniform_up_to_twice_their_mean(settings, generator):
    """From 1 to 10, rounded up, as steps have a size of 0.2. The mean of 400 has a
    deviation of 0.14, of which six are exceeded in 1 of 10^8 runs; one of the ten
    numbers is missing in 1 of 10^17."""
    density = GaussianPotential(torch.ones(2, dtype=torch.float64))
    kernel = HMC(None, step_size=0.2, **settings)
    state = kernel.init(density, density.sample(1), 0, generator)
    numbers = []
    for _ in range(400):
        state = kernel.step(density, state)
        numbers.append(state.statistics["n_steps"].item())
    assert set(numbers) == set(range(1, 11))
    assert np.mean(numbers) == pytest.approx(5.5, abs=0.86)


@pytest.mark.parametrize(
    "engine", ["eager", pytest.param("layers", marks=pytest.mark.cpu)]
)
def test_statistics_of_an_iteration_are_those_of_the_point_that_is_kept(
    engine, generator
):
    """Of three steps of the plain leapfrog method with the same momenta. The energy is
    that of trajectories, momenta included."""
    density = GaussianPotential(torch.ones(3, dtype=torch.float64))
    density.engine = engine  # loops, if it is "layers"
    kernel = HMC(None, step_size=1.7)
    state = kernel.init(density, density.sample(50), 0, generator)
    momentum = normal(state.z, state.generator.clone_state())
    z, p = state.z, momentum
    for _ in range(3):
        p = p - 0.85 * z  # the gradient of a standard normal's energy
        z = z + 1.7 * p
        p = p - 0.85 * z
    before, after = (
        0.5 * (at.square() + speed.square()).sum(-1)
        for at, speed in ((state.z, momentum), (z, p))
    )
    found = hmc_step(density, state, 3)
    accepted = (found.z != state.z).any(-1)
    assert 10 < accepted.sum() < 45
    assert torch.allclose(found.z, torch.where(accepted[:, None], z, state.z))
    assert torch.allclose(
        found.statistics["energy"], torch.where(accepted, after, before)
    )
    assert torch.allclose(
        found.statistics["acceptance_rate"], (before - after).exp().clamp(max=1)
    )
    assert torch.allclose(found.statistics["lp"], -0.5 * found.z.square().sum(-1))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chains", [1, 3])
def test_loops_follow_the_trajectories_of_tensors(dtype, chains):
    """Of step sizes, and variances, of each chain; a step size of 0 stays. The start
    isn't changed."""
    gaussian = GaussianPotential(torch.linspace(0.5, 2, 5, dtype=torch.float64))
    density = ToyPotential(partial(_in_double, gaussian.energy))
    z, momentum = torch.randn(2, chains, 5, dtype=dtype)
    variance = torch.rand(chains, 5, dtype=dtype) + 0.5
    step_size = torch.tensor([0.1, 0.0, 0.3], dtype=dtype)[:chains]
    first = PhasePoint(z, momentum, *density.energy_and_gradient(z))
    before = [value.clone() for value in first]
    expected = first
    for _ in range(7):
        expected = leapfrog(
            density.energy_and_gradient, expected, step_size[:, None], Mass(variance)
        )
    found = loops.leapfrog_trajectory(density, first, step_size, Mass(variance), 7)
    rounding = 1e-12 if dtype == torch.float64 else 1e-4
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value, exact, rtol=rounding, atol=rounding)
    assert all(map(torch.equal, first, before))


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(torch.float32, 0.0), (torch.float64, 64.0)]
)
def test_what_rounding_may_hide_of_huge_energies_counts_as_none(dtype, hidden):
    # The last place of an energy of 2 ** 30 in single precision is 64.
    before = torch.tensor([2.0**30, 2.0**30, 1e4, 1e4], dtype=dtype)
    moved = torch.tensor([64.0, 2.0**20, 2.0**-8, -3.0], dtype=dtype)
    expected = torch.tensor([hidden, 2.0**20, 2.0**-8, -3.0], dtype=dtype)
    assert torch.allclose(energy_error(before + moved, before), expected, atol=1e-3)


# the first step size ------------------------------------------------------------------


def test_a_step_size_is_found_from_either_side(generator):
    density = GaussianPotential(
        torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False
    )
    z, kernel = density.sample(2000), HMC(None, target_accept_prob=0.8)
    for first in (1e-4, 50.0):
        state = kernel.init(density, z, 0, generator)
        found = kernel._find_step_size(
            density, state, torch.full_like(z[:, 0], first)
        ).tuning.step_size
        assert torch.equal(found, found[:1].expand(2000))
        # the smallest deviation is 0.5: steps are stable below 1
        assert ((found > 0.1) & (found < 2)).all()


@pytest.mark.parametrize("offset", [1.0, 1e6])
def test_a_step_size_is_found_though_another_engine_rounded_the_energies_in_a_state(
    generator, offset
):
    density = GaussianPotential(
        torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False
    )
    state = HMC(None).init(density, density.sample(50), 100, generator)
    state = replace(state, energy=state.energy - offset)
    found = (
        HMC(None)
        ._find_step_size(density, state, torch.ones(50, dtype=torch.float64))
        .tuning.step_size
    )
    assert (found > 0.01).all()


@pytest.mark.parametrize(("kind", "compiles"), [(AdaptiveHMC, True), (NUTS, False)])
def test_steps_are_tried_by_programs_that_iterations_have_anyway(
    kind, compiles, generator, monkeypatch
):
    """The first step size is found before any program is compiled."""
    densities = []

    def record(density, function, *inputs):
        densities.append(type(density))
        return fused(density, function, *inputs)

    monkeypatch.setattr("pyro_symmetric.mcmc.kernels.adaptation.fused", record)
    density = GaussianPotential(torch.ones(3, dtype=torch.float64), rotated=False)
    kernel = kind(None)
    state = kernel.init(density, density.sample(8), 100, generator)
    assert set(densities) == {Uncompiled}
    densities.clear()
    kernel.adapt(density, kernel.step(density, state), 0, 100)
    assert set(densities) == {GaussianPotential if compiles else Uncompiled}


def test_each_chain_finds_the_step_that_it_would_find_alone(generator):
    """Chains of the same Gaussian, each in its own unit of length: steps go with the
    unit.
    """
    units = torch.tensor([1e-6, 1.0, 1e4], dtype=torch.float64)[:, None]
    density = ToyPotential(lambda z: 0.5 * (z / units).square().sum(-1))
    state = HMC(None, target_accept_prob=0.8).init(
        density, units.expand(3, 2).clone(), 100, generator
    )
    ratio = state.tuning.step_size / units[:, 0]
    assert ((ratio > 0.1) & (ratio < 16)).all()  # steps of at least 2 are unstable


# microcanonical kicks -----------------------------------------------------------------

unit = partial(torch.ones, dtype=torch.float64)


@pytest.mark.parametrize("dim", [2, 3, 50])
def test_a_kick_solves_its_differential_equation(dim):
    mass, time = Mass(unit(dim)), 0.7
    momentum = normalise(torch.randn(1, dim, dtype=torch.float64), mass)
    gradient = 2 * torch.randn(1, dim, dtype=torch.float64)
    g = gradient[0].numpy()

    def flow(_: float, state: np.ndarray) -> np.ndarray:
        u = state[:-1]
        turning = -math.sqrt(dim) / (dim - 1) * (g - u * (u @ g))
        # the energy's change against a fixed gradient
        return np.append(turning, -math.sqrt(dim) * (u @ g))

    first = np.append(momentum[0].numpy() / math.sqrt(dim), 0.0)
    exact = integrate.solve_ivp(flow, (0, time), first, rtol=1e-11, atol=1e-12).y[:, -1]
    found, change = kick(momentum, gradient, seconds(time), mass)
    np.testing.assert_allclose(found[0].numpy() / math.sqrt(dim), exact[:-1], atol=1e-9)
    assert change.item() == pytest.approx(exact[-1], abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kicks_of_all_sizes_keep_the_length_and_stay_finite(dtype):
    mass = Mass(torch.ones(10, dtype=dtype))
    momentum = normalise(torch.randn(200, 10, dtype=dtype), mass)
    gradient = (
        torch.randn(200, 10, dtype=dtype)
        * torch.logspace(-12, 12, 200, dtype=dtype)[:, None]
    )
    found, change = kick(momentum, gradient, torch.ones(200, 1, dtype=dtype), mass)
    assert torch.allclose(
        found.norm(dim=-1), torch.full((200,), math.sqrt(10.0), dtype=dtype), rtol=1e-4
    )
    assert torch.isfinite(change).all()
    down = -torch.nn.functional.normalize(gradient[-1], dim=0) * math.sqrt(10.0)
    assert torch.allclose(found[-1], down, atol=1e-3)  # a large force wins
    still, nothing = kick(momentum, 0 * gradient, torch.ones(200, 1, dtype=dtype), mass)
    assert torch.allclose(still, momentum)
    assert nothing.abs().max() == 0


@pytest.mark.parametrize(
    ("dtype", "sign", "most"),
    [
        (torch.float32, 1, 30),
        (torch.float64, 1, 300),
        (torch.float32, -1, 4),
        (torch.float64, -1, 12),
    ],
)
def test_a_kick_by_a_strong_force_changes_the_energy_as_it_should(dtype, sign, most):
    """Directions along the force stay, and the change is ``(D - 1) log(cosh δ ± sinh δ)
    = ±(D - 1) δ``; those against a stronger force are lost in rounding."""
    dim, delta = 4, torch.linspace(0.1, most, 50, dtype=dtype)
    gradient, momentum = torch.zeros(2, 50, dim, dtype=dtype)
    gradient[:, 0] = -delta * (dim - 1) / math.sqrt(dim)
    momentum[:, 0] = sign * math.sqrt(dim)
    found, change = kick(
        momentum,
        gradient,
        torch.ones(50, 1, dtype=dtype),
        Mass(torch.ones(dim, dtype=dtype)),
    )
    torch.testing.assert_close(found, momentum, rtol=2e-3, atol=0)
    torch.testing.assert_close(change, sign * (dim - 1) * delta, rtol=2e-3, atol=0)


@each_mass
def test_a_microcanonical_trajectory_is_that_of_whitened_coordinates(mass):
    density = GaussianPotential(torch.tensor([0.3, 4.0], dtype=torch.float64))
    whitener = mass.whiten(torch.eye(2, dtype=torch.float64)).mT  # W
    plain = type(density)(unit(2))
    plain.energy = lambda x: density.energy(x @ torch.linalg.inv(whitener).mT)
    first = start(density, 5, mass, True)
    at, directions = first.z @ whitener.mT, mass.velocity(first.momentum) @ whitener.mT
    end, change = isokinetics(density, first, seconds(0.3), mass, 7)
    same = PhasePoint(at, directions, *plain.energy_and_gradient(at))
    other, other_change = isokinetics(plain, same, seconds(0.3), Mass(unit(2)), 7)
    assert torch.allclose(end.z @ whitener.mT, other.z, atol=1e-9)
    assert torch.allclose(change, other_change, atol=1e-9)


@pytest.mark.stochastic
@each_mass
def test_refreshed_directions_are_uniform_and_forget_at_the_rate_of_the_length(mass):
    momentum = normalise(
        mass.momentum(torch.randn(1, 2, dtype=torch.float64)), mass
    ).expand(100_000, 2)
    spread, noise = (
        seconds(math.sqrt(math.expm1(2 * 30.0))),
        torch.randn(100_000, 2, dtype=torch.float64),
    )
    still = PhasePoint(momentum, momentum, momentum[:, 0], momentum)
    found = langevin_step(
        lambda z: (z[:, 0], z), still, noise, spread, seconds(0.0), mass
    )[0].momentum
    assert torch.allclose(2 * mass.kinetic(found), torch.tensor(2.0).double())
    angles = torch.atan2(*mass.whiten(mass.velocity(found)).unbind(-1))
    moments = torch.stack(
        [angles.sin(), angles.cos(), (2 * angles).sin(), (2 * angles).cos()]
    ).mean(1)
    # fails in one of 400,000 runs
    assert moments.abs().max() < 5 * math.sqrt(0.5 / 100_000)
