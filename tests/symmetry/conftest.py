"""Multilayer perceptrons as functions of weights, and their symmetries written down by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pyro_symmetric.symmetry.permutation import Axis, Factor, PermutationGroup
from pyro_symmetric.symmetry.rescaling import RescaledAxis, RescalingFactor, ScalingGroup, ShiftGroup, SignGroup


@dataclass
class Mlp:
    """A multilayer perceptron; ``activation`` "relu" has scalings, "tanh" has signs, both have the rest."""

    widths: Sequence[int]
    activation: str = "relu"
    bias: bool = True

    def __post_init__(self) -> None:
        self.depth = len(self.widths) - 1
        self.site_shapes: dict[str, torch.Size] = {}
        for l in range(self.depth):
            self.site_shapes[f"{l}.weight"] = torch.Size((self.widths[l + 1], self.widths[l]))
            if self.bias:
                self.site_shapes[f"{l}.bias"] = torch.Size((self.widths[l + 1],))
        permuted, rescaled = [], []
        for l in range(self.depth - 1):
            n = self.widths[l + 1]
            index = torch.arange(n)[None]
            axes = [(f"{l}.weight", 0, 1), (f"{l}.bias", 0, 1), (f"{l + 1}.weight", 1, -1)]
            axes = [axis for axis in axes if axis[0] in self.site_shapes]
            permuted.append(Factor(f"hidden.{l}", n, tuple(Axis(site, dim, index) for site, dim, _ in axes)))
            rescaled.append(
                RescalingFactor(f"hidden.{l}", n, tuple(RescaledAxis(site, dim, index, e) for site, dim, e in axes))
            )
        relu = self.activation == "relu"
        self.permutations = PermutationGroup(permuted, self.site_shapes)
        self.scalings = ScalingGroup(rescaled if relu else [], self.site_shapes)
        self.signs = SignGroup([] if relu else rescaled, self.site_shapes)
        self.shifts = ShiftGroup([f"{self.depth - 1}.bias"] if self.bias else [], self.site_shapes)

    def weights(self, *batch: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        return {site: torch.randn(*batch, *shape, dtype=dtype) for site, shape in self.site_shapes.items()}

    def __call__(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """Outputs before the softmax, ``batch + (len(x), outputs)``."""
        act = getattr(torch, self.activation)
        for l in range(self.depth):
            x = (x if l == 0 else act(x)) @ weights[f"{l}.weight"].mT
            if self.bias:
                x = x + weights[f"{l}.bias"].unsqueeze(-2)
        return x

    def anywhere_on_orbit(self, weights: dict[str, Tensor], *batch: int, spread: float = 1.0) -> dict[str, Tensor]:
        """``weights`` moved by a random element of the whole group."""
        dtype = next(iter(weights.values())).dtype
        moved = self.scalings.sample(batch, spread=spread, dtype=dtype)(weights)
        moved = self.signs.sample(batch, dtype=dtype)(moved)
        moved = self.permutations.sample(batch)(moved)
        return self.shifts.sample(batch, dtype=dtype)(moved) if self.bias else moved


@pytest.fixture(scope="session")
def mlp() -> Callable[..., Mlp]:
    return Mlp
