"""Draws of labelled things come into one frame in which every label has its own mean
and deviation.

The frame found is the planted one but for a few draws, with tolerances of 9 standard
errors and more: a test fails for fewer than 1 of 100 seeds, in each of which the search
would have to miss that frame.
"""

import math
from itertools import product

import pytest
import torch
from torch.distributions import Dirichlet, Normal

from pyro_symmetric import Group
from pyro_symmetric.alignment import align_many
from pyro_symmetric.canonical.forms import uncertain_share
from pyro_symmetric.posterior.posterior import Posterior

SHAPES = {
    "mu": torch.Size((4, 2)),
    "scale": torch.Size((4, 2, 2)),
    "weights": torch.Size((4,)),
}
AXES = {"mu": ("k", None), "scale": ("k", None, None), "weights": ("k",)}
MIXTURE = Group.declare(AXES, SHAPES)
MU = torch.tensor([[0.0, 0.0], [2.5, 0.5], [0.3, 2.8], [3.0, 3.0]])
LOADINGS = torch.tensor(
    [
        [0.9, 0.8, 0.7, 0, 0, 0.3],
        [0, 0.2, 0.9, 0.8, 0.1, 0],
        [0.5, 0, -0.2, 0.1, 0.9, 0.8],
    ]
)
FACTORS = {"loadings": ("factor", None)}
FACTOR_SHAPES = {"loadings": LOADINGS.shape, "noise": torch.Size((6,))}
SIGNED = Group.declare(FACTORS, FACTOR_SHAPES, moves=("permute", "flip"))


def mixture(*batch, unit=1.0):
    """Draws around four clusters in two dimensions, no coordinate of which tells them
    apart: no label is moved yet.

    :param unit: of the scales: in other units they are other numbers.
    """
    spread = torch.tensor([0.45, 0.3, 0.5, 0.35])[:, None]
    scales = (
        torch.tensor([0.5, 0.7, 0.6, 0.9])[:, None]
        * (0.15 * torch.randn(*batch, 4, 2)).exp()
    )
    scales = scales.diag_embed()  # the zeros beside the diagonal never vary
    weights = Dirichlet(torch.tensor([20.0, 40.0, 60.0, 80.0])).sample(batch)
    return {
        "mu": MU + spread * torch.randn(*batch, 4, 2),
        "scale": unit * scales,
        "weights": weights,
    }


def factor_analysis(*batch):
    """Draws around three factors, each known to 0.1."""
    return {
        "loadings": LOADINGS + 0.1 * torch.randn(*batch, *LOADINGS.shape),
        "noise": (0.1 * torch.randn(*batch, 6)).exp(),
    }


def flat(posterior, site):
    return posterior.samples[site].flatten(0, 1)


