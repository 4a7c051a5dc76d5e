"""Networks of PyTorch's own layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.networks import NETWORKS
from benchmarks.zoo import Built, Case, Cases

ACTIVATIONS = "ReLU LeakyReLU PReLU RReLU ELU SELU GELU SiLU Mish Tanh Sigmoid Softplus Hardswish Hardtanh Softsign"
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm1d": nn.BatchNorm1d,
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "GroupNorm": lambda width: nn.GroupNorm(2, width),
}


def mlp(middle: nn.Module) -> Built:
    net = nn.Sequential(
        nn.Linear(5, 12), middle, nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)
    )
    return net, (torch.randn(8, 5),)


class Cells(nn.Module):
    """A recurrent cell, called step by step."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell, self.out = cell, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


class TwoStreams(nn.Module):
    """Encoder and decoder, which attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(5, 16)
        self.net = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(self.net(self.inputs(x), self.inputs(y)))


class Bags(nn.Module):
    """Sums of embedded words, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.out = (
            nn.EmbeddingBag(20, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 2),
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.hidden(self.words(words)).relu())


class Pairs(nn.Module):
    """Two branches with the same weights, and a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 6))
        self.meet = nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.meet(self.branch(x), self.branch(y))


class Masked(nn.Module):
    """A sum over those entries of a sequence that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(5, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu()[x[:, 0] > 0].sum(0))


def plain() -> Cases:
    for name, (make, shape) in NETWORKS.items():
        yield Case(name, lambda make=make, shape=shape: (make(), (torch.randn(shape),)))
    for name in ACTIVATIONS.split():
        yield Case(f"MLP {name}", lambda name=name: mlp(getattr(nn, name)()))
    for name, norm in NORMS.items():
        yield Case(f"MLP {name}", lambda norm=norm: mlp(norm(12)))
    yield Case(
        "MLP weight_norm", lambda: mlp(parametrizations.weight_norm(nn.Linear(12, 12)))
    )
    yield Case(
        "MLP spectral_norm",
        lambda: mlp(parametrizations.spectral_norm(nn.Linear(12, 12))),
    )
    for cell in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):
        yield Case(
            cell.__name__,
            lambda cell=cell: (Cells(cell(5, 8)), (torch.randn(3, 4, 5),)),
        )
    yield Case(
        "Transformer",
        lambda: (TwoStreams(), (torch.randn(2, 6, 5), torch.randn(2, 4, 5))),
    )
    yield Case("EmbeddingBag", lambda: (Bags(), (torch.arange(24).reshape(4, 6) % 20,)))
    yield Case(
        "siamese Bilinear", lambda: (Pairs(), (torch.randn(4, 5), torch.randn(4, 5)))
    )
    yield Case("masked sum", lambda: (Masked(), (torch.randn(6, 5),)))
