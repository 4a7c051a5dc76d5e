"""Declared groups: units by the names of axes, what they may do, and what a declaration gets wrong."""

from __future__ import annotations

import pytest
import torch

from pyro_symmetric.groups import Group

from .cases import close, weights_of

AXES = {"loadings": (None, "factor"), "scores": ("factor", "group"), "scale": (None,)}
SHAPES = {"loadings": (4, 3), "scores": (3, 2), "scale": (4,), "other": (2, 2)}


def test_units_lie_along_the_axes_that_bear_their_name():
    group = Group.declare(AXES, SHAPES)
    assert group.factors == {"factor": 3, "group": 2}
    assert [(axis.site, axis.dim) for axis in group["factor"].axes] == [("loadings", 1), ("scores", 0)]
    assert group.sites == ("loadings", "scores")
    assert set(group.site_shapes) == set(SHAPES)
    assert group.order() == 12
    assert group.moves == {"permute"}


@pytest.mark.parametrize(
    ("moves", "order"),
    [
        ("permute", 6 * 2),
        ("flip", 2**5),
        (("permute", "flip"), 6 * 2 * 2**5),
        ({"factor": "flip", "group": "permute"}, 2**3 * 2),
        ({"factor": ("permute", "flip"), "group": ("permute",)}, 6 * 2**3 * 2),
    ],
)
def test_moves_are_those_of_all_units_or_of_each(moves, order):
    group = Group.declare(AXES, SHAPES, moves=moves)
    assert group.order() == order
    weights = weights_of(group)
    images = group.enumerate()(weights)
    distinct = torch.cat([value.flatten(1) for value in images.values()], 1).unique(dim=0)
    assert len(distinct) == order
    g, h = group.sample((20,)), group.sample((20,))
    assert close((g @ h)(weights), g(h(weights)))


def test_even_sites_are_exchanged_and_not_flipped():
    axes = {"loadings": (None, "factor"), "variances": ("factor",)}
    shapes = {"loadings": (4, 3), "variances": (3,)}
    both = Group.declare(axes, shapes, moves=("permute", "flip"), even=["variances"])
    weights = {site: value.abs() for site, value in weights_of(both).items()}
    moved = both.sample((50,))(weights)
    assert bool((moved["variances"] > 0).all())
    assert bool((moved["loadings"] < 0).any())
    assert both.sites == ("loadings", "variances")
    assert both.signs.sites == ("loadings",)
    flips = Group.declare(axes, shapes, moves="flip", even=["variances"])
    assert flips.sites == ("loadings",)


def test_scalars_along_which_no_units_lie_are_refused():
    with pytest.raises(ValueError, match="scale"):
        Group.declare({"scale": ()}, {"scale": ()})
