"""Symmetrised over permutations and signs: against explicit loops."""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_symmetric.distributions import ExactOrbit, SinkhornImportance, Symmetrized
from pyro_symmetric.groups import Action, Group

AXES = {"loadings": (None, "factor"), "scores": ("factor", None)}
SHAPES = {"loadings": torch.Size([2, 3]), "scores": torch.Size([3, 2])}
GROUP = Group.declare(AXES, SHAPES, moves=("permute", "flip"))


def base() -> dist.TorchDistribution:
    return dist.Normal(
        torch.randn(12, dtype=torch.float64), torch.rand(12, dtype=torch.float64) + 0.3
    ).to_event(1)


def looped(
    q: dist.TorchDistribution, w: torch.Tensor, permuted: bool = True
) -> torch.Tensor:
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
    exact = Symmetrized(
        q, Action(GROUP, ["loadings", "scores"]), ExactOrbit()
    ).log_prob(w)
    torch.testing.assert_close(exact, torch.stack([looped(q, one) for one in w]))


@pytest.mark.stochastic
def test_a_density_over_constrained_sites_with_signs_is_met_from_above() -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    shapes = {"loadings": torch.Size([2, 3]), "weights": torch.Size([3])}
    axes = {"loadings": (None, "f"), "weights": ("f",)}
    group = Group.declare(axes, shapes, moves=("permute", "flip"), even=["weights"])
    action = Action(
        group, {"loadings": constraints.real, "weights": constraints.simplex}
    )
    q = dist.Normal(
        torch.randn(8, dtype=torch.float64), torch.rand(8, dtype=torch.float64) + 0.3
    ).to_event(1)
    w = q.sample((1000,))
    exact = ExactOrbit().log_prob(q, action, w)
    gap = SinkhornImportance(16).log_prob(q, action, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    assert float(gap.mean()) < 0.2 * float((q.log_prob(w) - exact).mean())


def test_topics_each_on_a_simplex_of_its_own_are_moved_as_they_lie() -> None:
    shapes = {"topics": torch.Size([3, 4])}
    group = Group.declare({"topics": ("topic", None)}, shapes)
    action = Action(group, {"topics": constraints.simplex})
    assert not action.nonlinear_sites
    u, g = torch.randn(5, 9, dtype=torch.float64), group.sample((5,))
    to_simplex = torch.distributions.biject_to(constraints.simplex)
    moved = to_simplex(action(u, g).reshape(5, 3, 3))
    torch.testing.assert_close(
        moved, g({"topics": to_simplex(u.reshape(5, 3, 3))})["topics"]
    )
    q = dist.Normal(torch.randn(9, dtype=torch.float64), 1.0).to_event(1)
    draws = q.sample((200,))
    found = SinkhornImportance(8).log_prob(q, action, draws)
    torch.testing.assert_close(found, ExactOrbit().log_prob(q, action, draws))
    words = Group.declare({"topics": (None, "word")}, shapes)
    assert Action(words, {"topics": constraints.simplex}).nonlinear_sites
