"""The action on flat vectors against that on weights, and its log-determinant against
autograd.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributions import biject_to, constraints
from torch.func import jacrev

from pyro_symmetric.groups import Action, Group

from .cases import GROUPS, close, units, weights_of

BATCHES = [((), (6,)), ((6,), ()), ((4, 1), (3,)), ((2,), (2,))]


def by_jacobian(action: Action, vector, element):
    """The log-determinant of the action's Jacobian at one vector, by autograd."""
    return torch.linalg.slogdet(jacrev(lambda u: action(u, element))(vector)).logabsdet


@pytest.mark.parametrize("name", [name for name in GROUPS])
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_the_action_on_vectors_equals_the_action_on_weights(name, batches):
    group = GROUPS[name]()
    action = Action(group, list(reversed(group.site_shapes)))
    w, g = weights_of(group, *batches[0]), group.sample(batches[1], dtype=torch.float64)
    vector = action.layout.flatten(w)
    moved = action(vector, g)
    assert moved.shape == (*torch.broadcast_shapes(*batches), action.dim)
    assert close(action.layout.unflatten(moved), g(w))
    assert not action.nonlinear_sites


@pytest.mark.parametrize("name", [name for name in GROUPS])
def test_the_log_determinant_is_that_of_the_jacobian(name):
    group = GROUPS[name]()
    action = Action(group, list(group.site_shapes))
    vector, g = (
        action.layout.flatten(weights_of(group)),
        group.sample((3,), dtype=torch.float64),
    )
    found = action.log_abs_det(vector, g)
    assert found.shape == (3,)
    for k in range(3):
        torch.testing.assert_close(
            found[k], by_jacobian(action, vector, g.select(k)), rtol=1e-9, atol=1e-9
        )
    if not group.names("scale"):
        assert torch.equal(found, torch.zeros(3, dtype=torch.float64))
    else:
        assert bool((found.abs() > 1e-3).all())


TOPICS = {"topics": (3, 4), "weights": (3,), "rates": (3,), "mean": (3, 2)}
SUPPORTS = {
    "topics": constraints.independent(constraints.simplex, 1),
    "weights": constraints.simplex,
    "rates": constraints.positive,
    "mean": constraints.independent(constraints.real, 2),
}


def mixture(moves: str | tuple[str, ...] = "permute") -> Group:
    """Topics: weights on a simplex whose entries are permuted, simplices that are
    permuted as wholes, rates.
    """
    axes = {
        "topics": ("topic", None),
        "weights": ("topic",),
        "rates": ("topic",),
        "mean": ("topic", None),
    }
    return Group.declare(axes, TOPICS, moves=moves, even=["topics", "weights", "rates"])


@pytest.mark.parametrize("moves", ["permute", "flip", ("permute", "flip")])
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_unconstrained_coordinates_move_as_their_values_do(moves, batches):
    group = mixture(moves)
    action = Action(group, SUPPORTS)
    assert action.dim == 3 * 3 + 2 + 3 + 6
    assert action.layout.unconstrained_shapes["topics"] == (3, 3)
    u, g = (
        torch.randn(*batches[0], action.dim, dtype=torch.float64),
        group.sample(batches[1], dtype=torch.float64),
    )
    moved = action(u, g)
    assert moved.shape == (*torch.broadcast_shapes(*batches), action.dim)
    assert close(action.layout.constrain(moved), g(action.layout.constrain(u)))
    assert action.nonlinear_sites == (("weights",) if "permute" in group.moves else ())
    back = action(moved, g.inverse())
    torch.testing.assert_close(back, u.expand_as(back), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "supports",
    [
        SUPPORTS,
        {**SUPPORTS, "topics": constraints.simplex},
        {**SUPPORTS, "rates": constraints.interval(0.0, 2.0)},
        {**SUPPORTS, "rates": constraints.greater_than(torch.tensor(0.5))},
        {**SUPPORTS, "weights": constraints.positive},
    ],
)
def test_the_log_determinant_on_constrained_sites_is_that_of_the_jacobian(supports):
    group = mixture(("permute", "flip"))
    action = Action(group, supports)
    u, g = (
        torch.randn(action.dim, dtype=torch.float64),
        group.sample((4,), dtype=torch.float64),
    )
    found = action.log_abs_det(u, g)
    for k in range(4):
        torch.testing.assert_close(
            found[k], by_jacobian(action, u, g.select(k)), rtol=1e-8, atol=1e-8
        )
    assert close(action.layout.constrain(action(u, g)), g(action.layout.constrain(u)))


def test_gradients_pass_through_the_action():
    group = mixture(("permute", "flip"))
    action, g = Action(group, SUPPORTS), group.sample()
    u = torch.randn(action.dim, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: action(value, g), (u,))


def test_flips_of_sites_that_are_not_real_are_refused_and_those_of_even_sites_are_not():
    one = units("u", 3, [("w", 0, 1), ("v", 0, 0)], {"permute", "flip"})
    group = Group([one], {"w": (3,), "v": (3,)})
    Action(group, {"w": constraints.real, "v": constraints.positive})
    with pytest.raises(ValueError, match="'w'"):
        Action(group, {"w": constraints.positive, "v": constraints.positive})


def test_supports_that_are_repeated_are_those_of_their_entries() -> None:
    """One bound for each entry is one bound if all are equal; rows on a simplex are,
    however they are declared.
    """
    group = Group.declare(
        {"T": ("k", "k"), "a": ("k",)}, {"T": torch.Size([3, 3]), "a": torch.Size([3])}
    )
    rows = torch.distributions.Dirichlet(torch.ones(3, 3))
    one, ends = torch.distributions.Uniform(0.0, 1.0), torch.arange(1.0, 4.0)
    alike, others = (
        torch.distributions.Uniform(torch.zeros(3), end)
        for end in (torch.ones(3), ends)
    )
    for on_rows in (rows.support, constraints.independent(rows.support, 1)):
        for bounds, curved in ((one, ()), (alike, ()), (others, ("a",))):
            for support in (bounds.support, constraints.independent(bounds.support, 1)):
                action = Action(group, {"T": on_rows, "a": support})
                assert action.simplex_sites == ("T",)
                assert action.nonlinear_sites == ("T", *curved)
    u = torch.randn(5, 3, dtype=torch.float64)
    entries = Group.declare({"a": ("k",)}, {"a": torch.Size([3])})
    action, bijection = Action(entries, {"a": alike.support}), biject_to(alike.support)
    element = entries.element({"k": torch.tensor([2, 0, 1])})
    torch.testing.assert_close(
        bijection(action(u, element)), element({"a": bijection(u)})["a"]
    )


def test_the_log_determinant_between_different_bounds_is_that_of_the_jacobian():
    group = Group.declare({"r": ("k",)}, {"r": (3,)})
    bounds = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    action = Action(group, {"r": constraints.interval(torch.zeros(3), bounds)})
    vector = torch.tensor([-2.0, -1.5, -3.0], dtype=torch.float64)  # all below 1
    g = group.element({"k": torch.tensor([1, 2, 0])})
    expected = by_jacobian(action, vector, g)
    assert float(expected.abs()) > 0.01
    torch.testing.assert_close(action.log_abs_det(vector, g), expected)
