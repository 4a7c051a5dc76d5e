"""Kernels by targets: chains that start in a target stay in it, and those that start
elsewhere find it.

A target is an energy, or a model, whose exact draws or whose expectations are known.
For simulation-based calibration see ``test_calibration``.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from pyro_symmetric.mcmc import HMC, MCLMC, NUTS, AdaptiveHMC, Density, sample
from pyro_symmetric.mcmc.kernels import hmc
from pyro_symmetric.models import BayesianModel, GaussianLikelihood

from .conftest import Banana, GaussianPotential, ToyPotential, drive

KERNELS = {
    "HMC": HMC(None, step_size=0.75, num_steps=3),
    "NUTS": NUTS(None, step_size=0.75, max_tree_depth=5),
    "AdaptiveHMC": AdaptiveHMC(None, step_size=0.8),
}

# chains that start in the target ------------------------------------------------------


def scores_of_groups() -> None:
    """Scores of three groups; the spread of groups is positive, the shares of noise are
    a simplex.
    """
    spread = pyro.sample("spread", dist.Gamma(torch.tensor(2.0).double(), 2.0))
    shares = pyro.sample("shares", dist.Dirichlet(torch.full((2,), 3.0).double()))
    centre = pyro.sample("centre", dist.Normal(torch.tensor(0.0).double(), 1.0))
    offsets = pyro.sample(
        "offsets", dist.Normal(torch.zeros(3).double(), 1.0).to_event(1)
    )
    means, scale = centre + spread * offsets, 0.5 + shares[..., :1]
    pyro.sample("scores", dist.Normal(means[..., None].expand(3, 4), scale).to_event(2))


class Hierarchy(Density):
    """The joint law of a hierarchy's parameters and data, whose exact draws are
    ancestral: what Geweke (2004) compares with, through the library's own potential and
    transforms."""

    def __init__(self) -> None:
        super().__init__(scores_of_groups, dtype=torch.float64)

    def sample(self, count: int) -> Tensor:
        spread = dist.Gamma(torch.tensor(2.0).double(), 2.0).sample((count,))
        shares = dist.Dirichlet(torch.full((2,), 3.0).double()).sample((count,))
        centre, offsets, noise = (
            torch.randn(count, *shape).double() for shape in ((), (3,), (3, 4))
        )
        scores = (centre[:, None] + spread[:, None] * offsets)[..., None] + noise * (
            0.5 + shares[:, :1, None]
        )
        weights = {
            "spread": spread,
            "shares": shares,
            "centre": centre,
            "offsets": offsets,
            "scores": scores,
        }
        return self.unconstrain(weights)

    def standardise(self, z: Tensor) -> Tensor:
        spread, shares, centre, offsets, scores = self.layout.constrain(z).values()
        means = centre[:, None] + spread[:, None] * offsets
        noise = (scores - means[..., None]) / (0.5 + shares[:, :1, None])
        uniform = (
            stats.gamma.cdf(spread, 2, scale=0.5),
            stats.beta.cdf(shares[:, 0], 3, 3),
        )
        first = [torch.as_tensor(stats.norm.ppf(u))[:, None] for u in uniform]
        return torch.cat([*first, centre[:, None], offsets, noise.flatten(1)], 1)


# Each has exact draws and a map to independent standard normals, and a step size of its
# own: that of the Gaussian is too long for the banana's tails and for the hierarchy.
TARGETS = {
    "gaussian": (
        lambda: GaussianPotential(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)),
        20_000,
        {},
    ),
    "banana": (Banana, 20_000, {"step_size": 0.35}),
    "hierarchy": (Hierarchy, 4_000, {"step_size": 0.3}),
}


def p_value(normals: Tensor) -> float:
    """Of Kolmogorov-Smirnov tests of each coordinate, and of the sum of their squares,
    by Bonferroni's correction.
    """
    found = [stats.kstest(column.numpy(), "norm").pvalue for column in normals.T]
    squares = normals.square().sum(-1).numpy()
    found.append(stats.kstest(squares, "chi2", args=(normals.shape[1],)).pvalue)
    return len(found) * min(found)


def moved(
    kernel: Any, density: Any, start: Tensor, steps: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    """The places of chains after so many transitions without warm-up, and their mean
    acceptance.
    """
    state, rates = kernel.init(density, start, 0, generator), []
    for _ in range(steps):
        state = kernel.step(density, state)
        rates.append(
            state.statistics.get("acceptance_rate", state.energy * 0).mean().item()
        )
    return state.z, sum(rates) / steps


@pytest.mark.stochastic
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_chains_that_start_in_the_target_stay_in_it(name, target, generator):
    """Exact draws, three transitions with a coarse step, of which some are refused:
    were the accept step wrong (its sign, a missing energy term, a stale gradient) or a
    Jacobian, the law would move. False alarms 4e-4, and of means of changes within 5
    standard errors 6e-7 for each coordinate."""
    make, count, own = TARGETS[target]
    density = make()
    start = density.sample(count)
    end, acceptance = moved(replace(KERNELS[name], **own), density, start, 3, generator)
    assert 0.3 < acceptance < 0.99
    before, after = density.standardise(start), density.standardise(end)
    assert p_value(after) > 4e-4
    for change in (after.square() - before.square()).T:
        assert abs(change.mean().item()) < 5 * change.std().item() / math.sqrt(count)


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("step", "least", "most"), [(0.02, 3e-5, 3.0), (0.6, 0.0, 3e-6)]
)
def test_mclmc_leaves_a_bent_law_invariant_in_the_limit_of_small_steps(
    step, least, most, generator
):
    """False alarms 3e-5. At a large step the test sees the bias."""
    density = Banana()
    end, _ = moved(
        MCLMC(None, step_size=step), density, density.sample(10_000), 8, generator
    )
    assert least <= p_value(density.standardise(end)) <= most


@pytest.mark.stochastic
def test_accepting_with_the_wrong_sign_would_be_noticed(monkeypatch, generator):
    monkeypatch.setattr(hmc, "energy_error", lambda after, before: before - after)
    density = TARGETS["gaussian"][0]()
    end, _ = moved(
        replace(KERNELS["HMC"], step_size=0.9),
        density,
        density.sample(20_000),
        3,
        generator,
    )
    assert p_value(density.standardise(end)) < 4e-12


def test_rejected_chains_stay_and_statistics_describe_where_they_are(generator):
    density, kernel = Banana(), HMC(None, step_size=0.6, num_steps=4)
    state = kernel.init(density, density.sample(200), 0, generator)
    after = kernel.step(density, state)
    assert 0 < (after.z != state.z).any(-1).sum() < 200
    energy, gradient = density.energy_and_gradient(after.z)
    assert torch.allclose(after.energy, energy)
    assert torch.allclose(after.gradient, gradient)
    assert torch.allclose(after.statistics["lp"], -energy)
    assert torch.allclose(
        after.statistics["energy"], energy + 0.5 * after.momentum.square().sum(-1)
    )
    assert 1 <= after.statistics["n_steps"][0] <= 8


# chains that start elsewhere ----------------------------------------------------------


def assert_expectations(values: Tensor, truth: Tensor, alarm: float) -> Tensor:
    """Fail with probability ``alarm`` if draws ``(chains, draws, K)`` have the
    expectations ``(K,)``; standard errors.

    Chains are independent, so the spread of their means is the standard error, whatever
    the autocorrelation: K values of Student's t with one degree of freedom less than
    chains, each at ``alarm / K`` by Bonferroni's correction.
    """
    means = values.mean(1)
    error = means.std(0) / len(means) ** 0.5
    t = (means.mean(0) - truth) / error
    p = 2 * stats.t.sf(t.abs().numpy(), len(means) - 1)
    assert p.min() > alarm / len(p), (p.min(), int(p.argmin()), t)
    return error


@pytest.mark.stochastic
@pytest.mark.parametrize("name", ["NUTS", "AdaptiveHMC"])
def test_draws_after_warm_up_match_the_moments_of_a_banana(name):
    # Curvature grows like 16 x². The step of the usual target (0.4 deviations) is too
    # long beyond |x| = 2: chains enter and leave there once in hundreds of iterations.
    # At 0.95 the step is half of that, and 100 iterations of warm-up reach the tails.
    density, kernel = (
        Banana(),
        replace(KERNELS[name], step_size=None, target_accept_prob=0.95),
    )
    draws, statistics, _ = drive(
        kernel, density, torch.randn(200, 2, dtype=torch.float64), 100, 30
    )
    (x, y), (_, noise) = draws.unbind(-1), density.standardise(draws).unbind(-1)
    # E y = 1, cov(x, y) = 0; noise is normal and independent of x; y² has tails too
    # heavy for a mean of 200 chains to be normal, so it is cut off: E min(y², 9) by
    # quadrature.
    grid = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    mass = torch.outer(
        (-0.5 * grid.square()).softmax(0), (-0.5 * grid.square()).softmax(0)
    )
    cut_off = (
        (mass * (grid[:, None].square() + 0.5 * grid).square().clamp(max=9))
        .sum()
        .item()
    )
    values = [
        x,
        x.square(),
        y,
        y.square().clamp(max=9),
        x * y.clamp(max=3),
        noise,
        noise.square(),
        x * noise,
    ]
    truth = torch.tensor([0.0, 1.0, 1.0, cut_off, 0.0, 0.0, 1.0, 0.0])
    assert_expectations(torch.stack(values, -1), truth, alarm=8 * 6e-7)
    assert 0.85 < statistics["acceptance_rate"].mean() < 0.99


LONG = pytest.mark.slow
ILL_CONDITIONED = [
    (HMC(None, full_mass=True), 32, 300, 90),
    (AdaptiveHMC(None, full_mass=True), 32, 300, 90),
    pytest.param(
        HMC(None, trajectory_length=10.0, max_steps=1000), 64, 600, 200, marks=LONG
    ),
    pytest.param(NUTS(None), 64, 250, 60, marks=LONG),  # of trees of depth 9
    pytest.param(NUTS(None, full_mass=True), 64, 250, 60, marks=LONG),
    pytest.param(AdaptiveHMC(None), 64, 600, 200, marks=LONG),
]


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("kernel", "chains", "num_warmup", "num_samples"), ILL_CONDITIONED
)
def test_a_gaussian_of_100_dimensions_and_condition_number_1e4(
    kernel, chains, num_warmup, num_samples
):
    """Means and variances along all eigenvectors, rotated at random."""
    density = GaussianPotential(
        torch.logspace(-2, 2, 100, dtype=torch.float64),
        seed=int(torch.randint(2**62, ())),
    )
    z = 4 * torch.rand(chains, 100, dtype=torch.float64) - 2
    x = density.standardise(drive(kernel, density, z, num_warmup, num_samples)[0])
    truth = torch.tensor([0.0, 1.0]).double().repeat_interleave(100)
    error = assert_expectations(torch.cat([x, x.square()], -1), truth, alarm=1e-4)
    assert error.max() < 0.1  # so that something can be seen


@dataclass(frozen=True)
class Problem:
    """A model whose posterior is known: functions ``(..., K)`` of its draws and their
    expectations.
    """

    model: Callable[..., Any]
    args: tuple[Tensor, ...]
    functions: Callable[[dict[str, Tensor]], Tensor]
    truth: Tensor
    alarm: float
    chains: int
    num_warmup: int
    num_samples: int
    options: dict[str, Any] = field(default_factory=dict)


def noise() -> Problem:
    """A positive site: s ~ Gamma(2, 1), y ~ N(0, s)."""
    y, s = (
        torch.tensor([0.3, -1.2, 2.1, 0.4]),
        torch.linspace(1e-3, 50, 200_001, dtype=torch.float64),
    )

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    def functions(weights: dict[str, Tensor]) -> Tensor:
        return torch.stack([weights["scale"], weights["scale"].square()], -1)

    log_density = dist.Gamma(2.0, 1.0).log_prob(s) + dist.Normal(
        0.0, s[:, None]
    ).log_prob(y).sum(1)
    truth = log_density.softmax(0) @ functions({"scale": s})
    return Problem(model, (y,), functions, truth, 1.2e-6, 250, 60, 40)


def schools() -> Problem:
    """y_j ~ N(theta_j, s), theta_j ~ N(mu, tau), mu ~ N(0, 10). Given tau all else is
    Gaussian, so its posterior is known on a line up to a constant: p(tau | y) ~ p(tau)
    N(y; 0, (s^2 + tau^2) I + 100 1 1')."""
    y, s = (
        torch.tensor([2.8, 0.8, -0.3, 0.7, -0.1, 0.1, 1.8, 1.2], dtype=torch.float64),
        0.5,
    )

    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        tau = pyro.sample("tau", dist.HalfNormal(2.0))
        with pyro.plate("groups", len(y)):
            offset = pyro.sample("offset", dist.Normal(0.0, 1.0))  # not centred
            pyro.sample("y", dist.Normal(mu + tau * offset, s), obs=y)

    def functions(weights: dict[str, Tensor]) -> Tensor:
        tau = weights["tau"]
        # between points of the grid
        below = (tau[..., None] < torch.tensor([0.701, 1.001, 1.501])).double()
        return torch.cat([torch.stack([tau, tau.log(), tau.square()], -1), below], -1)

    grid = torch.linspace(1e-4, 8, 4001, dtype=torch.float64)
    eye, ones = torch.eye(8, dtype=torch.float64), torch.ones(8, 8, dtype=torch.float64)
    covariance = (s**2 + grid**2)[:, None, None] * eye + 100 * ones
    log_density = (
        dist.MultivariateNormal(torch.zeros(8).double(), covariance).log_prob(y)
        - grid**2 / 8
    )
    truth = log_density.softmax(0) @ functions({"tau": grid})
    # far out some get stuck
    start = {
        "mu": torch.tensor(1.0),
        "tau": torch.tensor(1.0),
        "offset": torch.zeros(8),
    }
    return Problem(
        model,
        (y,),
        functions,
        truth,
        1e-4,
        128,
        100,
        60,
        {"initial": start, "dtype": torch.float64},
    )


class TwoWeights(nn.Module):
    """f(x) = relu(w1 x) + relu(w2 x): a posterior with two copies, swapped by w1 <->
    w2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x)).sum(-1, keepdim=True)


@functools.cache
def network() -> Problem:
    """Two hidden units, w ~ N(0, 1), noise 0.5: on a grid of 801 x 801."""
    x = torch.tensor([-1.5, -0.5, 0.5, 1.0, 1.5, 2.0])
    y = torch.tensor([0.6, 0.3, 0.6, 1.1, 1.4, 2.1])

    def functions(weights: dict[str, Tensor]) -> Tensor:
        """Means, second moments, the larger weight, and shares below thresholds between
        points of the grid.
        """
        w = weights["hidden.weight"].squeeze(-1).double()
        first, second = w.unbind(-1)
        below = (
            (w[..., None] < torch.tensor([-1.00625, 0.00625, 0.50625, 1.00625]))
            .double()
            .flatten(-2)
        )
        moments = torch.stack(
            [first, second, first**2, second**2, first * second, w.amax(-1)], -1
        )
        return torch.cat([moments, below], -1)

    axis = torch.linspace(-5, 5, 801, dtype=torch.float64)
    w = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    outputs = (w[:, None, :] * x[:, None].double()).relu().sum(-1)
    log_density = -0.5 * w.square().sum(-1) - 0.5 * ((outputs - y) / 0.5).square().sum(
        -1
    )
    truth = log_density.softmax(0) @ functions({"hidden.weight": w[..., None]})
    model = BayesianModel(TwoWeights(), 1.0, GaussianLikelihood(0.5))
    return Problem(model, (x[:, None], y), functions, truth, 1e-4, 256, 80, 60)


def scales() -> Problem:
    """A correlated Gaussian whose variances are eight orders of magnitude apart."""
    deviations = torch.logspace(-2, 2, 20, dtype=torch.float64)
    factor = torch.randn(20, 20, dtype=torch.float64)
    correlation = factor @ factor.T / 20 + 0.3 * torch.eye(20, dtype=torch.float64)
    cholesky = deviations[:, None] * torch.linalg.cholesky(correlation)
    mean = deviations * torch.linspace(-1, 1, 20, dtype=torch.float64)

    def model() -> None:
        pyro.sample("x", dist.MultivariateNormal(mean, scale_tril=cholesky))

    def functions(weights: dict[str, Tensor]) -> Tensor:
        x = torch.linalg.solve_triangular(
            cholesky, (weights["x"] - mean)[..., None], upper=False
        )[..., 0]
        return torch.cat([x, x.square()], -1)

    return Problem(
        model,
        (),
        functions,
        torch.tensor([0.0, 1.0]).repeat_interleave(20),
        1e-4,
        64,
        400,
        50,
    )


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (HMC, noise),
        (functools.partial(HMC, target_accept_prob=0.9), schools),
        (HMC, network),
        (AdaptiveHMC, network),
        pytest.param(NUTS, network, marks=LONG),
        pytest.param(HMC, scales, marks=LONG),
    ],
)
def test_expectations_are_those_of_quadrature(kernel, problem):
    known = problem()
    counts = {
        "num_chains": known.chains,
        "num_warmup": known.num_warmup,
        "num_samples": known.num_samples,
    }
    draws = sample(
        kernel(known.model), *known.args, progress=False, **counts, **known.options
    ).samples
    assert_expectations(known.functions(draws).double(), known.truth, known.alarm)
    # chains go from one copy to the other, so that unsorted moments may be compared
    if problem is network:
        order = draws["hidden.weight"].squeeze(-1).diff(dim=-1).sign().squeeze(-1)
        assert (order.diff(dim=1) != 0).sum() > 500


@pytest.mark.stochastic
@pytest.mark.parametrize("target", [0.65, 0.9])
def test_adaptation_reaches_its_target_acceptance(target):
    # In few dimensions acceptance falls off a cliff where steps become unstable; in
    # many it is smooth. The mass matrix stays 1: so the step has all of warm-up.
    density = GaussianPotential(
        torch.linspace(0.1, 1, 100, dtype=torch.float64).square(), rotated=False
    )
    kernel = HMC(None, target_accept_prob=target, num_steps=3, adapt_mass_matrix=False)
    _, statistics, _ = drive(
        kernel, density, torch.randn(40, 100, dtype=torch.float64), 200, 25
    )
    # 1,000 acceptances: standard error about 0.01; the step itself misses its target by
    # 0.005. Five standard deviations of both: false alarms 6e-7.
    assert statistics["acceptance_rate"].mean().item() == pytest.approx(
        target, abs=0.055
    )


@pytest.mark.stochastic
def test_the_mass_matrix_learns_the_scales():
    density = GaussianPotential(
        torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), rotated=False
    )
    state = drive(HMC(None), density, torch.randn(100, 3, dtype=torch.float64), 150, 1)[
        2
    ]
    # 100 x 25 draws: relative error of a variance about 5 %, even if only a third of
    # them counts; at five of those: false alarms 6e-7 each.
    assert torch.allclose(state.tuning.mass.variance, density.eigenvalues, rtol=0.25)


@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC])
def test_one_chain_that_starts_far_out_is_not_left_behind(kernel):
    # A regression of 40 rows; one of 8 noises begins small and its slopes wrong,
    # thousands of nats from the others.
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * torch.randn(40).double()

    def energy(z: Tensor) -> Tensor:
        slopes, log_noise = z[:, :3], z[:, 3]
        errors = (slopes @ x.T - y) / log_noise.exp()[:, None]
        return (
            0.5 * errors.square().sum(-1)
            + 40 * log_noise
            + 0.125 * slopes.square().sum(-1)
            + 0.5 * log_noise**2
        )

    start = torch.cat(
        [torch.tensor([[2.0, 2.0, -2.0, -2.0]]), 0.3 * torch.randn(7, 4)]
    ).double()
    assert energy(start)[0] > energy(start)[1:].max() + 3000
    _, statistics, _ = drive(kernel(None), ToyPotential(energy), start, 100, 20)
    assert statistics["acceptance_rate"].mean(1).min() > 0.5


# where there is nothing to go to ------------------------------------------------------


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [*KERNELS, "MCLMC"])
def test_energies_that_are_no_numbers_are_never_moved_to(name, lost, generator):
    # Beyond 1 there is no number, not even minus infinity, which would look like a
    # place of endless mass.
    kernel = {**KERNELS, "MCLMC": MCLMC(None, step_size=0.3)}[name]
    density = ToyPotential(
        lambda z: torch.where(z.abs() < 1, 0.5 * z.square(), lost).sum(-1)
    )
    z = 2 * torch.rand(40, 2, dtype=torch.float64) - 1
    state = kernel.init(density, z, 0, generator)
    for _ in range(8):
        state = kernel.step(density, state)
        assert torch.isfinite(state.energy).all()
        assert torch.isfinite(state.gradient).all()
        assert (state.z.abs() < 1).all()
    assert (state.z != z).any(-1).float().mean() > 0.5
    step = (
        HMC(None)
        .init(density, torch.zeros(200, 1).double(), 0, generator)
        .tuning.step_size
    )
    # a standard normal momentum stays within with a chance of 0.8 for a step of 0.78
    assert (step < 2).all()


@pytest.mark.parametrize("name", KERNELS)
def test_divergent_trajectories_are_counted_and_not_used(name, generator):
    density = GaussianPotential(
        torch.full((1,), 1e-6, dtype=torch.float64), rotated=False
    )
    kernel = KERNELS[name]
    state = kernel.init(
        density, torch.tensor([[0.0], [1e-3]], dtype=torch.float64), 0, generator
    )
    after = kernel.step(density, state)
    assert after.statistics["diverging"].all()
    assert torch.equal(after.z, state.z)
    assert (after.statistics["acceptance_rate"] == 0).all()
