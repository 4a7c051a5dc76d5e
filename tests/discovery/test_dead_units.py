"""Units that a network's own weights or ordinary inputs never switch on: their
multipliers are those of the function, neither more nor fewer.

The right number of scales is that of units behind a positively homogeneous function;
what is homogeneous only within bounds, however far off, has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify
from pyro_symmetric.groups import Axis, Group, Units

Function = Callable[[Tensor], Tensor]


class Hidden(nn.Module):
    """Hidden units with a bias of any size, and a function of each of them."""

    def __init__(self, function: Function, bias: float = 0.0, units: int = 3):
        super().__init__()
        self.up, self.down = nn.Linear(2, units), nn.Linear(units, 1)
        self.function = function
        nn.init.constant_(self.up.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


def count(symmetry: Symmetry, move: str) -> int:
    """The number of units of one move."""
    return sum(symmetry.group[name].count for name in symmetry.group.names(move))


HOMOGENEOUS: dict[str, tuple[Callable[[], Function], float]] = {
    "PReLU at -6": (lambda: nn.PReLU(3), -6.0),
    "PReLU at 9": (lambda: nn.PReLU(3), 9.0),
    "ReLU at -6": (lambda: torch.relu, -6.0),
    "ReLU at -1000": (lambda: torch.relu, -1000.0),
    "ReLU at 9": (lambda: torch.relu, 9.0),
    "leaky ReLU at -30": (lambda: F.leaky_relu, -30.0),
    "RReLU at -30": (lambda: nn.RReLU().eval(), -30.0),
    "product with a comparison at -9": (lambda: lambda h: h * (h > 0), -9.0),
}


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_units_that_are_off_at_the_networks_own_weights_keep_their_scales(
    name: str,
) -> None:
    make, bias = HOMOGENEOUS[name]
    symmetry = find_symmetry(Hidden(make(), bias), torch.randn(5, 2))
    assert symmetry.log_order() == pytest.approx(math.log(6))
    assert count(symmetry, "scale") == 3
    assert not symmetry.at_least


def test_a_dead_layer_of_a_large_network_keeps_its_scales() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    nn.init.constant_(net[0].bias, -9.0)
    symmetry = find_symmetry(net, torch.randn(4, 64))
    assert count(symmetry, "scale") == 256


def bound(value: float) -> Tensor:
    return torch.tensor([value])


BOUNDED: dict[str, tuple[Function, float]] = {
    "minimum of a tensor": (lambda h: torch.minimum(h, bound(50.0)), 0.0),
    "minimum of a far tensor": (lambda h: torch.minimum(h, bound(400.0)), 0.0),
    "maximum of a tensor": (lambda h: torch.maximum(h, bound(-80.0)), 0.0),
    "clamp by tensors": (lambda h: h.clamp(bound(-70.0), bound(90.0)), 0.0),
    "comparison with a tensor": (lambda h: h * (h < bound(100.0)), 0.0),
    "comparison with a number": (lambda h: h * (h < 50.0), 0.0),
    "where a tensor is larger": (
        lambda h: torch.where(h < bound(60.0), h, bound(0.0)),
        0.0,
    ),
    "bound by a buffer's product": (lambda h: h - F.relu(h - bound(75.0)), 0.0),
    "threshold": (lambda h: F.threshold(h, -90.0, 0.0), 0.0),
    "softplus at -30": (F.softplus, -30.0),
    "ELU at 40": (F.elu, 40.0),
    "CELU at 40": (lambda h: F.celu(h, 2.0), 40.0),
    "SELU at 40": (F.selu, 40.0),
    "GELU at 40": (F.gelu, 40.0),
    "GELU at -40": (F.gelu, -40.0),
    "hardswish at 30": (F.hardswish, 30.0),
    "ReLU6 at 20": (F.relu6, 20.0),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_functions_that_are_homogeneous_within_bounds_have_no_scales(name: str) -> None:
    function, bias = BOUNDED[name]
    symmetry = find_symmetry(Hidden(function, bias), torch.randn(5, 2))
    assert symmetry.log_order() == pytest.approx(math.log(6))
    assert count(symmetry, "scale") == 0


def test_slopes_that_a_network_never_uses_have_no_scales_of_their_own() -> None:
    # six at the network's own weights, as nothing reads the slopes there
    net = Hidden(nn.PReLU(3), -6.0)
    group = find_symmetry(net, torch.randn(5, 2)).group
    slopes = [axis for units in group.units.values() for axis in units.axes]
    assert all(not a.exponent for a in slopes if a.site == "function.weight")


# verify -------------------------------------------------------------------------------


def one_unit(move: str) -> Group:
    """A flip, or a scale, of one hidden unit of :class:`Hidden`."""
    axes = [("up.weight", 1), ("up.bias", 1), ("down.weight", -1)]
    units = Units(
        "up",
        1,
        tuple(
            Axis(site, int(site == "down.weight"), torch.zeros(1, 1, dtype=int), power)
            for site, power in axes
        ),
        moves=frozenset({move}),
    )
    shapes = {
        name: p.shape for name, p in Hidden(torch.relu, 0.0, 1).named_parameters()
    }
    return Group([units], shapes)


def test_a_wrong_flip_of_a_unit_that_is_rarely_on_never_passes() -> None:
    # each input switches the unit on with probability a half
    for seed in range(40):
        torch.manual_seed(seed)
        net = Hidden(torch.relu, units=1)
        assert not verify(Symmetry(one_unit("flip")), net, torch.randn(1, 2))


@pytest.mark.parametrize("bias", [-6.0, -1000.0])
def test_a_wrong_flip_of_a_unit_that_its_own_weights_switch_off_never_passes(
    bias: float,
) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        net = Hidden(torch.relu, bias, units=1)
        assert not verify(Symmetry(one_unit("flip")), net, torch.randn(3, 2))


def test_a_scale_that_a_far_clamp_breaks_never_passes() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        net = Hidden(lambda h: torch.minimum(h.relu(), bound(60.0)), units=1)
        assert not verify(Symmetry(one_unit("scale")), net, torch.randn(3, 2))


def test_nothing_is_known_of_units_that_nothing_switches_on() -> None:
    net = Hidden(lambda h: torch.relu(h - 1e30), units=1)
    result = verify(Symmetry(one_unit("flip")), net, torch.randn(3, 2))
    assert not result
    assert result.broken == ()
    assert result.unknown == ("up",)
    assert "nothing is known of the units ['up']" in str(result)


def test_a_layer_that_nothing_switches_on_leaves_the_symmetry_open() -> None:
    net = Hidden(lambda h: torch.relu(h - 1e30))
    symmetry = find_symmetry(net, torch.randn(3, 2))
    assert count(symmetry, "scale") == 0
    assert symmetry.at_least
