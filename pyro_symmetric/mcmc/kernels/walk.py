"""Chains on their way through one iteration of a stochastic-gradient sampler."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.anchors import Anchor, estimated, estimated_gradient
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.randomness import Batches
from pyro_symmetric.mcmc.kernels.spread import Spread

WATCHED = 10  # steps: at every so many of a window the chains' spread is looked at
DRAWN = 2**18  # normal numbers that are drawn at once, at most, if one step's are fewer


class Walk:
    """Chains on their way through one iteration. They move in place, on copies that nothing else holds.

    :param steps: of the iteration. The energy is evaluated at the last one only.
    """

    def __init__(self, density: Density, state: State, steps: int):
        self.steps = steps
        self.density, self.generator = density, state.generator
        self.z, self.r = state.z.clone(), state.momentum.clone()
        self.batches: Batches = state.tuning.batches
        self.anchor: Anchor | None = state.tuning.anchor
        self.centre: Tensor | None = state.tuning.centre
        self.energy = state.energy
        self.last_gradient = state.gradient
        self.spread: Spread | None = None  # to learn from this walk
        self.count = 0  # of the steps so far
        self.spent = 0  # gradients, besides
        self._virial = torch.zeros_like(self.z)  # of each coordinate, as one sum in the end costs less than many
        self._away = torch.empty_like(self.z)
        self._counted = 0

    def gradient(self) -> Tensor:
        """The gradient ``(C, D)`` on each chain's next mini-batch; the virial takes it in."""
        away, gradient = self._evaluated()
        self._virial.addcmul_(away, gradient)
        return gradient

    def _evaluated(self) -> tuple[Tensor, Tensor]:
        """Places of the chains, seen from the centre, and the gradient ``(C, D)`` on each one's next mini-batch."""
        rows, self.batches = self.batches.next(self.generator)
        if self.count + 1 < self.steps:
            self.last_gradient = estimated_gradient(self.density, self.z, rows, self.anchor)
        else:
            self.energy, self.last_gradient = estimated(self.density, self.z, rows, self.anchor)
        away = self.z if self.centre is None else torch.sub(self.z, self.centre, out=self._away)
        if self.spread is not None and self._counted % WATCHED == 0:
            self.spread = self.spread.update(self.z, self.last_gradient)
        self.count += 1
        self._counted += 1
        return away, self.last_gradient

    def noise(self, steps: int, spread: Tensor) -> Iterator[Tensor]:
        """Normal numbers ``(C, D)`` of this spread for each of so many steps, drawn many at a time if they are few.

        Those of a step are overwritten once the next ones are drawn.
        """
        most = min(steps, max(1, DRAWN // max(1, self.z.numel())))
        drawn = self.z.new_empty(most, *self.z.shape)
        for begin in range(0, steps, most):
            yield from drawn[: steps - begin].normal_(generator=self.generator).mul_(spread)

    def langevin(self, step: Tensor, noise: Tensor | None) -> None:
        r"""One step of size :math:`\varepsilon`: half of it times the gradient, and noise of variance ``ε``.

        :param step: times the preconditioner, ``()``, ``(D,)`` or ``(C, D)``.
        """
        self.z.addcmul_(self.gradient(), step, value=-0.5)
        if noise is not None:
            self.z.add_(noise)

    def hamiltonian(self, step: Tensor, keep: Tensor, noise: Tensor | None) -> None:
        """Kick, half a drift, friction that keeps a share of the momentum and noise, half a drift.

        :param step: times the root of the preconditioner, ``()``, ``(D,)`` or ``(C, D)``.
        """
        self.r.addcmul_(self.gradient(), step, value=-1)
        self.z.addcmul_(self.r, step, value=0.5)
        if noise is None:
            self.r.mul_(keep)
        else:
            torch.addcmul(noise, self.r, keep, out=self.r)
        self.z.addcmul_(self.r, step, value=0.5)

    def hamiltonians(self, steps: int, step: Tensor, keep: Tensor, spread: Tensor) -> None:
        """Several such steps of one size, with noise of this spread. On a GPU, if they are small, two tensors move in
        one launch where neither needs the other."""
        if not self.z.is_cuda or steps * self.z.numel() > DRAWN:
            for noise in self.noise(steps, spread):
                self.hamiltonian(step, keep, noise)
        else:
            self._in_pairs(steps, step, keep, spread)

    def _in_pairs(self, steps: int, step: Tensor, keep: Tensor, spread: Tensor) -> None:
        share, half = (value.expand_as(self.z).contiguous() for value in (keep, 0.5 * step))
        kick, r = -2 * half, self.r
        for noise in self.noise(steps, spread):
            away, gradient = self._evaluated()
            torch._foreach_addcmul_([self._virial, r], [away, kick], [gradient, gradient])
            torch._foreach_addcmul_([self.z, noise], [r, r], [half, share])
            r = noise  # and the share of the momentum that friction kept
            self.z.addcmul_(r, half)
        self.r.copy_(r)

    def begin_averages(self) -> None:
        """Forget the virial of the steps so far: they were no sampling."""
        self._virial.zero_()
        self._counted = 0

    def virial(self) -> Tensor:
        """``(C,)``, the average over the steps."""
        return self._virial.sum(-1) / (self._counted * self.z.shape[-1])
