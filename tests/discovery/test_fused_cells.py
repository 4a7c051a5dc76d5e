"""Recurrent cells on a GPU take their step in one operator; it is taken apart as the CPU's own cell computes."""

import math

import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.discovery.export import _gru_cell, _lstm_cell


def gates(cell: nn.RNNCellBase, x: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
    return [x @ cell.weight_ih.T, h @ cell.weight_hh.T]


@pytest.mark.parametrize("bias", [True, False])
def test_steps_of_fused_cells_are_those_of_pytorchs_cells(bias: bool) -> None:
    x, h, c = (torch.randn(7, size, dtype=torch.float64) for size in (3, 4, 4))
    lstm, gru = nn.LSTMCell(3, 4, bias=bias).double(), nn.GRUCell(3, 4, bias=bias).double()
    biases = ((cell.bias_ih, cell.bias_hh) if bias else () for cell in (lstm, gru))
    torch.testing.assert_close(_lstm_cell(*gates(lstm, x, h), c, *next(biases))[:2], lstm(x, (h, c)))
    torch.testing.assert_close(_gru_cell(*gates(gru, x, h), h, *next(biases))[0], gru(x, h))


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
