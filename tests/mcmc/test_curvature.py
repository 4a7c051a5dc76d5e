"""The first mass matrix, against the covariance of Gaussians, however little the chains have spread."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.chain_statistics import chain_statistics
from pyro_symmetric.mcmc.kernels.curvature import WIDER, Curvature

DEVIATIONS = torch.tensor([1e4, 1e2, 1.0, 1e-3], dtype=torch.float64)
D = len(DEVIATIONS)


def covariance(generator: torch.Generator) -> Tensor:
    """With correlations of 0.999 and deviations of very different size."""
    rotation = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=generator))[0]
    found = rotation @ torch.diag(torch.tensor([1.0, 0.5, 0.1, 1e-3], dtype=torch.float64)) @ rotation.T
    return found * DEVIATIONS * DEVIATIONS[:, None]


def passed(draws: Tensor, gradients: Tensor) -> Curvature:
    found = Curvature()
    for z, gradient in zip(draws, gradients, strict=True):
        found = found.update(z, gradient)
    return found


@pytest.mark.parametrize("chains", [4, 64])
def test_of_a_gaussian_it_is_the_covariance_wherever_the_positions_lie(chains, generator):
    target = covariance(generator)
    draws = 1e-2 * torch.randn(
        12, chains, D, dtype=torch.float64, generator=generator
    )  # nowhere near, nor spread like it
    draws = draws * DEVIATIONS + 30 * DEVIATIONS
    found = passed(draws, torch.linalg.solve(target, draws.mT).mT).mass(torch.arange(float(chains)).double())
    left = torch.linalg.eigvalsh(found.whiten(found.whiten(target).T))
    assert torch.allclose(left, torch.ones(D, dtype=torch.float64), rtol=0.02)


def test_of_few_draws_it_is_the_root_of_the_ratio_of_the_variances(generator):
    draws, gradients = torch.randn(2, 3, 2, D, dtype=torch.float64, generator=generator) * DEVIATIONS
    found = passed(draws, gradients).mass(torch.tensor([1.0, 2.0], dtype=torch.float64))  # of the first chain alone
    expected = (draws[:, 0].var(0) / gradients[:, 0].var(0)).sqrt()
    assert torch.allclose(found.covariance, torch.diag(expected))


def test_chains_with_high_energies_dont_count(generator):
    target = covariance(generator)
    draws = torch.randn(10, 6, D, dtype=torch.float64, generator=generator) * DEVIATIONS
    gradients = torch.linalg.solve(target, draws.mT).mT
    energy = torch.tensor([1.0, 50.0, 2.0, 60.0, 3.0, 70.0], dtype=torch.float64)
    spoilt = torch.where((energy > 10)[:, None], 1e9 * gradients.roll(1, 0), gradients)
    assert torch.equal(passed(draws, spoilt).mass(energy).covariance, passed(draws, gradients).mass(energy).covariance)


def test_chains_that_never_moved_teach_nothing():
    still = torch.ones(5, 4, D, dtype=torch.float64)
    assert passed(still, still).mass(torch.zeros(4)) is None


def test_lost_is_who_has_a_steady_slope_and_a_higher_energy(generator):
    gradients = torch.randn(10, 5, D, dtype=torch.float64, generator=generator)
    energy = torch.tensor([3.0, 90.0, 1.0, 2.0, 80.0], dtype=torch.float64)
    found = passed(gradients, gradients)
    assert not found.lost(energy)[0].any()  # high energies alone, as of a broad mode
    gradients[:, 2, 0] += 20
    assert not passed(gradients, gradients).lost(energy)[0].any()  # a slope alone, with the lowest energy
    gradients[:, 1, 3] -= 20
    energy[1] = 79.0 + D * math.log(WIDER)
    assert not passed(gradients, gradients).lost(energy)[0].any()  # as of a mode that is wider
    energy[1] = 81.0 + D * math.log(WIDER)
    lost, arrived = passed(gradients, gradients).lost(energy)
    assert lost.nonzero().flatten().tolist() == [1]
    assert arrived.nonzero().flatten().tolist() == [0, 3, 4]
    gradients[:, 0] += 20
    assert not passed(gradients, gradients).lost(energy)[0].any()  # most have yet to arrive


def regression(x: Tensor, y: Tensor) -> None:
    """No prior but on positive deviations, as users write it."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1).mask(False))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0).mask(False))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


