"""Curvature and gradient noise where chains are, against a regression whose Hessian and row gradients are known."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.linalg import eigvalsh, inv
from torch import Tensor, nn

from pyro_symmetric.likelihoods import GaussianLikelihood
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.kernels.stochastic import CurvatureEstimate
from pyro_symmetric.models import BayesianModel

N, D, NOISE, BATCH = 60, 3, 0.5, 6
_GENERATOR = np.random.default_rng(0)
X = _GENERATOR.normal(size=(N, D)) * [0.6, 0.9, 1.2] + 0.2 * _GENERATOR.normal(size=(N, 1))
Y = X @ [1.0, -0.5, 0.3] + NOISE * _GENERATOR.normal(size=N)
PRECISION = np.eye(D) + X.T @ X / NOISE**2
MEAN = inv(PRECISION) @ X.T @ Y / NOISE**2


def density(batch_size: int | None = None) -> Density:
    model = BayesianModel(nn.Linear(D, 1, bias=False), prior=1.0, likelihood=GaussianLikelihood(scale=NOISE))
    x, y = torch.tensor(X), torch.tensor(Y)
    return Density(model.to(torch.float64), args=(x, y), batch_size=batch_size, subsampled=True)


def at_the_mean(chains: int) -> Tensor:
    return torch.tensor(MEAN).expand(chains, D).clone()


def measured(
    density: Density, z: Tensor, rounds: int, generator: torch.Generator, g: Tensor | None = None
) -> CurvatureEstimate:
    found = CurvatureEstimate.start(z, generator)
    for _ in range(rounds):
        found = found.update(density, z, generator, torch.ones_like(z[0]) if g is None else g)
    return found


def noise_of_rows(g: np.ndarray | float = 1.0) -> np.ndarray:
    """Variance of ``N / B`` times the sum of ``B`` rows' gradients ``x (x.w - y) / noise²`` at the posterior's mean."""
    gradients = X * ((X @ MEAN - Y) / NOISE**2)[:, None] * np.sqrt(g)
    return N**2 / BATCH * gradients.var(0)


@pytest.mark.stochastic
def test_power_iteration_finds_the_largest_curvature(generator):
    found = measured(density(), at_the_mean(500), 26, generator)
    assert found.stiffest.item() == pytest.approx(eigvalsh(PRECISION)[-1], rel=0.05)
    assert torch.equal(found.noise, torch.zeros(D, dtype=torch.float64))
    assert torch.allclose(found.direction.norm(dim=-1), torch.ones(500, dtype=torch.float64))
    _, vectors = np.linalg.eigh(PRECISION)
    assert (found.direction.numpy() @ vectors[:, -1]).__abs__().min() > 0.99


@pytest.mark.stochastic
def test_differences_of_two_batches_find_the_noise(generator):
    found = measured(density(BATCH), at_the_mean(500), 6, generator)
    # 3,000 squared differences, of a relative standard error of 0.04 (heavier tails than normal ones): at five
    # of them, false alarms below 1e-5 each.
    assert found.noise.numpy() == pytest.approx(noise_of_rows(), rel=0.2)


@pytest.mark.stochastic
def test_with_a_preconditioner_both_are_those_of_the_coordinates_in_which_the_sampler_is_plain(generator):
    g = np.array([0.2, 1.0, 3.0])
    diagonal = torch.tensor(g).expand(500, D)
    full = measured(density(), at_the_mean(500), 26, generator, diagonal)
    root = np.diag(np.sqrt(g))
    assert full.stiffest.item() == pytest.approx(eigvalsh(root @ PRECISION @ root)[-1], rel=0.05)
    assert full.stiffest.item() != pytest.approx(eigvalsh(PRECISION)[-1], rel=0.3)
    noisy = measured(density(BATCH), at_the_mean(500), 6, generator, diagonal)
    assert noisy.noise.numpy() == pytest.approx(noise_of_rows(g), rel=0.2)  # as above


def test_measurements_that_are_no_numbers_are_left_out(generator):
    class Wall:
        row_counts: ClassVar[dict[str, tuple[int, int]]] = {}

        def energy_and_gradient(self, z: Tensor, rows: None = None) -> tuple[Tensor, Tensor]:
            gradient = torch.where(z[:, :1] > 0, z, torch.nan)
            return gradient.sum(-1), gradient

    z = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    found = measured(Wall(), z, 3, generator)
    assert torch.isfinite(found.direction).all()
    assert found.curvature[0].item() == pytest.approx(1.0)
    assert found.curvature[1] == 0
