"""Weights by site: batch shapes, kind refusals; flat vectors and their
log-determinants, beside autograd's Jacobian.
"""

import pytest
import torch
from torch.distributions import biject_to, constraints

from pyro_symmetric import weights as w

SHAPES = {"a": torch.Size((2, 3)), "b": torch.Size((4,)), "scale": torch.Size(())}


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_batch_shape_is_what_precedes_every_site_shape(batch):
    weights = {site: torch.zeros((*batch, *shape)) for site, shape in SHAPES.items()}
    assert w.batch_shape(weights, SHAPES) == batch
    assert w.batch_shape({**weights, "other": torch.zeros(9)}, SHAPES) == batch
    assert w.batch_shape({"b": weights["b"]}, SHAPES) == batch


def test_weights_of_the_wrong_shape_are_refused_by_name():
    for weights, words in (
        ({"a": torch.zeros(3, 2)}, r"'a'\] has shape \(3, 2\).*\(2, 3\)"),
        (
            {"a": torch.zeros(5, 2, 3), "b": torch.zeros(6, 4)},
            r"one batch shape.*'b': \(6,\)",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            w.batch_shape(weights, SHAPES)


# flat vectors -------------------------------------------------------------------------

SUPPORTS = {
    "rows": constraints.independent(constraints.simplex, 1),
    "scale": constraints.positive,
    "share": constraints.unit_interval,
}
SITES = {"real": (2, 2), "rows": (2, 3), "scale": (2,), "share": ()}
LAYOUT = w.Layout(
    SITES, {site: biject_to(support) for site, support in SUPPORTS.items()}
)


def free_coordinates(z):
    """As many coordinates of the constrained values as there are free ones."""
    weights = LAYOUT.constrain(z)
    parts = (
        weights["real"],
        weights["rows"][:, :-1],
        weights["scale"],
        weights["share"],
    )
    return torch.cat([part.flatten() for part in parts])


def test_the_log_determinant_is_that_of_the_jacobian():
    assert LAYOUT.dim == 4 + 4 + 2 + 1
    z = torch.randn(3, LAYOUT.dim, dtype=torch.float64)
    jacobians = torch.stack(
        [torch.autograd.functional.jacobian(free_coordinates, one) for one in z]
    )
    truth = torch.linalg.slogdet(jacobians)[1]
    assert torch.allclose(LAYOUT.constrain_with_log_det(z)[1], truth)
    assert torch.allclose(
        sum(LAYOUT.constrain_with_log_det(z, [site])[1] for site in SUPPORTS), truth
    )


def test_vectors_and_weights_come_back_in_any_order():
    z = torch.randn(5, 3, LAYOUT.dim, dtype=torch.float64)
    weights = LAYOUT.constrain(z)
    assert {site: value.shape for site, value in weights.items()} == {
        s: (5, 3, *shape) for s, shape in SITES.items()
    }
    assert torch.allclose(LAYOUT.unconstrain(weights), z)
    assert torch.equal(LAYOUT.flatten(LAYOUT.unflatten(z)), z)
    turned = dict(reversed(SITES.items()))
    vector = torch.cat([weights[site].reshape(5, 3, -1) for site in turned], -1)
    assert all(
        torch.equal(value, weights[site])
        for site, value in w.unflatten(vector, turned).items()
    )
