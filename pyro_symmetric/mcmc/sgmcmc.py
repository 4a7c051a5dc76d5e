r"""Stochastic-gradient Hamiltonian Monte Carlo of many chains (Chen, Fox & Guestrin 2014, arXiv 1402.4102, eq. 13).

With step size :math:`\varepsilon`, friction :math:`C`, unit mass and a mini-batch's gradient :math:`\nabla\tilde U`,

.. math::
    r &\leftarrow r - \varepsilon \nabla\tilde U(z), \qquad z \leftarrow z + \tfrac12 \varepsilon r \\
    r &\leftarrow e^{-\varepsilon C} r + \mathcal N\left(0,\ 1 - e^{-2 \varepsilon C} - 2 \varepsilon \hat B\right),
        \qquad z \leftarrow z + \tfrac12 \varepsilon r

where :math:`\hat B` estimates :math:`B = \tfrac12 \varepsilon V`, half the step size times the variance of the
mini-batch's gradient. The paper discretises the same dynamics by Euler's method (Algorithm 2), which biases even
the variance under a quadratic potential of curvature :math:`\lambda`, by :math:`\tfrac14 \varepsilon^2 \lambda` of it.
This splitting (BAOAB: Leimkuhler & Matthews 2013, arXiv 1203.5428) costs the same and with full gradients has no bias
there.

There is no accept step: mini-batches make the variance about :math:`1 + B / C` times what it should be, less in passes
through the data without replacement, and other potentials add a bias of order :math:`\varepsilon^2`. All of it vanishes
with the step size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.batches import Batches
from pyro_symmetric.mcmc.kernel import Kernel, State, require_positive
from pyro_symmetric.mcmc.potential import Potential


@dataclass(frozen=True, eq=False)
class SGHMCTuning:
    """What changes beside the chains.

    :param step_size: of the next iteration, ``()``.
    :param final_step_size: of the iterations after warm-up, ``()``.
    :param friction: rate at which momentum is forgotten, ``()``.
    :param batches: the stream of mini-batches.
    """

    step_size: Tensor
    final_step_size: Tensor
    friction: Tensor
    batches: Batches


@dataclass(frozen=True, eq=False, repr=False)
class SGHMC(Kernel):
    """Stochastic-gradient Hamiltonian Monte Carlo.

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: ``ε``. Stable below ``2 / sqrt(λ)`` for the largest curvature ``λ`` of the potential, which grows
        with the number of rows; a tenth of that is accurate. ``None``: ``0.4 / sqrt(rows)``, for inputs and weights of
        order 1. The statistic ``kinetic_temperature`` averages to 1 where the step is small enough and friction
        outweighs the mini-batches' noise.
    :param friction: ``C``, the rate at which momentum is forgotten. ``None``: ``0.05 / step_size``, so that a step
        forgets a twentieth, as the paper's experiments do.
    :param noise_estimate: ``B̂``, one number or a tensor ``(D,)``; 0 keeps the noise that the mini-batches add.
    :param batch_size: rows of a mini-batch, cut from the model's tensor arguments and drawn by each chain for itself.
        ``None``: all data, or what the model's plates with ``subsample_size`` draw. The model's likelihood must count a
        mini-batch ``N / B`` times, as a plate with its full ``size`` does; a warning says if it doesn't.
    :param num_steps: gradient steps for each iteration; the sampler's ``thinning`` multiplies it.
    :param resample_momentum: draw momenta anew at the start of each iteration.
    :param warmup_factor: warm-up starts with steps so many times larger and shrinks them to ``step_size``, by a cosine.
    :param replacement: draw each batch independently instead of going through the data in random order.
    """

    model: Callable[..., Any]
    step_size: float | None = None
    friction: float | None = None
    noise_estimate: float | Tensor = 0.0
    batch_size: int | None = None
    num_steps: int = 10
    resample_momentum: bool = False
    warmup_factor: float = 3.0
    replacement: bool = False

    subsampled = True

    def __post_init__(self) -> None:
        for name in ("step_size", "friction", "num_steps", "warmup_factor"):
            require_positive(name, getattr(self, name))
        estimate = torch.as_tensor(self.noise_estimate)
        if not bool((estimate >= 0).all()):
            raise ValueError(f"noise_estimate is {self.noise_estimate}; it must not be negative")

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, potential: Potential, z: Tensor, num_warmup: int) -> State:
        batches = Batches(potential.row_counts, len(z), z.device, self.replacement)
        rows, batches = batches.next()
        energy, gradient = potential.value_and_grad(z, rows)
        step = z.new_tensor(self.step_size or 0.4 / math.sqrt(max(potential.num_rows, 1)))
        friction = z.new_tensor(self.friction) if self.friction is not None else 0.05 / step
        if not bool((self._injected_variance(step, friction) >= 0).all()):
            raise ValueError(
                f"noise_estimate is {self.noise_estimate}, more than a friction of {float(friction):.3g} can make up "
                "for; raise friction above it, or reduce the noise by a smaller step_size or a larger batch_size"
            )
        tuning = SGHMCTuning(self._scheduled(step, 0, num_warmup), step, friction, batches)
        return State(z, torch.randn_like(z), energy, gradient, tuning)

    def step(self, potential: Potential, state: State) -> State:
        step, batches = state.tuning.step_size, state.tuning.batches
        keep = (-step * state.tuning.friction).exp()
        noise = self._injected_variance(step, state.tuning.friction).clamp(min=0).sqrt()
        z, r = state.z, torch.randn_like(state.z) if self.resample_momentum else state.momentum
        for _ in range(self.num_steps):
            rows, batches = batches.next()
            energy, gradient = potential.value_and_grad(z, rows)
            r = r - step * gradient
            z = z + 0.5 * step * r
            r = keep * r + noise * torch.randn_like(r)
            z = z + 0.5 * step * r
        # A chain that left all numbers behind goes back to where the iteration began, and is counted.
        diverging = ~(torch.isfinite(z).all(-1) & torch.isfinite(r).all(-1) & torch.isfinite(energy))
        lost = diverging[:, None]
        energy = torch.where(diverging, state.potential, energy)
        r = torch.where(lost, torch.randn_like(r), r)
        return State(
            torch.where(lost, state.z, z),
            r,
            energy,
            torch.where(lost, state.gradient, gradient),
            replace(state.tuning, batches=batches),
            {
                "lp": -energy,
                "kinetic_temperature": r.square().mean(-1),
                "diverging": diverging,
                "step_size": step.expand(len(z)),
                "n_steps": torch.full_like(energy, self.num_steps, dtype=torch.long),
            },
        )

    def adapt(self, potential: Potential, state: State, iteration: int, num_warmup: int) -> State:
        step = self._scheduled(state.tuning.final_step_size, iteration + 1, num_warmup)
        return replace(state, tuning=replace(state.tuning, step_size=step))

    # small steps ----------------------------------------------------------------------------------------------------

    def _scheduled(self, final: Tensor, iteration: int, num_warmup: int) -> Tensor:
        if iteration >= num_warmup:
            return final
        share = 0.5 * (1 + math.cos(math.pi * iteration / num_warmup))
        return final * (1 + (self.warmup_factor - 1) * share)

    def _injected_variance(self, step: Tensor, friction: Tensor) -> Tensor:
        estimate = torch.as_tensor(self.noise_estimate, dtype=step.dtype, device=step.device)
        return 1 - (-2 * step * friction).exp() - 2 * step * estimate
