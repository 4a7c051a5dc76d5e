r"""Curvature and noise, which a stochastic-gradient sampler's step size depends on, measured from the chains' gradients
in warm-up.

The largest curvature is found by power iteration (one more product with the Hessian at every measurement, by a finite
difference of gradients on one mini-batch); the mini-batches' noise is half the mean squared difference between the
gradients of two independent batches, :math:`V = \tfrac12 \mathbb E (g_1 - g_2)^2`, coordinate by coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.randomness import independent_rows, normal


@dataclass(frozen=True, eq=False)
class CurvatureEstimate:
    r"""Curvature and gradient noise where the chains are, averaged over warm-up with weights that grow linearly.

    With a preconditioner ``G`` both are those of the coordinates :math:`G^{-1/2} z`, in which the sampler is plain.

    :param direction: each chain's direction of largest curvature, unit vectors ``(C, D)``.
    :param curvature: each chain's largest curvature, ``(C,)``.
    :param noise: variance of the mini-batches' gradients, averaged over chains, ``(D,)``; 0 without mini-batches.
    :param count: measurements so far.
    """

    direction: Tensor
    curvature: Tensor
    noise: Tensor
    count: int = 0

    @property
    def stiffest(self) -> Tensor:
        """The largest of the chains' curvatures, ``()``."""
        return self.curvature.max()

    @classmethod
    def start(cls, z: Tensor, generator: torch.Generator) -> CurvatureEstimate:
        """Nothing measured yet, for chains ``(C, D)``: directions at random."""
        direction = torch.nn.functional.normalize(normal(z, generator), dim=-1)
        return cls(direction, torch.zeros_like(z[:, 0]), torch.zeros_like(z[0]))

    def update(
        self, density: Density, z: Tensor, generator: torch.Generator, preconditioner: Tensor
    ) -> CurvatureEstimate:
        """Measure once more, at ``z`` of shape ``(C, D)``: three gradients of each chain.

        :param preconditioner: its diagonal, ``(C, D)`` or ``(D,)``.
        """
        scale = preconditioner.sqrt()
        rows = independent_rows(density.row_counts, len(z), generator)
        _, gradient = density.energy_and_gradient(z, rows)
        along = scale * self.direction
        # The cube root of the precision balances the rounding of a difference against the curvature's own change.
        length = torch.finfo(z.dtype).eps ** (1 / 3) * (1 + z.square().mean(-1, keepdim=True).sqrt())
        distance = length / along.norm(dim=-1, keepdim=True)
        product = along.mul_(distance).add_(z)  # from here on in place: chains of networks are large
        product = density.energy_and_gradient(product, rows)[1].sub(gradient).mul_(scale).div_(distance)
        curvature = product.norm(dim=-1, keepdim=True)
        usable = torch.isfinite(curvature) & (curvature > 0)
        noise = torch.zeros_like(z[0])
        if rows is not None:
            others = independent_rows(density.row_counts, len(z), generator)
            change = gradient - density.energy_and_gradient(z, others)[1]
            # What is no number counts as 0.
            noise = (scale * change).square_().mul_(0.5).nan_to_num_(0.0, 0.0, 0.0).mean(0)
        weight = 2 / (self.count + 2)
        return CurvatureEstimate(
            torch.where(usable, product.div_(curvature), self.direction),
            self.curvature.lerp(torch.where(usable[:, 0], curvature[:, 0], self.curvature), weight),
            self.noise.lerp(noise, weight),
            self.count + 1,
        )
