"""SGHMC of one Gaussian mean: its stationary distribution is the one that its recursion predicts, noise included."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

from pyro_symmetric.mcmc import SGHMC, Density, sample
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.models import BayesianModel

N, STEP, FRICTION = 50, 0.02, 4.0
DATA = torch.linspace(-2, 2, N, dtype=torch.float64) ** 3 / 3 + 0.5  # any data: its variance makes the gradient noise


def conjugate(y: Tensor) -> None:
    """A Gaussian mean with unit noise: curvature 1 + N, posterior mean sum(y) / (1 + N)."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N, subsample=torch.arange(len(y))):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def stationary(noise: float, estimate: float = 0.0) -> float:
    """Variance of z under kick, half drift, friction, half drift, with gradient noise of the given variance."""
    keep = math.exp(-STEP * FRICTION)
    kick = np.array([[1.0, 0.0], [-STEP * (1 + N), 1.0]])
    drift = np.array([[1.0, STEP / 2], [0.0, 1.0]])
    rest = drift @ np.diag([1.0, keep]) @ drift
    injected = drift @ np.diag([0.0, 1 - keep**2 - 2 * STEP * estimate]) @ drift.T
    from_batches = rest @ np.diag([0.0, STEP**2 * noise]) @ rest.T
    return float(solve_discrete_lyapunov(rest @ kick, injected + from_batches)[0, 0])


def run(num_warmup: int = 15, **options) -> tuple[Tensor, Tensor]:
    """Final positions and momenta of independent chains after warm-up."""
    kernel = SGHMC(conjugate, step_size=STEP, friction=FRICTION, **options)
    density = Density(conjugate, args=(DATA,), dtype=torch.float64, batch_size=kernel.batch_size, subsampled=True)
    state = kernel.init(density, starting_points(density, CHAINS), num_warmup, fresh_generator())
    for _ in range(num_warmup):
        state = kernel.step(density, state)
    return state.z[:, 0], state.momentum[:, 0]


# With 2,000 independent chains a variance's relative standard error is sqrt(2 / 2000) = 0.032. Bounds are at 4.5 of
# them (false alarms 7e-6 each). Deviations from the stationary law decay as exp(-FRICTION / 2 t), a run lasts t = 3.
CHAINS, TOLERANCE, EXACT = 2000, 0.143, 1 / (1 + N)


def fresh_generator() -> torch.Generator:
    """Seeded from the global one, so that a test's seed decides."""
    return torch.Generator(torch.empty(0).device).manual_seed(int(torch.randint(2**62, ())))


def gradient_noise(batch: int) -> float:
    """Variance of N times the mean of independent rows' gradients (m - y_i)."""
    return N**2 / batch * DATA.var(correction=0).item()


def assert_mean(z: Tensor) -> None:
    assert z.mean().item() == pytest.approx(DATA.sum().item() / (1 + N), abs=4.5 * math.sqrt(z.var().item() / CHAINS))


def test_full_gradients_give_the_exact_mean_and_variance():
    torch.manual_seed(0)
    z, r = run()
    assert stationary(0.0) == pytest.approx(EXACT, rel=1e-9)  # the splitting is exact here
    assert_mean(z)
    assert z.var().item() == pytest.approx(EXACT, rel=TOLERANCE)
    assert r.var().item() == pytest.approx(1.0, rel=TOLERANCE)


@pytest.mark.stochastic
def test_mini_batches_add_the_variance_of_their_gradients():
    torch.manual_seed(1)
    z, r = run(batch_size=10, replacement=True)
    noise = gradient_noise(10)
    assert stationary(noise) > 1.3 * EXACT  # the noise is no small thing here
    assert stationary(noise) == pytest.approx(EXACT * (1 + 0.5 * STEP * noise / FRICTION), rel=0.1)  # 1 + B / C
    assert_mean(z)
    assert z.var().item() == pytest.approx(stationary(noise), rel=TOLERANCE)
    assert r.var() > 1.2  # the kinetic temperature shows it


