"""Operator by operator: which permutations, scalings and signs of six hidden units an
operator lets through.

Each network is ``b(f(a(x)))`` with a linear layer ``a`` of six units. What must come
out follows from the operator: an order of permutations, the number of free scales, the
number of free signs. Those of all units together count: a norm, a mean, a cumulative
sum lets all units be scaled at once, and a layer normalisation lets all change their
sign. The numerical check excludes wrong groups that are too large, the expected numbers
those that are too small.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial, log
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify

ALL = factorial(6)


def _written_behind(h: Tensor) -> Tensor:
    result = torch.zeros(4, 6, 3)
    result[:, :, torch.tensor([2, 0])] = torch.stack([h, 2 * h], -1)
    return result


class Case(NamedTuple):
    """A network with an operator between two layers, and the units that it lets
    through.

    :param forward: from the six hidden units to the inputs of the last layer, of which
        there are ``width``.
    :param parts: modules and parameters that ``forward`` finds on its first argument.
    """

    forward: Callable[[Any, Tensor], Tensor]
    order: int
    scales: int
    signs: int
    width: int = 6
    parts: dict[str, Any] = {}  # noqa: RUF012


def counts(symmetry: Symmetry) -> tuple[int, int, int]:
    """The order of the permutations, the number of independent scales, and the number
    of signs.
    """
    group = symmetry.group
    scales = sum(group[n].count for n in group.names("scale"))
    return (
        group.permutations.order(),
        scales,
        sum(group[name].count for name in group.names("flip")),
    )


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def overwritten(s: Any, h: Tensor) -> Tensor:
    h = F.relu(h).clone()
    h[:, :2] = s.w
    return h


def halves_with_own_softmax(s: Any, h: Tensor) -> Tensor:
    """Units of two layers that are tied by a sum, but belong to two groups in between,
    which stay.
    """
    one, other = torch.tanh(h), torch.tanh(s.c(s.x))
    apart = torch.cat([one, other], -1).view(4, 2, 6).softmax(-1)
    return apart[:, 0] + 2 * apart[:, 1] + one + other


MASK = torch.tensor([True, True, False, False, False, False])
CASES = {
    "identity": Case(lambda s, h: h.clone(), ALL, 6, 6),
    "relu": Case(lambda s, h: F.relu(h), ALL, 6, 0),
    # the sign ends here: rows and biases flip on their own
    "abs": Case(lambda s, h: h.abs(), ALL, 6, 6),
    "tanh": Case(lambda s, h: torch.tanh(h), ALL, 0, 6),
    "gelu": Case(lambda s, h: F.gelu(h), ALL, 0, 0),
    "clamp from zero": Case(lambda s, h: h.clamp(min=0.0), ALL, 6, 0),
    "clamp on both sides": Case(lambda s, h: h.clamp(-1.0, 1.0), ALL, 0, 6),
    "clamp elsewhere": Case(lambda s, h: h.clamp(-1.0, 2.0), ALL, 0, 0),
    "square": Case(lambda s, h: h**2, ALL, 6, 6),
    "root": Case(lambda s, h: h.abs().sqrt(), ALL, 6, 6),
    "exp": Case(lambda s, h: h.exp(), ALL, 0, 0),
    "add a number": Case(lambda s, h: F.relu(h + 1.0), ALL, 0, 0),
    "multiply by a number": Case(lambda s, h: F.relu(h * 2.0), ALL, 6, 0),
    "multiply by a parameter": Case(lambda s, h: torch.tanh(h) * s.w, ALL, 6, 12, parts={"w": parameter(6)}),
    "add a parameter": Case(lambda s, h: F.relu(h + s.w), ALL, 6, 0, parts={"w": parameter(6)}),
    "add one bias for all": Case(lambda s, h: F.relu(h + s.w), ALL, 0, 0, parts={"w": parameter(1)}),
    "maximum with a parameter": Case(lambda s, h: torch.maximum(h, s.w), ALL, 6, 0, parts={"w": parameter(6)}),
    "prelu": Case(lambda s, h: s.p(h), ALL, 6, 0, parts={"p": nn.PReLU(6)}),
    "glu": Case(lambda s, h: F.glu(h), factorial(3), 3, 3, 3),
    "masked_fill": Case(lambda s, h: F.relu(h).masked_fill(MASK, 0.0), 96, 4, 0),
    "where": Case(lambda s, h: torch.where(MASK, F.relu(h), h), 48, 6, 4),
    "where with its own sign": Case(lambda s, h: torch.where(h > 1.0, h, 0.0), ALL, 0, 0),
    "dropout": Case(lambda s, h: F.dropout(F.relu(h), 0.5, s.training), ALL, 6, 0),
    "softmax": Case(lambda s, h: h.softmax(-1), ALL, 0, 0),
    # an even function: the sign ends here
    "cos": Case(lambda s, h: torch.cos(h), ALL, 0, 6),
    "cos of a sum with a number": Case(lambda s, h: torch.cos(h + 1.0), ALL, 0, 0),
    "sign": Case(lambda s, h: torch.sign(h), ALL, 0, 0),
    "threshold at zero": Case(lambda s, h: F.threshold(h, 0.0, 0.0), ALL, 6, 0),
    "rrelu": Case(lambda s, h: F.rrelu(h), ALL, 6, 0),
    "where it is positive": Case(lambda s, h: torch.where(h > 0.0, h, 0.1 * h), ALL, 6, 0),
    "where it is zero": Case(lambda s, h: torch.where(h == 0.0, 0.0, h), ALL, 6, 6),
    "divide by the own norm": Case(lambda s, h: h / h.norm(dim=-1, keepdim=True), ALL, 1, 6),
    "subtract the own mean": Case(lambda s, h: F.relu(h - h.mean(-1, keepdim=True)), ALL, 1, 0),
    "times the own norm": Case(lambda s, h: F.relu(s.c(s.x)) * h.norm(dim=-1, keepdim=True), ALL * ALL, 6, 6,
        parts={"c": nn.Linear(3, 6)}),  # scales of c, signs of a
    "RMSNorm": Case(lambda s, h: s.n(h), ALL, 7, 12, parts={"n": nn.RMSNorm(6)}),
    "LayerNorm": Case(lambda s, h: s.n(h), ALL, 6, 7, parts={"n": nn.LayerNorm(6)}),
    "weight_norm": Case(lambda s, h: torch.tanh(s.n(h)), ALL * 120, 5, 16, 5,
        {"n": parametrizations.weight_norm(nn.Linear(6, 5))}),  # rows of the direction
    "weight_norm, rescaled": Case(lambda s, h: F.relu(s.n(h)), ALL * 120, 10, 11, 5,
        {"n": parametrizations.weight_norm(nn.Linear(6, 5))}),  # and rows of the length
    "spectral_norm": Case(lambda s, h: F.relu(s.n(h)), ALL * 120, 1, 7, 5,
        {"n": parametrizations.spectral_norm(nn.Linear(6, 5))}),  # the whole weight; its sign in evaluation mode
    "cumsum": Case(lambda s, h: F.relu(h).cumsum(-1), 1, 1, 0),
    "cumsum over the batch": Case(lambda s, h: F.relu(h).cumsum(0), ALL, 6, 0),
    "differences": Case(lambda s, h: F.relu(h).diff(dim=-1), 1, 0, 0, 5),
    "differences over the batch": Case(lambda s, h: F.relu(h).diff(dim=0), ALL, 6, 0),
    # pinned
    "differences from units": Case(lambda s, h: F.relu(h).diff(dim=0, prepend=F.relu(h)[:1]), 1, 6, 0),
    "power in place": Case(lambda s, h: F.relu(h).clone().pow_(2.0), ALL, 6, 0),
    "ones like units": Case(lambda s, h: F.relu(h) * h.new_ones(6), ALL, 6, 0),
    "sort": Case(lambda s, h: h.sort(-1).values, ALL, 0, 0),
    "fourier transform": Case(lambda s, h: torch.fft.fft(h).abs(), 1, 1, 1),
    "tril": Case(lambda s, h: torch.tril(F.relu(h)), 4, 4, 0),
    # (pairs could turn round: they are pinned)
    "flip": Case(lambda s, h: F.relu(h) + F.relu(h).flip(-1), 1, 3, 0),
    "select": Case(lambda s, h: F.relu(h)[:, 2:3] * 2.0, 120, 1, 0, 1),
    "split": Case(lambda s, h: sum(p * (k + 1) for k, p in enumerate(F.relu(h).split(2, -1))), 2, 2, 0, 2),
    "unbind": Case(lambda s, h: F.relu(h).unflatten(-1, (2, 3)).unbind(1)[0], 36, 3, 0, 3),
    "repeat": Case(lambda s, h: F.relu(h).repeat(1, 2), ALL * 2**6, 6, 0, 12),
    "stack": Case(lambda s, h: torch.stack([F.relu(h), torch.tanh(h)], -1).flatten(1), ALL, 0, 0, 12),
    "cat with a constant": Case(lambda s, h: torch.cat([F.relu(h), torch.ones(4, 2)], -1), 2 * ALL, 6, 0, 8),
    "units beside themselves and their squares": Case(
        lambda s, h: torch.cat([h, h, h * h + 1.0], -1), ALL, 0, 6, 18
    ),
    "cat with data": Case(lambda s, h: torch.cat([F.relu(h), s.x], -1), ALL, 6, 0, 9),
    "an index map with copies": Case(lambda s, h: F.relu(h)[:, torch.tensor([1, 1, 5])], 24, 2, 0, 3),
    "mean over units": Case(lambda s, h: F.relu(h).mean(-1, keepdim=True), ALL, 0, 0, 1),
    "two heads by view": Case(lambda s, h: F.relu(h).view(4, 2, 3).sum(1), 6 * 8, 3, 0, 3),
    "an index map": Case(lambda s, h: F.relu(h)[:, torch.tensor([4, 2, 0])], 36, 3, 0, 3),
    "places of the two largest units": Case(lambda s, h: h.topk(2, -1).indices.to(h.dtype), 1, 0, 0, 2),
    "the two largest units": Case(lambda s, h: h.topk(2, -1).values, ALL, 0, 0, 2),
    "einsum with an ellipsis": Case(
        lambda s, h: torch.einsum("...i,ij->...j", F.relu(h), s.w), ALL * 120, 11, 5, 5, {"w": parameter(6, 5)}
    ),
    "einsum without an arrow": Case(
        lambda s, h: torch.einsum("ji,bi", s.w, F.relu(h)), ALL * 120, 11, 5, 5, {"w": parameter(5, 6)}
    ),
    "distances": Case(lambda s, h: torch.cdist(h, s.w), ALL * 120, 0, 1, 5, {"w": parameter(5, 6)}),
    "gather rows": Case(lambda s, h: F.relu(h).gather(0, torch.tensor([[2], [0]]).expand(2, 6)), ALL, 6, 0),
    "gather": Case(lambda s, h: F.relu(h).gather(1, torch.tensor([[0, 1]] * 4)), 48, 2, 0, 2),
    "labels of a categorical": Case(
        lambda s, h: torch.distributions.Categorical(logits=F.relu(h)[..., None] * s.w).log_prob(s.places[:, None]),
        ALL, 0, 0, parts={"w": parameter(4)},
    ),
    # real and imaginary parts flip by themselves
    "complex numbers": Case(
        lambda s, h: torch.view_as_complex(h.view(4, 3, 2)).abs(), 6, 3, 6, 3
    ),
    "places written by a parameter": Case(overwritten, 48, 4, 0, parts={"w": parameter(2)}),
    "tied units of two groups": Case(halves_with_own_softmax, ALL, 0, 0, parts={"c": nn.Linear(3, 6)}),
    "largest unit": Case(lambda s, h: h.amax(-1, keepdim=True), ALL, 0, 0, 1),
    "place of the largest unit": Case(lambda s, h: h.max(-1, keepdim=True).indices.to(h.dtype), 1, 0, 0, 1),
    "addmm": Case(
        lambda s, h: torch.addmm(s.c, F.relu(h), s.w), ALL * 120, 11, 5, 5, {"c": parameter(5), "w": parameter(6, 5)}
    ),
    "outer product": Case(
        lambda s, h: (F.relu(h)[:, :, None] * s.w).flatten(1), ALL * 6, 9, 3, 18, {"w": parameter(3)}
    ),
    "merged axes": Case(lambda s, h: F.relu(h).view(2, 12).view(4, 6), ALL, 6, 0),
    "scatter_add": Case(
        lambda s, h: torch.zeros(4, 6).scatter_add(0, s.places[:, None].expand(4, 6), F.relu(h)), ALL, 6, 0
    ),
    "scatter_add to places, of which one differs": Case(
        lambda s, h: torch.zeros(4, 6).scatter_add(0, torch.tensor([[2] * 6, [0, 0, 0, 0, 0, 3]] * 2), F.relu(h)),
        1, 6, 0,
    ),
    "scatter_add to places of their own": Case(
        lambda s, h: torch.zeros(4, 6).scatter_add(0, (s.places[:, None] + torch.arange(6)) % 4, F.relu(h)), 1, 6, 0
    ),
    "scatter_reduce": Case(
        lambda s, h: torch.zeros(4, 6).scatter_reduce(0, s.places[:, None].expand(4, 6), F.tanh(h), "mean"), ALL, 0, 6
    ),
    "index_add": Case(lambda s, h: torch.zeros(4, 6).index_add(0, s.places, F.relu(h)), ALL, 6, 0),
    "index_put": Case(lambda s, h: torch.zeros(4, 6).index_put((s.places,), F.relu(h), True), ALL, 6, 0),
    "index_put behind the units": Case(lambda s, h: _written_behind(F.relu(h)).sum(-1), ALL, 6, 0),
    "fold": Case(
        lambda s, h: F.fold(F.relu(h)[:, :, None].expand(4, 6, 4).reshape(4, 24, 1), (2, 2), 2).sum((2, 3)), ALL, 6, 0
    ),
    "EmbeddingBag": Case(
        lambda s, h: F.relu(h) * s.e(torch.tensor([[1, 2], [3, 4], [1, 1], [0, 2]])), ALL, 12, 6,
        parts={"e": nn.EmbeddingBag(7, 6)},
    ),
    "rows by a mask": Case(lambda s, h: F.relu(h)[s.x[:, 0] < 9.0].sum(0, keepdim=True), ALL, 6, 0),
    "entries by a mask of units": Case(lambda s, h: F.relu(h)[h > 0.5].sum().expand(1, 1), 1, 0, 0, 1),
    "rows by nonzero": Case(lambda s, h: F.relu(h)[s.x[:, 0].nonzero()[:, 0]].sum(0, keepdim=True), ALL, 6, 0),
    "rows by unique": Case(lambda s, h: F.relu(h)[torch.unique(s.places)].sum(0, keepdim=True), ALL, 6, 0),
    "places that data count": Case(
        lambda s, h: F.relu(h)[:, torch.arange((s.x[0] < 9.0).nonzero().shape[0])].sum(1, keepdim=True), 1, 0, 0, 1
    ),
    "places that data shift": Case(
        lambda s, h: F.relu(h)[:, (torch.arange(6) + (s.x[0] < 9.0).nonzero().shape[0]) % 6], 1, 1, 0
    ),
    "LSTM cell": Case(lambda s, h: s.n(h, s.n(h))[0], ALL * 120, 6, 11, 5, {"n": nn.LSTMCell(6, 5)}),
    "GRU cell": Case(lambda s, h: s.n(h, s.n(h)), ALL * 120, 6, 11, 5, {"n": nn.GRUCell(6, 5)}),
    "RNN cell with relu": Case(
        lambda s, h: s.n(h, s.n(h)), ALL * 120, 11, 6, 5, {"n": nn.RNNCell(6, 5, nonlinearity="relu")}
    ),
    "LSTM": Case(lambda s, h: s.n(h[:, None])[0][:, 0], ALL * 120, 6, 11, 5, {"n": nn.LSTM(6, 5)}),
    "LSTM in both directions": Case(
        lambda s, h: s.n(h[:, None])[0][:, 0], ALL * 120 * 120, 6, 16, 10, {"n": nn.LSTM(6, 5, bidirectional=True)}
    ),
    "LSTM with a projection": Case(
        lambda s, h: s.n(h[:, None])[0][:, 0], ALL * 120 * 2, 8, 13, 2, {"n": nn.LSTM(6, 5, proj_size=2)}
    ),
    "GRU": Case(lambda s, h: s.n(h[:, None])[0][:, 0], ALL * 120, 6, 11, 5, {"n": nn.GRU(6, 5)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_operator_lets_through_what_it_should(name: str) -> None:
    case = CASES[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(case.width, 2)
            for part, value in case.parts.items():
                setattr(self, part, value)
            self.register_buffer("places", torch.tensor([2, 0, 2, 1]))

        def forward(self, x: Tensor) -> Tensor:
            self.x = x
            return self.b(case.forward(self, self.a(x)))

    net, x = Net(), torch.randn(4, 3)
    # verification marks what holds in evaluation mode only
    symmetry = find_symmetry(net, x, verify=name == "spectral_norm")
    result = verify(symmetry, net, x, trials=2)
    assert result, result
    assert counts(symmetry) == (case.order, case.scales, case.signs)


IMAGE_CASES = {
    "max pooling": Case(lambda s, h: F.max_pool2d(h, 2), ALL, 6, 0),
    "mean pooling": Case(lambda s, h: F.avg_pool2d(h, 2), ALL, 6, 6),
    "adaptive pooling": Case(lambda s, h: F.adaptive_avg_pool2d(torch.tanh(h), 1), ALL, 0, 6),
    "upsampling": Case(lambda s, h: F.interpolate(F.relu(h), scale_factor=2), ALL, 6, 0),
    "bilinear upsampling": Case(lambda s, h: F.interpolate(h, scale_factor=2, mode="bilinear"), ALL, 6, 6),
    "reflected borders": Case(lambda s, h: F.pad(F.relu(h), (1, 1, 1, 1), mode="reflect"), ALL, 6, 0),
    "zero borders": Case(lambda s, h: F.pad(F.relu(h), (1, 1, 1, 1)), ALL, 6, 0),
    "local mixing": Case(lambda s, h: s.c(F.relu(h)), ALL * ALL, 12, 6, parts={"c": nn.Conv2d(6, 6, 3, padding=1)}),
    "transposed": Case(lambda s, h: s.c(F.relu(h)), ALL * 24, 10, 4, 4, {"c": nn.ConvTranspose2d(6, 4, 2)}),
    "squeeze and excite": Case(
        lambda s, h: F.relu(h) * s.c(F.relu(h).mean((2, 3), keepdim=True)).sigmoid(), ALL, 6, 0,
        parts={"c": nn.Conv2d(6, 6, 1)},
    ),
    "patches": Case(
        lambda s, h: s.c(F.unfold(F.relu(h), 2).transpose(1, 2)).transpose(1, 2)[..., None], ALL * 24, 10, 4, 4,
        {"c": nn.Linear(24, 4)},
    ),
    "space to depth": Case(lambda s, h: F.pixel_unshuffle(F.relu(h), 2), ALL, 6, 0, 24),
    "places of maxima": Case(
        lambda s, h: F.max_pool2d(h, 2, return_indices=True)[1].to(h.dtype) * s.w, ALL, 0, 0,
        parts={"w": parameter(6, 1, 1)},
    ),
    "cropped borders": Case(lambda s, h: F.pad(F.relu(h), (-1, 1, 0, -2)), ALL, 6, 0),
    "pixels in order": Case(lambda s, h: F.relu(h).flatten(2).cumsum(-1).unflatten(2, (4, 4)), ALL, 6, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGE_CASES)
def test_an_operator_on_images_lets_through_what_it_should(name: str) -> None:
    case = IMAGE_CASES[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 1), nn.Conv2d(case.width, 2, 1)
            for part, value in case.parts.items():
                setattr(self, part, value)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(case.forward(self, self.a(x)))

    net, x = Net(), torch.randn(2, 3, 4, 4)
    symmetry = find_symmetry(net, x, verify=False)
    result = verify(symmetry, net, x, trials=2)
    assert result, result
    assert counts(symmetry) == (case.order, case.scales, case.signs)


class Last(nn.Module):
    """A layer's outputs by the state of a cell."""

    def __init__(self, kind: type):
        super().__init__()
        self.cell, self.out = kind(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x)
        return self.out(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_units_of_cells_are_found_on_any_device(
    kind: type, device: torch.device
) -> None:
    symmetry = find_symmetry(Last(kind).to(device), torch.randn(5, 3, device=device))
    # Of the units, and of the columns that a first state of zeros meets.
    assert symmetry.permutations.log_order() == pytest.approx(2 * log(factorial(4)))


class Diagonal(nn.Module):
    """Six units, each of which is multiplied by an entry of a matrix's diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 6)
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.b = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(6)
        return self.b(torch.tanh(self.a(x)) * self.matrix[index, index])


def test_an_index_of_two_axes_at_once_pins_both_as_neither_moves_alone() -> None:
    net, x = Diagonal().double(), torch.randn(5, 3, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    assert symmetry.at_least
    assert int(symmetry.permutations.order()) == 1
    moved = Diagonal().double()
    moved.load_state_dict(symmetry.sample()(dict(net.state_dict())))
    assert not torch.equal(moved.matrix.diagonal(), net.matrix.diagonal())
    torch.testing.assert_close(moved(x), net(x))
