"""Buffers move along with units if they are statistics of these, by what the network does with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.discovery.verify import verify

CHANNELS = 3


class Frozen(nn.Module):
    """Batch normalisation with buffers alone, by plain arithmetic, under names of its own."""

    def __init__(self, channels: int = CHANNELS):
        super().__init__()
        for name in ("gain", "offset", "centre"):
            self.register_buffer(name, torch.randn(channels))
        self.register_buffer("spread", torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        gain, offset, centre, spread = (
            value.reshape(1, -1, 1, 1) for value in (self.gain, self.offset, self.centre, self.spread)
        )
        scale = gain * (spread + 1e-5).rsqrt()
        return x * scale + (offset - centre * scale)


def frozen() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, CHANNELS, 3), Frozen(), nn.ReLU(), nn.Conv2d(CHANNELS, 2, 1)).double()


X = torch.arange(100, dtype=torch.float64).square().sin().reshape(2, 2, 5, 5)


def permuted(net: nn.Sequential, order: tuple[int, ...], buffers: bool) -> Tensor:
    """The outputs with exchanged channels, written by hand."""
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    for name in ("0.weight", "0.bias", *(f"1.{name}" for name, _ in net[1].named_buffers() if buffers)):
        weights[name] = weights[name][list(order)]
    weights["3.weight"] = weights["3.weight"][:, list(order)]
    return torch.func.functional_call(net, weights, (X,))


def test_plain_arithmetic_with_buffers_is_a_normalisation() -> None:
    torch.manual_seed(0)
    net = frozen()
    symmetry = ps.find_symmetry(net, X)
    before = net(X)
    # By brute force: every order of the channels keeps the outputs if the buffers move along, none else does without.
    for order in itertools.permutations(range(CHANNELS)):
        assert torch.allclose(permuted(net, order, True), before)
        assert torch.allclose(permuted(net, order, False), before) == (order == (0, 1, 2))
    assert symmetry.permutations.log_order() == pytest.approx(math.log(math.factorial(CHANNELS)))
    assert set(symmetry.group.buffers) == {"1.gain", "1.offset", "1.centre", "1.spread"}
    result = verify(symmetry, net, X, trials=5)
    assert result
    assert max(result.error, result.train_error) < 1e-12
    held = ps.find_symmetry(net, X, buffers=False)
    assert held.permutations.order() == 1
    assert not held.group.names("scale")  # what is subtracted stays
    assert not held.group.buffers


def test_signs_and_scales_of_what_comes_in_meet_the_buffers_that_normalise_it() -> None:
    torch.manual_seed(0)
    net = frozen()
    symmetry = ps.find_symmetry(net, X)
    for move in ("scale", "flip"):
        moved = symmetry.group.sample(dtype=torch.float64)
        acted = symmetry.act(moved, net)
        assert not torch.allclose(acted[1].centre, net[1].centre), move
        assert torch.allclose(acted(X), net(X))
    with torch.no_grad():  # by hand: a channel's kernel, bias and centre change sign, and so does its gain
        for value in (net[0].weight, net[0].bias, net[1].centre, net[1].gain):
            before = net(X) if value is net[0].weight else before  # noqa: F821
            value[1] *= -1
    assert torch.allclose(net(X), before)
    assert sum(symmetry.group[n].count for n in symmetry.group.names("flip")) == CHANNELS


def test_torchvisions_frozen_normalisation_moves_with_its_channels() -> None:
    from pyro_symmetric._torchvision import import_torchvision

    layer = import_torchvision().ops.FrozenBatchNorm2d
    net = nn.Sequential(nn.Conv2d(2, 4, 3), layer(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    symmetry = ps.find_symmetry(net, X.float())
    assert symmetry.permutations.factors == {"0": 4}
    assert set(symmetry.group.buffers) >= {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert verify(symmetry, net, X.float()).error < 1e-12


class Constant(nn.Module):
    """A layer whose hidden units, or heads of two units, meet a constant of the architecture."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], value: Tensor, persistent: bool = True):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(3, 6), nn.Linear(6, 2), use
        self.register_buffer("running_mean", value, persistent)  # a name says nothing

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.use(self.a(x), self.running_mean)))


def _slopes(h: Tensor, slopes: Tensor) -> Tensor:
    heads = h.unflatten(-1, (3, 2))
    distance = torch.arange(h.shape[1], dtype=h.dtype)[:, None, None] * slopes[:, None]
    return (heads + distance).flatten(-2)


def _rotated(h: Tensor, frequencies: Tensor) -> Tensor:
    angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * frequencies
    return h * torch.cat([angle.cos(), angle.sin()], -1)


CONSTANTS = {
    "positions": (lambda h, value: h + value[: h.shape[1]], torch.randn(9, 6), True),
    "mask of weights": (lambda h, value: h @ value, (torch.rand(6, 6) < 0.5).float(), True),
    "slopes of heads": (_slopes, torch.tensor([0.5, 0.25, 0.125]), True),
    "frequencies": (_rotated, torch.tensor([1.0, 0.1, 0.01]), True),
    "not saved": (lambda h, value: h / value, torch.rand(6), False),
    "table": (lambda h, value: h + value, torch.rand(6), True),
    "mask of units": (lambda h, value: h * value, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5]), True),
    "bins": (lambda h, value: F.linear(h.softmax(-1), value[None]).expand(h.shape), torch.arange(6.0), True),
    "looked up": (lambda h, value: h * value[torch.tensor([3, 0, 1, 5, 4, 2])], torch.rand(6), True),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_architecture_stay(name: str) -> None:
    torch.manual_seed(0)
    net, x = Constant(*CONSTANTS[name]), torch.randn(2, 4, 3)
    symmetry = ps.find_symmetry(net, x)
    assert not symmetry.group.buffers
    assert verify(symmetry, net, x, trials=3)
    expected = {"slopes of heads": 2.0**3, "bins": 720.0}  # the two units of each head; all that see one number
    assert float(symmetry.permutations.order()) == expected.get(name, 1.0)


def test_what_a_unit_keeps_about_itself_moves_whatever_its_name() -> None:
    torch.manual_seed(0)
    net, x = Constant(lambda h, value: (h - value) / value.exp(), torch.randn(6)), torch.randn(2, 4, 3)
    symmetry = ps.find_symmetry(net, x)
    assert symmetry.permutations.factors == {"a": 6}
    assert symmetry.group.buffers == ("running_mean",)
    assert verify(symmetry, net, x, trials=3)
    assert ps.find_symmetry(net, x, buffers=False).permutations.order() == 1


def test_singular_vectors_move_and_keep_their_length() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    net, x = nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    symmetry = ps.find_symmetry(net, x)
    assert symmetry.permutations.factors == {"0": 4}
    element = symmetry.group.sample()
    moved = symmetry.act(element, net)[0].parametrizations.weight[0]._u
    assert torch.allclose(moved.sort().values, layer.parametrizations.weight[0]._u.sort().values)
    assert symmetry.group.buffers == ("0.parametrizations.weight.0._u",)
