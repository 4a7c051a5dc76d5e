r"""The settling of chains: those in negligible modes restart, and warm-up ends.

**Restarts.** Random starting points lead some chains into modes that hold next to
nothing of the posterior and that they would hardly ever leave, such as those in which a
component of a mixture covers a few outliers. Their draws would count like all others.
:class:`ModeMasses` bounds the mass of the mode that each of many chains is in. A chain
restarts at the position of another one if its mode is negligible by these bounds.

**The end.** A warm-up of length ``"auto"`` ends when each chain is stationary. A kernel
lists lengths at which its warm-up may end (``Kernel.warmups``). At each of them
:class:`Agreement` computes a split :math:`\hat R` of the second half of the iterations;
if it is below :data:`LIMIT`, or at the last length, warm-up ends. A run that ends after
300 iterations has the same draws as one with ``num_warmup=300``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from pyro_symmetric.mcmc.kernels.adaptation import Spread
from pyro_symmetric.posterior.diagnostics import R_HAT
from pyro_symmetric.posterior.statistics import chain_statistics

LIMIT = R_HAT[1]
OUTLIERS = 32  # one in so many chains may be stuck in a lower mode
LARGEST = 999.0  # R-hat of chains that don't move
# limits of the thinned history; an even number of draws
CHAINS = 64
COORDINATES = 512
DRAWS = 512
# A mode is negligible if the upper bound of its log mass is so many nats below the
# upper quartile of the lower bounds. By Markov's inequality each of those is too high
# by t nats with a chance of at most exp(-t).
MARGIN = 8.0
# Chains so far below that quartile may be on their way from such a mode.
ON_THEIR_WAY = 4.0
TRAVELLING = 50  # iterations before the first that count
MOST_CORRELATED = 64  # coordinates up to which covariances are estimated
SHRINKAGE = 0.05  # of correlations
LEVEL_RATE = 0.1  # weight of a draw in the fading mean of energies
POINTS = 8  # of a Gaussian, at which the density is evaluated

# positions (B, D), at most one for each chain -> energies (B,)
Energies = Callable[[Tensor], Tensor]


# restarts -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModeMasses:
    r"""Bounds of the masses of the modes that chains are in, from their recent draws.

    With :math:`U` the potential energy, and :math:`q` a Gaussian with the mean and the
    variances :math:`v_d` of the draws of a chain, Jensen's inequality gives

    .. math:: \mathbb E_q[-U(z) - \log q(z)] \le \log \int e^{-U(z)}\, dz,
        \qquad \log m \le \mathbb E_p[-U(z) - \log q(z)]
        = -\mathbb E_p[U(z)] + \tfrac12 \sum_d \log (2 \pi e\, v_d),

    where :math:`p` is the posterior within the mode, and :math:`m` the mode's mass. The
    first needs no assumption on the posterior, and is the tighter the better :math:`q`
    fits. The second holds for chains whose draws have explored their mode.

    :param recent: spread of positions, ``(C, D)``; ``None`` before the first.
    :param products: sums of outer products of deviations of the first chains,
        ``(B, D, D)``; ``None`` for many coordinates.
    :param level: mean energy of each chain, weighted towards its last draws, ``(C,)``.
    :param have_arrived: whether no chain restarted, or was on its way from a negligible
        mode, when the chains were last judged.
    """

    recent: Spread | None = None
    products: Tensor | None = None
    level: Tensor | None = None
    have_arrived: bool = True

    def update(self, iteration: int, z: Tensor, energy: Tensor) -> ModeMasses:
        """Add positions ``(C, D)`` and energies ``(C,)`` of an iteration, counted from
        0; the first :data:`TRAVELLING` don't count.
        """
        if iteration < TRAVELLING:
            return self
        z = z.double()
        before, products, level = self.recent, self.products, self.level
        if before is None or level is None:
            before, level = Spread.start(z), energy.double()
            if z.shape[1] <= MOST_CORRELATED:
                products = z.new_zeros(*z[:CHAINS].shape, z.shape[1])
        after = before.update(z)
        level = level.lerp(energy.double(), LEVEL_RATE)
        if products is not None:
            delta = (z - before.mean)[:CHAINS]
            products = products + delta[:, :, None] * (z - after.mean)[:CHAINS, None, :]
        return replace(self, recent=after, products=products, level=level)

    def gaps(self, energies: Energies, generator: Generator) -> Tensor:
        """Return how far the upper bounds of the chains' modes are above the upper
        quartile of the lower bounds of the posterior, in nats, ``(C,)``; infinite where
        no bound is known.
        """
        upper = self.upper_bounds()
        lower = self.lower_bounds(energies, generator)
        if not len(lower):
            return torch.full_like(upper, torch.inf)
        return upper - lower.quantile(0.75, interpolation="lower")

    def upper_bounds(self) -> Tensor:
        """Return upper bounds of the log masses of the chains' modes, ``(C,)``;
        infinite for chains of which a coordinate stands still.

        Chains that move slowly are credited with variances of at least the upper
        quartiles of all, and those on their way with the energies of their last draws.
        """
        assert self.recent is not None
        assert self.level is not None
        moves = self._moves()
        variances = self.recent.variances[:, moves]
        explores = self._explores(moves)
        if not explores.any():
            return torch.full_like(self.level, torch.inf)
        least = variances[explores].quantile(0.75, 0)
        log_variances = torch.maximum(variances, least).log()
        entropy = 0.5 * (log_variances + math.log(2 * math.pi * math.e)).sum(1)
        return (entropy - self.level).where(explores, torch.inf)

    def lower_bounds(self, energies: Energies, generator: Generator) -> Tensor:
        """Estimate lower bounds of the log mass of the posterior, one from each of the
        first :data:`CHAINS` that explore their modes.

        Each is the better one of two Gaussians', without and with correlations.
        """
        assert self.recent is not None
        moves = self._moves()
        chains = self._explores(moves)[:CHAINS].nonzero()[:, 0]
        if not len(chains):
            return self.recent.mean.new_empty(0)
        covariance = torch.diag_embed(self.recent.variances[chains][:, moves])
        mean = self.recent.mean[chains]
        bounds = _evidence_bound(energies, mean, covariance, moves, generator)
        if self.products is not None:
            products = self.products[chains][:, moves][:, :, moves]
            correlated = (products / (self.recent.count - 1)).lerp(
                covariance, SHRINKAGE
            )
            better = _evidence_bound(energies, mean, correlated, moves, generator)
            bounds = torch.maximum(bounds, better)
        return bounds

    def _moves(self) -> Tensor:
        """Return which coordinates change in any chain, ``(D,)``."""
        assert self.recent is not None
        return (self.recent.variances > 0).any(0)

    def _explores(self, moves: Tensor) -> Tensor:
        """Return the chains that change in all coordinates that do in any, and whose
        energies are finite, ``(C,)``.
        """
        assert self.recent is not None
        assert self.level is not None
        variances = self.recent.variances[:, moves]
        is_finite = variances.isfinite().all(1) & self.level.isfinite()
        return (variances > 0).all(1) & is_finite & moves.any()


def sources(gaps: Tensor, generator: Generator) -> Tensor:
    """Draw the chain at whose position each one continues, ``(C,)``: its own or, in a
    negligible mode, that of one of the first :data:`CHAINS` that aren't in such a mode.

    :param gaps: as :meth:`ModeMasses.gaps` returns them.
    """
    chains = torch.arange(len(gaps), device=gaps.device)
    is_negligible = gaps < -MARGIN
    is_known = gaps.isfinite() & ~is_negligible
    others = is_known[:CHAINS].nonzero()[:, 0]
    if not is_negligible.any() or not len(others):
        return chains
    chosen = torch.randint(
        len(others), chains.shape, generator=generator, device=gaps.device
    )
    return torch.where(is_negligible, others[chosen], chains)


def _evidence_bound(
    energies: Energies,
    mean: Tensor,
    covariance: Tensor,
    moves: Tensor,
    generator: Generator,
) -> Tensor:
    """Estimate the lower bounds of the log evidence ``(B,)`` by Gaussians, of means
    ``(B, D)`` and of covariances of the coordinates that move.

    :return: minus infinity if a covariance isn't positive definite.
    """
    factor, failed = torch.linalg.cholesky_ex(covariance)
    log_determinant = factor.diagonal(dim1=1, dim2=2).log().sum(1)
    total = torch.zeros_like(log_determinant)
    for _ in range(POINTS):  # one after another, as a model may need much memory
        noise = torch.empty_like(mean[:, moves]).normal_(generator=generator)
        z = mean.clone()
        z[:, moves] += torch.linalg.vecdot(factor, noise[:, None])
        energy = energies(z)
        squares = noise.square() + math.log(2 * math.pi)
        log_density = -0.5 * squares.sum(1) - log_determinant
        total += -energy - log_density
    bounds = total / POINTS
    return bounds.where(bounds.isfinite() & (failed == 0), -torch.inf)


# the end ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Agreement:
    r"""Thinned history of warm-up, and the :math:`\hat R` that ends it; part of a
    checkpoint.

    Chains need not be in the same place, nor have the same scale: those of mixtures and
    networks sit in symmetric copies of a mode, and waiting doesn't bring them together.
    Whether they should is for
    :func:`~pyro_symmetric.compare.diagnose`. Here the two halves of each chain must
    agree in every coordinate, and all chains in energy and acceptance, apart from one
    in :data:`OUTLIERS`. Means of half chains of :math:`n` effective draws have
    :math:`\hat R^2 \approx 1 + 1/n`, so :data:`LIMIT` asks for about ten in each half.

    :param stride: iterations per draw. It doubles, and every second draw is dropped,
        when there are :data:`DRAWS`. The history thus depends on the iterations only,
        not on interruptions.
    :param kept: positions, energy and acceptance, ``(C, coordinates + 2)`` per draw.
    """

    stride: int = 1
    kept: tuple[Tensor, ...] = ()

    def update(
        self,
        iteration: int,
        z: Tensor,
        energy: Tensor,
        acceptance: Tensor | None = None,
    ) -> Agreement:
        """Add positions ``(C, D)``, energies and acceptances ``(C,)`` of an iteration,
        counted from 0.
        """
        if iteration % self.stride:
            return self
        full = len(self.kept) == DRAWS
        stride, history = (
            (2 * self.stride, self.kept[::2]) if full else (self.stride, self.kept)
        )
        levels = [
            energy,
            torch.ones_like(energy) if acceptance is None else acceptance.to(energy),
        ]
        positions = z[:, :: -(-z.shape[1] // COORDINATES)]
        return Agreement(
            stride,
            (*history, torch.cat([positions, torch.stack(levels, 1)], 1)[:CHAINS]),
        )

    def of_chains(self, chains: Tensor) -> Agreement:
        """Give each chain the history of another one, by their indices."""
        rows = chains[:CHAINS]
        return replace(self, kept=tuple(draw[rows] for draw in self.kept))

    def r_hat(self) -> float:
        r"""Return the largest split :math:`\hat R` of the second half of the
        iterations, at most :data:`LARGEST`.
        """
        draws = torch.stack(self.kept[len(self.kept) // 2 :], 1).cpu()
        if not draws.isfinite().all():
            return LARGEST
        # About the mean of its own chain, the mean of a half has half the variance: the
        # excess of R-hat is doubled.
        deviation, mean = torch.std_mean(draws[..., :-2].double(), 1, keepdim=True)
        positions = (draws[..., :-2] - mean) / deviation.clamp(min=1e-300)
        within = (
            1 + 2 * (chain_statistics(positions).r_hat.square() - 1).clamp(min=0)
        ).sqrt()
        energy = draws[..., -2].mean(1)
        inliers = (
            (energy - energy.median())
            .abs()
            .argsort()[: len(energy) - len(energy) // OUTLIERS]
        )
        values = torch.cat([within, chain_statistics(draws[inliers][..., -2:]).r_hat])
        values = values[~values.isnan()]  # NaN for constant coordinates
        return min(float(values.max()), LARGEST) if len(values) else LARGEST
