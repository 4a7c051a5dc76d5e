"""Long runs against known posteriors: a correlated and badly scaled Gaussian, a hierarchy, a conjugate regression, and
the network of two hidden ReLU units whose posterior is known by quadrature."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc import HMC, SGHMC, sample
from pyro_symmetric.samples import Posterior


def effective(posterior: Posterior, site: str) -> float:
    """The smallest bulk effective sample size of a site."""
    return posterior.diagnostics()[site]["ess_bulk"]


def test_hmc_on_a_correlated_badly_scaled_gaussian():
    dim = 20
    torch.manual_seed(0)
    factor = torch.randn(dim, dim, dtype=torch.float64)
    scales = torch.logspace(-2, 2, dim, dtype=torch.float64)
    correlation = factor @ factor.T / dim + 0.3 * torch.eye(dim, dtype=torch.float64)
    covariance = correlation * scales * scales[:, None]
    mean = scales * torch.linspace(-1, 1, dim, dtype=torch.float64)
    cholesky = torch.linalg.cholesky(covariance)

    def model() -> None:
        pyro.sample("x", dist.MultivariateNormal(mean, scale_tril=cholesky))

    posterior = sample(HMC(model), num_chains=32, num_warmup=300, num_samples=150, seed=1, progress=False)
    assert posterior.diagnostics()["x"]["r_hat"] < 1.05
    assert effective(posterior, "x") > 1000
    x = posterior.get_samples()["x"]
    deviations = covariance.diagonal().sqrt()
    # At least 1000 effective draws: means within five standard errors 0.16, correlations likewise.
    assert ((x.mean(0) - mean) / deviations).abs().max() < 0.16
    found = ((x - x.mean(0)).T @ (x - x.mean(0)) / len(x)) / deviations / deviations[:, None]
    assert (found - covariance / deviations / deviations[:, None]).abs().max() < 0.25


def test_hmc_on_a_hierarchy_with_a_positive_site():
    # y_j ~ N(theta_j, s), theta_j ~ N(mu, tau), mu ~ N(0, 10). Given tau all else is Gaussian, so the posterior of
    # tau is known on a line up to a constant: p(tau | y) ~ p(tau) N(y; 0, (s^2 + tau^2) I + 100 1 1').
    y, s = torch.tensor([2.8, 0.8, -0.3, 0.7, -0.1, 0.1, 1.8, 1.2], dtype=torch.float64), 0.5

    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        tau = pyro.sample("tau", dist.HalfNormal(2.0))
        with pyro.plate("groups", len(y)):
            offset = pyro.sample("offset", dist.Normal(0.0, 1.0))  # not centred
            pyro.sample("y", dist.Normal(mu + tau * offset, s), obs=y)

    grid = torch.linspace(1e-4, 8, 4001, dtype=torch.float64)
    eye, ones = torch.eye(8, dtype=torch.float64), torch.ones(8, 8, dtype=torch.float64)
    covariance = (s**2 + grid**2)[:, None, None] * eye + 100 * ones
    log_density = dist.MultivariateNormal(torch.zeros(8).double(), covariance).log_prob(y) - grid**2 / 8
    density = (log_density - log_density.max()).exp()
    density = density / torch.trapezoid(density, grid)
    mean = torch.trapezoid(grid * density, grid).item()
    deviation = math.sqrt(torch.trapezoid((grid - mean) ** 2 * density, grid).item())

    kernel = HMC(model, target_accept=0.9)
    posterior = sample(
        kernel, y, num_chains=32, num_warmup=300, num_samples=150, seed=0, dtype=torch.float64, progress=False
    )
    assert posterior.diagnostics()["tau"]["r_hat"] < 1.05
    ess = effective(posterior, "tau")
    assert ess > 500
    tau = posterior.get_samples()["tau"]
    assert tau.mean().item() == pytest.approx(mean, abs=5 * deviation / math.sqrt(ess))
    cdf = torch.cumulative_trapezoid(density, grid)
    for level in (0.1, 0.5, 0.9):
        quantile = grid[1:][cdf >= level][0]
        share = (tau <= quantile).double().mean().item()
        assert share == pytest.approx(level, abs=5 * math.sqrt(level * (1 - level) / ess))


# the two-weight network ---------------------------------------------------------------------------------------------

X2 = torch.tensor([-1.5, -0.5, 0.5, 1.0, 1.5, 2.0])
Y2 = torch.tensor([0.6, 0.3, 0.6, 1.1, 1.4, 2.1])


def two_weights(x: Tensor, y: Tensor) -> None:
    """f(x) = relu(w1 x) + relu(w2 x), weights N(0, 1), noise 0.5: a posterior with two copies, swapped by w1 <-> w2."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((w[..., None, :] * x[:, None]).relu().sum(-1), 0.5), obs=y)


