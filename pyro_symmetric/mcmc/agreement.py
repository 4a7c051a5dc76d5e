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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.posterior.diagnostics import R_HAT
from pyro_symmetric.posterior.statistics import chain_statistics

LIMIT = R_HAT[1]
MAY_DIFFER = 32  # of so many chains one may sit in a lower mode, which no warm-up helps, and hold up no others
LARGEST = 999.0  # what is said of chains that don't move at all
DRAWS = 512  # that are kept of each chain, at most
NUMBERS = 2**22  # that are kept in all, about: beyond it fewer draws, then fewer chains, then fewer coordinates
FEWEST_DRAWS, FEWEST_CHAINS, MOST_CHAINS, MOST_COORDINATES = 64, 16, 128, 4096


class Thinned:
    """Every ``stride``-th of a run's iterations, one vector each.

    Whenever there are ``most``, every second one is dropped and the stride doubles. So what is kept depends on the
    iterations alone, not on where the run was broken or how many were first asked for.

    :param most: an even number.
    """

    def __init__(self, most: int):
        self._most, self.stride, self.kept = most, 1, list[Tensor]()

    def note(self, iteration: int, vector: Callable[[], Tensor]) -> None:
        """Keep an iteration's vector, if it is its turn; it takes the place of all that came from there on."""
        if iteration % self.stride:
            return
        del self.kept[iteration // self.stride :]
        if len(self.kept) == self._most:
            self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.kept.append(vector())

    def until(self, iterations: int) -> list[Tensor]:
        """The vectors of the first iterations."""
        return self.kept[: -(-iterations // self.stride)]

    def to_dict(self, iterations: int) -> dict[str, Any]:
        """The part of the first iterations that a checkpoint keeps."""
        return {"stride": self.stride, "kept": torch.stack(self.until(iterations)) if self.kept else None}

    def restore(self, found: dict[str, Any]) -> None:
        """Take up what :meth:`to_dict` gave."""
        self.stride = found["stride"]
        self.kept = [] if found["kept"] is None else list(found["kept"].unbind())


class Agreement(Thinned):
    """The places that chains have been at in warm-up, thinned; part of what a run resumes from.

    :param z: where they start, ``(C, D)``.
    """

    def __init__(self, z: Tensor):
        self._every = -(-z.shape[1] // MOST_COORDINATES)
        width = -(-z.shape[1] // self._every) + 2
        fitting = max(FEWEST_CHAINS, NUMBERS // (FEWEST_DRAWS * width))
        self._chains = min(len(z), MOST_CHAINS, fitting)
        draws = NUMBERS // (self._chains * width) // 2 * 2
        super().__init__(min(DRAWS, max(FEWEST_DRAWS, draws)))
        self._shape = torch.Size((self._chains, width))

    def restore(self, found: dict[str, Any]) -> None:
        super().restore(found)
        if any(value.shape != self._shape for value in self.kept):
            raise ValueError(f"what chains have passed isn't of shape {tuple(self._shape)}")

    def record(self, iteration: int, z: Tensor, energy: Tensor, acceptance: Tensor | None = None) -> None:
        """Note places ``(C, D)``, energies and acceptances ``(C,)`` after an iteration, counted from 0."""
        chains = slice(self._chains)
        told = [energy, torch.ones_like(energy) if acceptance is None else acceptance.to(energy)]
        self.note(iteration, lambda: torch.cat([z[chains, :: self._every], torch.stack(told, 1)[chains]], 1))

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
