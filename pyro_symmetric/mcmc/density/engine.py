"""An engine: what computes a density's energies and gradients faster than the model itself.

None is taken on trust: its results are compared with the model's own, value and gradient, before it serves.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.targets import Rows

Evaluation = tuple[Tensor, Tensor]


class Engine(Protocol):
    """The contract."""

    name: str
    """``"native"``, ``"torch"`` or ``"inductor"``."""

    by_chain: bool
    """True if it goes chain by chain, so that chunks of chains gain nothing."""

    def serves(self, z: Tensor, rows: Rows | None) -> bool:
        """True if it was made for such points and mini-batches."""

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Energy ``(C,)`` and gradient ``(C, D)`` at points ``(C, D)``, on mini-batches ``(C, B)`` if given."""


class Unavailable(Exception):
    """Why an engine can't serve."""


class NoCompiler(Unavailable):
    """Why there is no compiled code on this machine, which another machine may have."""


def same_evaluation(found: Evaluation, expected: Evaluation) -> bool:
    """True if two evaluations are the same, up to rounding, where the expected energy is finite.

    Energies are continuous, but where the sign of a ReLU's input hangs on rounding, gradients are not. Gradients that
    are no numbers are alike.
    """
    (energy, gradient), (right, slope) = found, expected
    coarse, fine = (1e-2, 3e-4) if right.dtype == torch.float32 else (1e-6, 1e-8)
    near = (energy - right).abs() <= fine * (1 + right.abs())
    close = (gradient - slope).norm(dim=-1) <= coarse * (1 + slope.norm(dim=-1))
    close |= (gradient.isnan() & slope.isnan()).any(dim=-1)
    return bool((near & close | ~torch.isfinite(right)).all())
