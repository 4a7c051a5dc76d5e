"""Signs that all units of something share: a normalised vector keeps its sign, which its gain or its readers undo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry

LOG_TWO = math.log(2.0)


class PreNormalised(nn.Module):
    """A stream that a block reads normalised and adds to, and a last normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.a, self.b = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 4)
        self.last_norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.first(x)
        stream = stream + self.b(torch.relu(self.a(self.norm(stream))))
        return self.out(self.last_norm(stream))


def dense(size: int, *between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, size), *between, nn.Linear(size, 2))


def images(size: int, *between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, size, 1), *between, nn.Conv2d(size, 2, 1))


def factorial(*sizes: int) -> float:
    return sum(math.lgamma(size + 1) for size in sizes)


CASES: dict[str, tuple[nn.Module, float]] = {
    "tanh": (dense(4, nn.LayerNorm(4), nn.Tanh()), math.log(768)),
    "relu": (dense(4, nn.LayerNorm(4), nn.ReLU()), math.log(48)),
    "no gain": (dense(4, nn.LayerNorm(4, elementwise_affine=False)), math.log(48)),
    "no gain, relu": (dense(4, nn.LayerNorm(4, elementwise_affine=False), nn.ReLU()), math.log(24)),
    "a residual block": (PreNormalised(), factorial(4, 5) + 9 * LOG_TWO),
    "many units": (dense(300, nn.LayerNorm(300), nn.Tanh()), factorial(300) + 301 * LOG_TWO),
    "one group": (images(4, nn.GroupNorm(1, 4), nn.ReLU()), math.log(48)),
    "two groups": (images(4, nn.GroupNorm(2, 4), nn.ReLU()), math.log(32)),
    "32 groups": (images(64, nn.GroupNorm(32, 64), nn.ReLU()), factorial(32) + 64 * LOG_TWO),
    "large groups": (images(64, nn.GroupNorm(2, 64), nn.Tanh()), 2 * factorial(32) + 67 * LOG_TWO),
}


@pytest.mark.parametrize("name", CASES)
def test_a_normalised_vector_flips_as_a_whole(name: str) -> None:
    net, log_order = CASES[name]
    x = torch.randn(5, 3) if any(isinstance(module, nn.Linear) for module in net.modules()) else torch.randn(2, 3, 4, 4)
    symmetry = find_symmetry(net, x)
    assert symmetry.log_order() == pytest.approx(log_order, abs=1e-6)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        moved = symmetry.act(symmetry.signs.sample(), net)
        assert torch.allclose(moved(x), net(x), atol=1e-4)
