r"""Control variates for mini-batches: the gradient at a point :math:`a` at which that of all data is known.

.. math:: \hat g(z) = \nabla\tilde U(z) - \nabla\tilde U(a) + \nabla U(a),

with one mini-batch for both estimates (Baker, Fearnhead, Fox & Nemeth 2019, arXiv 1706.05439). It is unbiased wherever
:math:`a` lies, and its variance falls with the squared distance of :math:`z` from :math:`a`: of regressions, whose
posteriors are narrow, to about ``D / N`` of what it is without. Only then may the step be as long as the posterior's
curvature allows; otherwise it must fall with ``B / N``, or the draws spread too widely (Brosse, Durmus & Moulines 2018,
arXiv 1811.10072). Each gradient costs two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.targets import Rows


@dataclass(frozen=True, eq=False)
class Anchor:
    """A point of each chain.

    :param z: where they are, ``(C, D)``.
    :param energy: of all data there, ``(C,)``.
    :param gradient: of all data there, ``(C, D)``.
    """

    z: Tensor
    energy: Tensor
    gradient: Tensor

    @classmethod
    def at(cls, density: Density, z: Tensor) -> Anchor:
        """Go through all data in :func:`batches_of_a_pass` mini-batches, at ``z`` of shape ``(C, D)``.

        The first row fills up the last batch. A batch of the first row alone says what that added.
        """
        ((name, (total, size)),) = density.row_counts.items()
        spare = -total % size
        order = torch.arange(total + spare, device=z.device)
        batches = list(torch.where(order < total, order, 0).split(size))
        weights = [size / total] * len(batches)
        if spare:
            batches, weights = [*batches, torch.zeros_like(batches[0])], [*weights, -spare / total]
        energy, gradient = torch.zeros_like(z[:, 0], dtype=torch.double), torch.zeros_like(z, dtype=torch.double)
        for rows, weight in zip(batches, weights, strict=True):
            own = density.energy_and_gradient(z, {name: rows.expand(len(z), size)})
            energy.add_(own[0], alpha=weight)
            gradient.add_(own[1], alpha=weight)
        return cls(z, energy.to(z.dtype), gradient.to(z.dtype))


def batches_of_a_pass(density: Density) -> int | None:
    """The number of batches that :meth:`Anchor.at` takes; ``None`` if there are none, or of several plates at once."""
    if len(density.row_counts) != 1:
        return None
    ((total, size),) = density.row_counts.values()
    return -(-total // size) + (total % size > 0)


def estimated(density: Density, z: Tensor, rows: Rows | None, anchor: Anchor | None) -> tuple[Tensor, Tensor]:
    """Energy ``(C,)`` and gradient ``(C, D)`` by these mini-batches, with the anchor's help if there is one."""
    if anchor is None or rows is None:
        return density.energy_and_gradient(z, rows)
    energy, gradient = density.energy_and_gradient(*_beside(z, rows, anchor))
    (energy, known), (gradient, slope) = energy.chunk(2), gradient.chunk(2)
    return energy - known + anchor.energy, gradient - slope + anchor.gradient


def estimated_gradient(density: Density, z: Tensor, rows: Rows | None, anchor: Anchor | None) -> Tensor:
    """The gradient of :func:`estimated` alone."""
    if anchor is None or rows is None:
        return density.gradient(z, rows)
    gradient, slope = density.gradient(*_beside(z, rows, anchor)).chunk(2)
    return gradient - slope + anchor.gradient


def _beside(z: Tensor, rows: Rows, anchor: Anchor) -> tuple[Tensor, Rows]:
    """Chains and their anchors, on the same mini-batches."""
    return torch.cat([z, anchor.z]), {name: index.repeat(2, 1) for name, index in rows.items()}
