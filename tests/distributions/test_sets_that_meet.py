"""Sets of units that meet in one array, and move nothing else: matched, with signs.

Units are far apart, so that the symmetrised density is that of the base over the order
of the group.
"""

import pyro.distributions as dist
import pytest
import torch

from pyro_symmetric.distributions import ExactOrbit, SinkhornImportance
from pyro_symmetric.groups import Action, Group

BOTH = ("permute", "flip")
CASES = {
    "a further axis": ({"w": (("r", "c", None), (6, 5, 3))}, ("permute",)),
    "a further axis first": ({"w": ((None, "r", "c"), (2, 6, 5))}, ("permute",)),
    "three sets": ({"w": (("r", "c", "k"), (6, 5, 4))}, ("permute",)),
    "wide": ({"w": (("r", "c"), (6, 300))}, ("permute",)),
    "wide both ways": ({"w": (("r", "c"), (258, 257))}, ("permute",)),
    "signs": ({"w": (("r", "c"), (6, 5))}, BOTH),
    "signs and a further axis": ({"w": ((None, "r", "c"), (2, 6, 5))}, BOTH),
    "signs of three sets": ({"w": (("r", "c", "k"), (4, 3, 3))}, BOTH),
    "signs alone": ({"w": (("r", "c"), (6, 5))}, ("flip",)),
    "signs in a chain": (
        {"w": (("r", "c"), (6, 5)), "v": (("c", "k"), (5, 7))},
        BOTH,
    ),
    "signs in a ring": (
        {
            "w": (("r", "c"), (6, 5)),
            "v": (("c", "k"), (5, 4)),
            "u": (("k", "r"), (4, 6)),
        },
        BOTH,
    ),
    "signs that a vector tells at the end": (
        {"w": (("r", "c"), (6, 5)), "v": (("c", "k"), (5, 4)), "u": (("k",), (4,))},
        BOTH,
    ),
}


@pytest.mark.stochastic
@pytest.mark.parametrize("name", CASES)
def test_the_density_at_any_copy_is_that_of_the_base_over_the_order(name: str) -> None:
    """Within 2 nats of up to 2,351; errors of a wrong matching are hundreds of nats.
    None of three draws fails at any of 20 seeds.
    """
    sites, moves = CASES[name]
    shapes = {site: torch.Size(shape) for site, (_, shape) in sites.items()}
    group = Group.declare({s: axes for s, (axes, _) in sites.items()}, shapes, moves)
    action = Action(group, list(shapes))
    size = sum(shape.numel() for shape in shapes.values())
    spaced = 5.0 + 5.0 * torch.randperm(size, dtype=torch.float64)
    loc = torch.where(torch.rand(size) < 0.5, -spaced, spaced)
    base = dist.Normal(loc, 1.0).to_event(1)
    w = base.sample((3,))
    exact = base.log_prob(w) - group.log_order()
    copies = action(w, group.sample((3,)))
    estimator = SinkhornImportance(4)
    found = estimator.log_prob_elsewhere(base, action, copies)
    torch.testing.assert_close(found, exact, rtol=0, atol=2.0)
    at_draws = estimator.log_prob(base, action, w)
    torch.testing.assert_close(at_draws, exact, rtol=0, atol=2.0)


def test_gradients_are_those_of_the_sum_over_all_elements() -> None:
    shapes = {"w": torch.Size([3, 2])}
    group = Group.declare({"w": ("r", "c")}, shapes, BOTH)
    action = Action(group, ["w"])
    loc = torch.tensor([4.0, -9.0, 14.0, 19.0, -24.0, 29.0], dtype=torch.float64)
    loc.requires_grad_()
    base = dist.Normal(loc, 1.0).to_event(1)
    w = action(base.sample((4,)), group.sample((4,)))
    gradients = []
    for estimator in (ExactOrbit(), SinkhornImportance(4)):
        log_prob = estimator.log_prob_elsewhere(base, action, w)
        gradients += torch.autograd.grad(log_prob.sum(), loc)
    torch.testing.assert_close(*gradients)