@pytest.mark.stochastic
@pytest.mark.parametrize("seed", range(2))
def test_a_regression_on_unscaled_columns_is_its_closed_form_after_a_short_warm_up(seed, generator):
    """Starts lie thousands of deviations away, and the posterior's condition number is 1e10.

    Coefficients have a multivariate Student's t around the least squares. Means of about 5,000 effective draws; six
    standard errors of 4 numbers: false alarms under 1e-7.
    """
    rows = 200
    year = 1950 + torch.arange(rows, dtype=torch.float64) % 60
    x = torch.stack([torch.ones_like(year), year], 1)
    y = 3e4 + 800 * (year - 1980) + 2e4 * torch.randn(rows, dtype=torch.float64, generator=generator)
    posterior = ps.sample(
        regression, x, y, num_samples=200, seed=seed, dtype=torch.float64, engine="torch", progress=False
    )
    assert posterior.metadata["num_warmup"] <= 300
    precision = x.T @ x
    expected = torch.linalg.solve(precision, x.T @ y)
    freedom = rows - x.shape[1] - 1
    scale = (y - x @ expected).square().sum() / freedom
    deviations = (torch.linalg.inv(precision).diagonal() * scale * freedom / (freedom - 2)).sqrt()
    draws = posterior.samples["beta"].double()
    error = deviations / chain_statistics(draws).ess_bulk.sqrt()
    assert ((draws.mean((0, 1)) - expected).abs() < 6 * error).all()
    assert (draws.flatten(0, 1).std(0) / deviations - 1).abs().max() < 6 * (error / deviations).max()


@pytest.mark.parametrize("kernel", [ps.HMC, ps.NUTS, ps.AdaptiveHMC])
def test_chains_that_went_on_from_others_are_listed(kernel, monkeypatch, tmp_path):
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def metadata(**more):
        settings = {"num_samples": 5, "num_warmup": 40, "num_chains": 4, "seed": 0, "progress": False}
        return ps.sample(kernel(model, mass="dense"), **settings, **more).metadata

    assert "relocated_chains" not in metadata()
    monkeypatch.setattr("pyro_symmetric.mcmc.kernels.warmup.window_ends", lambda num_warmup: (10, (20, 30)))
    ends = torch.tensor([True, False, False, True])
    monkeypatch.setattr(Curvature, "lost", lambda self, energy: (ends, ~ends))
    assert metadata()["relocated_chains"] == [0, 3]
    assert metadata(store=tmp_path / "run")["relocated_chains"] == [0, 3]


@pytest.mark.parametrize(("scale", "far"), [(1.0, 30.0), (10.0, 200.0), (0.1, 30.0)])
def test_no_mode_loses_its_chains(scale, far, generator):
    """Two modes of the same weight, of which a chain in four found one. Their energies differ by ``D log(scale)``, and
    chains cross the wide one slowly: by their slopes alone they were taken to be lost."""
    size, chains = 10, 16
    centre = far * torch.eye(size, dtype=torch.float64)[0]

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(size), 100.0).to_event(1))
        narrow, wide = (
            dist.Normal(at, width).to_event(1).log_prob(w) for at, width in ((0 * centre, 1), (centre, scale))
        )
        pyro.factor("modes", torch.logaddexp(narrow, wide) - dist.Normal(0.0, 100.0).log_prob(w).sum())

    found_it = torch.arange(chains) % 4 == 0
    w = torch.randn(chains, size, dtype=torch.float64, generator=generator)
    w[found_it] = centre + scale * w[found_it]
    settings = {"num_samples": 5, "num_warmup": 90, "dtype": torch.float64, "seed": 0, "progress": False}
    kernel = ps.HMC(model, num_steps=3, mass="dense")
    posterior = ps.sample(kernel, initial={"w": w}, num_chains=chains, engine="torch", **settings)
    assert torch.equal(posterior.samples["w"][:, -1, 0] > far / 2, found_it)
    assert "relocated_chains" not in posterior.metadata
