"""Mass matrices: their algebra against explicit matrices, their estimates against plain
sums and known covariances.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.adaptation import MassEstimate
from pyro_symmetric.mcmc.kernels.kernel import DenseMass, Mass

from .conftest import variances_by_formula

D = 6


def covariance_of(mass: Mass) -> Tensor:
    return mass.velocity(torch.eye(D, dtype=torch.float64))


def diagonal() -> Mass:
    return Mass(torch.rand(D, dtype=torch.float64) + 0.1)


def dense() -> Mass:
    factor = torch.randn(D, D, dtype=torch.float64)
    covariance = factor @ factor.T + torch.eye(D, dtype=torch.float64)
    deviation = covariance.diagonal().sqrt()
    return DenseMass.of(deviation.square(), covariance / deviation / deviation[:, None])


# algebra ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [diagonal, dense])
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
    assert torch.allclose(
        mass.kinetic(p), 0.5 * torch.einsum("abi,ij,abj->ab", p, covariance, p)
    )
    assert torch.allclose(mass.whiten(p), p @ whitener.T)


@pytest.mark.parametrize("make", [diagonal, dense])
def test_each_chain_has_its_own_matrix(make):
    mass = make()
    mass = replace(mass, variance=mass.variance * torch.rand(5, 1).double())
    noise = torch.randn(5, D, dtype=torch.float64)
    for chain in range(5):
        alone = replace(mass, variance=mass.variance[chain])
        for operation in ("velocity", "whiten", "momentum", "kinetic"):
            result = getattr(mass, operation)(noise)[chain]
            torch.testing.assert_close(result, getattr(alone, operation)(noise[chain]))
    chains = torch.tensor([3, 0])
    torch.testing.assert_close(
        mass.of_chains(chains).velocity(noise[chains]), mass.velocity(noise)[chains]
    )


# estimates ----------------------------------------------------------------------------


def of_each_chain(draws: Tensor, full: bool = False) -> Mass:
    """The matrices by draws ``(S, C, D)``."""
    estimate = MassEstimate.start(draws[0], len(draws), full=full)
    for draw in draws:
        estimate = estimate.update(draw)
    return estimate.mass()


def estimated(draws: Tensor, kind: str) -> Mass:
    """The geometric mean of the chains' matrices."""
    mass = of_each_chain(draws, kind == "dense")
    return replace(mass, variance=mass.variance.log().mean(0).exp())


@pytest.mark.stochastic
def test_dense_keeps_the_pooled_correlations_when_draws_abound():
    torch.manual_seed(1)
    target = dense()
    draws = torch.randn(2000, 8, D, dtype=torch.float64) @ torch.linalg.cholesky(
        covariance_of(target)
    ).T + 50 * torch.randn(1, 8, 1)
    found = covariance_of(estimated(draws, "dense"))
    centred = draws - draws.mean(0)
    plain = torch.einsum("sci,scj->ij", centred, centred) / (8 * 1999)
    assert torch.allclose(found, plain, rtol=0.01, atol=0.01)
    # 16,000 draws: standard errors of correlations under 0.008.
    factor = torch.linalg.cholesky(covariance_of(target))
    whitened = torch.linalg.solve(factor, torch.linalg.solve(factor, found).T)
    assert torch.allclose(whitened, torch.eye(D, dtype=torch.float64), atol=0.05)


def condition(mass: Mass, truth: Tensor) -> float:
    """Of what whitening leaves of the true covariance, in the worst chain."""
    numbers = []
    for variance in mass.variance:
        alone = replace(mass, variance=variance)
        eigenvalues = torch.linalg.eigvalsh(alone.whiten(alone.whiten(truth).T))
        numbers.append(float(eigenvalues.max() / eigenvalues.min()))
    return max(numbers)


@pytest.mark.parametrize("degenerate", ["constant", "twice"])
def test_a_coordinate_that_is_constant_or_another_once_more_leaves_a_matrix_that_whitens(
    degenerate,
):
    torch.manual_seed(5)
    draws = torch.randn(30, 4, D, dtype=torch.float64)
    draws[..., 0] = 3.0 if degenerate == "constant" else draws[..., 1]
    mass = estimated(draws, "dense")
    whitener = mass.whiten(torch.eye(D, dtype=torch.float64)).T
    assert torch.allclose(
        whitener @ covariance_of(mass) @ whitener.T,
        torch.eye(D, dtype=torch.float64),
        atol=1e-6,
    )


def test_of_fewer_draws_than_twice_the_coordinates_a_dense_matrix_is_diagonal():
    torch.manual_seed(2)
    # degrees of freedom: 8 and 12, for 6 coordinates
    for count, known in ((3, False), (4, True)):
        draws = torch.randn(count, 4, D, dtype=torch.float64)
        covariance = covariance_of(estimated(draws, "dense"))
        assert torch.equal(covariance, covariance.diagonal().diag()) != known
        if not known:
            assert torch.allclose(
                covariance.diagonal(), estimated(draws, "diagonal").variance
            )


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("correlations", "dim", "draws", "chains", "unit", "most"),
    [
        ((0.99, -0.95), 24, 25, 4, 1.0, 15),
        ((-0.99999,), D, 50, 16, 1.0, 3),
        ((-0.99999,), D, 50, 16, 1e-6, 3),
    ],
)
def test_strong_correlations_of_few_are_kept_whatever_their_units(
    correlations, dim, draws, chains, unit, most
):
    """The second as of an intercept and a slope on calendar years, whose deviations
    differ by thousands. Condition numbers of the first on 40 seeds: by the sample
    covariance 5.8 to 9.8, by the diagonal 199 to 309; of the others at most 2.03."""
    pairs = [
        torch.tensor([[1.0, r], [r, 1.0]], dtype=torch.float64) for r in correlations
    ]
    truth = torch.block_diag(
        *pairs, torch.eye(dim - 2 * len(pairs), dtype=torch.float64)
    )
    scale = torch.ones(dim, dtype=torch.float64)
    scale[1] = unit
    truth = truth * scale * scale[:, None]
    noise = torch.randn(draws, chains, dim, dtype=torch.float64)
    found = noise @ torch.linalg.cholesky(truth).mT
    assert condition(of_each_chain(found, full=True), truth) < most
    assert condition(of_each_chain(found), truth) > 100


