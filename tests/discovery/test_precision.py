"""Networks that don't run in float64 as they are: integer inputs, casts inside, half precision, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.verify import verify
from pyro_symmetric.groups import Group


class Layers(nn.Module):
    """``b(f(a(x)))``, with six hidden units."""

    def __init__(self, forward: Callable[[Layers, Tensor], Tensor], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.a, self.b = nn.Linear(3, 6, dtype=dtype), nn.Linear(6, 2, dtype=dtype)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mlp(s: Layers, x: Tensor) -> Tensor:
    return s.b(torch.relu(s.a(x)))


def apart(s: Layers, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(torch.complex(h.real.relu(), h.imag.relu()))


def mixed_by_frequency(s: Layers, x: Tensor) -> Tensor:
    h = torch.fft.irfft(torch.fft.rfft(s.a(x), dim=1) * torch.tensor([1.0, 0.5j, 2.0])[:, None], n=5, dim=1)
    return s.b(h.relu())


DOUBLE = {
    "bytes": (Layers(lambda s, x: mlp(s, x.float() / 255)), torch.randint(0, 255, (4, 3), dtype=torch.uint8)),
    "whole numbers": (Layers(lambda s, x: mlp(s, x.float())), torch.randint(0, 9, (4, 3))),
    "cast to half": (Layers(lambda s, x: mlp(s, x.half()), torch.float16), torch.randn(4, 3)),
    "bfloat16": (Layers(lambda s, x: mlp(s, x.to(torch.bfloat16)), torch.bfloat16), torch.randn(4, 3).bfloat16()),
    "softmax in single": (Layers(lambda s, x: mlp(s, x).softmax(-1, dtype=torch.float32)), torch.randn(4, 3)),
    "complex": (Layers(apart, torch.complex64), torch.randn(4, 3, dtype=torch.complex64)),
    "frequencies": (Layers(mixed_by_frequency), torch.randn(4, 5, 3)),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_casts_go_to_double_precision_while_a_network_is_verified(name: str) -> None:
    net, x = DOUBLE[name]
    symmetry = find_symmetry(net, x)
    assert symmetry.group.restricted("permute", "scale").factors == {"a": 6}
    assert symmetry.group.names("scale") == ("a",)
    result = verify(symmetry, net, x, trials=3)
    assert result
    assert result.error < 1e-12


def only_half(s: Layers, x: Tensor) -> Tensor:
    if s.a.weight.dtype != torch.float16:
        raise RuntimeError("half precision only")
    return mlp(s, x.half())


OWN = {
    "single": (Layers(lambda s, x: mlp(s, x) if x.dtype == torch.float32 else 1 / 0), torch.randn(4, 3), 1e-4),
    "half": (Layers(only_half, torch.float16), torch.randn(4, 3), 0.3),
}


@pytest.mark.parametrize("name", OWN)
def test_a_network_that_only_runs_in_its_own_precision_is_verified_in_it(name: str) -> None:
    net, x, coarse = OWN[name]
    symmetry = find_symmetry(net, x)
    assert symmetry.permutations.factors == {"a": 6}
    result = verify(symmetry, net, x, trials=3)
    assert result
    assert 1e-6 <= result.tolerance < coarse
    axes = tuple(axis for axis in symmetry.group["a"].axes if axis.site != "b.weight")
    wrong = replace(symmetry, group=Group([replace(symmetry.group["a"], axes=axes)], symmetry.site_shapes))
    assert not verify(wrong, net, x, trials=3)  # all three pass with a probability below 1e-6


def test_what_a_network_refuses_in_its_own_precision_is_said() -> None:
    net = Layers(mlp)
    with pytest.raises(ValueError, match="fails on the example inputs"):
        find_symmetry(net, torch.randn(4, 2))
    with pytest.raises(ValueError, match="fails on the example inputs"):
        verify(find_symmetry(net, torch.randn(4, 3)), net, torch.randn(4, 2))