@pytest.mark.stochastic
def test_the_noise_estimate_takes_the_added_variance_away_again():
    torch.manual_seed(2)
    noise = gradient_noise(10)
    z, _ = run(batch_size=10, replacement=True, noise_estimate=0.5 * STEP * noise)
    assert stationary(noise, 0.5 * STEP * noise) == pytest.approx(EXACT, rel=0.1)
    assert z.var().item() == pytest.approx(stationary(noise, 0.5 * STEP * noise), rel=TOLERANCE)


def test_passes_in_random_order_add_less_variance_than_independent_batches():
    torch.manual_seed(3)
    z, _ = run(batch_size=10)
    assert_mean(z)
    assert EXACT * (1 - TOLERANCE) < z.var().item() < stationary(gradient_noise(10)) * (1 - TOLERANCE)


def test_resampled_momenta_leave_mean_and_variance():
    torch.manual_seed(4)
    z, _ = run(resample_momentum=True)
    assert_mean(z)
    assert z.var().item() == pytest.approx(EXACT, rel=TOLERANCE + 0.02)


def test_defaults_follow_curvature_and_noise():
    def chosen(**options) -> tuple[float, float]:
        """The step size, and the share of the momentum that it keeps."""
        kernel = SGHMC(conjugate, **options)
        density = Density(conjugate, args=(DATA,), dtype=torch.float64, batch_size=kernel.batch_size, subsampled=True)
        tuning = kernel.init(density, starting_points(density, 500), 0, fresh_generator()).tuning
        return tuning.step_size.item(), kernel._momentum_shares(tuning, tuning.step_size)[0].mean().item()

    step, keep = chosen()
    assert step == pytest.approx(math.sqrt(0.2 / (1 + N)), rel=1e-4)
    assert keep == pytest.approx(0.95)
    noise = gradient_noise(10)
    step, keep = chosen(batch_size=10)  # 3,000 squared differences: relative standard error 0.026, of the step half
    assert step == pytest.approx(math.sqrt(0.05 / noise), rel=0.06)
    assert keep == pytest.approx((0.2 - 0.05) / (0.2 + 0.05), rel=1e-4)  # the excess h² V (1 + k) / (4 (1 - k)) is 0.05


@pytest.mark.stochastic
def test_the_excess_at_any_friction_is_the_one_that_the_docstring_gives():
    for keep in (0.9, 0.5, 0.01):
        step, curvature, noise = 0.02, 0.5, 30.0  # moving slowly: step² curvature is far below 1 - keep
        kick = np.array([[1.0, 0.0], [-step * curvature, 1.0]])
        drift = np.array([[1.0, step / 2], [0.0, 1.0]])
        rest = drift @ np.diag([1.0, keep]) @ drift
        injected = drift @ np.diag([0.0, 1 - keep**2]) @ drift.T
        from_batches = rest @ np.diag([0.0, step**2 * noise]) @ rest.T
        found = solve_discrete_lyapunov(rest @ kick, injected + from_batches)[0, 0] * curvature - 1
        assert found == pytest.approx(step**2 * noise / 4 * (1 + keep) / (1 - keep), rel=5e-3)


def test_more_noise_than_friction_can_make_up_for_is_refused():
    with pytest.raises(ValueError, match="more than a friction of 1 can make up"):
        sample(SGHMC(conjugate, friction=1.0, noise_estimate=2.0), DATA, progress=False)


def test_a_network_is_sampled_from_mini_batches_that_differ_between_chains():
    torch.manual_seed(0)
    model = BayesianModel(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), num_data=40)
    x, y = torch.randn(40, 2), torch.arange(40) % 2
    kernel = SGHMC(model, batch_size=8, step_size=0.02)
    posterior = sample(kernel, x, y, num_chains=3, num_warmup=5, num_samples=4, progress=False)
    assert posterior.samples["0.weight"].shape == (3, 4, 3, 2)
    density = Density(model, args=(x, y), batch_size=8, subsampled=True)
    state = kernel.init(density, starting_points(density, 1).expand(3, -1).clone(), 0, fresh_generator())
    assert state.energy.unique().numel() == 3  # one place, three mini-batches
