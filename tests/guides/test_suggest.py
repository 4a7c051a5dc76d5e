"""Suggestions are exact where that is cheap, a bound elsewhere, and run."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)

from pyro_symmetric.distributions import ExactOrbit, SinkhornImportance
from pyro_symmetric.groups import Action, Group
from pyro_symmetric.guides import AutoModes, AutoSymmetrized, AutoUnitBlocks, suggest_estimator
from pyro_symmetric.guides.layout import layout_of


def layer(n: int) -> Group:
    return Group.declare(
        {"in": ("unit", None), "out": (None, "unit")}, {"in": torch.Size([n, 3]), "out": torch.Size([1, n])}
    )


@pytest.mark.parametrize(
    ("n", "base", "training", "kind"),
    [
        (4, AutoMultivariateNormal, True, ExactOrbit),
        (6, AutoMultivariateNormal, True, ExactOrbit),
        (7, AutoMultivariateNormal, True, SinkhornImportance),
        (6, AutoLowRankMultivariateNormal, True, ExactOrbit),
        (6, AutoIAFNormal, True, ExactOrbit),
        (7, AutoIAFNormal, True, SinkhornImportance),
        (6, AutoIAFNormal, False, ExactOrbit),
        (5, AutoDiagonalNormal, True, ExactOrbit),
        (9, AutoDiagonalNormal, True, ExactOrbit),
        (9, AutoMultivariateNormal, True, SinkhornImportance),
        (12, AutoDiagonalNormal, True, ExactOrbit),
        (13, AutoDiagonalNormal, True, SinkhornImportance),
        (13, AutoDiagonalNormal, False, ExactOrbit),
        (200, AutoDiagonalNormal, False, SinkhornImportance),
    ],
)
def test_the_exact_sum_is_suggested_where_it_is_cheap(n: int, base: type, training: bool, kind: type) -> None:
    estimator, reason = suggest_estimator(base, layer(n), training=training)
    assert isinstance(estimator, kind)
    assert ("exact" in reason) == (kind is ExactOrbit)
    if n < 20:
        action = Action(layer(n), ["in", "out"])
        q = torch.distributions.Independent(torch.distributions.Normal(torch.randn(action.dim), 1.0), 1)
        assert torch.isfinite(estimator.log_prob(q, action, q.sample()))


def test_reports_get_more_proposals_than_training() -> None:
    training, report = (suggest_estimator(AutoDiagonalNormal, layer(64), training=t).estimator for t in (True, False))
    assert training == SinkhornImportance(4)
    assert report == SinkhornImportance(16)


def test_many_numbers_make_every_element_of_a_flow_dear() -> None:
    """120 elements of 1,000 numbers each cost more than four matchings; 24 don't."""
    wide = {n: Group.declare({"in": ("unit", None)}, {"in": torch.Size([n, 200])}) for n in (4, 5)}
    assert suggest_estimator(AutoIAFNormal, wide[4]).estimator == ExactOrbit()
    assert suggest_estimator(AutoIAFNormal, wide[5]).estimator == SinkhornImportance(16)


def test_a_mixture_is_what_the_hardest_of_its_modes_is() -> None:
    def model() -> None:
        for site, shape in layer(9).site_shapes.items():
            pyro.sample(site, dist.Normal(torch.zeros(shape), 1.0).to_event(2))

    fits = [AutoGuide(model) for AutoGuide in (AutoDiagonalNormal, AutoMultivariateNormal)]
    for fit in fits:
        fit()
    assert suggest_estimator(AutoModes(model, 3), layer(9)).estimator == ExactOrbit()
    assert suggest_estimator(AutoModes.from_guides(fits[:1]), layer(9)).estimator == ExactOrbit()
    assert suggest_estimator(AutoModes.from_guides(fits), layer(9)).estimator == SinkhornImportance(16)


def test_signs_are_counted() -> None:
    signs = Group.declare({"in": ("unit", None)}, {"in": torch.Size([4, 3])}, moves="flip")
    assert isinstance(suggest_estimator(AutoDiagonalNormal, signs).estimator, ExactOrbit)
    assert "unit" in suggest_estimator(AutoDiagonalNormal, signs).reason


def test_simplex_sites_are_no_sum_of_independent_units_once_they_are_known() -> None:
    """A permutation mixes the unconstrained coordinates of a simplex: no permanent; 5,040 elements are too many."""
    seven = torch.Size([7])
    group = Group.declare({"weights": ("k",), "locs": ("k",)}, {"weights": seven, "locs": seven})

    def model() -> None:
        pyro.sample("weights", dist.Dirichlet(torch.ones(7)))
        pyro.sample("locs", dist.Normal(0.0, 1.0).expand([7]).to_event(1))

    assert suggest_estimator(AutoDiagonalNormal, group).estimator == ExactOrbit()
    for base in (AutoDiagonalNormal, AutoMultivariateNormal, AutoUnitBlocks):
        guide = AutoSymmetrized(model, group, base=base).setup()
        assert guide.estimator == SinkhornImportance(16)
        assert suggest_estimator(guide, group).estimator == SinkhornImportance(16)
        assert AutoSymmetrized(model, group, base=base, estimator=ExactOrbit()).setup().estimator == ExactOrbit()
    assert layout_of(guide).action(group).simplex_sites == ("weights",)
