r"""Mass matrices: what a sampler holds the posterior's covariance to be, and its estimate from the chains.

With :math:`M^{-1} = \Sigma`, the covariance of the unconstrained coordinates, all directions move at the same pace and
one step size fits them all. It is the covariance *within* chains, pooled over them (Welford 1962): chains of a network
usually sit in different modes, and the distance between modes says nothing about how far one trajectory may go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.randomness import normal

MASSES = ("diagonal", "dense")
MAX_DENSE = 10_000  # coordinates; a dense matrix of more fills the memory
MANY_DRAWS = 2  # for each coordinate, from which on correlations are learnt
FEW_DRAWS, SMALL = 5.0, 1e-3  # variances are shrunk towards a small constant as if by five draws, as Stan does


@dataclass(frozen=True, eq=False)
class Mass:
    r"""A mass matrix :math:`M = W^\top W` with :math:`W \Sigma W^\top = I`. Vectors are batched: ``batch + (D,)``.

    :param covariance: :math:`\Sigma`, ``(D, D)``, or its diagonal ``(D,)`` if there is nothing else.
    :param whitener: :math:`W`, likewise.
    """

    covariance: Tensor
    whitener: Tensor

    @classmethod
    def of(cls, covariance: Tensor) -> Mass:
        """From a positive covariance, ``(D, D)`` or ``(D,)``."""
        if covariance.dim() == 1:
            return cls(covariance, covariance.rsqrt())
        exact = covariance.double()
        eye = torch.eye(len(exact), dtype=exact.dtype, device=exact.device)
        whitener = torch.linalg.solve_triangular(torch.linalg.cholesky(exact), eye, upper=False)
        return cls(covariance, whitener.to(covariance.dtype))

    @property
    def variance(self) -> Tensor:
        r"""The diagonal of :math:`\Sigma`, ``(D,)``."""
        return self.covariance if self.covariance.dim() == 1 else self.covariance.diagonal()

    def velocity(self, momentum: Tensor) -> Tensor:
        r""":math:`M^{-1} p = \Sigma p`."""
        return _product(momentum, self.covariance)

    def whiten(self, z: Tensor) -> Tensor:
        r""":math:`W z`, whose coordinates have variance 1 and no correlations."""
        return _product(z, self.whitener.t())

    def momentum(self, noise: Tensor) -> Tensor:
        r""":math:`W^\top \epsilon`: momenta :math:`\mathcal N(0, M)` from standard normal noise."""
        return _product(noise, self.whitener)

    def draw(self, z: Tensor, generator: torch.Generator) -> Tensor:
        """Fresh momenta in the shape of ``z``."""
        return self.momentum(normal(z, generator))

    def kinetic(self, momentum: Tensor) -> Tensor:
        r"""Kinetic energy :math:`\tfrac12 p^\top M^{-1} p`, of shape ``batch``."""
        return 0.5 * (momentum * self.velocity(momentum)).sum(-1)


def _product(vectors: Tensor, matrix: Tensor) -> Tensor:
    return vectors * matrix if matrix.dim() == 1 else vectors @ matrix


@dataclass(frozen=True, eq=False)
class MassEstimate:
    """Running covariance within chains, pooled over the chains.

    :param mean: each chain's mean, ``(C, D)``.
    :param scatter: sum of squared deviations over chains and draws, ``(D,)``; for a dense matrix of their outer
        products, ``(D, D)``, in double precision.
    :param count: draws of each chain so far.
    """

    mean: Tensor
    scatter: Tensor
    count: int = 0

    @classmethod
    def start(cls, z: Tensor, kind: str = "diagonal") -> MassEstimate:
        """Nothing seen yet, for chains ``(C, D)``."""
        dim = z.shape[-1]
        nothing = z.new_zeros(dim, dim, dtype=torch.double) if kind == "dense" else z.new_zeros(dim)
        return cls(torch.zeros_like(z), nothing)

    def update(self, z: Tensor) -> MassEstimate:
        """Take in one draw of every chain, ``(C, D)``."""
        count = self.count + 1
        delta = z - self.mean
        # These rows' squares sum to the scatter about the chains' final means.
        rows = (delta * ((count - 1) / count) ** 0.5).to(self.scatter)
        more = rows.square().sum(0) if self.scatter.dim() == 1 else rows.mT @ rows
        return MassEstimate(self.mean + delta / count, self.scatter + more, count)

    def mass(self) -> Mass:
        """The mass matrix that the draws so far suggest; of less than two draws the unit matrix. Of fewer draws than
        twice the coordinates there are no correlations in it, and of all they are shrunk as variances are."""
        dense = self.scatter.dim() == 2
        squares = self.scatter.diagonal() if dense else self.scatter
        degrees = len(self.mean) * max(self.count - 1, 0)
        share = degrees / (degrees + FEW_DRAWS)
        variance = squares / max(degrees, 1) * share + SMALL * (1 - share) if degrees else torch.ones_like(squares)
        if not dense:
            return Mass.of(variance)
        correlations = torch.eye(len(squares), dtype=squares.dtype, device=squares.device)
        if degrees >= MANY_DRAWS * len(squares):
            moves = squares > 0
            norms = torch.where(moves, squares, 1.0).sqrt()
            found = (self.scatter / norms / norms[:, None]).fill_diagonal_(1.0)
            correlations = found.lerp(correlations, SMALL * (1 - share))
            variance = torch.where(moves, squares / degrees, variance)
        deviations = variance.sqrt()
        return Mass.of((correlations * deviations * deviations[:, None]).to(self.mean.dtype))