@pytest.mark.stochastic
@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_every_component_of_a_mixture_has_its_own_mean_and_deviation(unit):
    planted = mixture(8, 500, unit=unit)
    posterior = Posterior(MIXTURE.sample((8, 500))(planted), kind="chains")
    aligned = align_many(posterior, MIXTURE, progress=False).posterior
    truth = Posterior(planted, kind="chains")
    order = torch.cdist(MU, flat(aligned, "mu").mean(0)).argmin(-1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    for site in planted:
        found, expected = flat(aligned, site)[:, order], flat(truth, site)
        torch.testing.assert_close(found.std(0), expected.std(0), rtol=0.1, atol=0)
        assert bool(
            ((found.mean(0) - expected.mean(0)).abs() <= 0.1 * expected.std(0)).all()
        )


@pytest.mark.stochastic
def test_loadings_up_to_order_and_sign_are_near_the_truth():
    posterior = Posterior(
        SIGNED.sample((4, 250))(factor_analysis(4, 250)), kind="chains"
    )
    found = align_many(posterior, SIGNED, progress=False).posterior.samples
    means = found["loadings"].mean((0, 1))
    distance = torch.stack(
        [(LOADINGS - sign * means[:, None]).abs().amax(-1) for sign in (1, -1)]
    ).amin(0)
    assert float(distance.amin(0).max()) < 0.12
    assert len(set(distance.argmin(0).tolist())) == 3
    assert float(found["loadings"].flatten(0, 1).std(0).max()) < 0.12


def best_by_enumeration(draws, order):
    """The least mean cost, of Gaussians fitted to the labelled draws, over all labels
    of all draws but the first.
    """
    count, n = len(draws), draws.shape[1]
    arrangements = order[
        torch.tensor(list(product(range(len(order)), repeat=count - 1)))
    ]
    first = torch.arange(n).expand(len(arrangements), 1, n)
    places = (
        torch.cat([first, arrangements], 1)
        .unsqueeze(-1)
        .expand(-1, -1, -1, draws.shape[2])
    )
    labelled = draws.expand(len(places), *draws.shape).gather(2, places)
    mean, scale = (
        labelled.mean(1, keepdim=True),
        labelled.std(1, correction=0, keepdim=True),
    )
    return -float(Normal(mean, scale).log_prob(labelled).sum((-1, -2)).mean(1).max())


@pytest.mark.stochastic
def test_the_gaussian_cost_of_a_few_draws_is_the_enumerated_least():
    shape = {"w": torch.Size((3, 2))}
    group = Group.declare({"w": ("k", None)}, shape)
    centre = torch.tensor([[0.0, 0.0], [3.0, 30.0], [6.0, -30.0]], dtype=torch.float64)
    draws = centre + torch.tensor([0.5, 5.0]) * torch.randn(
        6, 3, 2, dtype=torch.float64
    )
    draws = group.sample((6,))({"w": draws})["w"]
    frame = align_many({"w": draws}, group, cost="gaussian", progress=False)
    every = torch.tensor([p for p in product(range(3), repeat=3) if len(set(p)) == 3])
    expected = best_by_enumeration(draws, every)
    assert frame.history[-1] == pytest.approx(expected, abs=1e-6)
    assert float(frame.cost.mean()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.stochastic
def test_signs_and_orders_are_counted_from_the_commonest():
    planted, element = factor_analysis(300), SIGNED.sample((300,))
    frame = align_many(element(planted), SIGNED, progress=False)
    relative = frame.element @ element
    for numbers in (relative.permutations["factor"], relative.signs["factor"]):
        assert bool((numbers == numbers[:1]).all())
    counts = torch.cat(
        [element.permutations["factor"], element.signs["factor"]], -1
    ).unique(dim=0, return_counts=True)[1]
    assert int((~frame.displaced).sum()) == int(counts.max())


def test_the_uncertain_share_is_that_of_the_enumerated_exchanges_and_flips():
    axes, shapes = {"loadings": ("factor", None)}, {"loadings": torch.Size((3, 2))}
    centre = torch.tensor([[1.0, 0.5], [0.3, 0.9], [1.5, -0.6]], dtype=torch.float64)
    draws = centre + torch.tensor([[0.3], [0.5], [0.7]]) * torch.randn(
        200, 3, 2, dtype=torch.float64
    )

    def log_density(labelled):
        return (
            Normal(draws.mean(0), draws.std(0, correction=0))
            .log_prob(labelled)
            .sum((-1, -2))
        )

    orders = torch.tensor([[1, 0, 2], [0, 2, 1], [2, 1, 0]])
    exchanged = torch.stack([log_density(draws[:, order]) for order in orders])
    flipped = torch.stack(
        [log_density(draws * sign[:, None]) for sign in 1 - 2 * torch.eye(3)]
    )
    for others, moves in ((exchanged, "permute"), (flipped, "flip")):
        expected = float(
            (log_density(draws) - others.amax(0) < math.log(3)).double().mean()
        )
        assert 0.02 < expected < 0.9
        assert uncertain_share(
            {"loadings": draws}, Group.declare(axes, shapes, moves=moves)
        ) == pytest.approx(expected)
