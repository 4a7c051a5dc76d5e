"""Kernels against analytic targets: chains that start in them stay in them; a wrong sampler would be noticed."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_symmetric.mcmc import HMC, NUTS, AdaptiveHMC
from pyro_symmetric.mcmc.kernels.integrator import PhasePoint, leapfrog
from pyro_symmetric.mcmc.kernels.mass import Mass

COUNT = 20_000
KERNELS = {
    "HMC": HMC(None, step_size=0.75, num_steps=3),
    "NUTS": NUTS(None, step_size=0.75, max_treedepth=5),
    "AdaptiveHMC": AdaptiveHMC(None, step_size=0.8, trajectory_length=4.0),
}
SCALES = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)


def banana_draws() -> Tensor:
    x, noise = torch.randn(2, COUNT, dtype=torch.float64)
    return torch.stack([x, x.square() + 0.5 * noise], -1)


def banana_normals(z: Tensor) -> Tensor:
    x, y = z.unbind(-1)
    return torch.stack([x, (y - x.square()) / 0.5], -1)


def least_p(normals: Tensor) -> float:
    """Of Kolmogorov-Smirnov tests of each coordinate, and of the sum of their squares."""
    found = [stats.kstest(column.numpy(), "norm").pvalue for column in normals.T]
    squares = normals.square().sum(-1).numpy()
    return min(*found, stats.kstest(squares, "chi2", args=(normals.shape[1],)).pvalue)


@pytest.mark.stochastic
@pytest.mark.parametrize("target", ["gaussian", "banana"])
@pytest.mark.parametrize("name", KERNELS)
def test_chains_that_start_in_the_target_stay_in_it(name, target, gaussian, banana, generator):
    """Exact draws, three transitions with a coarse step, of which some are refused: were the accept step wrong (its
    sign, a missing energy term, a stale gradient), the law would move. At 1e-4 for each of up to 4 tests: false alarms
    4e-4. Means of changes within 5 standard errors: 3e-6."""
    kernel, density = KERNELS[name], gaussian(SCALES) if target == "gaussian" else banana
    start = density.sample(COUNT) if target == "gaussian" else banana_draws()
    kernel = kernel if target == "gaussian" else replace(kernel, step_size=0.35)  # too long for the banana's tails
    normals = density.standardise if target == "gaussian" else banana_normals
    state = kernel.init(density, start, 0, generator)
    rates = []
    for _ in range(3):
        state = kernel.step(density, state)
        rates.append(state.statistics["acceptance_rate"].mean().item())
    assert 0.3 < sum(rates) / 3 < 0.99
    assert least_p(normals(state.z)) > 1e-4
    before, after = normals(start), normals(state.z)
    for change in (after.square() - before.square()).T:
        assert abs(change.mean().item()) < 5 * change.std().item() / math.sqrt(COUNT)


@pytest.mark.stochastic
def test_accepting_with_the_wrong_sign_would_be_noticed(gaussian):
    density, mass, step = gaussian(SCALES), Mass.of(torch.ones(3).double()), torch.tensor(0.9).double()
    z = density.sample(COUNT)
    for _ in range(3):
        start = end = PhasePoint(z, torch.randn_like(z), *density.energy_and_gradient(z))
        for _ in range(3):
            end = leapfrog(density.energy_and_gradient, end, step, mass)
        error = end.total_energy(mass) - start.total_energy(mass)
        z = torch.where((torch.rand_like(error) < error.clamp(max=0).exp())[:, None], end.z, z)
    assert least_p(density.standardise(z)) < 1e-12


@pytest.mark.stochastic
@pytest.mark.parametrize("name", ["NUTS", "AdaptiveHMC"])
def test_draws_after_warm_up_match_the_moments_of_a_banana(name, banana, drive):
    # Curvature grows like 16 x². The step of the usual target (0.4 deviations) is too long beyond |x| = 2: chains enter
    # and leave there once in hundreds of iterations. At 0.95 the step is half of that, and 100 iterations of warm-up
    # reach the tails.
    kernel = replace(KERNELS[name], step_size=None, target_accept=0.95)
    draws, statistics, _ = drive(kernel, banana, torch.randn(200, 2, dtype=torch.float64), 100, 30)
    x, y = draws.unbind(-1)
    noise = (y - x.square()) / 0.5
    # E y = 1, cov(x, y) = 0; noise is normal and independent of x; y² has tails too heavy for a mean of 200 chains to
    # be normal, so it is cut off: E min(y², 9) by quadrature. Standard errors from the means of independent chains;
    # 5 of them: false alarms 1e-6 for each of 8.
    grid = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    mass = torch.outer((-0.5 * grid.square()).softmax(0), (-0.5 * grid.square()).softmax(0))
    cut_off = (mass * (grid[:, None].square() + 0.5 * grid).square().clamp(max=9)).sum().item()
    moments = ((x, 0.0), (x.square(), 1.0), (y, 1.0), (y.square().clamp(max=9), cut_off), (x * y.clamp(max=3), 0.0))
    whitened = ((noise, 0.0), (noise.square(), 1.0), (x * noise, 0.0))
    for values, truth in (*moments, *whitened):
        means = values.mean(1)
        assert abs(means.mean().item() - truth) < 5 * (means.std() / len(means) ** 0.5).item()
    assert 0.85 < statistics["acceptance_rate"].mean() < 0.99


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", KERNELS)
def test_energies_that_are_no_numbers_are_never_moved_to(toy, name, lost, generator):
    # Beyond 1 there is no number, not even minus infinity, which would look like a place of endless mass.
    kernel, density = KERNELS[name], toy(lambda z: torch.where(z.abs() < 1, 0.5 * z.square(), lost).sum(-1))
    z = 2 * torch.rand(40, 2, dtype=torch.float64) - 1
    state = kernel.init(density, z, 0, generator)
    for _ in range(8):
        state = kernel.step(density, state)
        assert torch.isfinite(state.energy).all()
        assert torch.isfinite(state.gradient).all()
        assert (state.z.abs() < 1).all()
    assert (state.z != z).any(-1).float().mean() > 0.5


@pytest.mark.parametrize("name", KERNELS)
def test_divergent_trajectories_are_counted_and_not_used(name, gaussian, generator):
    density = gaussian(torch.full((1,), 1e-6, dtype=torch.float64), rotated=False)
    kernel = KERNELS[name]
    state = kernel.init(density, torch.tensor([[0.0], [1e-3]], dtype=torch.float64), 0, generator)
    after = kernel.step(density, state)
    assert after.statistics["diverging"].all()
    assert torch.equal(after.z, state.z)
    assert (after.statistics["acceptance_rate"] == 0).all()
