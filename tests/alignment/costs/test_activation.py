"""Units are matched by what they do, wherever in the network they show, and by scores of the user's own."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from pyro_symmetric.alignment import ActivationCost, align
from pyro_symmetric.symmetry import find_symmetry
from pyro_symmetric.symmetry.permutation import PermutationGroup


class Convolutional(nn.Module):
    """A flatten makes blocks of channels, and nothing in it is a module with one output per factor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 5, 3), nn.Linear(5 * 4, 3)

    def forward(self, x):
        x = torch.relu(torch.nn.functional.conv2d(x, self.a.weight, self.a.bias))
        return self.c(torch.nn.functional.max_pool2d(torch.relu(self.b(x)), 2).flatten(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.encode, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(12, 3)

    def forward(self, x):
        return self.out(self.encode(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.LSTM(4, 7, batch_first=True), nn.Linear(7, 2)

    def forward(self, x):
        return self.out(self.layer(x)[0][:, -1])


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 2)), (50, 4)),
    "convolution": (Convolutional, (20, 1, 8, 8)),
    "attention": (Attention, (20, 5, 12)),
    "lstm": (Recurrent, (20, 6, 4)),
}


def moved_network(name):
    make, shape = NETWORKS[name]
    net = make().double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    return net, x, symmetry, {site: value.detach() for site, value in symmetry.weights_of(net).items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_planted_permutations_are_found_by_activations(name):
    net, x, symmetry, weights = moved_network(name)
    group = symmetry.permutations
    planted = group.sample()
    result = align(planted.inverse()(weights), weights, group, cost="activation", net=net, inputs=x)
    assert result.permutation.equal(planted)
    assert all(later <= earlier for earlier, later in pairwise(result.history))


def test_scores_are_the_correlations_of_hooked_activations():
    net, x, symmetry, weights = moved_network("mlp")
    hidden = {}
    net[1].register_forward_hook(lambda module, inputs, output: hidden.update({"0": output}))
    net[3].register_forward_hook(lambda module, inputs, output: hidden.update({"2": output}))
    other = {site: torch.randn_like(value) for site, value in weights.items()}
    activations = []
    for own in (weights, other):
        torch.func.functional_call(net, own, (x,))
        activations.append(dict(hidden))
    scores = ActivationCost(net, x)(other, weights, symmetry.permutations)
    for name in ("0", "2"):
        first, second = (values[name].detach() for values in activations)
        expected = torch.corrcoef(torch.cat([first, second], 1).T)[: first.shape[1], first.shape[1] :].nan_to_num()
        torch.testing.assert_close(scores[name], expected)


def test_signs_go_with_activations():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(50, 4, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    weights = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
    planted = symmetry.finite.sample()
    source = planted.inverse()(weights)
    result = align(source, weights, symmetry, cost=ActivationCost(net, x))
    torch.testing.assert_close(result.element(source), weights)
    assert result.cost == pytest.approx(-8.0)


def test_scales_are_fitted_to_the_weights_after_the_match():
    net, x, symmetry, weights = moved_network("mlp")
    source = symmetry.sample(spread=0.5).inverse()(weights)
    result = align(source, weights, symmetry, cost=ActivationCost(net, x), tolerance=1e-12)
    torch.testing.assert_close(result.element(source), weights, atol=1e-3, rtol=1e-3)
    assert result.cost == pytest.approx(-15.0)


def test_a_users_scores_are_maximised_factor_by_factor():
    group = PermutationGroup.declare({"w": ("a", "b")}, {"w": torch.zeros(4, 3)})
    scores = {"a": torch.randn(4, 4), "b": torch.randn(3, 3)}
    source = {"w": torch.randn(5, 4, 3)}
    result = align(source, {"w": torch.randn(4, 3)}, group, cost=lambda source, reference, permutations: scores)
    best = 0.0
    for name, n in group.factors.items():
        single = PermutationGroup.declare({"v": (name,)}, {"v": torch.zeros(n)})
        best += float(scores[name][torch.arange(n), single.enumerate()[name]].sum(-1).max())
    torch.testing.assert_close(result.cost, torch.full((5,), -best, dtype=torch.float64))


def test_bad_scores_and_networks_are_named():
    group = PermutationGroup.declare({"w": ("a", "b")}, {"w": torch.zeros(4, 3)})
    weights = {"w": torch.randn(4, 3)}
    for scores, message in (
        ({"a": torch.zeros(4, 4)}, "no scores of factor 'b'"),
        ({"a": torch.zeros(4, 4), "b": torch.zeros(2, 3)}, r"\(2, 3\) for factor 'b'; it must be \(3, 3\)"),
        ({"a": torch.full((4, 4), torch.nan), "b": torch.zeros(3, 3)}, "infinite scores of factor 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            align(weights, weights, group, cost=lambda *_, scores=scores: scores)
    with pytest.raises(TypeError, match="cost returned a NoneType"):
        align(weights, weights, group, cost=lambda *_: None)
    with pytest.raises(ValueError, match="needs net"):
        align(weights, weights, group, cost="activation")
    with pytest.raises(ValueError, match="needs inputs"):
        align(weights, weights, group, cost="activation", net=nn.Linear(3, 4))
    with pytest.raises(TypeError, match="net is 'net'"):
        ActivationCost("net")
    net = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="no site 'w'"):
        align(weights, weights, group, cost=ActivationCost(net, torch.randn(2, 3)))
    with pytest.raises(ValueError, match="shapes"):
        ActivationCost(net, torch.randn(2, 5))
    group = PermutationGroup.declare({"weight": ("a", None)}, {"weight": torch.zeros(4, 3)})
    weights, wider = {"weight": torch.randn(4, 3)}, nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"site 'weight' have shape \(4, 3\), but those of net \(5, 3\)"):
        align(weights, weights, group, "activation", net=wider, inputs=torch.randn(2, 3))


def normalised(activation):
    """A batch normalisation in front of the activation, with statistics and an affine part of its own."""
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), activation(), nn.Linear(8, 3)).double().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net[1].running_mean.normal_()
    return net


