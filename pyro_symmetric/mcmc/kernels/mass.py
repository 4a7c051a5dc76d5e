r"""Mass matrices: what a sampler holds the posterior's covariance to be, and how it is learnt from many chains.

With :math:`M^{-1} = \Sigma`, the covariance of the unconstrained coordinates, all directions move at the same pace and
one step size fits them all. Three forms, of rising cost:

* diagonal, :math:`\Sigma = S^2`, for any dimension;
* low-rank, :math:`\Sigma = S (I + U (\Lambda - I) U^\top) S` with orthonormal :math:`U` of ``rank`` columns, for strong
  correlations of many coordinates;
* dense, :math:`\Sigma = L L^\top`, for up to a few hundred dimensions.

Covariances are taken *within* chains and pooled over them: chains of a network usually sit in different modes, and the
distance between modes says nothing about how far one trajectory may go. Few draws make extreme eigenvalues, so all are
shrunk: variances as Stan shrinks them, but not those of the dense form if draws
abound; eigenvalues of the dense form, each by itself, by the quadratic-inverse
shrinkage (Ledoit & Wolf 2022, "Quadratic shrinkage for large covariance matrices", Bernoulli 28, section 4.4), or, of
fewer draws than twice the coordinates, towards 1 by the oracle approximating shrinkage (Chen et al. 2010, arXiv
0907.4698, eq. 23); those of the low-rank form by the spiked covariance model (Donoho, Gavish & Johnstone 2018, arXiv
1311.0851, section 4).

What a trajectory costs goes with the root of the condition number that whitening leaves. One share for all eigenvalues
is right for the matrix's entries, and not for that: of 100 draws of 24 coordinates, two pairs of which have
correlations 0.99 and -0.95, it left 10.9, this leaves 2.0, the diagonal 14. Of few draws, which are correlated besides,
it is the safer one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.randomness import normal

MASSES = ("diagonal", "low-rank", "dense")
MAX_DENSE = 10_000  # coordinates; a dense matrix of more fills the memory
LEAST = 1e-6  # eigenvalue of a correlation matrix
MANY_DRAWS = 2  # for each coordinate
SKETCH = 5  # directions that are followed for each one that is kept in the end


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
    def of(cls, covariance: Tensor, cholesky: Tensor) -> DenseMass:
        r"""From a covariance and its lower triangular factor :math:`L`, both ``(D, D)``."""
        eye = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
        whitener = torch.linalg.solve_triangular(cholesky, eye, upper=False)
        return cls(covariance.diagonal().clone(), covariance, whitener)

    def velocity(self, momentum: Tensor) -> Tensor:
        return momentum @ self.covariance

    def whiten(self, z: Tensor) -> Tensor:
        return z @ self.whitener.mT

    def momentum(self, noise: Tensor) -> Tensor:
        return noise @ self.whitener


@dataclass(frozen=True, eq=False)
class LowRankMass(Mass):
    r"""
    :param scale: diagonal of :math:`S`, ``(D,)``.
    :param directions: :math:`U`, orthonormal columns ``(D, K)``.
    :param eigenvalues: diagonal of :math:`\Lambda`, ``(K,)``, positive.
    """

    scale: Tensor
    directions: Tensor
    eigenvalues: Tensor

    @classmethod
    def of(cls, scale: Tensor, directions: Tensor, eigenvalues: Tensor) -> LowRankMass:
        """From its parts, which have a variance."""
        variance = scale.square() * (1 + directions.square() @ (eigenvalues - 1))
        return cls(variance, scale, directions, eigenvalues)

    def velocity(self, momentum: Tensor) -> Tensor:
        return self.scale * self._stretch(self.scale * momentum, self.eigenvalues)

    def whiten(self, z: Tensor) -> Tensor:
        return self._stretch(z / self.scale, self.eigenvalues.rsqrt())

    def momentum(self, noise: Tensor) -> Tensor:
        return self._stretch(noise, self.eigenvalues.rsqrt()) / self.scale

    def _stretch(self, vectors: Tensor, factors: Tensor) -> Tensor:
        r""":math:`(I + U (F - I) U^\top) v`."""
        return vectors + ((vectors @ self.directions) * (factors - 1)) @ self.directions.mT


@dataclass(frozen=True, eq=False)
class MassEstimate:
    r"""Running covariance within chains, pooled over the chains (Welford 1962), in the form that a mass matrix needs.

    :param kind: one of :data:`MASSES`.
    :param rank: of a low-rank matrix.
    :param mean: each chain's mean, ``(C, D)``.
    :param squares: sum of squared deviations over chains and draws, ``(D,)``.
    :param scatter: dense: sum of the deviations' outer products, ``(D, D)``. Low-rank: a sketch ``(R, D)`` of the
        deviations, in units of ``scale``, whose Gram matrix is about theirs. Diagonal: ``None``.
    :param scale: deviations of the coordinates as known before, ``(D,)``.
    :param count: draws of each chain so far.
    """

    kind: str
    rank: int
    mean: Tensor
    squares: Tensor
    scatter: Tensor | None
    scale: Tensor
    count: int = 0

    @classmethod
    def start(cls, z: Tensor, kind: str = "diagonal", rank: int = 16, scale: Tensor | None = None) -> MassEstimate:
        """Nothing seen yet, for chains ``(C, D)``."""
        dim = z.shape[-1]
        rows = {"diagonal": None, "dense": dim, "low-rank": 0}[kind]
        scatter = None if rows is None else z.new_zeros(rows, dim)
        return cls(
            kind, rank, torch.zeros_like(z), z.new_zeros(dim), scatter, z.new_ones(dim) if scale is None else scale
        )

    def update(self, z: Tensor) -> MassEstimate:
        """Take in one draw of every chain, ``(C, D)``."""
        count = self.count + 1
        delta = z - self.mean
        # These rows' outer products sum to the scatter about the chains' final means.
        rows = delta * ((count - 1) / count) ** 0.5
        scatter = self.scatter
        if scatter is not None and count > 1:
            if self.kind == "dense":
                scatter = torch.addmm(scatter, rows.mT, rows)
            else:
                scatter = _sketch(torch.cat([scatter, rows / self.scale]), SKETCH * self.rank)
        squares = self.squares + rows.square().sum(0)
        return replace(self, mean=self.mean + delta / count, squares=squares, scatter=scatter, count=count)

    def mass(self) -> Mass:
        """The mass matrix that the draws so far suggest; of less than two draws the unit matrix."""
        variance = self._variance()
        if self.kind == "diagonal":
            return Mass(variance)
        return self._dense(variance) if self.kind == "dense" else self._low_rank(variance)

    @property
    def _degrees(self) -> int:
        return len(self.mean) * max(self.count - 1, 0)

    def _variance(self) -> Tensor:
        """Variances ``(D,)``, shrunk towards a small constant as if by five draws, as Stan does."""
        if self._degrees < 1:
            return torch.ones_like(self.squares)
        share = self._degrees / (self._degrees + 5.0)
        return share * self.squares / self._degrees + 1e-3 * (1 - share)

    def _dense(self, variance: Tensor) -> DenseMass:
        eye = torch.eye(len(variance), dtype=torch.float64, device=variance.device)
        correlation, deviations = eye, variance.double().sqrt()
        if self._degrees >= 1 and self.scatter is not None:
            norms = self.squares.double().clamp(min=torch.finfo(self.squares.dtype).tiny).sqrt()
            found = (self.scatter.double() / norms / norms[:, None]).fill_diagonal_(1.0)
            abound = self._degrees >= MANY_DRAWS * len(eye)
            shrunk = _quadratic_shrinkage if abound else _linear_shrinkage
            if abound:  # where correlations are strong, a small change of one variance alone ruins all of the matrix
                deviations = torch.where(self.squares > 0, norms / self._degrees**0.5, deviations)
            correlation = torch.lerp(shrunk(found, self._degrees), eye, LEAST)
        return dense_mass(correlation, deviations, variance.dtype)

    def _low_rank(self, variance: Tensor) -> LowRankMass:
        deviations = variance.sqrt()
        none = LowRankMass.of(deviations, variance.new_zeros(len(variance), 0), variance.new_zeros(0))
        if self._degrees < 2 or self.scatter is None:
            return none
        rows = self.scatter * (self.scale / deviations)
        _, singular, directions = torch.linalg.svd(rows.double(), full_matrices=False)
        found = singular[: self.rank].square() / self._degrees
        ratio = len(variance) / self._degrees
        eigenvalues = _spiked_shrinkage(found, ratio)
        kept = int((eigenvalues > 1).sum())
        if kept == 0:
            return none
        eigenvalues, directions = eigenvalues[:kept], directions[:kept]
        # What the kept directions carry, the others lack: the correlation matrix has trace D.
        dim = len(variance)
        bulk = ((dim - eigenvalues.sum()) / max(dim - kept, 1)).clamp(0.05, 1.0)
        return LowRankMass.of(
            deviations * bulk.sqrt().to(variance.dtype),
            directions.mT.contiguous().to(variance.dtype),
            (eigenvalues / bulk).to(variance.dtype),
        )


def dense_mass(correlation: Tensor, deviations: Tensor, dtype: torch.dtype) -> DenseMass:
    """From a correlation matrix ``(D, D)``, whose eigenvalues are kept away from 0, and deviations ``(D,)``, both in
    double precision."""
    factor = deviations[:, None] * torch.linalg.cholesky(correlation)
    mass = DenseMass.of(correlation * deviations * deviations[:, None], factor)
    return DenseMass(mass.variance.to(dtype), mass.covariance.to(dtype), mass.whitener.to(dtype))


# small steps --------------------------------------------------------------------------------------------------------


def _sketch(rows: Tensor, size: int) -> Tensor:
    """At most ``size`` rows whose Gram matrix ``rowsᵀ rows`` is nearest that of the given ones."""
    if len(rows) <= size:
        return rows
    vectors = torch.linalg.eigh((rows @ rows.mT).double()).eigenvectors
    return vectors[:, -size:].mT.to(rows.dtype) @ rows


def _linear_shrinkage(correlation: Tensor, degrees: int) -> Tensor:
    """The mixture with the identity that is nearest to the true correlation matrix."""
    dim = len(correlation)
    if dim == 1:
        return correlation
    squares = correlation.square().sum()
    share = ((1 - 2 / dim) * squares + dim**2) / ((degrees + 1 - 2 / dim) * (squares - dim).clamp(min=1e-12))
    return torch.lerp(
        correlation, torch.eye(dim, dtype=correlation.dtype, device=correlation.device), share.clamp(0, 1)
    )


def _quadratic_shrinkage(correlation: Tensor, degrees: int) -> Tensor:
    r"""The correlation matrix ``(D, D)`` whose inverse is nearest to the true one's, of those with these eigenvectors.

    With :math:`c = D / n` and the sample's positive eigenvalues :math:`\lambda_i`, :math:`\theta_i` and
    :math:`(H\theta)_i` are Stein's sum over :math:`j` and its conjugate, with eigenvalues smoothed over a bandwidth
    :math:`h / \lambda_j`,

    .. math:: \theta_i = \frac1D \sum_j \frac{\lambda_j^{-1} (\lambda_j^{-1} - \lambda_i^{-1})}{
            (\lambda_j^{-1} - \lambda_i^{-1})^2 + h^2 \lambda_j^{-2}}, \quad
        (H\theta)_i = \frac1D \sum_j \frac{h \lambda_j^{-2}}{(\lambda_j^{-1} - \lambda_i^{-1})^2 + h^2 \lambda_j^{-2}},

    and eigenvalues become

    .. math:: \lambda_i \bigl/ \left((1 - c)^2 + 2 c (1 - c) \theta_i + c^2 (\theta_i^2 + (H\theta)_i^2)\right).

    :param degrees: :math:`n`, more than coordinates.
    """
    dim = len(correlation)
    values, vectors = torch.linalg.eigh(correlation)
    inverse = values.clamp(min=LEAST).reciprocal()
    ratio = dim / degrees
    bandwidth = ratio**0.7 / dim**0.35
    gap = inverse - inverse[:, None]
    spread = gap.square() + (bandwidth * inverse).square()
    theta, hilbert = ((inverse * part / spread).mean(1) for part in (gap, bandwidth * inverse))
    amplitude = theta.square() + hilbert.square()
    shrunk = 1 / (inverse * ((1 - ratio) ** 2 + 2 * ratio * (1 - ratio) * theta + ratio**2 * amplitude))
    found = (vectors * shrunk) @ vectors.mT
    norms = found.diagonal().rsqrt()
    return found * norms * norms[:, None]


def _spiked_shrinkage(found: Tensor, ratio: float) -> Tensor:
    r"""Eigenvalues for sample eigenvalues that stand out of noise of variance 1; 1 for those that don't.

    :param ratio: :math:`\gamma`, dimensions for each draw. Noise alone reaches :math:`(1 + \sqrt\gamma)^2`.
    """
    stands_out = found > (1 + ratio**0.5) ** 2
    half = (found + 1 - ratio) / 2
    spike = half + (half.square() - found).clamp(min=0).sqrt()
    spike = torch.where(stands_out, spike, 2.0)
    cosine = (1 - ratio / (spike - 1).square()) / (1 + ratio / (spike - 1))  # squared, of sample and true direction
    return torch.where(stands_out, 1 + (spike - 1) * cosine, 1.0)
