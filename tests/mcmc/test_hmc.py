"""HMC: one transition, adaptation, reproducibility, errors. Long runs are in tests/statistical."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from pyro_symmetric.mcmc import HMC, AdaptiveHMC, Density, sample
from pyro_symmetric.mcmc.starts import starting_points


def banana() -> None:
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x**2, 0.5))


def gaussian() -> None:
    pyro.sample("x", dist.Normal(torch.zeros(3), torch.tensor([0.5, 1.0, 2.0])).to_event(1))


# one transition -----------------------------------------------------------------------------------------------------


def test_rejected_chains_stay_and_statistics_describe_where_they_are(generator):
    density = Density(banana, dtype=torch.float64)
    kernel = HMC(banana, step_size=0.3, num_steps=4, jitter=0.0)
    state = kernel.init(density, starting_points(density, 200), 0, generator)
    after = kernel.step(density, state)
    moved = (after.z != state.z).any(-1)
    assert 0 < moved.sum() < 200
    energy, gradient = density.energy_and_gradient(after.z)
    assert torch.allclose(after.energy, energy)
    assert torch.allclose(after.gradient, gradient)
    assert torch.allclose(after.statistics["lp"], -energy)
    assert torch.allclose(after.statistics["energy"], energy + 0.5 * after.momentum.square().sum(-1))
    assert (after.statistics["n_steps"] == 4).all()


# whole runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("target", [0.65, 0.9])
def test_adaptation_reaches_its_target_acceptance(target):
    def wide() -> None:
        # In few dimensions acceptance falls off a cliff where steps become unstable; in many it is smooth.
        pyro.sample("x", dist.Normal(torch.zeros(100), torch.linspace(0.1, 1, 100)).to_event(1))

    # The mass matrix stays 1: so the step has all of warm-up.
    kernel = HMC(wide, target_accept=target, num_steps=3, adapt_mass=False)
    posterior = sample(kernel, num_chains=40, num_warmup=200, num_samples=25, progress=False)
    # 1,000 acceptances: standard error about 0.01; the step itself misses its target by 0.005. Five standard deviations
    # of both: false alarms 6e-7.
    assert posterior.statistics["acceptance_rate"].mean().item() == pytest.approx(target, abs=0.055)


@pytest.mark.stochastic
def test_the_mass_matrix_learns_the_scales(generator):
    density = Density(gaussian)
    kernel = HMC(gaussian)
    state = kernel.init(density, starting_points(density, 100), 150, generator)
    for iteration in range(150):
        state = kernel.adapt(density, kernel.step(density, state), iteration, 150)
    # 100 x 25 draws: relative error of a variance about 5 %, even if only a third of them counts; at five
    # of those: false alarms 6e-7 each.
    assert torch.allclose(state.tuning.mass.variance, torch.tensor([0.25, 1.0, 4.0]), rtol=0.25)


@pytest.mark.stochastic
def test_posterior_on_a_positive_site_matches_quadrature():
    y = torch.tensor([0.3, -1.2, 2.1, 0.4])

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    def density(s: float) -> float:
        return stats.gamma.pdf(s, 2) * stats.norm.pdf(y.numpy(), 0, s).prod()

    evidence = integrate.quad(density, 0, 50)[0]
    mean = integrate.quad(lambda s: s * density(s), 0, 50)[0] / evidence
    square = integrate.quad(lambda s: s * s * density(s), 0, 50)[0] / evidence
    draws = sample(HMC(model), y, num_chains=250, num_warmup=60, num_samples=40, progress=False)
    s = draws.get_samples()["scale"].double()
    # 10,000 draws, nearly independent; deviations about 0.5 and 2: five standard errors are 0.03 and 0.12:
    # false alarms 6e-7 each.
    assert s.mean().item() == pytest.approx(mean, abs=0.03)
    assert s.square().mean().item() == pytest.approx(square, abs=0.12)


@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC])
def test_one_chain_that_starts_far_out_is_not_left_behind(kernel, toy, drive):
    # A regression of 40 rows; one of 8 noises begins small and its slopes wrong, thousands of nats from the others.
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * torch.randn(40).double()

    def energy(z: Tensor) -> Tensor:
        slopes, log_noise = z[:, :3], z[:, 3]
        errors = (slopes @ x.T - y) / log_noise.exp()[:, None]
        return 0.5 * errors.square().sum(-1) + 40 * log_noise + 0.125 * slopes.square().sum(-1) + 0.5 * log_noise**2

    start = torch.cat([torch.tensor([[2.0, 2.0, -2.0, -2.0]]), 0.3 * torch.randn(7, 4)]).double()
    assert energy(start)[0] > energy(start)[1:].max() + 3000
    _, statistics, _ = drive(kernel(None), toy(energy), start, 100, 20)
    assert statistics["acceptance_rate"].mean(1).min() > 0.5