def test_anticorrelated_units_behind_a_normalisation_do_not_go_together_by_a_sign_that_stays_inside():
    one, other, x = normalised(nn.ReLU), normalised(nn.ReLU), torch.randn(100, 5, dtype=torch.float64)
    symmetry = find_symmetry(one, x[:4])
    source, reference = (
        {site: value.detach() for site, value in symmetry.weights_of(net).items()} for net in (other, one)
    )
    for group in (symmetry, symmetry.permutations):
        result = align(source, reference, group, "activation", net=one, inputs=x)
        scores = ActivationCost(one, x)(result.element(source), reference, symmetry.permutations)["0"]
        assert result.cost == pytest.approx(-float(scores.diagonal().sum()))
        assert result.converged


def test_signs_on_both_sides_of_a_normalisation_are_found():
    net, x = normalised(nn.Tanh), torch.randn(100, 5, dtype=torch.float64)
    symmetry = find_symmetry(net, x[:4])
    weights = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
    source = symmetry.finite.sample().inverse()(weights)
    result = align(source, weights, symmetry.finite, "activation", net=net, inputs=x)
    assert result.cost == pytest.approx(-8.0)
    moved = result.element(source)
    scores = ActivationCost(net, x)(moved, weights, symmetry.permutations)["0"]
    torch.testing.assert_close(scores.diagonal(), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(torch.func.functional_call(net, moved, (x,)), net(x))


@pytest.mark.parametrize("name", NETWORKS)
def test_scores_of_several_sources_are_those_of_each_alone(name):
    net, x, symmetry, weights = moved_network(name)
    cost, group = ActivationCost(net, x), symmetry.permutations
    sources = [{site: torch.randn_like(value) for site, value in weights.items()} for _ in range(3)]
    together = cost.of_many(sources, weights, group)
    for k, source in enumerate(sources):
        torch.testing.assert_close({name: scores[k] for name, scores in together.items()}, cost(source, weights, group))


def test_one_activation_cost_serves_several_groups():
    net, x, symmetry, weights = moved_network("mlp")
    cost, whole = ActivationCost(net, x), symmetry.permutations
    part = PermutationGroup([whole.factor("2")], whole.site_shapes)
    assert torch.equal(cost(weights, weights, whole)["2"], cost(weights, weights, part)["2"])
    other = {site: torch.randn_like(value) for site, value in weights.items()}
    assert cost(weights, other, part).keys() == {"2"}
    assert cost(weights, other, whole).keys() == {"0", "2"}
