"""Groups, weights, distances and networks that several tests of alignment share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.weights import Weights


def mlp(*widths: int, moves: tuple[str, ...] = ("permute",)) -> Group:
    """Layers of some widths; scales come in by weights and biases, and go out by the
    next layer's columns.
    """
    shapes, units = {}, []
    for l, (n, m) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"{l}.weight": torch.Size((m, n)), f"{l}.bias": torch.Size((m,))}
    for l, n in enumerate(widths[1:-1]):
        index = torch.arange(n)[None]
        sites = ((f"{l}.weight", 0, 1), (f"{l}.bias", 0, 1), (f"{l + 1}.weight", 1, -1))
        axes = tuple(Axis(site, dim, index, exponent) for site, dim, exponent in sites)
        units.append(Units(f"hidden.{l}", n, axes, moves=frozenset(moves)))
    return Group(units, shapes)


def weights_of(
    group: Group, *batch: int, dtype: torch.dtype = torch.float64
) -> Weights:
    return {
        site: torch.randn(*batch, *shape, dtype=dtype)
        for site, shape in group.site_shapes.items()
    }


def squared_distance(a: Weights, b: Weights, batch_dims: int = 0) -> Tensor:
    return sum(
        (a[site].double() - b[site].double()).square().flatten(batch_dims).sum(-1)
        for site in b
    )


class Convolutional(nn.Module):
    """A flatten makes blocks of channels, and nothing in it is a module with one output
    per factor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(1, 6, 3),
            nn.Conv2d(6, 5, 3),
            nn.Linear(5 * 4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(torch.nn.functional.conv2d(x, self.a.weight, self.a.bias))
        return self.c(
            torch.nn.functional.max_pool2d(torch.relu(self.b(x)), 2).flatten(1)
        )


class Recurrent(nn.Module):
    def __init__(
        self, kind: type[nn.RNNBase], inputs: int = 5, width: int = 8, **options: Any
    ) -> None:
        super().__init__()
        self.layers = kind(inputs, width, batch_first=True, **options)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(
        self, layers: int = 2, width: int = 12, heads: int = 3, **options: Any
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 16, dropout=0.0, batch_first=True, **options
        )
        self.encode = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(self.embed(x)).mean(1))
