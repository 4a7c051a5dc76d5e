"""Mass matrices: their algebra against explicit matrices, their estimates against plain sums and known covariances."""

import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.mass import DenseMass, LowRankMass, Mass, MassEstimate, _quadratic_shrinkage

D = 6


def covariance_of(mass: Mass) -> Tensor:
    return mass.velocity(torch.eye(D, dtype=torch.float64))


def diagonal() -> Mass:
    return Mass(torch.rand(D, dtype=torch.float64) + 0.1)


def low_rank() -> LowRankMass:
    directions = torch.linalg.qr(torch.randn(D, 2, dtype=torch.float64))[0]
    scale = torch.rand(D, dtype=torch.float64) + 0.5
    return LowRankMass.of(scale, directions, torch.tensor([9.0, 0.2], dtype=torch.float64))


def dense() -> DenseMass:
    factor = torch.randn(D, D, dtype=torch.float64)
    covariance = factor @ factor.T + torch.eye(D, dtype=torch.float64)
    return DenseMass.of(covariance, torch.linalg.cholesky(covariance))


# algebra ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [diagonal, low_rank, dense])
def test_operations_are_those_of_one_matrix(make):
    mass = make()
    covariance = covariance_of(mass)
    eye = torch.eye(D, dtype=torch.float64)
    assert torch.allclose(covariance, covariance.T)
    whitener = mass.whiten(eye).T  # W: columns are W e_i
    assert torch.allclose(whitener @ covariance @ whitener.T, eye)
    assert torch.allclose(mass.momentum(eye), whitener)  # row i is Wᵀ e_i
    assert torch.allclose(mass.variance.sqrt(), covariance.diagonal().sqrt())
    p = torch.randn(4, 3, D, dtype=torch.float64)
    assert torch.allclose(mass.kinetic(p), 0.5 * torch.einsum("abi,ij,abj->ab", p, covariance, p))
    assert torch.allclose(mass.whiten(p), p @ whitener.T)


def test_low_rank_is_the_formula_in_its_docstring():
    mass = low_rank()
    u, s = mass.directions, torch.diag(mass.scale)
    middle = torch.eye(D, dtype=torch.float64) + u @ torch.diag(mass.eigenvalues - 1) @ u.T
    assert torch.allclose(covariance_of(mass), s @ middle @ s)


@pytest.mark.stochastic
@pytest.mark.parametrize("make", [diagonal, low_rank, dense])
def test_drawn_momenta_have_the_mass_as_covariance(make, generator):
    # Each entry of 100,000 whitened draws' covariance has standard error 0.0032 (0.0045 on the diagonal); six of them,
    # for 3 x 36 entries: false alarms under 1e-6.
    mass = make()
    p = mass.draw(torch.empty(100_000, D, dtype=torch.float64), generator)
    noise = p @ torch.linalg.cholesky(covariance_of(mass))
    assert (torch.cov(noise.T) - torch.eye(D, dtype=torch.float64)).abs().max() < 0.027


# estimates ----------------------------------------------------------------------------------------------------------


def estimated(draws: Tensor, kind: str, **options) -> Mass:
    """From draws ``(S, C, D)``."""
    estimate = MassEstimate.start(draws[0], kind, **options)
    for draw in draws:
        estimate = estimate.update(draw)
    return estimate.mass()


def test_variances_are_the_mean_of_those_within_chains():
    draws = torch.randn(30, 4, 5, dtype=torch.float64) * torch.arange(1.0, 6.0) + 100 * torch.arange(4.0)[:, None]
    expected = draws.var(0).mean(0)  # within chains: the distance of 100 between chains must not enter
    share = 4 * 29 / (4 * 29 + 5)
    mass = estimated(draws, "diagonal")
    assert torch.allclose(mass.variance, share * expected + (1 - share) * 1e-3)


@pytest.mark.parametrize("kind", ["diagonal", "low-rank", "dense"])
def test_nothing_and_one_draw_give_the_unit_matrix(kind):
    estimate = MassEstimate.start(torch.randn(3, D, dtype=torch.float64), kind)
    for mass in (estimate.mass(), estimate.update(torch.randn(3, D, dtype=torch.float64)).mass()):
        assert torch.allclose(covariance_of(mass), torch.eye(D, dtype=torch.float64))


