"""Canonical forms whose labels are mixed are noticed.

Shares above 0.05 of the 200 draws that are looked at are warned of. Here it is 0.27 or
more if keys overlap and 0 if they don't: a test fails for fewer than 1 of 10^4 seeds.
"""

import itertools
import math
import warnings

import pytest
import torch

from pyro_symmetric.canonical.forms import canonicalize, uncertain_share
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.posterior.posterior import Posterior

SHAPES = {"mu": torch.Size((4, 2)), "weights": torch.Size((4,))}
GROUP = Group.declare({"mu": ("k", None), "weights": ("k",)}, SHAPES)
SQUARE = torch.tensor([[0.0, 0.0], [2.5, 0.5], [0.3, 2.8], [3.0, 3.0]])
LINE = torch.tensor([[1.0, 1.0], [4.0, 4.0], [7.0, 7.0], [10.0, 10.0]])


def scattered(centre, *batch, spread=0.4):
    draws = {
        "mu": centre + spread * torch.randn(*batch, 4, 2),
        "weights": torch.rand(*batch, 4),
    }
    return GROUP.sample(batch)(draws)


@pytest.mark.stochastic
@pytest.mark.parametrize("key", ["first", "max", "norm"])
def test_mixed_labels_are_warned_of_under_every_key(key):
    draws = scattered(SQUARE, 8, 100)
    for given in (draws, Posterior(draws, kind="chains")):
        with pytest.warns(
            UserWarning,
            match=r"labels are mixed in \d+% of draws.* align_many or summary",
        ) as told:
            canonicalize(given, GROUP, key)
        assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="labels are mixed"):
        Posterior(draws, kind="chains").map(canonicalize, GROUP, permutations=key)


@pytest.mark.stochastic
@pytest.mark.parametrize("key", ["first", "max", "norm"])
def test_separated_keys_are_not_warned_of(key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        canonicalize(scattered(LINE, 8, 100), GROUP, key)


@pytest.mark.stochastic
def test_the_share_is_that_of_draws_whose_labels_have_lower_odds_than_some_exchange():
    form = canonicalize(scattered(SQUARE, 240), GROUP, "first", warn=False)
    units = torch.cat([form["mu"], form["weights"].unsqueeze(-1)], -1).double()
    fitted = torch.distributions.Normal(units.mean(0), units.std(0, correction=0))
    own, doubtful = (
        fitted.log_prob(units).sum((1, 2)),
        torch.zeros(240, dtype=torch.bool),
    )
    for i, j in itertools.combinations(range(4), 2):
        order = torch.arange(4)
        order[[i, j]] = torch.tensor([j, i])
        doubtful |= own - fitted.log_prob(units[:, order]).sum((1, 2)) < math.log(3)
    assert 0.05 < float(doubtful.double().mean()) < 0.95
    assert uncertain_share(form, GROUP) == pytest.approx(
        float(doubtful.double().mean()), abs=1e-9
    )


@pytest.mark.stochastic
def test_signs_of_tied_largest_weights_are_warned_of():
    shapes = {"w": torch.Size((2, 3))}
    group = Group.declare({"w": ("f", None)}, shapes, "flip")
    clear = torch.tensor([[5.0, 1.0, 1.0], [1.0, 5.0, 1.0]]) + 0.1 * torch.randn(
        200, 2, 3
    )
    tied = torch.tensor([[2.0, -2.0, 1.0], [1.0, 2.0, -2.0]]) + 0.1 * torch.randn(
        200, 2, 3
    )
    assert uncertain_share(canonicalize({"w": clear}, group), group, 1) == 0
    with pytest.warns(UserWarning, match="the units' keys overlap"):
        canonicalize({"w": tied}, group)
    both = Group.declare({"w": ("f", None)}, shapes, ("permute", "flip"))
    with pytest.warns(UserWarning, match="the units' keys overlap"):
        canonicalize({"w": tied}, both)


@pytest.mark.stochastic
def test_units_inside_others_are_judged_copy_by_copy() -> None:
    """Units of one copy that lie apart, and of another that can't be told apart.

    Of 400 draws of the second copy half are nearer to the means if its units change
    places: a share below 0.2 or above 0.8 has a probability below 1e-20.
    """
    place = torch.arange(4)[None]
    units = [
        Units(
            "head",
            2,
            (Axis("w", 0, place.view(2, 2).T), Axis("head", 0, torch.arange(2)[None])),
        ),
        Units("row", 2, (Axis("w", 0, place),), parent="head", copies=2),
    ]
    group = Group(units, {"w": (4, 3), "head": (2,)})
    centre = torch.tensor([[5.0, 0, 0], [9, 0, 0], [-2, 0, 0], [-2, 0, 0]])
    draws = {
        "w": centre + 0.1 * torch.randn(400, 4, 3),
        "head": torch.tensor([3.0, -3.0]).expand(400, 2),
    }
    assert 0.2 < uncertain_share(draws, group) <= 1.0
    assert 0.2 < uncertain_share(draws, group, 1) < 0.8
    apart = {**draws, "w": draws["w"] + torch.tensor([0.0, 0.0, 0.0, 4.0])[:, None]}
    assert uncertain_share(apart, group) == 0.0


@pytest.mark.stochastic
def test_the_share_of_flips_is_that_of_draws_with_lower_odds_than_their_negatives():
    group = Group.declare({"w": ("k", None)}, {"w": (3, 2)}, "flip")
    form = {"w": torch.randn(240, 3, 2) + torch.tensor([0.5, 1.0, 2.0])[:, None]}
    units = form["w"].double()
    fitted = torch.distributions.Normal(units.mean(0), units.std(0, correction=0))
    odds = (fitted.log_prob(units) - fitted.log_prob(-units)).sum(-1)
    share = float((odds < math.log(3)).any(-1).double().mean())
    assert 0.2 < share < 0.95
    found = uncertain_share(form, group, moves=["flip"])
    assert found == pytest.approx(share, abs=1e-9)
