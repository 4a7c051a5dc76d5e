"""Random networks that cut, join, mask and index their hidden units, and the exact
number of permutations of each, by brute force.

A network is ``b(f(sin(a(x))))``: a layer ``a`` of three or four units, a random chain
``f`` of operators without parameters, and a linear layer ``b`` that reads what leaves
them. Let :math:`p` be an exchange of units. It is a symmetry if the columns of
:math:`f(p h)` are those of :math:`f(h)` in another order; columns that are equal may be
exchanged besides. So the number of symmetries is the number of such :math:`p`, times
the factorials of the numbers of equal columns.

``python -m benchmarks.checks.shuffles 500`` compares the symmetries of 500 networks
with it: none may have more, and a network that has fewer must say "at least".
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry

Shuffle = Callable[["Shuffled", Tensor], Tensor]  # of (rows, units)
ROWS = 3
DIGITS = 9  # to which columns of features are compared
LARGEST = 12  # features


class Shuffled(nn.Module):
    """A layer of hidden units, a function of these without parameters, and a layer that
    reads it.

    :ivar ones, mask, order: constants that the function may use.
    """

    ones: Tensor
    mask: Tensor
    order: Tensor

    def __init__(self, function: Shuffle, units: int = 4):
        super().__init__()
        self.function, self.units = function, units
        order = [2, 0, 3, 1] if units == 4 else [2, 0, 1]
        self.register_buffer("ones", torch.ones(units, dtype=torch.float64))
        self.register_buffer("mask", 1.0 * (torch.arange(units) != 2))
        self.register_buffer("order", torch.tensor(order))
        self.a = nn.Linear(2, units, dtype=torch.float64)
        width = function(self, torch.zeros(ROWS, units, dtype=torch.float64)).shape[-1]
        self.b = nn.Linear(width, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self, self.a(x).sin()))


def exact_order(net: Shuffled) -> int:
    """Count the permutations of units and of columns that leave the function alone."""
    generator = torch.Generator().manual_seed(1)
    shape = (7, net.units)
    h = 2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0
    columns = _columns(net, h)
    orders = itertools.permutations(range(net.units))
    of_units = sum(_columns(net, h[:, list(order)]) == columns for order in orders)
    return of_units * math.prod(math.factorial(n) for n in columns.values())


def _columns(net: Shuffled, h: Tensor) -> Counter[tuple[float, ...]]:
    """Count the columns of features at these units."""
    features = net.function(net, h).detach()
    rounded = features.T.mul(10.0**DIGITS).round().add(0.0)
    return Counter(tuple(column) for column in rounded.tolist())


# operators ----------------------------------------------------------------------------


def _halves(h: Tensor) -> tuple[Tensor, Tensor]:
    half = h.shape[-1] // 2
    return h[:, :half], h[:, half : 2 * half]


def _paired(h: Tensor) -> Tensor:
    """Return units in pairs, without the last of an odd number."""
    return h[:, : 2 * (h.shape[-1] // 2)].unflatten(-1, (-1, 2))


def _backwards(n: int) -> list[int]:
    return list(range(n))[::-1]


def _assigned(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, :1] = h[:, 1:2].clone()
    return h


SHUFFLES: dict[str, Shuffle] = {
    "nothing": lambda s, h: h,
    "unbind and stack": lambda s, h: torch.stack(h.unbind(-1), -1),
    "unbind, reversed": lambda s, h: torch.stack(h.unbind(-1)[::-1], -1),
    "unbind, each by itself": lambda s, h: torch.stack(
        [column.exp() for column in h.unbind(-1)], -1
    ),
    "unbind, one is another": lambda s, h: torch.stack(
        [h.unbind(-1)[0].exp(), *h.unbind(-1)[1:]], -1
    ),
    "unbind, without the first": lambda s, h: torch.stack(h.unbind(-1)[1:], -1),
    "unbind, rotated": lambda s, h: torch.stack(
        [*h.unbind(-1)[1:], h.unbind(-1)[0]], -1
    ),
    "unbind and add": lambda s, h: sum(h.unbind(-1)).unsqueeze(-1),  # type: ignore
    "unbind and weigh": lambda s, h: torch.stack(
        [column * (1 + i % 2) for i, column in enumerate(h.unbind(-1))], -1
    ),
    "rows by unbind": lambda s, h: torch.stack(h.unbind(0)),
    "chunks exchanged": lambda s, h: torch.cat(h.chunk(2, -1)[::-1], -1),
    "chunks, each by itself": lambda s, h: torch.cat(
        [piece.exp() for piece in h.chunk(2, -1)], -1
    ),
    "chunks, one is another": lambda s, h: torch.cat(
        [h.chunk(2, -1)[0].exp(), *h.chunk(2, -1)[1:]], -1
    ),
    "halves multiplied": lambda s, h: _halves(h)[0] * _halves(h)[1],
    "halves, gated": lambda s, h: _halves(h)[0] * _halves(h)[1].sigmoid(),
    "halves stacked and added": lambda s, h: torch.stack(_halves(h)).sum(0),
    "halves, each with a softmax": lambda s, h: torch.cat(
        [piece.softmax(-1) for piece in _halves(h)], -1
    ),
    "halves, one of them reversed": lambda s, h: torch.cat(
        [_halves(h)[0].flip(-1), _halves(h)[1]], -1
    ),
    "split": lambda s, h: torch.cat(h.split([1, h.shape[-1] - 1], -1)[::-1], -1),
    "tensor_split": lambda s, h: torch.cat(h.tensor_split(3, -1)[::-1], -1),
    "hstack": lambda s, h: torch.hstack([h[:, 1:], h[:, :1]]),
    "column_stack": lambda s, h: torch.column_stack([h[:, -1], h[:, :-1]]),
    "vstack": lambda s, h: torch.vstack([h.T[1:], h.T[:1]]).T,
    "selected": lambda s, h: torch.stack(
        [h.select(-1, i) for i in _backwards(h.shape[-1])], -1
    ),
    "narrow": lambda s, h: torch.cat(
        [h.narrow(-1, i, 1) for i in _backwards(h.shape[-1])], -1
    ),
    "index_select": lambda s, h: h.index_select(
        -1, torch.tensor(_backwards(h.shape[-1]))
    ),
    "selected twice": lambda s, h: h[:, [0, 0, *range(h.shape[-1])]],
    "a list": lambda s, h: h[:, _backwards(h.shape[-1])],
    "a mask": lambda s, h: h[:, torch.arange(h.shape[-1]) != 1],
    "rows and columns": lambda s, h: h[
        torch.arange(len(h))[:, None], torch.arange(h.shape[-1])
    ],
    "rows and columns, reversed": lambda s, h: h[
        torch.arange(len(h))[:, None], torch.tensor(_backwards(h.shape[-1]))
    ],
    "three indices": lambda s, h: torch.stack([h, h.exp()], -1)[
        torch.tensor([0, 2, 1])[:, None],
        torch.arange(h.shape[-1]),
        torch.tensor([1, 0, 1])[:, None],
    ],
    "gather": lambda s, h: h.gather(
        -1, torch.tensor(_backwards(h.shape[-1])).expand(h.shape)
    ),
    "gather by a buffer": lambda s, h: h.gather(
        -1, (s.order % h.shape[-1]).expand(len(h), -1)
    ),
    "take_along_dim": lambda s, h: torch.take_along_dim(h, torch.tensor([[1, 0]]), -1),
    "take": lambda s, h: torch.take(h, torch.arange(h.numel()).view(h.shape)),
    "roll": lambda s, h: h.roll(1, -1),
    "roll and add": lambda s, h: h.roll(1, -1) + h,
    "flip": lambda s, h: h.flip(-1),
    "flip and add": lambda s, h: h.flip(-1) + h,
    "flip of halves": lambda s, h: _paired(h).flip(1).flatten(1),
    "repeat_interleave": lambda s, h: h.repeat_interleave(2, -1),
    "repeat": lambda s, h: h.repeat(1, 2),
    "einops": lambda s, h: _paired(h).transpose(1, 2).reshape(len(h), -1),
    "pairs by unbind": lambda s, h: torch.cat(_paired(h).unbind(2), -1),
    "pairs added": lambda s, h: _paired(h).sum(2),
    "pairs, the largest": lambda s, h: _paired(h).amax(2),
    "pairs turned": lambda s, h: _paired(h).rot90(1, (1, 2)).flatten(1),
    "ones made": lambda s, h: h * torch.ones(h.shape[-1], dtype=h.dtype),
    "a number for all": lambda s, h: h * torch.full((h.shape[-1],), 0.5),
    "a buffer of ones": lambda s, h: h * s.ones[0].expand(h.shape[-1]),
    "a buffer of two values": lambda s, h: (
        h * (1 + s.mask[: h.shape[-1]]) if h.shape[-1] <= len(s.mask) else h
    ),
    "a mask that prunes": lambda s, h: h * s.mask if h.shape == s.mask.shape else h,
    "where": lambda s, h: torch.where(torch.arange(h.shape[-1]) < 2, h, h.exp()),
    "masked_fill": lambda s, h: h.masked_fill(torch.arange(h.shape[-1]) == 1, 0.0),
    "linspace": lambda s, h: h * torch.linspace(0.0, 1.0, h.shape[-1]),
    "signs, then even": lambda s, h: (h * (-1.0) ** torch.arange(h.shape[-1])).abs(),
    "eye": lambda s, h: h @ torch.eye(h.shape[-1], dtype=h.dtype),
    "a permutation matrix": lambda s, h: (
        h @ torch.eye(h.shape[-1], dtype=h.dtype)[_backwards(h.shape[-1])]
    ),
    "a matrix of ones": lambda s, h: (
        h @ torch.ones(h.shape[-1], h.shape[-1], dtype=h.dtype)
    ),
    "a triangle": lambda s, h: (
        h @ torch.ones(h.shape[-1], h.shape[-1], dtype=h.dtype).tril()
    ),
    "centred": lambda s, h: h - h @ torch.full((h.shape[-1], h.shape[-1]), 0.3).to(h),
    "outer": lambda s, h: (h[:, :2, None] * h[:, None]).flatten(1),
    "outer, above the diagonal": lambda s, h: (h[:, :, None] * h[:, None])[
        :, *torch.triu_indices(h.shape[-1], h.shape[-1], 1)
    ],
    "diagonal": lambda s, h: (h[:, :, None] * h[:, None]).diagonal(dim1=1, dim2=2),
    "padded": lambda s, h: F.pad(h, (1, 1)),
    "padded and cropped": lambda s, h: F.pad(h, (1, 1))[:, 1:-1],
    "beside constants": lambda s, h: torch.cat([h, h.new_ones(len(h), 2)], -1),
    "beside itself": lambda s, h: torch.cat([h, h.exp()], -1),
    "beside itself, reversed": lambda s, h: torch.cat([h, h.flip(-1)], -1),
    "stacked in pairs": lambda s, h: torch.stack([h, h.flip(-1)], -1).flatten(1),
    "cumsum": lambda s, h: h.cumsum(-1),
    "the last of sums": lambda s, h: h.cumsum(-1)[:, -1:],
    "differences": lambda s, h: h.diff(dim=-1).abs(),
    "sorted": lambda s, h: h.sort(-1).values,
    "fourier": lambda s, h: torch.fft.fft(h).abs(),
    "the largest, by its place": lambda s, h: h.gather(-1, h.argmax(-1, keepdim=True)),
    "mean pooling": lambda s, h: F.avg_pool1d(h[:, None], 2)[:, 0],
    "unfold": lambda s, h: h.unfold(-1, 2, 1).sum(-1),
    "assigned": lambda s, h: _assigned(h),
    "index_copy": lambda s, h: torch.zeros_like(h).index_copy(
        1, torch.tensor(_backwards(h.shape[-1])), h
    ),
    "softmax": lambda s, h: h.softmax(-1),
    "layer norm": lambda s, h: F.layer_norm(h, h.shape[-1:]),
    "square": lambda s, h: h.square(),
    "triangle of pairs": lambda s, h: _paired(h).tril().flatten(1),
    "pruned pairs": lambda s, h: (_paired(h) * torch.ones(2).to(h)).flatten(1),
}


# random chains ------------------------------------------------------------------------


def network(seed: int) -> Shuffled:
    """Draw a network with a chain of one to three shuffles."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    units = rng.choice([3, 4, 4])
    while True:
        chosen = [rng.choice([*SHUFFLES.values()]) for _ in range(rng.randint(1, 3))]
        try:
            net = Shuffled(_chained(chosen), units)
        except (RuntimeError, IndexError):  # a shuffle for more features than there are
            continue
        if 0 < net.b.in_features <= LARGEST:
            return net


