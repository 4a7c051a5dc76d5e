"""Under small groups of every kind the result is the least cost of all elements, one by
one; and a result says that it is least, or converged, only if that was checked.
"""

import itertools
import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from pyro_symmetric.alignment import GaussianWeights, align, nearest_copy
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.groups import Axis, Group, Units

from .cases import mlp, squared_distance, weights_of
from .test_small_groups import heads

SIGNED = ("permute", "flip")
COSTS = ("l2", "wasserstein", "gaussian")


def declared(axes, moves="permute", even=(), **lengths):
    shapes = {
        site: torch.Size([lengths.get(name, 2) for name in names])
        for site, names in axes.items()
    }
    return Group.declare(axes, shapes, moves, even)


def signed_heads():
    """Two heads with signs of their own, of two signed units each."""
    inner, flat = torch.arange(4).reshape(2, 2).T, torch.arange(4)[None]
    outer = Units("heads", 2, (Axis("in", 0, inner), Axis("out", 1, inner)))
    within = Units(
        "inside",
        2,
        (Axis("in", 0, flat, 1), Axis("out", 1, flat, -1)),
        parent="heads",
        copies=2,
        moves=frozenset(SIGNED),
    )
    shapes = {"in": torch.Size((4, 1)), "out": torch.Size((1, 4))}
    return Group([outer, within], shapes)


def convolutions():
    net = nn.Sequential(
        *(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 3, 2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(12, 1)),
    )
    return find_symmetry(net, torch.randn(2, 1, 4, 4)).finite


def attention():
    net = nn.TransformerEncoderLayer(4, 2, 2, dropout=0.0, batch_first=True)
    return find_symmetry(net, torch.randn(2, 3, 4)).finite.without_buffers()


KINDS = {
    "one signed layer": lambda: mlp(1, 4, 1, moves=SIGNED),
    "two signed layers": lambda: mlp(1, 3, 3, 1, moves=SIGNED),
    "two layers": lambda: mlp(2, 5, 4, 1),
    "three layers": lambda: mlp(1, 4, 3, 4, 1),
    "three signed layers": lambda: mlp(1, 2, 3, 2, 1, moves=SIGNED),
    "signs of three layers": lambda: mlp(1, 4, 4, 4, 1, moves=("flip",)),
    "heads": lambda: heads(2, 3),
    "signed heads": signed_heads,
    "a recurrent matrix": lambda: declared({"w": ("h", "h"), "b": ("h",)}, h=6),
    "a signed recurrent matrix": lambda: declared({"w": ("h", "h")}, SIGNED, h=4),
    "a residual stream": lambda: declared(
        {"in": ("s", None), "up": ("a", "s"), "down": ("s", "a"), "b": ("b", "s")},
        s=4,
        a=3,
        b=3,
    ),
    "tied layers": lambda: declared(
        {"w": ("a", "b"), "v": ("b", "a"), "bias": ("a",)}, SIGNED, a=3, b=3
    ),
    "even sites": lambda: declared(
        {"loc": ("k", None), "scale": ("k",)}, SIGNED, ["scale"], k=4
    ),
    "convolutions": convolutions,
    "attention": attention,
}


def gaussians(group, *batch):
    """Gaussians of random deviations, and a reference near a copy of the first."""
    source = GaussianWeights(
        weights_of(group, *batch),
        {site: 0.2 + value.abs() for site, value in weights_of(group, *batch).items()},
    )
    return source, GaussianWeights(
        weights_of(group),
        {site: 0.2 + value.abs() for site, value in weights_of(group).items()},
    )


def all_costs(cost, moved, reference):
    """The costs of moved Gaussians, ``(elements, ...)``, by their definition."""
    total = 0.0
    for site, loc in reference.loc.items():
        scale = reference.scale[site]
        moved_loc, moved_scale = moved[0][site], moved[1][site].abs()
        entries = (moved_loc - loc) ** 2
        if cost == "wasserstein":
            entries = entries + (moved_scale - scale) ** 2
        if cost == "gaussian":
            entries = (
                (entries + moved_scale**2) / (2 * scale**2)
                + scale.log()
                + math.log(2 * math.pi) / 2
            )
        total = total + entries.flatten(-loc.dim()).sum(-1)
    return total