# chains in different modes ------------------------------------------------------------


def copies(seed: int, draws: int = 100, chains: int = 16) -> tuple[Tensor, Tensor]:
    """Draws ``(S, C, D)`` of chains in copies of a mode, and their deviations ``(C,
    D)``: those of the coordinates in an order of each chain's own.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-1, 1, D, dtype=torch.float64)
    orders = torch.rand(chains, D, generator=generator).argsort(1)
    noise = torch.randn(draws, chains, D, generator=generator, dtype=torch.float64)
    return noise * scales[orders], scales[orders]


@pytest.mark.stochastic
def test_in_copies_of_a_mode_each_chain_has_the_deviations_of_its_copy():
    # The log of a deviation by 400 draws has an error of 0.035: 96 of them are within 5
    # standard errors with a chance of 1 - 6e-5; r is 0.85 at least, and the largest log
    # of a deviation relative to the pooled one -3.9.
    draws, deviations = copies(torch.initial_seed() % 1000, draws=400)
    ratio = (of_each_chain(draws).deviation / deviations).log()
    assert ratio.abs().max() < 0.18 + 0.15 * 3.9
    assert ratio.mean().abs() < 0.1
    pooled = draws.var(0).mean(0).sqrt() / deviations
    assert pooled.log().abs().max() > 2  # which doesn't fit any chain


@pytest.mark.stochastic
def test_chains_of_one_mode_share_their_deviations():
    # The correlation of 16 x 6 log variances in halves has, without a mode of their
    # own, a standard error of 1 / sqrt(15 x 5) = 0.12: a share above 0.7 is that of a
    # correlation of 0.54, and has a chance of 4e-6.
    draws = torch.randn(100, 16, D, dtype=torch.float64)
    logs = of_each_chain(draws).deviation.log()
    own = 0.5 * draws.var(0).log()
    assert (logs - logs.mean(0)).std() < 0.7 * (own - own.mean(0)).std()


@pytest.mark.parametrize("chains", [15, 16])
@pytest.mark.parametrize("seed", range(3))
def test_the_deviations_are_those_of_the_formula(seed, chains):
    draws = copies(seed, draws=50, chains=chains)[0]
    deviation = of_each_chain(draws).deviation
    expected = variances_by_formula(draws.numpy()) ** 0.5
    assert deviation.numpy() == pytest.approx(expected, rel=1e-9)


def test_a_chain_that_does_not_move_has_the_deviations_of_the_others():
    draws = torch.randn(100, 16, D, dtype=torch.float64)
    draws[:, 3] = draws[0, 3]
    deviation = of_each_chain(draws).deviation
    assert (deviation[3] > 0.7).all()


@pytest.mark.parametrize(("chains", "dim"), [(1, 1), (1, D), (5, 1)])
def test_one_chain_or_one_coordinate_has_the_pooled_variance(chains, dim):
    draws = torch.randn(50, chains, dim, dtype=torch.float64)
    degrees = chains * 49
    pooled = (draws.var(0).mean(0) * degrees + 5 * 1e-3) / (degrees + 5)
    expected = pooled.expand(chains, dim)
    torch.testing.assert_close(of_each_chain(draws).variance, expected)


def test_chains_on_their_way_do_not_widen_the_deviations_of_many():
    draws = torch.randn(50, 64, D, dtype=torch.float64)
    draws[:, :6] += 10 * torch.arange(50.0)[:, None, None]
    deviation = of_each_chain(draws).deviation[6:]
    assert deviation.log().abs().max() < 0.5
    # the mean variance is a thousand times as large
    assert draws.var(0).mean(0).min() > 500


def test_a_constant_coordinate_leaves_the_others_as_they_are():
    draws, deviations = copies(1, draws=400)
    constant = torch.cat([draws, torch.ones(400, 16, 1).double()], -1)
    found = of_each_chain(constant).deviation
    assert found.isfinite().all()
    ratio = (found[:, :D] / deviations).log()
    assert ratio.abs().max() < 0.8
    assert ratio.mean().abs() < 0.2


def test_a_dense_matrix_in_copies_of_a_mode_suits_each_chain():
    draws, deviations = copies(2, draws=400)
    mass = of_each_chain(draws, full=True)
    for chain, scales in enumerate(deviations):
        alone = replace(mass, variance=mass.variance[chain])
        eigenvalues = torch.linalg.eigvalsh(
            alone.whiten(alone.whiten(scales.square().diag()).T)
        )
        assert eigenvalues.max() / eigenvalues.min() < 10  # 10,000 without
