r"""Chains in phase space: the mass matrix that gives momenta their scale, and the leapfrog method that moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.eager import Evaluate
from pyro_symmetric.mcmc.kernels.kernel import State, normal

ROUNDING = 4.0  # of a sum, in units of the last place, about

MAX_ENERGY_ERROR = 1000.0  # beyond it a trajectory counts as divergent, as in Stan and Pyro


@dataclass(frozen=True, eq=False)
class Mass:
    r"""A mass matrix :math:`M = W^\top W` with :math:`W \Sigma W^\top = I`. Vectors are batched: ``batch + (D,)``.

    With :math:`M^{-1} = \Sigma`, the covariance of the unconstrained coordinates, all directions move at the same pace
    and one step size fits them all.

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

    def kinetic(self, momentum: Tensor) -> Tensor:
        r"""Kinetic energy :math:`\tfrac12 p^\top M^{-1} p`, of shape ``batch``."""
        return 0.5 * (momentum * self.velocity(momentum)).sum(-1)


def _product(vectors: Tensor, matrix: Tensor) -> Tensor:
    return vectors * matrix if matrix.dim() == 1 else vectors @ matrix


class PhasePoint(NamedTuple):
    """Points of C chains in phase space; these fields a :class:`~pyro_symmetric.mcmc.State` has, too.

    :param z: positions ``(C, D)``; likewise ``momentum``.
    :param energy: potential energy at ``z``, ``(C,)``; ``gradient`` is its gradient ``(C, D)``.
    """

    z: Tensor
    momentum: Tensor
    energy: Tensor
    gradient: Tensor

    def total_energy(self, mass: Mass) -> Tensor:
        """Potential and kinetic energy, ``(C,)``."""
        return self.energy + mass.kinetic(self.momentum)


def with_fresh_momenta(state: State, mass: Mass) -> PhasePoint:
    """The places of the chains, with new momenta."""
    momentum = mass.momentum(normal(state.z, state.generator))
    return PhasePoint(state.z, momentum, state.energy, state.gradient)


def choose(mask: Tensor, if_true: PhasePoint, if_false: PhasePoint) -> PhasePoint:
    """For each chain the one point or the other, by a mask ``(C,)``."""
    rows = mask[:, None]
    return PhasePoint(
        *(torch.where(mask if a.dim() == 1 else rows, a, b) for a, b in zip(if_true, if_false, strict=True))
    )


def leapfrog(evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass) -> PhasePoint:
    """One step along the Hamiltonian flow: reversible, volume-preserving, energy error O(step²).

    :param evaluate: points ``(C, D)`` -> energy ``(C,)`` and gradient ``(C, D)``.
    :param step_size: ``(C, 1)``; negative ones go back in time.
    """
    momentum = torch.addcmul(start.momentum, step_size, start.gradient, value=-0.5)
    z = torch.addcmul(start.z, step_size, mass.velocity(momentum))
    energy, gradient = evaluate(z)
    return PhasePoint(z, torch.addcmul(momentum, step_size, gradient, value=-0.5), energy, gradient)


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """The change of a trajectory's energy, ``(C,)``; infinite where it left the support or all numbers behind.

    Far out, energies may be so large that rounding hides more than a unit. There what it may hide counts as none, or
    chains would be stuck: rounding alone would refuse every other step, however short. If that lasts while chains are
    sampled, :func:`~pyro_symmetric.posterior.diagnostics.blurred` says so.
    """
    error = after - before
    if error.dtype == torch.float32:
        blur = ROUNDING * torch.finfo(before.dtype).eps * before.abs()
        error = torch.where((blur > 1) & (error.abs() <= blur), 0.0, error)
    return error.nan_to_num(torch.inf, torch.inf, torch.inf)
