"""Laws of equal blocks: what is found in the first of each run, and copied, is what is
found in all blocks at once.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyro_symmetric.discovery import conservation_law
from pyro_symmetric.discovery.find import UnknownOperator, find_symmetry
from pyro_symmetric.discovery.repeats import Repeats
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify

WIDTH = 24
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)
NORMS = (nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)


class Branch(nn.Module):
    """A branch of a residual block: two layers, gated or not, between norms, or
    attention, or a gain alone.
    """

    def __init__(self, rng: random.Random, hidden: int):
        super().__init__()
        self.before, self.after = (rng.choice(NORMS)(WIDTH) for _ in range(2))
        self.kind = rng.choice(["layers", "layers", "gated", "attention", "gain"])
        if self.kind in ("layers", "gated"):
            self.first, self.last = (
                nn.Linear(WIDTH, hidden),
                nn.Linear(hidden, WIDTH, bias=rng.random() < 0.5),
            )
            self.activation = rng.choice(ACTIVATIONS)()
        if self.kind == "gated":
            self.gate = nn.Linear(WIDTH, hidden)
        if self.kind == "attention":
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.gain = (
            nn.Parameter(torch.randn(WIDTH))
            if rng.random() < 0.3 or self.kind == "gain"
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        if self.kind == "attention":
            y = self.attention(y[None], y[None], y[None], need_weights=False)[0][0]
        elif self.kind != "gain":
            h = self.activation(self.first(y))
            y = self.last(h * self.gate(y) if self.kind == "gated" else h)
        return self.after(y) if self.gain is None else self.after(y) * self.gain


class Deep(nn.Module):
    """Equal blocks, one after the other; ``kind`` says how they are joined."""

    def __init__(self, rng: random.Random, kind: str, depth: int):
        super().__init__()
        branches = [
            (rng.randrange(2**30), rng.choice([16, 20]))
            for _ in range(rng.choice([1, 1, 2]))
        ]
        self.kind, norm = kind, rng.choice(NORMS)
        self.start, self.end = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.norms = nn.ModuleList(
            norm(WIDTH) for _ in range({"post-norm": depth, "one norm": 1}.get(kind, 0))
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                Branch(random.Random(seed), hidden) for seed, hidden in branches
            )
            for _ in range(depth)
        )
        self.readers = nn.ModuleList(
            nn.Linear(WIDTH, 2)
            for _ in range(depth if kind == "read everywhere" else 0)
        )
        if kind == "tied":
            for one in self.blocks[1:]:
                one[0] = self.blocks[0][0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        total = torch.zeros(2)
        for i, block in enumerate(self.blocks):
            for branch in block:
                x = branch(x) if self.kind == "sequence" else x + branch(x)
            x = self.norms[i % len(self.norms)](x) if len(self.norms) else x
            total = total + self.readers[i](x) if len(self.readers) else total
        return self.end(x) + total


KINDS = ["residual", "sequence", "read everywhere", "post-norm", "one norm", "tied"]


def moves(symmetry: Symmetry) -> dict[str, int]:
    group = symmetry.group
    return {
        move: sum(group[name].count for name in group.names(move))
        for move in ("permute", "scale", "flip", "shift")
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_the_first_of_equal_blocks_tells_what_all_do(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    require_same_moves(
        Deep(random.Random(seed), kind, depth=3 + seed % 3).eval(),
        torch.randn(7, 4),
        monkeypatch,
    )


def require_same_moves(
    net: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Require that moves are sound, and as many as without copies from block to
    block.
    """
    monkeypatch.setattr(conservation_law, "SMALL", 0)
    found = find_symmetry(net, x, verify=False)
    assert verify(found, net, x)
    monkeypatch.setattr(
        conservation_law, "without_repeats", lambda trace, laws: Repeats(None, {}, {})
    )
    assert moves(found) == moves(find_symmetry(net, x, verify=False))


class Power(nn.Module):
    """Two layers in a residual block, and a power between them, which is no weight."""

    def __init__(self, power: int = 1):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.register_buffer("power", torch.tensor(power))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x).relu() ** self.power)


class Chain(nn.Module):
    """Blocks that read a residual stream; the output is gated by the change in the last
    but one block.
    """

    def __init__(self, *blocks: nn.Module, gated: bool = False):
        super().__init__()
        self.blocks, self.gated = nn.ModuleList(blocks), gated
        self.start, self.end = (
            nn.Linear(4, WIDTH, bias=False),
            nn.Linear(WIDTH, 2, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [self.start(x)]
        for block in self.blocks:
            values.append(block(values[-1]))
        gate = (
            (values[-2] - values[-3]).mean(-1, keepdim=True).exp()
            if self.gated
            else 1.0
        )
        return self.end(values[-1]) * gate


class Normed(nn.Module):
    """A layer whose output isn't normalised unless another one reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.layer_norm(x, (WIDTH,), eps=0.0)).cumsum(-1)


class Gain(nn.Module):
    """An odd function of a vector's entries times weights: two of these may flip
    together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).tanh()


def convolutions(biases: list[bool]) -> nn.Sequential:
    layers = [
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1, bias=bias), nn.ReLU())
        for bias in biases
    ]
    return nn.Sequential(
        nn.Unflatten(1, (4, 1)), *layers, nn.Flatten(), nn.Linear(4, 2)
    )


def with_a_dead_block() -> Chain:
    net = Chain(*(Power() for _ in range(4)))
    nn.init.constant_(net.blocks[0].first.bias, -50.0)
    return net


UNEQUAL = {
    "other powers": lambda: Chain(*(Power(power) for power in (1, 1, 2, 2))),
    "blocks compared": lambda: Chain(*(Power() for _ in range(5)), gated=True),
    "last one read without norm": lambda: nn.Sequential(
        nn.ZeroPad1d((0, WIDTH - 4)), *(Normed() for _ in range(4))
    ),
    "biases here and there": lambda: convolutions([True, True, False, False, False]),
    "pairs of flips": lambda: nn.Sequential(nn.Softsign(), *(Gain() for _ in range(5))),
    "dead block": with_a_dead_block,
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_blocks_that_differ_in_more_than_weights_keep_laws_of_their_own(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    require_same_moves(UNEQUAL[case]().eval(), torch.randn(7, 4), monkeypatch)


def test_sparse_constants_are_equal_to_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.register_buffer("graph", torch.eye(5).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.relu(torch.sparse.mm(self.graph, layer(x)))
            return x

    monkeypatch.setattr(conservation_law, "SMALL", 0)
    torch.manual_seed(0)
    net, x = Spread().eval(), torch.randn(5, 8)
    with pytest.warns(UnknownOperator):
        assert verify(find_symmetry(net, x, verify=False), net, x)


def test_equal_stretches_without_parameters_of_their_own_are_no_blocks() -> None:
    shared = nn.Sequential(nn.Linear(160, 160), nn.Tanh())
    one_block = nn.Sequential(nn.Linear(4, 160), *[shared] * 4, nn.Linear(160, 2))
    rectified = nn.Sequential(
        nn.Linear(4, 4_000), *[nn.ReLU() for _ in range(3)], nn.Linear(4_000, 2)
    )
    for net in (one_block, rectified):
        symmetry = find_symmetry(net, torch.randn(2, 4), verify=False)
        assert symmetry.group.factors
