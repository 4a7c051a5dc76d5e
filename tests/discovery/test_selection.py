"""Sites that stay: the rest of the group is counted by hand, by brute force, and by
linear algebra.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Linear(2, 4, bias),
        nn.ReLU(),
        nn.Linear(4, 3, bias),
        nn.ReLU(),
        nn.Linear(3, 2, bias),
    )
    return nn.Sequential(*layers).double()


X = torch.randn(5, 2, dtype=torch.float64)

# Which sites stay: arguments -> the sites.
CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "a layer": ({"freeze": ["0"]}, {"0.weight", "0.bias"}),
    "one name": ({"freeze": "2.bias"}, {"2.bias"}),
    "a pattern": ({"freeze": ["*.bias"]}, {"0.bias", "2.bias", "4.bias"}),
    "the last layer": ({"freeze": ["4"]}, {"4.weight", "4.bias"}),
    "only two layers": ({"only": ["0", "2.weight"]}, {"2.bias", "4.weight", "4.bias"}),
    "only, and not": ({"only": ["*"], "freeze": ["4.bias"]}, {"4.bias"}),
    "only one layer": ({"only": "2"}, {"0.weight", "0.bias", "4.weight", "4.bias"}),
}


def moved(
    weights: dict[str, Tensor],
    one: Tensor,
    other: Tensor,
    log_one: Tensor,
    log_other: Tensor,
) -> dict[str, Tensor]:
    """The action by hand: scale and permute the hidden units of both layers."""
    s, t = log_one.exp(), log_other.exp()
    new = {
        "0.weight": weights["0.weight"] * s[:, None],
        "0.bias": weights.get("0.bias", torch.zeros(4)) * s,
        "2.weight": weights["2.weight"] / s * t[:, None],
        "2.bias": weights.get("2.bias", torch.zeros(3)) * t,
        "4.weight": weights["4.weight"] / t,
        "4.bias": weights.get("4.bias", torch.zeros(2)),
    }
    new = {
        "0.weight": new["0.weight"][one],
        "0.bias": new["0.bias"][one],
        "2.weight": new["2.weight"][:, one][other],
        "2.bias": new["2.bias"][other],
        "4.weight": new["4.weight"][:, other],
        "4.bias": new["4.bias"],
    }
    return {site: value for site, value in new.items() if site in weights}


def by_brute_force(weights: dict[str, Tensor], stay: set[str]) -> tuple[int, int]:
    """The numbers of permutations of hidden units, and of dimensions of their scales,
    that leave some sites alone.
    """
    zeros = torch.zeros(4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    count = 0
    for one, other in itertools.product(
        itertools.permutations(range(4)), itertools.permutations(range(3))
    ):
        new = moved(weights, torch.tensor(one), torch.tensor(other), *zeros)
        count += all(
            torch.equal(new[site], weights[site]) for site in stay if site in weights
        )

    def scaled(logs: Tensor) -> Tensor:
        new = moved(weights, torch.arange(4), torch.arange(3), logs[:4], logs[4:])
        return torch.cat(
            [new[site].reshape(-1) for site in sorted(stay) if site in weights]
        )

    if not stay:
        return count, 7
    jacobian = torch.autograd.functional.jacobian(
        scaled, torch.zeros(7, dtype=torch.float64)
    )
    return count, 7 - int(torch.linalg.matrix_rank(jacobian))


def scales_of(symmetry: Symmetry) -> int:
    return sum(symmetry.group[n].count for n in symmetry.group.names("scale"))


def require_held(net: nn.Module, symmetry: Symmetry, stay: set[str]) -> None:
    """Elements leave the function alone, and what stays exactly as it is."""
    weights = {name: value.detach() for name, value in net.named_parameters()}
    new = symmetry.sample()(weights)
    torch.testing.assert_close(
        functional_call(net, new, (X,)),
        functional_call(net, weights, (X,)),
        rtol=1e-9,
        atol=1e-9,
    )
    for site in stay & set(weights):
        assert torch.equal(new[site], weights[site])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_what_is_left_if_sites_stay_is_what_brute_force_finds(
    name: str, bias: bool
) -> None:
    net, (options, stay) = network(bias), CHOICES[name]
    if not bias and name in ("one name", "a pattern", "only, and not"):
        pytest.skip("it names biases")
    symmetry = find_symmetry(net, X, **options)
    count, dimension = by_brute_force(
        {site: value.detach() for site, value in net.named_parameters()}, stay
    )
    assert symmetry.permutations.order() == count
    assert scales_of(symmetry) == dimension
    require_held(net, symmetry, stay)


def test_frozen_parameters_move_only_if_asked() -> None:
    net = network()
    net[0].requires_grad_(False)
    symmetry = find_symmetry(net, X)
    assert symmetry.permutations.factors == {"2": 3}
    require_held(net, symmetry, {"0.weight", "0.bias"})
    assert "requires_grad=False" in str(symmetry.explain("0"))
    assert find_symmetry(net, X, only="*").permutations.factors == {"0": 4, "2": 3}
    # Where nothing is trained by gradients, the flag says nothing about what may move.
    assert find_symmetry(net.requires_grad_(False), X).permutations.factors == {
        "0": 4,
        "2": 3,
    }


def test_tied_weights_stay_under_either_name() -> None:
    net = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    ).double()
    net[2].weight = net[0].weight
    x = torch.randn(5, 4, dtype=torch.float64)
    for name in ("0.weight", "2.weight"):
        assert (
            find_symmetry(net, x, freeze=[name]).group
            == find_symmetry(net, x, freeze=["0.weight"]).group
        )
        assert not find_symmetry(net, x, freeze=[name]).permutations.units


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
    ).double()
    net(torch.randn(50, 2, dtype=torch.float64))
    return net.eval()


def test_running_statistics_move_stay_or_are_left() -> None:
    net = normalised()
    assert find_symmetry(net, X).permutations.order() == 120
    held = find_symmetry(net, X, buffers=False)
    assert held.group == find_symmetry(net, X).holding(net).group
    assert not held.buffers
    assert held.permutations.order() == 1
    assert find_symmetry(net, X, freeze=["1.running_mean"]).permutations.order() == 1
    assert (
        find_symmetry(
            net, X, only=["0", "1.weight", "1.bias", "3"]
        ).permutations.order()
        == 1
    )
    assert find_symmetry(net, X, only=["0", "1", "3"]).permutations.order() == 120
    net[1].reset_running_stats()
    assert find_symmetry(net, X, buffers=False).permutations.order() == 120


def test_a_constant_of_the_softmax_stays_with_its_bias() -> None:
    net = network()
    assert find_symmetry(net, X, logits=True).group.names("shift")
    assert not find_symmetry(net, X, logits=True, freeze=["4.bias"]).group.names(
        "shift"
    )


def test_kernels_of_groups_stay() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 1, groups=2),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
    ).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert find_symmetry(net, x).permutations.units
    held = find_symmetry(net, x, freeze=["2.weight"])
    assert held.permutations.order() == 1
    moved = held.act(held.sample(), net)
    assert torch.equal(moved[2].weight, net[2].weight)
    torch.testing.assert_close(moved(x), net(x), rtol=1e-9, atol=1e-9)
    assert find_symmetry(net, x, freeze=["0.weight"]).permutations.order() == 6**2


def test_explanations_are_chosen_by_site_and_tell_how_many_positions_move() -> None:
    symmetry = find_symmetry(network(), X)
    assert {axis.site for axis in symmetry.explain("2")} == {"2.weight", "2.bias"}
    assert {axis.site for axis in symmetry.explain("*.bias")} == {
        "0.bias",
        "2.bias",
        "4.bias",
    }
    assert {(axis.site, axis.dim) for axis in symmetry.explanation if "2" in axis.units} == {
        ("2.weight", 0), ("2.bias", 0), ("4.weight", 1),
    }  # fmt: skip
    pinned = {
        (axis.site, axis.dim)
        for axis in symmetry.explanation
        if axis.permuted < axis.length
    }
    assert pinned == {("0.weight", 1), ("4.weight", 0), ("4.bias", 0)}


def test_explanations_show_the_chain_that_ties_an_axis_or_pins_it() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.out(h + self.b(h.relu()))

    symmetry = find_symmetry(Residual(), torch.randn(5, 3))
    chains = {(axis.site, axis.dim): axis.chain for axis in symmetry.explanation}
    assert chains["b.bias", 0] == (
        "b.weight[0] by linear in b (Linear)",
        "a.weight[0] by add in Residual",
    )
    assert chains["out.bias", 0] == ("out.weight[0] by linear in out (Linear)",)
