"""Suggestions are exact where that is cheap, a bound elsewhere, and run."""

import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from pyro_symmetric.distributions import ExactOrbit, SinkhornImportance
from pyro_symmetric.groups import Action, Group
from pyro_symmetric.guides import suggest_estimator


def layer(n: int) -> Group:
    return Group.declare(
        {"in": ("unit", None), "out": (None, "unit")}, {"in": torch.Size([n, 3]), "out": torch.Size([1, n])}
    )


@pytest.mark.parametrize(
    ("n", "base", "training", "kind"),
    [
        (4, AutoMultivariateNormal, True, ExactOrbit),
        (5, AutoMultivariateNormal, True, SinkhornImportance),
        (5, AutoMultivariateNormal, False, ExactOrbit),
        (5, AutoDiagonalNormal, True, ExactOrbit),
        (9, AutoDiagonalNormal, True, ExactOrbit),
        (9, AutoMultivariateNormal, True, SinkhornImportance),
        (12, AutoDiagonalNormal, True, SinkhornImportance),
        (12, AutoDiagonalNormal, False, ExactOrbit),
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


def test_signs_are_counted() -> None:
    signs = Group.declare({"in": ("unit", None)}, {"in": torch.Size([4, 3])}, moves="flip")
    assert isinstance(suggest_estimator(AutoDiagonalNormal, signs).estimator, ExactOrbit)
    assert "unit" in suggest_estimator(AutoDiagonalNormal, signs).reason
