"""Signs, scales and nested units are aligned like permutations, whatever the
architecture.
"""

import math
from itertools import pairwise

import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from pyro_symmetric.alignment import GaussianWeights, align
from pyro_symmetric.discovery.find import find_symmetry

from .cases import Convolutional, Recurrent, Transformer, squared_distance, weights_of
from .cases import mlp as layers


def mlp(activation, *widths):
    layers = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), activation()]
    return nn.Sequential(*layers[:-1])


NETWORKS = {
    "tanh": (lambda: mlp(nn.Tanh, 4, 7, 8, 3), (3, 4)),
    "relu": (lambda: mlp(nn.ReLU, 4, 7, 8, 3), (3, 4)),
    "convolution": (Convolutional, (2, 1, 8, 8)),
    "tanh recurrent": (lambda: Recurrent(nn.RNN), (2, 6, 5)),
    "relu recurrent": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), (2, 6, 5)),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), (2, 6, 5)),
    "transformer": (Transformer, (2, 6, 5)),
}


def network(name):
    make, shape = NETWORKS[name]
    net = make()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    symmetry = find_symmetry(net, torch.randn(shape))
    return symmetry, {
        site: value.detach().double()
        for site, value in symmetry.weights_of(net).items()
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_a_planted_element_of_the_whole_symmetry_is_undone(name):
    symmetry, weights = network(name)
    for _ in range(2):
        source = symmetry.sample(spread=0.5).inverse()(weights)
        result = align(source, weights, symmetry, restarts=0)
        # Of squared distances; scales are found to rounding.
        assert result.cost <= 1e-18 * result.initial_cost
        moved = result.element(source)
        assert float(squared_distance(moved, weights)) == pytest.approx(
            result.cost, abs=1e-15 * result.initial_cost
        )
        for site in weights:  # running statistics come along
            torch.testing.assert_close(moved[site], weights[site], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("cost", ["l2", "wasserstein", "gaussian"])
def test_permutations_and_signs_reach_the_enumerated_optimum(cost):
    group = layers(3, 4, 2, moves=("permute", "flip"))
    every = group.enumerate()
    for _ in range(5):
        loc = [weights_of(group) for _ in range(2)]
        scale = [
            {site: 0.3 + value.abs() for site, value in weights_of(group).items()}
            for _ in range(2)
        ]
        moved = every(loc[0])
        spread = {site: value.abs() for site, value in every(scale[0]).items()}
        costs = 0.0
        for site in moved:
            m0, s0, m1, s1 = loc[1][site], scale[1][site], moved[site], spread[site]
            squares = (m0 - m1).square()
            entries = {
                "l2": squares,
                "wasserstein": squares + (s0 - s1).square(),
                "gaussian": s0.log()
                + (s1.square() + squares) / (2 * s0.square())
                + 0.5 * math.log(2 * math.pi),
            }[cost]
            costs = costs + entries.flatten(1).sum(1)
        result = align(
            GaussianWeights(loc[0], scale[0]),
            GaussianWeights(loc[1], scale[1]),
            group,
            cost,
        )
        assert result.cost == pytest.approx(float(costs.min()), rel=1e-10)


def scaled_cost(source, reference, log_scales):
    scale = torch.as_tensor(log_scales).exp()
    moved = {
        "0.weight": scale[:, None] * source["0.weight"],
        "0.bias": scale * source["0.bias"],
    }
    return squared_distance(
        {**source, **moved, "1.weight": source["1.weight"] / scale}, reference
    )


def test_permutations_and_scales_come_near_the_optimum_of_scipy_over_every_permutation():
    group = layers(4, 3, 2, moves=("permute", "scale"))
    permutations = group.permutations
    for _ in range(3):
        source, reference = weights_of(group), weights_of(group)
        best = float("inf")
        for k in range(permutations.order()):
            moved = permutations.enumerate().select(k)(source)
            for start in ([0.0] * 3, [1.0] * 3, [-1.0] * 3):
                found = minimize(
                    lambda t, w=moved, r=reference: float(scaled_cost(w, r, t)),
                    start,
                    method="BFGS",
                )
                best = min(best, found.fun)
        result = align(source, reference, group)
        assert best * (1 - 1e-6) <= result.cost <= 1.1 * best
