"""Small networks of papers and of PyTorch's own layers, by name: what benchmarks and
tests share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pyro_symmetric.networks import optunet, resnet20


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes, inputs and outputs included, with ReLU in
    between.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class UNet(nn.Module):
    """Two scales with a skip connection by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.bottom = nn.Sequential(
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Sequential(
            nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.bottom(skip))], 1))


class Shared(nn.Module):
    """One hidden layer, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = (
            nn.Linear(3, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for _ in range(3):
            x = self.again(x).relu()
        return self.last(x)


class Recurrent(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, kind: Any):
        super().__init__()
        self.layer = kind(5, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0])


def transformer() -> nn.Module:
    """A transformer encoder of two layers between two linear ones."""
    layer = nn.TransformerEncoderLayer(
        d_model=16, nhead=4, dim_feedforward=32, batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(5, 16), encoder, nn.Linear(16, 2))


# Name -> what builds it, and the shape of its inputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "OptuNet": (optunet, (8, 1, 28, 28)),
    "ResNet-20 FRN SiLU": (resnet20, (8, 3, 32, 32)),
    "UNet": (UNet, (2, 3, 16, 16)),
    "weight-shared MLP": (Shared, (4, 3)),
    "TransformerEncoder": (transformer, (2, 7, 5)),
    "bidirectional LSTM": (lambda: Recurrent(nn.LSTM), (2, 7, 5)),
    "bidirectional GRU": (lambda: Recurrent(nn.GRU), (2, 7, 5)),
}
