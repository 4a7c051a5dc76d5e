"""Symmetrised over permutations and signs: against explicit loops."""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_symmetric.distributions import ConstrainedAction, ExactOrbit, InfoNCE, Symmetrized
from pyro_symmetric.distributions.constrained import action_on_unconstrained
from pyro_symmetric.symmetry import PermutationGroup, SignGroup
from pyro_symmetric.symmetry.finite import FiniteGroup, SignedFlatAction, finite_part
from pyro_symmetric.symmetry.permutation import FlatAction, Permutation

AXES = {"loadings": (None, "factor"), "scores": ("factor", None)}
SHAPES = {"loadings": torch.Size([2, 3]), "scores": torch.Size([3, 2])}
GROUP = FiniteGroup(PermutationGroup.declare(AXES, SHAPES), SignGroup.declare(AXES, SHAPES))


def base() -> dist.TorchDistribution:
    return dist.Normal(torch.randn(12, dtype=torch.float64), torch.rand(12, dtype=torch.float64) + 0.3).to_event(1)


def looped(q: dist.TorchDistribution, w: torch.Tensor, permuted: bool = True) -> torch.Tensor:
    loadings, scores = w[:6].reshape(2, 3), w[6:].reshape(3, 2)
    orders = itertools.permutations(range(3)) if permuted else [(0, 1, 2)]
    terms = []
    for order in map(list, orders):
        for signs in itertools.product((1.0, -1.0), repeat=3):
            flip = torch.tensor(signs, dtype=torch.float64)
            moved = (loadings * flip)[:, order], (scores * flip[:, None])[order]
            terms.append(q.log_prob(torch.cat([part.reshape(-1) for part in moved])))
    return torch.logsumexp(torch.stack(terms), 0) - math.log(len(terms))


def test_exact_orbit_over_the_hyperoctahedral_group_equals_loops() -> None:
    q = base()
    w = q.sample((6,))
    exact = Symmetrized(q, GROUP.flat(["loadings", "scores"]), ExactOrbit()).log_prob(w)
    torch.testing.assert_close(exact, torch.stack([looped(q, one) for one in w]))


def test_exact_orbit_over_signs_alone_equals_loops() -> None:
    q = base()
    w = q.sample((6,))
    exact = Symmetrized(q, finite_part(GROUP.signs).flat(["loadings", "scores"]), ExactOrbit()).log_prob(w)
    torch.testing.assert_close(exact, torch.stack([looped(q, one, permuted=False) for one in w]))


def test_a_density_over_signs_and_permutations_is_constant_on_orbits() -> None:
    q, flat = base(), GROUP.flat(["loadings", "scores"])
    symmetrized = Symmetrized(q, flat, ExactOrbit())
    w = q.sample((9,))
    torch.testing.assert_close(symmetrized.log_prob(flat(w, GROUP.sample((9,)))), symmetrized.log_prob(w))


@pytest.mark.stochastic
def test_infonce_over_signs_lies_above_the_exact_value() -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6. The gap itself is many of them."""
    q, flat = base(), GROUP.flat(["loadings", "scores"])
    w = q.sample((4000,))
    gap = Symmetrized(q, flat, InfoNCE(4)).log_prob(w) - Symmetrized(q, flat, ExactOrbit()).log_prob(w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    assert float(gap.mean()) < math.log(GROUP.order())


def test_signs_beside_constrained_sites() -> None:
    """Factors with positive scales and weights on a simplex, exchanged together; only the loadings are flipped."""
    shapes = {"loadings": torch.Size([2, 3]), "scales": torch.Size([3]), "weights": torch.Size([3])}
    permutations = PermutationGroup.declare({"loadings": (None, "f"), "scales": ("f",), "weights": ("f",)}, shapes)
    group = FiniteGroup(permutations, SignGroup.declare({"loadings": (None, "f")}, shapes))
    supports = {"loadings": constraints.real, "scales": constraints.positive, "weights": constraints.simplex}
    action = action_on_unconstrained(group, supports, shapes)
    assert isinstance(action, ConstrainedAction)
    u = torch.randn(5, 6 + 3 + 2, dtype=torch.float64)
    g = group.sample((5,))
    expected = g(action.constrain(u))
    for site, value in action.constrain(action(u, g)).items():
        torch.testing.assert_close(value, expected[site])
    flat = action_on_unconstrained(
        FiniteGroup(
            PermutationGroup.declare({"loadings": (None, "f"), "scales": ("f",)}, shapes),
            SignGroup.declare({"loadings": (None, "f")}, shapes),
        ),
        supports,
        shapes,
    )
    assert isinstance(flat, SignedFlatAction)


@pytest.mark.parametrize("support", [constraints.positive, constraints.unit_interval, constraints.interval(-1.0, 1.0)])
def test_signs_at_a_site_that_is_not_real_are_refused_by_name(support: constraints.Constraint) -> None:
    shapes = {"scales": torch.Size([3])}
    signs = finite_part(SignGroup.declare({"scales": ("unit",)}, shapes))
    with pytest.raises(ValueError, match=r"\['unit'\] flip the site 'scales'.*every real number"):
        action_on_unconstrained(signs, {"scales": support}, shapes)


def test_topics_each_on_a_simplex_of_its_own_are_moved_by_one_gather() -> None:
    shapes = {"topics": torch.Size([3, 4])}
    group = PermutationGroup.declare({"topics": ("topic", None)}, shapes)
    action = action_on_unconstrained(group, {"topics": constraints.simplex}, shapes)
    assert isinstance(action, FlatAction)
    u, g = torch.randn(5, 9, dtype=torch.float64), group.sample((5,))
    to_simplex = torch.distributions.biject_to(constraints.simplex)
    moved = to_simplex(action(u, Permutation(action.group, g.images)).reshape(5, 3, 3))
    torch.testing.assert_close(moved, g({"topics": to_simplex(u.reshape(5, 3, 3))})["topics"])
    words = PermutationGroup.declare({"topics": (None, "word")}, shapes)
    assert isinstance(action_on_unconstrained(words, {"topics": constraints.simplex}, shapes), ConstrainedAction)