def in_front(weights):
    """The same weights with a dimension for elements in front of a site's batch."""
    return {site: value.unsqueeze(1) for site, value in weights.items()}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_is_the_least_of_all_elements_one_by_one(kind, cost):
    group = KINDS[kind]()
    elements = group.enumerate()
    for seed in range(4):
        torch.manual_seed(seed)
        source, reference = gaussians(group, 5)
        moved = [elements(in_front(part)) for part in (source.loc, source.scale)]
        least = all_costs(cost, moved, reference).amin(1)
        result = align(source, reference, group, cost)
        torch.testing.assert_close(result.cost, least, rtol=1e-10, atol=1e-10)
        assert result.exact
        assert bool(result)
        found = [result.element(part) for part in (source.loc, source.scale)]
        torch.testing.assert_close(
            all_costs(cost, found, reference), least, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_copy_with_noise_costs_no_more_than_where_it_was_planted(kind):
    group = KINDS[kind]()
    for seed in range(10):
        torch.manual_seed(seed)
        reference = weights_of(group)
        noisy = {s: v + 0.6 * torch.randn_like(v) for s, v in reference.items()}
        source = group.sample(dtype=torch.float64).inverse()(noisy)
        planted = float(squared_distance(noisy, reference))
        assert align(source, reference, group).cost <= planted * (1 + 1e-12)


def rows_of(weights, into, out):
    """The units of a layer in rows: their weights and biases, and the next columns."""
    incoming, bias = weights[f"{into}.weight"], weights[f"{into}.bias"]
    return torch.cat([incoming, bias[:, None], weights[f"{out}.weight"].T], 1)


def test_the_least_cost_of_wide_layers_beside_a_narrow_one_is_exact():
    """By an assignment problem for each of the 24 permutations of the narrow layer."""
    group = mlp(3, 30, 4, 20, 2)
    source, reference = weights_of(group), weights_of(group)
    result = align(source, reference, group)
    assert result.exact
    totals = []
    for order in itertools.permutations(range(4)):
        moved = dict(source)
        moved["1.weight"] = source["1.weight"][list(order)]
        moved["1.bias"] = source["1.bias"][list(order)]
        moved["2.weight"] = source["2.weight"][:, list(order)]
        unmatched = {site: moved[site] for site in ("1.bias", "3.bias")}
        total = float(squared_distance(moved, {s: reference[s] for s in unmatched}))
        for layer in (0, 2):
            squares = torch.cdist(
                rows_of(reference, layer, layer + 1), rows_of(moved, layer, layer + 1)
            ).square()
            total += float(squares[linear_sum_assignment(squares.numpy())].sum())
        totals.append(total)
    assert result.cost == pytest.approx(min(totals), rel=1e-9)


def test_wide_layers_are_not_called_exact_and_converge_only_if_restarts_agree():
    group = mlp(4, 8, 8, 8, 2, moves=SIGNED)
    reference = weights_of(group)
    source = group.sample(dtype=torch.float64)(reference)
    assert align(source, reference, group, restarts=0).converged  # the cost is zero
    other = weights_of(group)
    alone = align(other, reference, group, restarts=0)
    assert not alone.exact
    assert not alone.converged
    assert not alone
    assert "not converged" in repr(alone)
    searched = align(other, reference, group, restarts=64)
    least = sum(c <= searched.cost * (1 + 1e-6) for c in searched.start_costs)
    assert not searched.exact
    assert not searched.converged or least > 1


@pytest.mark.stochastic
def test_alignments_that_converged_are_at_least_as_close_as_where_they_were_planted():
    """Of 200 alignments of each kind none that converged missed the planted copy: at
    a rate of 0.0075, the most that this leaves likely, 3 of 16 miss it once in 4,000.
    """
    wrong = converged = 0
    for group in (mlp(3, 8, 8, 8, 1, moves=SIGNED), mlp(2, 8, 8, 8, 8, 1)):
        for _ in range(8):
            reference = weights_of(group)
            noisy = {s: v + 0.7 * torch.randn_like(v) for s, v in reference.items()}
            source = group.sample(dtype=torch.float64).inverse()(noisy)
            result = align(source, reference, group)
            planted = float(squared_distance(noisy, reference))
            converged += bool(result)
            wrong += bool(result) and result.cost > planted * (1 + 1e-9)
    assert converged >= 8
    assert wrong <= 2


# the nearest copy ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_copy_is_the_nearest_of_all_that_are_enumerated(kind):
    group = KINDS[kind]()
    elements = group.enumerate()
    for seed in range(5):
        torch.manual_seed(seed)
        weights = weights_of(group)
        squares = squared_distance(elements(weights), weights, 1)
        least = float(squares[squares > 1e-20].min().sqrt())  # inert elements are none
        nearest = nearest_copy(weights, group)
        if nearest.exact:
            assert nearest.distance == pytest.approx(least, rel=1e-9)
        assert nearest.exact or len(squares) > 5_100
        assert nearest.distance >= least * (1 - 1e-9)
        moved = nearest.element(weights)
        square = float(squared_distance(moved, weights))
        assert math.sqrt(square) == pytest.approx(nearest.distance, rel=1e-9)


def test_the_nearest_copy_of_wide_layers_says_whether_it_is_exact():
    layer = mlp(3, 40, 2, moves=SIGNED)
    assert nearest_copy(weights_of(layer), layer).exact
    layers = mlp(3, 40, 40, 2)
    assert not nearest_copy(weights_of(layers), layers).exact
    nested = heads(8, 8, coupled=False)
    assert not nearest_copy(weights_of(nested), nested).exact
