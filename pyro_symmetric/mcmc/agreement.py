r"""The end of a warm-up whose length is ``"auto"``: when every chain has settled.

A kernel names lengths at which its warm-up may end (:attr:`~pyro_symmetric.mcmc.kernels.kernel.Kernel.warmups`). At
each of them the second half of the iterations is looked at, by the rank-normalised split :math:`\hat R`: of every
unconstrained coordinate, in units of each chain's own deviation from its own mean, so that it compares the halves of
each chain; and of the energy and the acceptance, of which all chains must have one law. If the largest is below
:data:`LIMIT`, warm-up ends there; at the last length it ends in any case. So a run that ended after 300 iterations is,
draw for draw, the run that was asked for 300.

Chains needn't be at the same place, nor spread alike: those of a mixture or a network sit in copies of one mode, which
no waiting brings together, and whether they may is for :func:`~pyro_symmetric.compare.diagnose` to say. For the same
reason one in :data:`MAY_DIFFER` chains, the farthest by their energy, are left out of what all must agree in. Means of
half chains of :math:`n` effective draws have :math:`\hat R^2 \approx 1 + 1/n`, so that the limit asks for about ten of
each half chain. Seen from the mean of its own chain a half is half as far away, squared, which is undone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.posterior.diagnostics import R_HAT
from pyro_symmetric.posterior.statistics import chain_statistics

LIMIT = R_HAT[1]
MAY_DIFFER = 32  # of so many chains one may sit in a lower mode, which no warm-up helps, and hold up no others
LARGEST = 999.0  # what is said of chains that don't move at all
CHAINS, COORDINATES, DRAWS = 64, 512, 512  # that are kept at most; an even number of draws


class Agreement:
    """The places that chains have been at in warm-up, thinned; part of what a run resumes from.

    Every ``stride``-th iteration is kept. Whenever there are :data:`DRAWS`, every second one is dropped and the stride
    doubles. So what is kept depends on the iterations alone, not on where the run was broken.
    """

    def __init__(self, stride: int = 1, kept: Tensor | None = None):
        self.stride, self.kept = stride, [] if kept is None else list(kept)

    def to_dict(self, iterations: int) -> dict[str, Any]:
        """The record of the first iterations, as :class:`Agreement` takes it up again."""
        return {"stride": self.stride, "kept": torch.stack(self.until(iterations)) if self.kept else None}

    def until(self, iterations: int) -> list[Tensor]:
        """The places of the first iterations that are kept."""
        return self.kept[: -(-iterations // self.stride)]

    def record(self, iteration: int, z: Tensor, energy: Tensor, acceptance: Tensor | None = None) -> None:
        """Note places ``(C, D)``, energies and acceptances ``(C,)`` after an iteration, counted from 0; they take the
        place of all that came from there on."""
        if iteration % self.stride:
            return
        del self.kept[iteration // self.stride :]
        if len(self.kept) == DRAWS:
            self.kept, self.stride = self.kept[::2], 2 * self.stride
        told = [energy, torch.ones_like(energy) if acceptance is None else acceptance.to(energy)]
        self.kept.append(torch.cat([z[:, :: -(-z.shape[1] // COORDINATES)], torch.stack(told, 1)], 1)[:CHAINS])

    def r_hat(self, iterations: int) -> float:
        """The largest one over the second half of the first iterations, at most :data:`LARGEST`."""
        kept = self.until(iterations)
        draws = torch.stack(kept[len(kept) // 2 :], 1).cpu()
        if not bool(draws.isfinite().all()):
            return LARGEST
        deviation, mean = torch.std_mean(draws[..., :-2].double(), 1, keepdim=True)
        places = (draws[..., :-2] - mean) / deviation.clamp(min=1e-300)
        halves = (1 + 2 * (chain_statistics(places).r_hat.square() - 1).clamp(min=0)).sqrt()
        levels = draws[..., -2].mean(1)
        nearest = (levels - levels.median()).abs().argsort()[: len(levels) - len(levels) // MAY_DIFFER]
        found = torch.cat([halves, chain_statistics(draws[nearest][..., -2:]).r_hat])
        found = found[~found.isnan()]  # coordinates that have one value everywhere
        return min(float(found.max()), LARGEST) if len(found) else LARGEST
