r"""Mass matrices: what a sampler holds the posterior's covariance to be.

With :math:`M^{-1} = \Sigma`, the covariance of the unconstrained coordinates, all directions move at the same pace and
one step size fits them all. Two forms: diagonal, for any dimension, and dense, :math:`\Sigma = L L^\top`, for up to a
few hundred coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.randomness import normal

MASSES = ("diagonal", "dense")
MAX_DENSE = 10_000  # coordinates; a dense matrix of more fills the memory


@dataclass(frozen=True, eq=False)
class Mass:
    r"""A mass matrix :math:`M = W^\top W` with :math:`W \Sigma W^\top = I`, here a diagonal one.

    Vectors are batched: ``batch + (D,)``.

    :param variance: the diagonal of :math:`\Sigma`, ``(D,)``.
    """

    variance: Tensor

    def velocity(self, momentum: Tensor) -> Tensor:
        r""":math:`M^{-1} p = \Sigma p`."""
        return self.variance * momentum

    def whiten(self, z: Tensor) -> Tensor:
        r""":math:`W z`, whose coordinates have variance 1 and no correlations."""
        return z * self.variance.rsqrt()

    def momentum(self, noise: Tensor) -> Tensor:
        r""":math:`W^\top \epsilon`: momenta :math:`\mathcal N(0, M)` from standard normal noise."""
        return noise * self.variance.rsqrt()

    def draw(self, z: Tensor, generator: torch.Generator) -> Tensor:
        """Fresh momenta in the shape of ``z``."""
        return self.momentum(normal(z, generator))

    def kinetic(self, momentum: Tensor) -> Tensor:
        r"""Kinetic energy :math:`\tfrac12 p^\top M^{-1} p`, of shape ``batch``."""
        return 0.5 * (momentum * self.velocity(momentum)).sum(-1)


@dataclass(frozen=True, eq=False)
class DenseMass(Mass):
    r"""
    :param covariance: :math:`\Sigma`, ``(D, D)``.
    :param whitener: :math:`W = L^{-1}`, ``(D, D)``.
    """

    covariance: Tensor
    whitener: Tensor

    @classmethod
    def of(cls, covariance: Tensor) -> DenseMass:
        """From a positive covariance ``(D, D)``."""
        exact = covariance.double()
        eye = torch.eye(len(exact), dtype=exact.dtype, device=exact.device)
        whitener = torch.linalg.solve_triangular(torch.linalg.cholesky(exact), eye, upper=False)
        return cls(covariance.diagonal().clone(), covariance, whitener.to(covariance.dtype))

    def velocity(self, momentum: Tensor) -> Tensor:
        return momentum @ self.covariance

    def whiten(self, z: Tensor) -> Tensor:
        return z @ self.whitener.mT

    def momentum(self, noise: Tensor) -> Tensor:
        return noise @ self.whitener
