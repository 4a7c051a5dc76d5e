"""Buffers move along with units if they are statistics of these, by their names."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.discovery.symmetry import Symmetry, copied
from pyro_symmetric.discovery.verify import verify

X = torch.arange(100, dtype=torch.float64).square().sin().reshape(2, 2, 5, 5)


def test_torchvisions_frozen_normalisation_moves_with_its_channels() -> None:
    from pyro_symmetric.networks import import_torchvision

    layer = import_torchvision().ops.FrozenBatchNorm2d
    net = nn.Sequential(nn.Conv2d(2, 4, 3), layer(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    symmetry = ps.find_symmetry(net, X.float())
    assert symmetry.permutations.factors == {"0": 4}
    assert set(symmetry.group.buffers) >= {
        f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }
    assert verify(symmetry, net, X.float()).error < 1e-12


class Constant(nn.Module):
    """A layer whose hidden units, or heads of two units, meet a constant of the
    architecture.
    """

    def __init__(
        self,
        use: Callable[[Tensor, Tensor], Tensor],
        value: Tensor,
        persistent: bool = True,
        name: str = "table",
    ):
        super().__init__()
        self.a, self.b, self.use, self.name = (
            nn.Linear(3, 6),
            nn.Linear(6, 2),
            use,
            name,
        )
        self.register_buffer(name, value, persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.use(self.a(x), getattr(self, self.name))))


def _slopes(h: Tensor, slopes: Tensor) -> Tensor:
    heads = h.unflatten(-1, (3, 2))
    distance = torch.arange(h.shape[1], dtype=h.dtype)[:, None, None] * slopes[:, None]
    return (heads + distance).flatten(-2)


def _rotated(h: Tensor, frequencies: Tensor) -> Tensor:
    angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * frequencies
    return h * torch.cat([angle.cos(), angle.sin()], -1)


CONSTANTS = {
    "positions": (lambda h, value: h + value[: h.shape[1]], torch.randn(9, 6), True),
    "mask of weights": (
        lambda h, value: h @ value,
        torch.ones(6, 6).tril(),  # no two units are read alike
        True,
    ),
    "slopes of heads": (_slopes, torch.tensor([0.5, 0.25, 0.125]), True),
    "frequencies": (_rotated, torch.tensor([1.0, 0.1, 0.01]), True),
    "not saved": (lambda h, value: h / value, torch.rand(6), False),
    "table": (lambda h, value: h + value, torch.rand(6), True),
    "mask of units": (
        lambda h, value: h * value,
        torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5]),
        True,
    ),
    "bins": (
        lambda h, value: F.linear(h.softmax(-1), value[None]).expand(h.shape),
        torch.arange(6.0),
        True,
    ),
    "looked up": (
        lambda h, value: h * value[torch.tensor([3, 0, 1, 5, 4, 2])],
        torch.rand(6),
        True,
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_architecture_stay(name: str) -> None:
    torch.manual_seed(0)
    net, x = Constant(*CONSTANTS[name]), torch.randn(2, 4, 3)
    symmetry = ps.find_symmetry(net, x)
    assert not symmetry.group.buffers
    assert verify(symmetry, net, x, trials=3)
    # the two units of each head; all that see one number
    # those that are multiplied by one, and those that are multiplied by zero, of which
    # the columns that read them move by themselves
    expected = {"slopes of heads": 2.0**3, "bins": 720.0, "mask of units": 24.0}
    assert float(symmetry.permutations.order()) == expected.get(name, 1.0)


def test_what_a_unit_keeps_about_itself_moves() -> None:
    torch.manual_seed(0)
    use, x = (lambda h, value: (h - value) / value.exp()), torch.randn(2, 4, 3)
    net = Constant(use, torch.randn(6), name="running_mean")
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
    assert torch.allclose(
        moved.sort().values, layer.parametrizations.weight[0]._u.sort().values
    )
    assert symmetry.group.buffers == ("0.parametrizations.weight.0._u",)


class Attention(nn.Module):
    """Queries, keys and values, each behind a batch normalisation of its own.

    Running means of keys shift all scores of a query alike.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value"):
            layers = nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2)
            setattr(self, name, nn.Sequential(*layers))
        self.out = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) @ self.key(x).T).softmax(-1)
        return self.out(scores @ self.value(x))


def test_scales_that_hold_in_evaluation_mode_only_are_marked() -> None:
    torch.manual_seed(0)
    net, x = Attention().double(), torch.randn(6, 3, dtype=torch.float64)
    for _ in range(3):
        net(3.0 * torch.randn(20, 3, dtype=torch.float64) + 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is dropped
        symmetry = ps.find_symmetry(net, x)
    scaled = {axis.site for axis in symmetry.scalings["key.0"].axes if axis.exponent}
    assert scaled == {"key.0.weight", "key.1.weight"}  # no running statistics
    marked = {("scale", "key.0"), ("scale", "key.1"), ("scale", "query.0~2")}
    assert marked <= set(symmetry.eval_only)
    assert "in evaluation mode only" in str(symmetry)
    said = "key.0 (scale) in evaluation mode only"
    assert said in str(symmetry.explain("key.0.weight"))
    assert ("scale", "key.0") in symmetry.holding(net).eval_only

    read = Symmetry.from_dict(symmetry.to_dict())
    in_both = read.in_train_mode()
    assert in_both.scalings.units
    assert not in_both.eval_only
    assert _change(symmetry, net.eval(), x) < 1e-12
    assert _change(symmetry, net.train(), x) > 1e-2
    assert _change(in_both, net.eval(), x) < 1e-12
    assert _change(in_both, net.train(), x) < 1e-12


def _change(symmetry: Symmetry, net: nn.Module, x: Tensor) -> float:
    """Return the largest change of outputs by a random element, in the net's mode."""
    moved = symmetry.act(symmetry.sample(), net)
    return float((moved(x) - copied(net)(x)).abs().max().detach())


class Spectral(nn.Module):
    """A layer that is divided by its largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(3, 4, bias=False)
        self.first = nn.utils.parametrizations.spectral_norm(layer)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def test_signs_that_hold_in_evaluation_mode_only_are_marked() -> None:
    """Train mode computes singular vectors anew, and so gives a value a sign."""
    torch.manual_seed(0)
    net, x = Spectral().double(), torch.randn(5, 3, dtype=torch.float64)
    symmetry = ps.find_symmetry(net, x)
    (flip,) = [name for move, name in symmetry.eval_only if move == "flip"]
    assert {axis.site for axis in symmetry.signs[flip].axes} == {
        "first.parametrizations.weight.original"
    }
    signs = ps.Group([symmetry.signs[flip]], symmetry.site_shapes)
    minus = signs.element(signs={flip: -torch.ones(1)})
    before = net.eval()(x)
    assert (symmetry.act(minus, net)(x) - before).abs().max() < 1e-12
    assert (symmetry.act(minus, net.train())(x) - before).abs().max() > 1e-2