def quadrature() -> tuple[Tensor, Tensor, Tensor]:
    """Mean ``(2,)``, covariance ``(2, 2)`` and the mean of the sorted weights, on a grid of 801 x 801 points."""
    axis = torch.linspace(-5, 5, 801, dtype=torch.float64)
    w = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    outputs = (w[:, None, :] * X2[:, None].double()).relu().sum(-1)
    log_density = -0.5 * w.square().sum(-1) - 0.5 * ((outputs - Y2) / 0.5).square().sum(-1)
    share = (log_density - log_density.max()).exp()
    share = share / share.sum()
    mean = share @ w
    covariance = (w - mean).T @ (share[:, None] * (w - mean))
    return mean, covariance, share @ w.sort(-1).values


def test_hmc_on_the_two_weight_network_matches_quadrature():
    mean, covariance, sorted_mean = quadrature()
    posterior = sample(HMC(two_weights), X2, Y2, num_chains=64, num_warmup=300, num_samples=300, seed=0, progress=False)
    w = posterior.get_samples()["w"].double()
    crossings = (posterior.samples["w"].diff(dim=-1).sign().squeeze(-1).diff(dim=1) != 0).sum()
    assert crossings > 500  # chains go from one copy to the other, so that unsorted moments may be compared
    ess = effective(posterior, "w")
    assert ess > 1000
    error = 5 / math.sqrt(ess)
    deviations = covariance.diagonal().sqrt()
    assert ((w.mean(0) - mean) / deviations).abs().max() < error
    found = torch.cov(w.T)
    assert ((found - covariance) / deviations / deviations[:, None]).abs().max() < 2 * error
    assert (w.sort(-1).values.mean(0) - sorted_mean).abs().max() < error * deviations.max()


# stochastic gradients -----------------------------------------------------------------------------------------------


def test_sghmc_on_a_conjugate_regression_has_a_bias_that_shrinks_with_its_step():
    torch.manual_seed(0)
    n, d = 200, 4
    x = torch.randn(n, d, dtype=torch.float64) @ torch.tril(torch.ones(d, d, dtype=torch.float64))
    y = x @ torch.linspace(-1, 1, d, dtype=torch.float64) + 0.5 * torch.randn(n, dtype=torch.float64)
    precision = torch.eye(d, dtype=torch.float64) + x.T @ x / 0.25
    covariance = torch.linalg.inv(precision)
    mean = covariance @ x.T @ y / 0.25

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(d, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", n, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    excess = []
    for step in (0.008, 0.002):
        kernel = SGHMC(
            model, step_size=step, friction=20.0, batch_size=20, replacement=True, num_steps=round(0.08 / step)
        )
        posterior = sample(kernel, x, y, num_chains=400, num_warmup=60, num_samples=20, seed=0, progress=False)
        w = posterior.get_samples()["w"]
        residual = torch.cov(w.T) @ precision - torch.eye(d, dtype=torch.float64)
        excess.append(torch.diagonal(residual).mean().item())  # mean relative excess of the variance
        assert (((w.mean(0) - mean) / covariance.diagonal().sqrt()).abs() < 0.25).all()
    # About B / C = step V / (2 C). The noise depends on w, so its size is not pinned down here; what must hold is that
    # the variance is too large, and by a share that falls with the step.
    assert excess[0] > 0.1
    assert 0 < excess[1] < 0.5 * excess[0]
