"""Kernels by analytic targets: chains that start in a target stay in it, and those that start elsewhere find it."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_symmetric.mcmc import HMC, MCLMC, NUTS, AdaptiveHMC
from pyro_symmetric.mcmc.kernels.kernel import Mass, PhasePoint, leapfrog

from .conftest import GaussianPotential, ToyPotential, banana_energy, drive

COUNT = 20_000
KERNELS = {
    "HMC": HMC(None, step_size=0.75, num_steps=3),
    "NUTS": NUTS(None, step_size=0.75, max_treedepth=5),
    "AdaptiveHMC": AdaptiveHMC(None, step_size=0.8),
}


class Banana(ToyPotential):
    """x ~ N(0, 1), y ~ N(x², 0.5²)."""

    def __init__(self) -> None:
        super().__init__(banana_energy)

    def sample(self, count: int) -> Tensor:
        x, noise = torch.randn(2, count, dtype=torch.float64)
        return torch.stack([x, x.square() + 0.5 * noise], -1)

    def standardise(self, z: Tensor) -> Tensor:
        x, y = z.unbind(-1)
        return torch.stack([x, (y - x.square()) / 0.5], -1)


# Each has exact draws and a map to independent standard normals. A step size of its own: that of the Gaussian is too
# long for the banana's tails.
TARGETS = {
    "gaussian": (lambda: GaussianPotential(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)), {}),
    "banana": (Banana, {"step_size": 0.35}),
}


def least_p(normals: Tensor) -> float:
    """Of Kolmogorov-Smirnov tests of each coordinate, and of the sum of their squares."""
    found = [stats.kstest(column.numpy(), "norm").pvalue for column in normals.T]
    squares = normals.square().sum(-1).numpy()
    return min(*found, stats.kstest(squares, "chi2", args=(normals.shape[1],)).pvalue)


# chains that start in the target ------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_chains_that_start_in_the_target_stay_in_it(name, target, generator):
    """Exact draws, three transitions with a coarse step, of which some are refused: were the accept step wrong (its
    sign, a missing energy term, a stale gradient), the law would move. At 1e-4 for each of up to 4 tests: false alarms
    4e-4. Means of changes within 5 standard errors: 3e-6."""
    make, own = TARGETS[target]
    kernel, density = replace(KERNELS[name], **own), make()
    start = density.sample(COUNT)
    state = kernel.init(density, start, 0, generator)
    rates = []
    for _ in range(3):
        state = kernel.step(density, state)
        rates.append(state.statistics["acceptance_rate"].mean().item())
    assert 0.3 < sum(rates) / 3 < 0.99
    assert least_p(density.standardise(state.z)) > 1e-4
    before, after = density.standardise(start), density.standardise(state.z)
    for change in (after.square() - before.square()).T:
        assert abs(change.mean().item()) < 5 * change.std().item() / math.sqrt(COUNT)


@pytest.mark.stochastic
@pytest.mark.parametrize(("step", "least", "most"), [(0.02, 1e-5, 1.0), (0.6, 0.0, 1e-6)])
def test_mclmc_leaves_a_bent_law_invariant_in_the_limit_of_small_steps(step, least, most, generator):
    """False alarms 3e-5. At a large step the test sees the bias."""
    density, kernel = Banana(), MCLMC(None, step_size=step)
    state = kernel.init(density, density.sample(10_000), 0, generator)
    for _ in range(8):
        state = kernel.step(density, state)
    assert least <= least_p(density.standardise(state.z)) <= most


@pytest.mark.stochastic
def test_accepting_with_the_wrong_sign_would_be_noticed():
    density, mass, step = TARGETS["gaussian"][0](), Mass.of(torch.ones(3).double()), torch.tensor(0.9).double()
    z = density.sample(COUNT)
    for _ in range(3):
        start = end = PhasePoint(z, torch.randn_like(z), *density.energy_and_gradient(z))
        for _ in range(3):
            end = leapfrog(density.energy_and_gradient, end, step, mass)
        error = end.total_energy(mass) - start.total_energy(mass)
        z = torch.where((torch.rand_like(error) < error.clamp(max=0).exp())[:, None], end.z, z)
    assert least_p(density.standardise(z)) < 1e-12


def test_rejected_chains_stay_and_statistics_describe_where_they_are(generator):
    density, kernel = Banana(), HMC(None, step_size=0.6, num_steps=4)
    state = kernel.init(density, density.sample(200), 0, generator)
    after = kernel.step(density, state)
    assert 0 < (after.z != state.z).any(-1).sum() < 200
    energy, gradient = density.energy_and_gradient(after.z)
    assert torch.allclose(after.energy, energy)
    assert torch.allclose(after.gradient, gradient)
    assert torch.allclose(after.statistics["lp"], -energy)
    assert torch.allclose(after.statistics["energy"], energy + 0.5 * after.momentum.square().sum(-1))
    assert 1 <= after.statistics["n_steps"][0] <= 8


# chains that start elsewhere ----------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("name", ["NUTS", "AdaptiveHMC"])
def test_draws_after_warm_up_match_the_moments_of_a_banana(name):
    # Curvature grows like 16 x². The step of the usual target (0.4 deviations) is too long beyond |x| = 2: chains enter
    # and leave there once in hundreds of iterations. At 0.95 the step is half of that, and 100 iterations of warm-up
    # reach the tails.
    density, kernel = Banana(), replace(KERNELS[name], step_size=None, target_accept=0.95)
    draws, statistics, _ = drive(kernel, density, torch.randn(200, 2, dtype=torch.float64), 100, 30)
    (x, y), (_, noise) = draws.unbind(-1), density.standardise(draws).unbind(-1)
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


LONG = pytest.mark.slow
ILL_CONDITIONED = [
    (HMC(None, mass="dense"), 32, 300, 90),
    (AdaptiveHMC(None, mass="dense"), 32, 300, 90),
    pytest.param(HMC(None, trajectory_length=10.0, max_steps=1000), 64, 600, 200, marks=LONG),
    pytest.param(NUTS(None), 64, 250, 60, marks=LONG),  # of trees of depth 9
    pytest.param(NUTS(None, mass="dense"), 64, 250, 60, marks=LONG),
    pytest.param(AdaptiveHMC(None), 64, 600, 200, marks=LONG),
]


@pytest.mark.stochastic
@pytest.mark.parametrize(("kernel", "chains", "num_warmup", "num_samples"), ILL_CONDITIONED)
def test_a_gaussian_of_100_dimensions_and_condition_number_1e4(kernel, chains, num_warmup, num_samples):
    """Means and variances along all eigenvectors, rotated at random. Chains are independent, so the spread of their
    means is the standard error, whatever the autocorrelation: Student's t, by Bonferroni's correction 1e-4 in all."""
    density = GaussianPotential(torch.logspace(-2, 2, 100, dtype=torch.float64), seed=int(torch.randint(2**62, ())))
    z = 4 * torch.rand(chains, 100, dtype=torch.float64) - 2
    x = density.standardise(drive(kernel, density, z, num_warmup, num_samples)[0])
    means, truth = torch.cat([x, x.square()], -1).mean(1), torch.tensor([0.0, 1.0]).double().repeat_interleave(100)
    error = means.std(0) / chains**0.5
    assert error.max() < 0.1  # so that something can be seen
    p = 2 * stats.t.sf(((means.mean(0) - truth) / error).abs().numpy(), chains - 1)
    assert p.min() > 1e-4 / len(p)


@pytest.mark.stochastic
@pytest.mark.parametrize("target", [0.65, 0.9])
def test_adaptation_reaches_its_target_acceptance(target):
    # In few dimensions acceptance falls off a cliff where steps become unstable; in many it is smooth. The mass matrix
    # stays 1: so the step has all of warm-up.
    density = GaussianPotential(torch.linspace(0.1, 1, 100, dtype=torch.float64).square(), rotated=False)
    kernel = HMC(None, target_accept=target, num_steps=3, adapt_mass=False)
    _, statistics, _ = drive(kernel, density, torch.randn(40, 100, dtype=torch.float64), 200, 25)
    # 1,000 acceptances: standard error about 0.01; the step itself misses its target by 0.005. Five standard deviations
    # of both: false alarms 6e-7.
    assert statistics["acceptance_rate"].mean().item() == pytest.approx(target, abs=0.055)


@pytest.mark.stochastic
def test_the_mass_matrix_learns_the_scales():
    density = GaussianPotential(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False)
    state = drive(HMC(None), density, torch.randn(100, 3, dtype=torch.float64), 150, 1)[2]
    # 100 x 25 draws: relative error of a variance about 5 %, even if only a third of them counts; at five
    # of those: false alarms 6e-7 each.
    assert torch.allclose(state.tuning.mass.variance, density.eigenvalues, rtol=0.25)


@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC])
def test_one_chain_that_starts_far_out_is_not_left_behind(kernel):
    # A regression of 40 rows; one of 8 noises begins small and its slopes wrong, thousands of nats from the others.
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * torch.randn(40).double()

    def energy(z: Tensor) -> Tensor:
        slopes, log_noise = z[:, :3], z[:, 3]
        errors = (slopes @ x.T - y) / log_noise.exp()[:, None]
        return 0.5 * errors.square().sum(-1) + 40 * log_noise + 0.125 * slopes.square().sum(-1) + 0.5 * log_noise**2

    start = torch.cat([torch.tensor([[2.0, 2.0, -2.0, -2.0]]), 0.3 * torch.randn(7, 4)]).double()
    assert energy(start)[0] > energy(start)[1:].max() + 3000
    _, statistics, _ = drive(kernel(None), ToyPotential(energy), start, 100, 20)
    assert statistics["acceptance_rate"].mean(1).min() > 0.5


# where there is nothing to go to ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [*KERNELS, "MCLMC"])
def test_energies_that_are_no_numbers_are_never_moved_to(name, lost, generator):
    # Beyond 1 there is no number, not even minus infinity, which would look like a place of endless mass.
    kernel = {**KERNELS, "MCLMC": MCLMC(None, step_size=0.3)}[name]
    density = ToyPotential(lambda z: torch.where(z.abs() < 1, 0.5 * z.square(), lost).sum(-1))
    z = 2 * torch.rand(40, 2, dtype=torch.float64) - 1
    state = kernel.init(density, z, 0, generator)
    for _ in range(8):
        state = kernel.step(density, state)
        assert torch.isfinite(state.energy).all()
        assert torch.isfinite(state.gradient).all()
        assert (state.z.abs() < 1).all()
    assert (state.z != z).any(-1).float().mean() > 0.5


@pytest.mark.parametrize("name", KERNELS)
def test_divergent_trajectories_are_counted_and_not_used(name, generator):
    density = GaussianPotential(torch.full((1,), 1e-6, dtype=torch.float64), rotated=False)
    kernel = KERNELS[name]
    state = kernel.init(density, torch.tensor([[0.0], [1e-3]], dtype=torch.float64), 0, generator)
    after = kernel.step(density, state)
    assert after.statistics["diverging"].all()
    assert torch.equal(after.z, state.z)
    assert (after.statistics["acceptance_rate"] == 0).all()


def test_the_first_step_size_stays_clear_of_where_there_are_no_numbers(generator):
    density = ToyPotential(lambda z: torch.where(z.abs() < 1, 0.5 * z.square(), -torch.inf).sum(-1))
    step = HMC(None).init(density, torch.zeros(200, 1, dtype=torch.float64), 0, generator).tuning.step_size
    assert (step < 2).all()  # a standard normal momentum stays within with a chance of 0.8 for a step of 0.78
