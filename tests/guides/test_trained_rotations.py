"""Guides that are trained on averages over rotations, against quadrature."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from scipy import stats
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.distributions import RotationImportance

ROWS, FACTORS = 5, 2
ANGLES = 720
LOC = torch.linspace(-1.0, 1.5, ROWS * FACTORS, dtype=torch.float64)


def factors(covariance: Tensor) -> None:
    """Depend on a matrix through its product with its transpose only."""
    prior = dist.Normal(torch.zeros(ROWS, FACTORS, dtype=torch.float64), 1.0)
    matrix = pyro.sample("w", prior.to_event(2))
    product = matrix @ matrix.transpose(-1, -2)
    pyro.sample("y", dist.Normal(product, 0.3).to_event(2), obs=covariance)


def trained_on_rotations() -> ps.AutoSymmetrized:
    guide = ps.AutoSymmetrized(factors, estimator=RotationImportance(32))
    guide.setup(DATA)
    with torch.no_grad():
        guide.base.loc.copy_(LOC)
        guide.base.scale = torch.full_like(LOC, 0.3)
    return guide


MATRIX = LOC.reshape(ROWS, FACTORS)
DATA = MATRIX @ MATRIX.T


def orthogonal_maps() -> Tensor:
    """All of O(2), on a grid: ``(2 * ANGLES, 2, 2)``."""
    angle = 2 * math.pi * torch.arange(ANGLES, dtype=torch.float64) / ANGLES
    turned = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    rotations = turned.reshape(-1, 2, 2)
    mirror = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    return torch.cat([rotations, rotations @ mirror])


def test_the_density_of_a_guide_is_its_average_over_rotations():
    guide = trained_on_rotations()
    assert guide.group.names("rotate")
    pyro.set_rng_seed(0)
    base = guide.base.get_posterior()
    value = base.sample((20,))
    copies = value.reshape(20, 1, ROWS, FACTORS) @ orthogonal_maps()
    exact = base.log_prob(copies.flatten(-2)).logsumexp(1) - math.log(2 * ANGLES)
    estimate = guide.get_posterior().log_prob(value)
    assert float((estimate - exact).detach().abs().max()) < 0.1


@pytest.mark.stochastic
def test_draws_of_a_guide_are_turned_uniformly():
    """False alarms: 1 in 10^6."""
    guide = trained_on_rotations()
    draws = guide.sample_posterior((4_000,))["w"].detach()
    angles = torch.atan2(draws[:, 0, 1], draws[:, 0, 0])
    shares = (angles / (2 * math.pi)).remainder(1.0)
    assert stats.kstest(shares.numpy(), "uniform").pvalue > 1e-6


def test_a_guide_trained_on_rotations_gains_over_signed_permutations(tmp_path):
    pyro.set_rng_seed(0)
    values = []
    for estimator in (None, RotationImportance(4)):
        pyro.clear_param_store()
        guide = ps.AutoSymmetrized(factors, estimator=estimator, init_scale=0.1)
        svi = SVI(factors, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
        for _ in range(120):
            svi.step(DATA)
        worth = ps.evidence(guide, DATA, num_samples=200)
        values.append(worth.symmetrized_elbo - worth.elbo)
    assert values[1] > values[0] + 0.5
    ps.save_guide(guide, tmp_path / "guide.safetensors")
    loaded = ps.load_guide(tmp_path / "guide.safetensors")
    assert loaded.estimator == RotationImportance(4)
    assert loaded.group == guide.group
