"""pSGLD's running preconditioner: the bias of the correction that it leaves out, by quadrature."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_symmetric.mcmc import Density, pSGLD

CHAINS, ROWS = 4000, 10
CURVATURE = 1.0 + ROWS


def conjugate(y: torch.Tensor) -> None:
    """A Gaussian mean: the potential is quadratic."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def mean_square(smoothing: float, running: bool, iterations: int) -> float:
    """Of the position, in standard deviations of the posterior, over many chains."""
    torch.manual_seed(0)
    y = torch.zeros(ROWS, dtype=torch.float64)
    damping = CURVATURE**0.5 / ROWS  # one standard deviation's gradient, per row
    kernel = pSGLD(
        conjugate, step_size=0.1 * damping / CURVATURE, smoothing=smoothing, damping=damping, running=running
    )
    density = Density(conjugate, args=(y,), dtype=torch.float64, subsampled=True)
    z = torch.randn(CHAINS, 1, dtype=torch.float64) / CURVATURE**0.5
    state = kernel.init(
        density, z, 0, torch.Generator(torch.empty(0).device).manual_seed(int(torch.randint(2**62, ())))
    )
    for _ in range(iterations):
        state = kernel.step(density, state)
    return float(state.z.square().mean() * CURVATURE)


@pytest.mark.stochastic
def test_a_preconditioner_that_follows_the_gradient_at_once_draws_from_the_density_divided_by_it():
    # With x in standard deviations, G is proportional to 1 / (1 + |x|), so the law is exp(-x²/2) (1 + |x|).
    x = np.linspace(-9, 9, 20_001)
    density = np.exp(-(x**2) / 2) * (1 + np.abs(x))
    wrong = (density * x**2).sum() / density.sum()
    assert wrong > 1.4
    # A mean of 4,000 squares with standard deviation below 2: standard error 0.032, at 4.5 of them (false alarms
    # 7e-6); 0.03 for the step.
    assert mean_square(0.0, running=True, iterations=15) == pytest.approx(wrong, abs=0.17)


@pytest.mark.stochastic
def test_slow_averages_and_kept_preconditioners_leave_the_posterior():
    # A mean of squares of standard error sqrt(2 / 4000) = 0.022, at 4.5 of them (false alarms 7e-6); 0.03 for the step.
    assert mean_square(0.0, running=False, iterations=15) == pytest.approx(1.0, abs=0.13)
    assert mean_square(0.99, running=True, iterations=15) < 1.3
