"""Computations of few numbers on a GPU, where nothing is asked that the host would have to wait for."""

import itertools
from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_symmetric.distributions import density_gain, unit_densities
from pyro_symmetric.distributions.density_gain import log_density_gain
from pyro_symmetric.distributions.matchings import doubly_stochastic, draw_rows, scaled_in_logarithms
from pyro_symmetric.distributions.normals import normals_of, sites_of
from pyro_symmetric.distributions.placements import Placements
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.groups import Group
from pyro_symmetric.groups.tensors import permute_axes

from .groups import action_of, grouped, mixed_heads, one_layer, recurrent, recurrent_with_signs, two_layers

GROUPS: dict[str, Callable[[], Group]] = {
    "one layer": lambda: one_layer(4),
    "two layers": lambda: two_layers(3, 4),
    "two layers with signs": lambda: two_layers(3, 4, moves=("permute", "flip")),
    "recurrent": lambda: recurrent(4),
    "recurrent with signs": recurrent_with_signs,
    "mixed heads": mixed_heads,
    "grouped convolution": grouped,
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_gain_of_all_that_may_move_is_that_of_moved_weights(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GROUPS[name]()
    action = action_of(group)
    leaves = [torch.randn(n, action.dim, dtype=torch.float64).requires_grad_() for n in (batch, 1, 1)]
    elements = group.finite.sample((5, batch), device=leaves[0].device, dtype=torch.float64)

    def gradients(of: Callable[[Tensor, dist.TorchDistribution], Tensor]) -> tuple[Tensor, ...]:
        value, loc, log_scale = leaves
        gain = of(value, dist.Normal(loc[0], log_scale[0].exp()).to_event(1))
        weights = torch.linspace(-1.0, 2.0, gain.numel(), dtype=torch.float64).view_as(gain)
        return gain.detach(), *torch.autograd.grad((gain * weights).sum(), leaves)

    def as_defined(value: Tensor, q: dist.TorchDistribution) -> Tensor:
        return q.log_prob(action(value, elements)) - q.log_prob(value)

    def at_once(value: Tensor, q: dist.TorchDistribution) -> Tensor:
        units = UnitDensities(group.finite, normals_of(q, action, (batch,)), sites_of(action, value))
        return log_density_gain(units, elements)

    monkeypatch.setattr(density_gain, "asks", lambda _: False)
    for found, expected in zip(gradients(at_once), gradients(as_defined), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spread", [0.5, 5.0, 200.0])
def test_scaling_in_logarithms_gives_the_same_matrix(spread: float) -> None:
    densities = spread * torch.randn(3, 2, 7, 7, dtype=torch.float64)
    densities = densities.log_softmax(-1).log_softmax(-2)
    matrix = scaled_in_logarithms(densities, 500)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 2, 7, dtype=torch.float64))
    if spread < 10:  # no entry is so small that it counts as lost
        torch.testing.assert_close(matrix, doubly_stochastic(densities, 500))
    many = scaled_in_logarithms(densities[0].float(), 2000)
    torch.testing.assert_close(many.sum(-2), torch.ones(2, 7), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["one layer", "two layers", "recurrent", "grouped convolution"])
def test_few_products_at_once_give_the_matrix_that_is_asked_about(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = GROUPS[name]()
    action = action_of(group)
    value = 50 + torch.randn(3, action.dim, dtype=torch.float64)
    q = dist.Normal(50 + torch.randn(action.dim).double(), torch.rand(action.dim).double() + 0.5).to_event(1)

    def densities() -> list[Tensor]:
        units = UnitDensities(group.finite, normals_of(q, action, (3,)), sites_of(action, value))
        return [units.densities(one, Placements()).total for one in units.sets]

    at_once = densities()
    monkeypatch.setattr(unit_densities, "FEW_PRODUCTS", {})
    for one, other in zip(at_once, densities(), strict=True):  # up to a constant for each place
        torch.testing.assert_close(one - one[..., :1], other - other[..., :1])


@pytest.mark.parametrize("undrawn", [0, 1, 3])
def test_few_rows_choose_without_replacement_one_after_the_other(undrawn: int) -> None:
    rows, rank = torch.rand(2, 3, 5, 6), torch.rand(2, 3, 5).argsort(-1)
    chosen = draw_rows(rows, rank, undrawn)
    assert all(len(set(own)) == 5 for own in chosen.flatten(0, 1).tolist())
    # Rows that want one column only get it, whatever their rank, unless an earlier one wants it, too.
    certain = torch.eye(6)[:5].expand(2, 3, 5, 6) + 1e-30
    assert torch.equal(draw_rows(certain, rank), torch.arange(5).expand(2, 3, 5))


def test_several_elements_move_one_value_as_each_does() -> None:
    value = torch.randn(1, 4, 3, 5)
    for dim, length in enumerate((4, 3, 5)):
        index = torch.rand(6, 1, length).argsort(-1)
        found = permute_axes(value, {dim: index}, 3)
        assert found.shape == (6, 1, 4, 3, 5)
        for k, own in itertools.product(range(6), range(1)):
            assert torch.equal(found[k, own], value[0].index_select(dim, index[k, own]))