@pytest.mark.stochastic
def test_dense_keeps_the_pooled_correlations_when_draws_abound():
    torch.manual_seed(1)
    target = dense()
    draws = torch.randn(2000, 8, D, dtype=torch.float64) @ torch.linalg.cholesky(
        target.covariance
    ).T + 50 * torch.randn(1, 8, 1)
    found = covariance_of(estimated(draws, "dense"))
    centred = draws - draws.mean(0)
    plain = torch.einsum("sci,scj->ij", centred, centred) / (8 * 1999)
    assert torch.allclose(found, plain, rtol=0.01, atol=0.01)
    # 16,000 draws: standard errors of correlations under 0.008.
    factor = torch.linalg.cholesky(target.covariance)
    whitened = torch.linalg.solve(factor, torch.linalg.solve(factor, found).T)
    assert torch.allclose(whitened, torch.eye(D, dtype=torch.float64), atol=0.05)


def condition(mass: Mass, truth: Tensor) -> float:
    """Of what whitening leaves of the true covariance."""
    eigenvalues = torch.linalg.eigvalsh(mass.whiten(mass.whiten(truth).T))
    return (eigenvalues.max() / eigenvalues.min()).item()


@pytest.mark.parametrize(("dim", "degrees"), [(5, 40), (20, 40), (2, 4), (1, 7)])
def test_eigenvalues_are_those_of_the_papers_formula(dim, degrees, generator):
    """Entry by entry, in plain loops."""
    draws = torch.randn(degrees, dim, dtype=torch.float64, generator=generator) @ torch.diag(
        torch.linspace(1, 3, dim).double()
    )
    draws[:, 0] += draws[:, -1]
    sample = draws.T @ draws / degrees
    sample = sample / sample.diagonal().sqrt() / sample.diagonal().sqrt()[:, None]
    values, vectors = (part.numpy() for part in torch.linalg.eigh(sample))
    c = dim / degrees
    h = c**0.7 / dim**0.35
    inverse, new = 1 / values, []
    for i in inverse:
        theta = sum(j * (j - i) / ((j - i) ** 2 + (h * j) ** 2) for j in inverse) / dim
        hilbert = sum(j * (h * j) / ((j - i) ** 2 + (h * j) ** 2) for j in inverse) / dim
        new.append(1 / (i * ((1 - c) ** 2 + 2 * c * (1 - c) * theta + c**2 * (theta**2 + hilbert**2))))
    expected = torch.as_tensor(vectors @ torch.diag(torch.tensor(new, dtype=torch.float64)).numpy() @ vectors.T)
    expected = expected / expected.diagonal().sqrt() / expected.diagonal().sqrt()[:, None]
    assert torch.allclose(_quadratic_shrinkage(sample, degrees), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.stochastic
def test_strong_correlations_of_few_among_many_are_kept():
    """Condition numbers on 40 seeds: 3.3 to 5.7; by the diagonal 199 to 309, by the sample covariance 5.8 to 9.8."""
    torch.manual_seed(4)
    truth = torch.eye(24, dtype=torch.float64)
    truth[0, 1] = truth[1, 0] = 0.99
    truth[2, 3] = truth[3, 2] = -0.95
    draws = torch.randn(25, 4, 24, dtype=torch.float64) @ torch.linalg.cholesky(truth).T
    assert condition(estimated(draws, "dense"), truth) < 10
    assert condition(estimated(draws, "diagonal"), truth) > 100


@pytest.mark.parametrize("degenerate", ["constant", "twice"])
def test_a_coordinate_that_is_constant_or_another_once_more_leaves_a_matrix_that_whitens(degenerate):
    torch.manual_seed(5)
    draws = torch.randn(30, 4, D, dtype=torch.float64)
    draws[..., 0] = 3.0 if degenerate == "constant" else draws[..., 1]
    mass = estimated(draws, "dense")
    whitener = mass.whiten(torch.eye(D, dtype=torch.float64)).T
    assert torch.allclose(whitener @ covariance_of(mass) @ whitener.T, torch.eye(D, dtype=torch.float64), atol=1e-6)


@pytest.mark.stochastic
def test_dense_from_fewer_draws_than_dimensions_conditions_better_than_the_diagonal():
    torch.manual_seed(2)
    dim = 60
    lag = (torch.arange(dim)[:, None] - torch.arange(dim)).abs()
    truth = 0.9 ** lag.double()
    draws = torch.randn(11, 4, dim, dtype=torch.float64) @ torch.linalg.cholesky(truth).T  # 40 degrees of freedom
    # The sample covariance itself is singular. On 20 seeds the two were 25 to 48 and 370 to 541.
    assert condition(estimated(draws, "dense"), truth) < 0.2 * condition(estimated(draws, "diagonal"), truth)


@pytest.mark.stochastic
def test_a_common_factor_is_found_by_the_low_rank_form():
    torch.manual_seed(3)
    dim, strength = 200, 30.0
    direction = torch.nn.functional.normalize(torch.randn(dim, dtype=torch.float64), dim=0)
    scales = torch.logspace(-1, 1, dim, dtype=torch.float64)
    noise = torch.randn(100, 8, dim, dtype=torch.float64)
    spiked = noise + (strength**0.5 - 1) * (noise @ direction)[..., None] * direction
    mass = estimated(spiked * scales, "low-rank", rank=5, scale=torch.rand(dim, dtype=torch.float64) + 0.5)
    assert mass.eigenvalues.shape == (1,)  # and no direction that is noise
    overlap = (torch.nn.functional.normalize(mass.directions[:, 0], dim=0) @ direction).abs()
    assert overlap > 0.9  # correlations are taken in units of deviations, which the factor raises a little
    # The target looks alike in all directions after whitening: without the factor the largest eigenvalue is about 30.
    factor = scales[:, None] * (
        torch.eye(dim, dtype=torch.float64) + (strength**0.5 - 1) * torch.outer(direction, direction)
    )
    eigenvalues = torch.linalg.eigvalsh(
        torch.cov(mass.whiten(torch.randn(4000, dim, dtype=torch.float64) @ factor.T).T)
    )
    assert eigenvalues.max() < 4


@pytest.mark.stochastic
def test_pure_noise_has_no_directions():
    torch.manual_seed(4)
    mass = estimated(torch.randn(50, 8, 100, dtype=torch.float64), "low-rank", rank=10)
    # The largest of the noise's eigenvalues exceeds the edge now and then, by a little: it must not matter.
    assert (mass.eigenvalues - 1).clamp(min=0).sum() < 3
    assert torch.allclose(mass.variance.sqrt(), torch.ones(100, dtype=torch.float64), atol=0.3)


def test_a_coordinate_that_never_moved_gives_finite_masses(generator):
    draws = torch.randn(20, 3, D, dtype=torch.float64)
    draws[..., 2] = 7.0
    for kind in ("diagonal", "low-rank", "dense"):
        mass = estimated(draws, kind)
        assert torch.isfinite(mass.draw(draws[0], generator)).all()
        assert torch.isfinite(mass.whiten(draws[0])).all()
        assert (mass.variance > 0).all()


@pytest.mark.parametrize("unit", [1.0, 1e-6])
def test_a_dense_matrix_of_many_draws_doesnt_depend_on_units(unit, generator):
    """As an intercept and a slope on calendar years: correlation -0.99999, and deviations that differ by thousands."""
    truth = torch.tensor([[1.0, -0.99999], [-0.99999, 1.0]], dtype=torch.float64)
    truth = torch.block_diag(truth, torch.eye(D - 2, dtype=torch.float64))
    scale = torch.tensor([1.0, unit, *[1.0] * (D - 2)], dtype=torch.float64)
    truth = truth * scale * scale[:, None]
    noise = torch.randn(50, 16, D, dtype=torch.float64, generator=generator)
    found = estimated(noise @ torch.linalg.cholesky(truth).mT, "dense")
    assert condition(found, truth) < 2
