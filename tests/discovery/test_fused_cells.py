"""Recurrent cells on a GPU take their step in one operator."""

import math

import pytest
import torch
from torch import nn

import pyro_symmetric as ps


class Last(nn.Module):
    """A layer's outputs by the state of a cell."""

    def __init__(self, kind: type):
        super().__init__()
        self.cell, self.out = kind(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x)
        return self.out(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_units_of_cells_are_found_on_any_device(kind: type, device: torch.device) -> None:
    symmetry = ps.find_symmetry(Last(kind).to(device), torch.randn(5, 3, device=device))
    # Of the units, and of the columns that a first state of zeros meets.
    assert symmetry.permutations.log_order() == pytest.approx(2 * math.log(math.factorial(4)))
