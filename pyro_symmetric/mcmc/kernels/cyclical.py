r"""Cyclical stochastic-gradient MCMC of many chains (Zhang, Li, Zhang, Chen & Wilson 2020, arXiv 1902.03932).

Every cycle of ``K`` gradient steps begins with a large step size that falls to nothing by a cosine,

.. math:: \varepsilon_k = \tfrac12 \varepsilon_0 \left(\cos\frac{\pi k}{K} + 1\right), \qquad k = 0, \dots, K - 1.

Its first part, the exploration stage, follows gradients without noise, so that the chain leaves its mode and finds
another; in the rest, the sampling stage, it draws from the mode that it has found, with shrinking steps and bias.
Modes are visited as optimisation finds them, not in proportion to their mass: the price of visiting more of them than a
chain with a constant step can.

The dynamics are Langevin (:mod:`~pyro_symmetric.mcmc.kernels.sgld`) or Hamiltonian
(:mod:`~pyro_symmetric.mcmc.kernels.sghmc`). A Hamiltonian step of size ``h`` matches a Langevin step of size ``h²``, so
there ``h²`` follows the cosine; momenta are drawn anew where sampling begins, since exploration leaves them cold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.landscape import Landscape
from pyro_symmetric.mcmc.kernels.stochastic import StochasticGradientKernel, StochasticTuning, Walk

DYNAMICS = ("langevin", "hamiltonian")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CyclicalSG(StochasticGradientKernel):
    """Cyclical stochastic-gradient MCMC.

    An iteration ends with a draw worth keeping: the exploration stage belongs to the first iteration of its cycle. So
    ``num_samples=30`` with ``samples_per_cycle=3`` are ten cycles, and ``num_warmup=3`` forgets one cycle before them;
    leave the sampler's ``thinning`` at 1. The first cycle after warm-up starts with the first draw.

    >>> kernel = CyclicalSG(model, batch_size=128, cycle_length=1000, samples_per_cycle=3)
    >>> posterior = sample(kernel, args=(x, y), num_chains=4, num_samples=30, num_warmup=3)

    ``step_size`` is the cycle's largest, ``ε₀`` (Hamiltonian: ``h₀``). If not given, the sampling stage starts with
    what keeps to ``tolerance``, and the cycle with what that asks for, within stability. The statistic ``cycle`` counts
    from 0, warm-up below it.

    :param cycle_length: ``K``, gradient steps of a cycle.
    :param samples_per_cycle: draws of a cycle, spread evenly over its sampling stage.
    :param exploration: the share of a cycle that is exploration, in (0, 1).
    :param dynamics: ``"langevin"`` or ``"hamiltonian"``.
    :param momentum_decay: the share of the momentum that a Hamiltonian step forgets.
    """

    cycle_length: int = 1000
    samples_per_cycle: int = 4
    exploration: float = 0.8
    dynamics: str = "langevin"
    momentum_decay: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("cycle_length", self.cycle_length, 1)
        arguments.whole("samples_per_cycle", self.samples_per_cycle, 1)
        arguments.fraction("exploration", self.exploration)
        arguments.fraction("momentum_decay", self.momentum_decay)
        arguments.one_of("dynamics", self.dynamics, DYNAMICS)
        if not self.samples_per_cycle <= self.cycle_length - self.exploration_length:
            raise ValueError(
                f"samples_per_cycle is {self.samples_per_cycle}; the sampling stage of a cycle has "
                f"{self.cycle_length - self.exploration_length} of its {self.cycle_length} steps, and each draw needs "
                "at least one: raise cycle_length, or lower exploration"
            )

    @property
    def exploration_length(self) -> int:
        """Gradient steps of a cycle's exploration stage."""
        return round(self.exploration * self.cycle_length)

    @property
    def has_momentum(self) -> bool:
        return self.dynamics == "hamiltonian"

    def best_step(self, landscape: Landscape) -> Tensor:
        share = self._share(self.exploration_length)
        if not self.has_momentum:
            sampling = 4 * self.tolerance / (landscape.stiffest + landscape.noise.mean())
            return torch.minimum(sampling / share, 2 / landscape.stiffest)  # half of what is stable
        renewed = 1 - (1 - self.momentum_decay) ** 2
        squared = self.tolerance / torch.maximum(landscape.stiffest / 4, landscape.noise.mean() / renewed)
        return torch.minimum(squared / share, 2 / landscape.stiffest).sqrt()

    def step(self, density: Density, state: State) -> State:
        after, tuning = super().step(density, state), state.tuning
        cycle = (tuning.iteration - tuning.num_warmup) // self.samples_per_cycle
        counted = torch.full_like(state.energy, cycle, dtype=torch.long)
        return replace(after, statistics={**after.statistics, "cycle": counted})

    def walk(self, walk: Walk, tuning: StochasticTuning) -> StochasticTuning:
        draw = (tuning.iteration - tuning.num_warmup) % self.samples_per_cycle
        if draw == 0 or tuning.iteration == 0:
            self._follow(walk, tuning, range(self.exploration_length), noisy=False)
            walk.begin_sampling()
        length = self.cycle_length - self.exploration_length
        begin, end = (self.exploration_length + length * part // self.samples_per_cycle for part in (draw, draw + 1))
        return replace(tuning, step_size=self._follow(walk, tuning, range(begin, end), noisy=True))

    def _follow(self, walk: Walk, tuning: StochasticTuning, steps: range, noisy: bool) -> Tensor:
        """Make these steps of a cycle; returns the last one's size."""
        keep = torch.full_like(tuning.base_step_size, 1 - self.momentum_decay)
        spread = (1 - keep.square()).sqrt() if noisy else None
        step = tuning.step_size
        for k in steps:
            if self.has_momentum:
                step = tuning.base_step_size * math.sqrt(self._share(k))
                walk.hamiltonian(step, keep, spread)
            else:
                step = tuning.base_step_size * self._share(k)
                walk.langevin(step, noisy)
        return step

    def _share(self, k: int) -> float:
        return 0.5 * (math.cos(math.pi * k / self.cycle_length) + 1)
