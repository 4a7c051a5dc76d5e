"""Gaussian guides pushed forward by any element: exact moments, the same functions,
guides of their own.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import UnitBlocks
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.guides import (
    push_forward,
)
from pyro_symmetric.models import BayesianModel

FAMILIES = [
    AutoNormal,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
]
KINDS = ["permutations", "scalings", "signs", "shifts", "finite", "all"]


def network() -> nn.Sequential:
    """A classifier with all four symmetries: a rectified layer, an odd one, and a
    softmax.
    """
    return nn.Sequential(
        nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)
    )


@cache
def symmetry_of_network() -> Symmetry:
    """Once for all tests: tracing takes longer than most of them."""
    symmetry = find_symmetry(network(), torch.randn(20, 2), logits=True)
    assert symmetry.permutations.factors
    assert symmetry.scalings.factors
    assert symmetry.signs.factors
    assert symmetry.shifts.units
    return symmetry


def problem() -> tuple[BayesianModel, Symmetry, Tensor, Tensor]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(20, 2)
    return (
        BayesianModel(network(), 1.0, "categorical"),
        symmetry_of_network(),
        x,
        (x.sum(-1) > 0).long(),
    )


def steps(model: Any, guide: Any, *data: Tensor, number: int = 15) -> list[float]:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())
    return [svi.step(*data) for _ in range(number)]


def trained(kind: Any, model: BayesianModel, x: Tensor, y: Tensor) -> Any:
    guide = kind(model, init_scale=0.3)
    steps(model, guide, x, y)
    return guide


def one_of(symmetry: Symmetry, kind: str) -> Any:
    if kind == "finite":  # what symmetrised guides average over
        return symmetry.finite.sample()
    return symmetry.sample() if kind == "all" else getattr(symmetry, kind).sample()


def moments(guide: Any) -> tuple[Tensor, Tensor]:
    """Mean and covariance over flat vectors, by the guide's own distribution."""
    if isinstance(guide, AutoNormal):
        pairs = [
            guide._get_loc_and_scale(name)
            for name, _ in guide.prototype_trace.iter_stochastic_nodes()
        ]
        loc, scale = (
            torch.cat([value.detach().reshape(-1) for value in column])
            for column in zip(*pairs, strict=True)
        )
        return loc, scale.square().diag()
    with torch.no_grad():
        posterior = guide.get_posterior()
        if isinstance(posterior, dist.Independent):
            return posterior.mean.clone(), posterior.variance.diag()
        if isinstance(posterior, UnitBlocks):
            (where,), (tril,) = posterior.positions, posterior.scale_trils
            assert torch.equal(where[0], torch.arange(len(posterior.loc)))
            return posterior.loc.clone(), tril[0] @ tril[0].mT
        return posterior.mean.clone(), posterior.covariance_matrix.clone()


def explicit_action(
    element: Any, shapes: dict[str, torch.Size]
) -> tuple[Tensor, Tensor]:
    """``A`` and ``b`` of the action ``A w + b``, from what it makes of zero and of all
    unit vectors.
    """
    dim = sum(shape.numel() for shape in shapes.values())
    points = torch.cat([torch.zeros(1, dim), torch.eye(dim)])
    pieces = points.split([shape.numel() for shape in shapes.values()], -1)
    weights = {
        s: piece.reshape(-1, *shape)
        for (s, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
    moved = torch.cat(
        [value.reshape(dim + 1, -1) for value in element(weights).values()], -1
    )
    return (moved[1:] - moved[0]).mT, moved[0]


@pytest.mark.parametrize("element_kind", KINDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_pushed_covariance_is_that_of_the_explicit_matrix_of_the_action(
    kind: type, element_kind: str
) -> None:
    model, symmetry, x, y = problem()
    guide = trained(kind, model, x, y)
    element = one_of(symmetry, element_kind)
    pushed = push_forward(guide, element)
    (loc, covariance), (matrix, constant) = (
        moments(guide),
        explicit_action(element, model.site_shapes),
    )
    new_loc, new_covariance = moments(pushed)
    torch.testing.assert_close(new_loc, matrix @ loc + constant)
    torch.testing.assert_close(new_covariance, matrix @ covariance @ matrix.mT)
    assert not torch.allclose(new_loc, loc)


def test_in_single_precision_small_deviations_beside_large_means_keep_their_digits() -> (
    None
):
    """g(m + s) - g(m) would lose all digits of s at 1e-8 of m; the derivative of the
    action loses none.
    """
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    model = BayesianModel(net, 1.0, "gaussian")
    guide = AutoDiagonalNormal(model)
    guide(torch.zeros(2, 1), torch.zeros(2))
    with torch.no_grad():
        guide.loc.fill_(1e4)
    guide.scale = torch.full_like(guide.loc, 1e-4)
    symmetry = find_symmetry(net, torch.zeros(2, 1))
    twice = {
        name: torch.full((n,), math.log(2.0))
        for name, n in symmetry.scalings.factors.items()
    }
    scaling = symmetry.scalings.element(log_scales=twice)
    pushed = push_forward(guide, scaling)
    torch.testing.assert_close(
        pushed.scale / guide.scale, pushed.loc / guide.loc, rtol=1e-5, atol=0
    )
    assert set((pushed.scale / guide.scale).round(decimals=3).tolist()) == {
        0.5,
        1.0,
        2.0,
    }


def test_permutations_move_positive_sites_and_scalings_refuse_them() -> None:
    def model() -> None:
        pyro.sample("scales", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))

    group = Group.declare({"scales": ("k",)}, {"scales": torch.Size([3])})
    guide = AutoLowRankMultivariateNormal(model)
    guide()
    pushed = push_forward(guide, group.element({"k": [2, 0, 1]}))
    torch.testing.assert_close(
        pushed.median()["scales"], guide.median()["scales"][[2, 0, 1]]
    )
    torch.testing.assert_close(
        moments(pushed)[1], moments(guide)[1][[2, 0, 1]][:, [2, 0, 1]]
    )
    units = Units(
        "k",
        3,
        (Axis("scales", 0, torch.arange(3)[None], 1),),
        moves=frozenset({"scale"}),
    )
    with pytest.raises(ValueError, match=r"\['k'\].*'scales'.*real number"):
        push_forward(guide, Group([units], {"scales": torch.Size([3])}).sample())
    units = Units(
        "k",
        1,
        (Axis("scales", 0, torch.arange(3)[:, None], 0),),
        moves=frozenset({"shift"}),
    )
    with pytest.raises(ValueError, match=r"\['k'\].*'scales'.*real number"):
        push_forward(guide, Group([units], {"scales": torch.Size([3])}).sample())
