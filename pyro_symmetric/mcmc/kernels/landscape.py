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
from pyro_symmetric.mcmc.kernels.anchors import Anchor
from pyro_symmetric.mcmc.kernels.randomness import independent_rows, normal


@dataclass(frozen=True, eq=False)
class Landscape:
    r"""Curvature and gradient noise where the chains are, averaged over warm-up with weights that grow linearly.

    With a preconditioner ``G`` both are those of the coordinates :math:`G^{-1/2} z`, in which the sampler is plain.

    :param direction: each chain's direction of largest curvature, unit vectors ``(C, D)``.
    :param curvature: each chain's largest curvature, ``(C,)``.
    :param noise: variance of the mini-batches' gradients, averaged over chains, ``(D,)``; 0 without mini-batches.
    :param bare_noise: what it is without an anchor's help, likewise.
    :param count: measurements so far.
    """

    direction: Tensor
    curvature: Tensor
    noise: Tensor
    bare_noise: Tensor
    count: int = 0

    @property
    def stiffest(self) -> Tensor:
        """The largest of the chains' curvatures, ``()``."""
        return self.curvature.max()

    @property
    def anchor_pays(self) -> bool:
        """True if an anchor lets steps be more than twice as long, which is what it costs."""
        return bool(self.stiffest + self.bare_noise.mean() > 2 * (self.stiffest + self.noise.mean()))

    @classmethod
    def start(cls, z: Tensor, generator: torch.Generator) -> Landscape:
        """Nothing measured yet, for chains ``(C, D)``: directions at random."""
        direction = torch.nn.functional.normalize(normal(z, generator), dim=-1)
        return cls(direction, torch.zeros_like(z[:, 0]), torch.zeros_like(z[0]), torch.zeros_like(z[0]))

    def update(
        self,
        density: Density,
        z: Tensor,
        generator: torch.Generator,
        preconditioner: Tensor | None = None,
        anchor: Anchor | None = None,
    ) -> Landscape:
        """Measure once more, at ``z`` of shape ``(C, D)``: three gradients of each chain, and two at an anchor.

        :param preconditioner: its diagonal, ``(C, D)`` or ``(D,)``; ``None`` for none.
        """
        scale = torch.ones_like(z) if preconditioner is None else preconditioner.sqrt()
        rows = independent_rows(density.row_counts, len(z), generator)
        _, gradient = density.energy_and_gradient(z, rows)
        along = scale * self.direction
        # The cube root of the precision balances the rounding of a difference against the curvature's own change.
        length = torch.finfo(z.dtype).eps ** (1 / 3) * (1 + z.square().mean(-1, keepdim=True).sqrt())
        distance = length / along.norm(dim=-1, keepdim=True)
        product = scale * (density.energy_and_gradient(z + distance * along, rows)[1] - gradient) / distance
        curvature = product.norm(dim=-1, keepdim=True)
        usable = torch.isfinite(curvature) & (curvature > 0)
        change = bare = torch.zeros_like(z)
        if rows is not None:
            others = independent_rows(density.row_counts, len(z), generator)
            change = bare = gradient - density.energy_and_gradient(z, others)[1]
            if anchor is not None:
                first, second = (density.energy_and_gradient(anchor.z, batch)[1] for batch in (rows, others))
                change = bare - (first - second)
        weight = 2 / (self.count + 2)
        noise, bare_noise = (
            (0.5 * (scale * difference).square()).nan_to_num(0.0, 0.0, 0.0).mean(0) for difference in (change, bare)
        )
        return Landscape(
            torch.where(usable, product / curvature, self.direction),
            self.curvature.lerp(torch.where(usable[:, 0], curvature[:, 0], self.curvature), weight),
            self.noise.lerp(noise, weight),
            self.bare_noise.lerp(bare_noise, weight),
            self.count + 1,
        )
