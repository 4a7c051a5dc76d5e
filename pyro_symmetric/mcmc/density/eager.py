"""Engine ``"eager"``: the model itself, mapped over chains, and autograd; what all other engines are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_symmetric.layout import Layout
from pyro_symmetric.mcmc.density.targets import NetworkTarget, Rows
from pyro_symmetric.traced import TracedTarget

Evaluation = tuple[Tensor, Tensor]
Evaluate = Callable[..., Evaluation]


class Unavailable(Exception):
    """Why an engine can't serve."""


class Eager:
    """Evaluations of a target as it is."""

    name = "eager"

    def __init__(self, target: NetworkTarget | TracedTarget, layout: Layout):
        self.target, self.layout = target, layout

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``; of chains whose matrices are singular energies are
        infinite: half of the chains are tried again, until such a chain is alone."""
        try:
            return self.raw(z, rows)
        except torch.linalg.LinAlgError:
            if len(z) == 1:
                return torch.full_like(z[:, 0], torch.inf), torch.zeros_like(z)
            return in_chunks(self.energy_and_gradient, z, rows, -(-len(z) // 2))

    def raw(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Evaluate all chains at once. They are independent, so one backward pass gives every chain's gradient.

        :raises torch.linalg.LinAlgError: if a chain's matrix is singular.
        """
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            weights, log_det = self.layout.constrain_with_log_det(leaf)
            energy = -(self.target.log_joint(weights, rows) + log_det).to(z.dtype)  # a model may hold finer numbers
            return energy.detach(), torch.autograd.grad(energy.sum(), leaf)[0]


def in_chunks(evaluate: Evaluate, z: Tensor, rows: Rows | None, size: int | None) -> Evaluation:
    """Evaluate so many chains at once; ``None``: all."""
    if size is None or len(z) <= size:
        return evaluate(z, rows)
    cuts = [slice(start, start + size) for start in range(0, len(z), size)]
    parts = [evaluate(z[cut], rows and {name: index[cut] for name, index in rows.items()}) for cut in cuts]
    energy, gradient = (torch.cat(values) for values in zip(*parts, strict=True))
    return energy, gradient


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
