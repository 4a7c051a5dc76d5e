"""Symmetry: elements of all moves together, tables, formats, priors, sites with other
names.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pyro_symmetric as ps
from pyro_symmetric.discovery import conservation_law
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.moves import Move


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.Linear(5, 4),
        nn.LogSoftmax(-1),
    ).double()


def found(net: nn.Module) -> Symmetry:
    return find_symmetry(net, torch.randn(4, 3, dtype=torch.float64))


def outputs(net: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.vmap(lambda w: functional_call(net, w, (x,)))(weights)


def test_elements_leave_the_function_of_a_batch_of_weights_unchanged() -> None:
    net = network()
    symmetry, x = found(net), torch.randn(7, 3, dtype=torch.float64)
    weights = {
        name: torch.randn(10, *p.shape, dtype=p.dtype)
        for name, p in net.named_parameters()
    }
    moved = symmetry.sample((10,))(weights)
    torch.testing.assert_close(
        outputs(net, moved, x), outputs(net, weights, x), rtol=1e-6, atol=1e-6
    )
    assert not torch.allclose(moved["0.weight"], weights["0.weight"])


def test_act_returns_a_new_module_and_leaves_the_old_one() -> None:
    net = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    ).double()
    net(torch.randn(50, 3, dtype=torch.float64))
    net.eval()
    x = torch.randn(6, 3, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    # Every kind of element; log-scales stay small, so that running variances stay
    # positive.
    elements = [
        symmetry.sample(spread=0.1),
        symmetry.permutations.sample(),
        symmetry.scalings.sample(),
        symmetry.signs.sample(),
    ]
    for element in elements:
        moved = symmetry.act(element, net)
        torch.testing.assert_close(moved(x), net(x), rtol=1e-6, atol=1e-6)
        assert moved is not net
    assert not torch.equal(
        symmetry.act(elements[0], net)[1].running_mean, net[1].running_mean
    )
    assert all(
        torch.equal(value, before[name]) for name, value in net.state_dict().items()
    )
    with pytest.raises(ValueError, match="one module takes one element"):
        symmetry.act(symmetry.sample((3,)), net)
    with pytest.raises(ValueError, match="isn't the network"):
        symmetry.act(symmetry.sample(), nn.Linear(3, 3))


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    ).double()
    net[2].bias = net[0].bias
    x = torch.randn(4, 3, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    moved = symmetry.act(symmetry.permutations.sample(), net)
    assert moved[2].bias is moved[0].bias
    torch.testing.assert_close(moved(x), net(x))


def test_json_brings_everything_back() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 2),
        nn.Softmax(-1),
    )
    symmetry = find_symmetry(net, torch.randn(2, 3, 4, 4))
    again = Symmetry.from_dict(json.loads(json.dumps(symmetry.to_dict())))
    for kind in ("group", "explanation", "logits", "at_least"):
        assert getattr(again, kind) == getattr(symmetry, kind)


def test_parts_of_a_symmetry() -> None:
    net, x = network(), torch.randn(4, 3, dtype=torch.float64)
    symmetry = found(net)
    for part in (
        symmetry.without(["0"]),
        symmetry.without(["0", "2"], "permute"),
        symmetry.without(["2"], ["flip"]),
        symmetry.without(["shift of 4.bias"]),
    ):
        assert part.explanation == symmetry.explanation
        torch.testing.assert_close(
            symmetry.act(part.sample(), net)(x), net(x), rtol=1e-6, atol=1e-6
        )
    assert symmetry.without(["0"]).permutations.factors == {"2": 5}
    assert symmetry.without(["0"], "permute").scalings == symmetry.scalings
    with pytest.raises(ValueError, match="nowhere"):
        symmetry.without(["nowhere"])


def test_sites_of_a_larger_model_have_a_prefix() -> None:
    net = network()
    symmetry = found(net).prefixed("net")
    weights = {f"net.{name}": p.detach() for name, p in net.named_parameters()}
    assert set(symmetry.site_shapes) == set(weights) == set(symmetry.sample()(weights))


class Cached(nn.Module):
    """Attention whose biases are looked up once and kept for eval mode, in a
    dictionary.
    """

    def __init__(self, heads: int = 3):
        super().__init__()
        self.qk, self.v, self.o = (
            nn.Linear(5, heads * 2),
            nn.Linear(5, heads * 2),
            nn.Linear(heads * 2, 2),
        )
        self.biases = nn.Parameter(torch.randn(heads, 4))
        self.register_buffer(
            "places", (torch.arange(4)[:, None] - torch.arange(4)).abs()
        )
        self.kept: dict[str, torch.Tensor] = {}

    def train(self, mode: bool = True) -> Cached:
        if mode:
            self.kept = {}
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training or "bias" not in self.kept:
            self.kept["bias"] = self.biases[:, self.places]
        qk, v = (
            layer(x).unflatten(-1, (3, 2)).transpose(1, 2)
            for layer in (self.qk, self.v)
        )
        return self.o(
            (torch.softmax(qk @ qk.mT + self.kept["bias"], -1) @ v)
            .transpose(1, 2)
            .flatten(2)
        )


def test_what_a_forward_pass_with_gradients_has_left_behind_is_copied_and_forgotten() -> (
    None
):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5)
    fresh = ps.find_symmetry(Cached().eval(), x)
    net = Cached().eval()
    before = net(x)
    assert not net.kept["bias"].is_leaf
    symmetry = ps.find_symmetry(net, x)
    assert symmetry.permutations.factors == fresh.permutations.factors
    assert any(
        axis.site == "biases"
        for units in symmetry.permutations.units.values()
        for axis in units.axes
    )
    assert not net.kept["bias"].is_leaf  # the network itself keeps what it had
    acted = symmetry.act(symmetry.group.sample(dtype=torch.float64), net)
    assert not acted.training
    assert torch.allclose(acted(x), before, atol=1e-5)  # with biases of its own weights


def test_a_network_that_calls_a_module_twice_says_that_its_symmetry_is_at_least_that() -> (
    None
):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.m, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.act = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.act(self.m(self.act(self.m(self.a(x))))))

    once, twice = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), Twice()
    assert not find_symmetry(once, torch.randn(5, 3)).at_least
    assert find_symmetry(twice, torch.randn(5, 3)).at_least


def test_a_multiplier_that_no_group_holds_is_left_out_after_few_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def units(name: str, moves: set[Move], index: list[list[int]], site: str) -> Units:
        return Units(
            name,
            len(index[0]),
            (Axis(site, 0, torch.tensor(index), 1),),
            moves=frozenset(moves),
        )

    sets = [
        units(f"u{k}", {"permute", "scale"}, [[0, 1, 2]], f"w{k}") for k in range(64)
    ]
    # others of u3 and u40 aren't multiplied
    alone = [units(f"alone{k}", {"scale"}, [[1]], f"w{k}") for k in (3, 40)]
    attempts = []

    class Counted(Group):
        def __init__(self, *args: Any, **kwargs: Any):
            attempts.append(args)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(conservation_law, "Group", Counted)
    group = conservation_law.grouped(
        [*alone, *sets], {f"w{k}": torch.Size([3]) for k in range(64)}
    )
    assert (
        set(group.names("scale"))
        == set(group.names("permute"))
        == {one.name for one in sets}
    )
    assert len(attempts) < 20


def test_a_parameter_that_is_a_single_number_is_explained() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.layer = nn.Parameter(torch.tensor(1.5)), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gain * self.layer(x)

    symmetry = find_symmetry(Gain(), torch.randn(5, 2))
    line = "gain[0]: all 1 stay; a single number has no axis"
    assert str(symmetry.explain("gain")) == line
