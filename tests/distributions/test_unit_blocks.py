"""Normals in blocks, against the same normal with its whole covariance."""

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_symmetric.distributions import UnitBlocks

# of ten numbers; 4, 6, 8 are alone
POSITIONS = (torch.tensor([[7, 0], [3, 5]]), torch.tensor([[1, 2, 9]]))


def parameters() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(torch.empty(0).device).manual_seed(0)
    shapes = ((10,), (2, 2, 2), (1, 3, 3), (10,))
    loc, first, second, scale = (
        torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes
    )
    factors = [
        m.tril(-1) + torch.diag_embed(0.5 + m.diagonal(dim1=-2, dim2=-1).abs())
        for m in (first, second)
    ]
    return tuple(part.requires_grad_() for part in (loc, *factors, scale.abs() + 0.2))  # type: ignore[return-value]


def blocks_and_whole() -> tuple[UnitBlocks, MultivariateNormal, tuple[Tensor, ...]]:
    loc, first, second, scale = given = parameters()
    covariance = torch.zeros(10, 10, dtype=torch.float64)
    for unit, tril in (
        (POSITIONS[0][0], first[0]),
        (POSITIONS[0][1], first[1]),
        (POSITIONS[1][0], second[0]),
    ):
        covariance = covariance.index_put((unit[:, None], unit[None]), tril @ tril.mT)
    alone = torch.tensor([4, 6, 8])
    covariance = covariance.index_put((alone, alone), scale[alone].square())
    return (
        UnitBlocks(loc, POSITIONS, (first, second), scale),
        MultivariateNormal(loc, covariance),
        given,
    )


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_density_and_gradient_are_those_of_the_whole_covariance(
    shape: tuple[int, ...],
) -> None:
    blocks, whole, given = blocks_and_whole()
    value = torch.randn(*shape, 10, dtype=torch.float64, requires_grad=True)
    found, expected = blocks.log_prob(value), whole.log_prob(value)
    assert found.shape == shape
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(density.sum(), (value, *given))
        for density in (found, expected)
    ]
    # Numbers above a diagonal don't count.
    gradients = [
        [g.tril() if g.dim() == 3 else g for g in parts] for parts in gradients
    ]
    torch.testing.assert_close(gradients[0], gradients[1])
    assert blocks.expand((4, *shape)).log_prob(value).shape == (4, *shape)


def test_moments_are_those_of_the_whole_covariance() -> None:
    blocks, whole, _ = blocks_and_whole()
    torch.testing.assert_close(blocks.expand((2,)).mean, whole.mean.expand(2, 10))
    torch.testing.assert_close(
        blocks.expand((2,)).variance, whole.variance.expand(2, 10)
    )
    entries = torch.tensor([[0, 7], [3, 5]])  # one of two blocks the other way round
    expected = torch.stack(
        [whole.covariance_matrix[row][:, row].inverse() for row in entries]
    )
    torch.testing.assert_close(blocks.precisions(entries), expected)
    assert blocks.precisions(torch.tensor([[7], [3]])) is None


@pytest.mark.stochastic
def test_draws_have_the_covariance() -> None:
    """Whitened draws have second moments of the unit matrix, with errors of at most
    (2/n)^(1/2): 6 of them in each of 65, false alarm below 1 in 10^6."""
    blocks, whole, _ = blocks_and_whole()
    draws = blocks.expand((3,)).sample((20_000,))
    assert draws.shape == (20_000, 3, 10)
    centred = (draws - whole.loc.detach()).reshape(-1, 10).mT
    white = torch.linalg.solve_triangular(
        whole.scale_tril.detach(), centred, upper=False
    )
    error = 6 * (2 / 60_000) ** 0.5
    torch.testing.assert_close(
        white @ white.mT / 60_000,
        torch.eye(10, dtype=torch.float64),
        rtol=0,
        atol=error,
    )
    assert float(white.mean(1).abs().max()) < error


@pytest.mark.parametrize(
    "positions", [POSITIONS[0] - 2, POSITIONS[0][:1], torch.tensor([[7, 0], [3, 0]])]
)
def test_positions_that_do_not_fit_are_refused(positions: Tensor) -> None:
    with pytest.raises((ValueError, IndexError)):
        UnitBlocks(
            torch.zeros(10),
            (positions,),
            (torch.eye(2).expand(2, 2, 2),),
            torch.ones(10),
        )
