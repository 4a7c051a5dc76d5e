"""Flat vectors and their log-determinants, beside autograd's Jacobian."""

import torch
from torch.distributions import biject_to, constraints

from pyro_symmetric.layout import Layout

SUPPORTS = {
    "rows": constraints.independent(constraints.simplex, 1),
    "scale": constraints.positive,
    "share": constraints.unit_interval,
}
SHAPES = {"real": (2, 2), "rows": (2, 3), "scale": (2,), "share": ()}
LAYOUT = Layout(SHAPES, {site: biject_to(support) for site, support in SUPPORTS.items()})


def free_coordinates(z):
    """As many coordinates of the constrained values as there are free ones."""
    weights = LAYOUT.constrain(z)
    parts = (weights["real"], weights["rows"][:, :-1], weights["scale"], weights["share"])
    return torch.cat([part.flatten() for part in parts])


def test_the_log_determinant_is_that_of_the_jacobian():
    assert LAYOUT.dim == 4 + 4 + 2 + 1
    z = torch.randn(3, LAYOUT.dim, dtype=torch.float64)
    jacobians = torch.stack([torch.autograd.functional.jacobian(free_coordinates, one) for one in z])
    truth = torch.linalg.slogdet(jacobians)[1]
    assert torch.allclose(LAYOUT.constrain_with_log_det(z)[1], truth)
    assert torch.allclose(sum(LAYOUT.constrain_with_log_det(z, [site])[1] for site in SUPPORTS), truth)


def test_vectors_and_weights_come_back():
    z = torch.randn(5, 3, LAYOUT.dim, dtype=torch.float64)
    weights = LAYOUT.constrain(z)
    assert {site: value.shape for site, value in weights.items()} == {s: (5, 3, *shape) for s, shape in SHAPES.items()}
    assert torch.allclose(LAYOUT.unconstrain(weights), z)
    assert torch.equal(LAYOUT.flatten(LAYOUT.unflatten(z)), z)
