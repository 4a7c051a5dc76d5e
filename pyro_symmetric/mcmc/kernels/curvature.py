r"""A first dense mass matrix, from positions and gradients of chains that may have yet to arrive.

Of a Gaussian with covariance :math:`\Sigma`, gradients of the energy are :math:`g = \Sigma^{-1} (z - \mu)`. So the
covariances of any positions and of the gradients there are bound by :math:`\Sigma C_g \Sigma = C_z`, wherever the
positions lie and however little they have spread, and

.. math:: \Sigma = C_z \mathbin{\#} C_g^{-1} = L \, (L^\top C_g L)^{-1/2} L^\top, \qquad C_z = L L^\top,

the geometric mean of two positive matrices, is the covariance. In general it is the matrix for which whitened positions
and whitened gradients vary alike, which makes the Fisher divergence from a Gaussian least (Seyboldt, Carlson &
Carpenter 2026, "Preconditioning Hamiltonian Monte Carlo by minimizing Fisher divergence", arXiv 2603.18845).

Covariances alone can't do this: with the unit matrix, chains of a regression on unscaled columns would take as
many steps to spread as the root of the condition number, and that is 1,000 and
more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.mass import LEAST, MANY_DRAWS, DenseMass, dense_mass

LOST = 3.0  # deviations from 0 of a mean gradient
WIDER = 1e4  # than another mode of the same weight: no step that suits both would cross it


@dataclass(frozen=True, eq=False)
class Curvature:
    """The positions and gradients that chains have passed since the mass matrix was last learnt.

    :param positions: of all chains, ``(C, D)`` each.
    :param gradients: of the energy there, likewise.
    :param renewals: how often it was.
    """

    positions: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()
    renewals: int = 0

    def update(self, z: Tensor, gradient: Tensor) -> Curvature:
        """Take in one draw of every chain and its gradient, ``(C, D)`` each."""
        return Curvature((*self.positions, z), (*self.gradients, gradient), self.renewals)

    def lost(self, energy: Tensor) -> tuple[Tensor, Tensor]:
        """Which chains are lost, and which have arrived, ``(C,)`` each.

        The mean gradient is 0 for a chain that has arrived, in whichever mode (integrate by parts). Lost is a chain
        whose gradients, in some coordinate, lie further from 0 than ``LOST`` of their deviations, while its energy is
        higher than that of all chains of which this isn't so, by ``D log WIDER`` at least. These must be half of all.

        A few draws of a chain that crosses a wide mode slowly have such gradients, too, and energies that are higher
        by ``D log s`` than in a mode of the same weight that is ``s`` times narrower. So chains leave a mode of that
        weight only if it is ``WIDER`` times wider in every coordinate.

        :param energy: of the chains now, ``(C,)``.
        """
        gradients = torch.stack(self.gradients).double()
        settled = (gradients.mean(0).abs() <= LOST * gradients.std(0)).all(-1)
        highest = torch.where(settled, energy, -torch.inf).max() + gradients.shape[-1] * math.log(WIDER)
        return ~settled & (energy > highest) & (2 * settled.sum() >= len(energy)), settled

    def mass(self, energy: Tensor) -> DenseMass | None:
        """The mass matrix that the draws so far suggest, or ``None`` if some coordinate hardly moved.

        Of fewer draws than twice the coordinates it is diagonal: :math:`\\Sigma_{ii}^2 = C_{z,ii} / C_{g,ii}`.

        :param energy: of the chains now, ``(C,)``. The half of them with the higher energies doesn't count: some may be
            far out, where gradients are steeper by orders of magnitude.
        """
        ahead = energy.argsort()[: (len(energy) + 1) // 2]
        draws = torch.stack([torch.stack(self.positions), torch.stack(self.gradients)])[:, :, ahead].double()
        rows = (draws - draws.mean(1, keepdim=True)).flatten(1, 2)
        degrees, squares = len(ahead) * (len(self.positions) - 1), rows.square().sum(1)
        if not bool((squares.isfinite() & (squares > 0)).all()):
            return None
        deviations = (squares[0] / squares[1]).sqrt().sqrt()
        eye = torch.eye(len(deviations), dtype=deviations.dtype, device=deviations.device)
        if degrees < MANY_DRAWS * len(eye):
            return dense_mass(eye, deviations, energy.dtype)
        # In units of these deviations both covariances have the same diagonal.
        rows = rows * torch.stack([1 / deviations, deviations])[:, None]
        positions, gradients = rows.mT @ rows
        scale = positions.diagonal().sqrt()
        correlations = torch.lerp(positions / scale / scale[:, None], eye, LEAST)
        factor = scale[:, None] * torch.linalg.cholesky(correlations)
        values, vectors = torch.linalg.eigh(factor.mT @ gradients @ factor)
        roots = values.clamp(min=values.max() * LEAST**2).rsqrt().sqrt()
        half = factor @ vectors * roots
        covariance = half @ half.mT
        found = covariance.diagonal().sqrt()
        correlation = torch.lerp(covariance / found / found[:, None], eye, LEAST)
        return dense_mass(correlation, found * deviations, energy.dtype)
