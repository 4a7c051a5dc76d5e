r"""The settling of chains: those in negligible modes restart, and warm-up ends.

**Restarts.** Random starting points lead some chains into modes that hold next to
nothing of the posterior and that they would hardly ever leave, such as those in which a
component of a mixture covers a few outliers. Their draws would count like all others.
:class:`ModeMasses` estimates the mass of the mode that each of many chains is in, and a
chain whose mode is negligible restarts at the position of another one.

**The end.** A warm-up of length ``"auto"`` ends when each chain is stationary. A kernel
lists lengths at which its warm-up may end (``Kernel.warmups``). At each of them
:class:`Agreement` computes a split :math:`\hat R` of the second half of the iterations;
if it is below :data:`LIMIT`, or at the last length, warm-up ends. A run that ends after
300 iterations has the same draws as one with ``num_warmup=300``.
"""

from __future__ import annotations

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
# A mode is negligible if its estimated log mass is so many nats below the upper
# quartile of all chains; the estimate may be off in each coordinate.
MARGIN, MARGIN_PER_COORDINATE = 8.0, 0.5
TRAVELLING = 50  # iterations before the first that count


# restarts -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModeMasses:
    r"""Running estimate of the mass of each chain's mode.

    By Laplace's approximation with the mean energy :math:`\bar U` and the variances
    :math:`v_d` of a chain's recent draws,

    .. math:: \log m = -\bar U + \tfrac12 \sum_d \log v_d + \text{const}.

    :param recent: spread of positions and energy, ``(C, D + 1)``; ``None`` before the
        first.
    """

    recent: Spread | None = None

    def update(self, iteration: int, z: Tensor, energy: Tensor) -> ModeMasses:
        """Add positions ``(C, D)`` and energies ``(C,)`` of an iteration, counted from
        0; the first :data:`TRAVELLING` don't count.
        """
        if iteration < TRAVELLING:
            return self
        values = torch.cat([z, energy[:, None]], 1).double()
        recent = Spread.start(values) if self.recent is None else self.recent
        return replace(self, recent=recent.update(values))

    def negligible(self) -> Tensor:
        """Return which chains are in modes of negligible mass, ``(C,)``.

        The variances of a chain that is judged are at least the median ones, as one
        that hardly moves isn't in a narrow mode.
        """
        assert self.recent is not None
        energy = self.recent.mean[:, -1]
        variances = self.recent.variances[:, :-1].clamp(min=torch.finfo().tiny)
        largest = torch.maximum(variances, variances.median(0).values)
        log_mass = 0.5 * variances.log().sum(1) - energy
        most = 0.5 * largest.log().sum(1) - energy
        margin = MARGIN + MARGIN_PER_COORDINATE * variances.shape[1]
        return most < log_mass.quantile(0.75) - margin

    def sources(self, generator: Generator) -> Tensor | None:
        """Draw the chain at whose position each one continues, ``(C,)``: its own or, in
        a negligible mode, that of one of the first :data:`CHAINS` that aren't in such a
        mode; ``None`` if all stay.
        """
        is_negligible = self.negligible()
        others = (~is_negligible[:CHAINS]).nonzero()[:, 0]
        if not is_negligible.any() or not len(others):
            return None
        chains = torch.arange(len(is_negligible), device=others.device)
        chosen = torch.randint(
            len(others), chains.shape, generator=generator, device=others.device
        )
        return torch.where(is_negligible, others[chosen], chains)


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