def _chained(shuffles: list[Shuffle]) -> Shuffle:
    def function(net: Shuffled, h: Tensor) -> Tensor:
        for shuffle in shuffles:
            h = shuffle(net, h)
        return h

    return function


class Comparison(NamedTuple):
    """The order of the permutations that were found, and of all that there are.

    :param at_least: whether the symmetry says that there may be more.
    """

    found: int
    exact: int
    at_least: bool

    @property
    def sound(self) -> bool:
        """The verdict: no wrong permutation, and none that is missed in silence."""
        if self.found == self.exact:
            return True
        return (
            self.exact % self.found == 0 and self.found < self.exact and self.at_least
        )


def compared(net: Shuffled) -> Comparison:
    """Compare the symmetry of a network with brute force."""
    x = torch.randn(ROWS, 2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule
        symmetry = find_symmetry(net, x)
    order = symmetry.permutations.order()
    return Comparison(int(order), exact_order(net), symmetry.at_least)


def main() -> None:
    """Compare many random networks, and print those that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--start", type=int, default=0)
    arguments = parser.parse_args()
    results = {}
    for seed in range(arguments.start, arguments.start + arguments.count):
        results[seed] = result = compared(network(seed))
        if not result.sound:
            print(f"seed {seed}: {result}", flush=True)
    right = sum(result.found == result.exact for result in results.values())
    needless = sum(r.at_least and r.found == r.exact for r in results.values())
    wrong = sum(not result.sound for result in results.values())
    print(
        f"{len(results)} networks: {right} right, of which {needless} say at least; "
        f"{wrong} wrong or missed in silence"
    )


if __name__ == "__main__":
    main()
