"""Units are matched by what they do, where a layer reads them, else by their
weights.
"""

import pytest
import torch
from torch import nn

from pyro_symmetric.alignment import align
from pyro_symmetric.alignment.moments import shown_by
from pyro_symmetric.discovery.find import find_symmetry

from .cases import Convolutional, Recurrent, Transformer

NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 2)
        ),
        (50, 4),
    ),
    "convolution": (Convolutional, (20, 1, 8, 8)),
    "attention": (lambda: Transformer(1, activation="gelu"), (20, 6, 5)),
    "lstm": (lambda: Recurrent(nn.LSTM), (20, 6, 5)),
}


def moved_network(name):
    make, shape = NETWORKS[name]
    net = make().double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    return (
        net,
        x,
        symmetry,
        {site: value.detach() for site, value in symmetry.weights_of(net).items()},
    )


def tables(net, x, source, weights, group):
    """The correlations with one source, by the layer that reads the units."""
    shown = shown_by(
        (net, x), {site: value[None] for site, value in source.items()}, weights, group
    )
    return {
        site: (shown.reference[site] @ shown.source[site].mT)[0, 0]
        for site in shown.reference
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_planted_permutations_are_found_by_activations(name):
    net, x, symmetry, weights = moved_network(name)
    group = symmetry.permutations
    planted = group.sample()
    result = align(planted.inverse()(weights), weights, group, activations=(net, x))
    assert result.element.equal(planted)


def test_scores_are_the_correlations_of_hooked_activations():
    net, x, symmetry, weights = moved_network("mlp")
    hidden = {}
    net[1].register_forward_hook(
        lambda module, inputs, output: hidden.update({"2.weight": output})
    )
    net[3].register_forward_hook(
        lambda module, inputs, output: hidden.update({"4.weight": output})
    )
    other = {site: torch.randn_like(value) for site, value in weights.items()}
    activations = []
    for own in (weights, other):
        torch.func.functional_call(net, own, (x,))
        activations.append(dict(hidden))
    scores = tables(net, x, other, weights, symmetry.permutations)
    assert scores.keys() == {"2.weight", "4.weight"}
    for site, found in scores.items():
        first, second = (values[site].detach() for values in activations)
        expected = torch.corrcoef(torch.cat([first, second], 1).T)[
            : first.shape[1], first.shape[1] :
        ].nan_to_num()
        torch.testing.assert_close(found, expected)


def test_signs_go_with_activations():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(50, 4, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    weights = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
    planted = symmetry.finite.sample()
    source = planted.inverse()(weights)
    result = align(source, weights, symmetry, activations=(net, x))
    torch.testing.assert_close(result.element(source), weights)
    assert result.cost == pytest.approx(-8.0)


def test_scales_are_fitted_to_the_weights_after_the_match():
    net, x, symmetry, weights = moved_network("mlp")
    source = symmetry.sample(spread=0.5).inverse()(weights)
    result = align(source, weights, symmetry, activations=(net, x), tolerance=1e-12)
    torch.testing.assert_close(result.element(source), weights, atol=1e-3, rtol=1e-3)
    assert result.cost == pytest.approx(-15.0)


def normalised(activation):
    """A batch normalisation in front of the activation, with statistics and an affine
    part of its own.
    """
    net = (
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), activation(), nn.Linear(8, 3))
        .double()
        .eval()
    )
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net[1].running_mean.normal_()
    return net


def test_anticorrelated_units_behind_a_normalisation_do_not_go_together_by_a_sign_that_stays_inside():
    one, other, x = (
        normalised(nn.ReLU),
        normalised(nn.ReLU),
        torch.randn(100, 5, dtype=torch.float64),
    )
    symmetry = find_symmetry(one, x[:4])
    source, reference = (
        {site: value.detach() for site, value in symmetry.weights_of(net).items()}
        for net in (other, one)
    )
    for group in (symmetry, symmetry.permutations):
        result = align(source, reference, group, activations=(one, x))
        scores = tables(
            one, x, result.element(source), reference, symmetry.permutations
        )["3.weight"]
        assert result.cost == pytest.approx(-float(scores.diagonal().sum()))
        assert result.converged
