"""Long runs against known posteriors: a correlated and badly scaled Gaussian, a hierarchy, and the network of two
hidden ReLU units whose posterior is known by quadrature."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_symmetric.mcmc import HMC, NUTS, AdaptiveHMC, sample


def assert_expectations(values: Tensor, truth: Tensor | float, alarm: float) -> None:
    """Fail with probability ``alarm`` if draws ``(chains, draws, K)`` have the expectations ``(K,)``.

    Chains are independent, so the spread of their means is the standard error, whatever the autocorrelation: K values
    of Student's t with one degree of freedom less than chains, each at ``alarm / K`` by Bonferroni's correction.
    """
    means = values.mean(1)
    t = (means.mean(0) - torch.as_tensor(truth)) / (means.std(0) / len(means) ** 0.5)
    p = 2 * stats.t.sf(t.abs().numpy(), len(means) - 1)
    assert p.min() > alarm / len(p), (p.min(), int(p.argmin()), t)


@pytest.mark.stochastic
@pytest.mark.slow  # by default: test_the_mass_matrix_learns_the_scales, and the Gaussian of test_kernels.py
def test_hmc_finds_scales_eight_orders_of_variance_apart():
    dim = 20
    scales = torch.logspace(-2, 2, dim, dtype=torch.float64)
    factor = torch.randn(dim, dim, dtype=torch.float64)
    correlation = factor @ factor.T / dim + 0.3 * torch.eye(dim, dtype=torch.float64)
    cholesky = scales[:, None] * torch.linalg.cholesky(correlation)
    mean = scales * torch.linspace(-1, 1, dim, dtype=torch.float64)

    def model() -> None:
        pyro.sample("x", dist.MultivariateNormal(mean, scale_tril=cholesky))

    posterior = sample(HMC(model), num_chains=64, num_warmup=400, num_samples=50, progress=False)
    x = torch.linalg.solve_triangular(cholesky, (posterior.samples["x"] - mean)[..., None], upper=False)[..., 0]
    assert_expectations(torch.cat([x, x.square()], -1), torch.cat([torch.zeros(dim), torch.ones(dim)]), alarm=1e-4)


@pytest.mark.stochastic
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
    mass = log_density.softmax(0)

    def functions(tau: Tensor) -> Tensor:
        below = (tau[..., None] < torch.tensor([0.701, 1.001, 1.501])).double()  # between points of the grid
        return torch.cat([torch.stack([tau, tau.log(), tau.square()], -1), below], -1)

    posterior = sample(
        HMC(model, target_accept=0.9),
        y,
        initial={"mu": torch.tensor(1.0), "tau": torch.tensor(1.0), "offset": torch.zeros(8)},  # far out some get stuck
        num_chains=128,
        num_warmup=100,
        num_samples=60,
        dtype=torch.float64,
        progress=False,
    )
    assert_expectations(functions(posterior.samples["tau"]), mass @ functions(grid), alarm=1e-4)


# the two-weight network ---------------------------------------------------------------------------------------------

X2 = torch.tensor([-1.5, -0.5, 0.5, 1.0, 1.5, 2.0])
Y2 = torch.tensor([0.6, 0.3, 0.6, 1.1, 1.4, 2.1])


def two_weights(x: Tensor, y: Tensor) -> None:
    """f(x) = relu(w1 x) + relu(w2 x), weights N(0, 1), noise 0.5: a posterior with two copies, swapped by w1 <-> w2."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((w[..., None, :] * x[:, None]).relu().sum(-1), 0.5), obs=y)


def quadrature() -> tuple[Tensor, Tensor]:
    """Points of a grid of 801 x 801, and the posterior's mass at each."""
    axis = torch.linspace(-5, 5, 801, dtype=torch.float64)
    w = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    outputs = (w[:, None, :] * X2[:, None].double()).relu().sum(-1)
    log_density = -0.5 * w.square().sum(-1) - 0.5 * ((outputs - Y2) / 0.5).square().sum(-1)
    return w, log_density.softmax(0)


def functions(w: Tensor) -> Tensor:
    """Of weights ``(..., 2)``: means, second moments, the larger weight, and shares below thresholds between points."""
    first, second = w.unbind(-1)
    below = (w[..., None] < torch.tensor([-1.00625, 0.00625, 0.50625, 1.00625])).double().flatten(-2)
    moments = torch.stack([first, second, first**2, second**2, first * second, w.amax(-1)], -1)
    return torch.cat([moments, below], -1)


@pytest.mark.stochastic
# NUTS is compared in test_kernels.py, too.
@pytest.mark.parametrize("form", [HMC, pytest.param(NUTS, marks=pytest.mark.slow), AdaptiveHMC])
def test_the_two_weight_network_is_sampled_as_quadrature_has_it(form):
    w, mass = quadrature()
    posterior = sample(form(two_weights), X2, Y2, num_chains=256, num_warmup=80, num_samples=60, progress=False)
    draws = posterior.samples["w"].double()
    crossings = (draws.diff(dim=-1).sign().squeeze(-1).diff(dim=1) != 0).sum()
    assert crossings > 500  # chains go from one copy to the other, so that unsorted moments may be compared
    assert_expectations(functions(draws), mass @ functions(w), alarm=1e-4)
