r"""Stochastic-gradient Hamiltonian Monte Carlo of many chains (Chen, Fox & Guestrin 2014, arXiv 1402.4102).

With step size :math:`\varepsilon`, friction :math:`C`, unit mass and a mini-batch's gradient :math:`\nabla\tilde U`,

.. math::
    r &\leftarrow r - \varepsilon \nabla\tilde U(z), \qquad z \leftarrow z + \tfrac12 \varepsilon r \\
    r &\leftarrow e^{-\varepsilon C} r + \mathcal N\left(0,\ 1 - e^{-2 \varepsilon C} - 2 \varepsilon \hat B\right),
        \qquad z \leftarrow z + \tfrac12 \varepsilon r

where :math:`\hat B` estimates :math:`B = \tfrac12 \varepsilon V`, half the step size times the variance of the
mini-batch's gradient. The paper discretises the same dynamics by Euler's method (its Algorithm 2), which biases even
the variance under a quadratic potential of curvature :math:`\lambda`, by :math:`\tfrac14 \varepsilon^2 \lambda` of it.
This splitting (BAOAB: Leimkuhler & Matthews 2013, arXiv 1203.5428) costs the same and with full gradients has no bias
there.

There is no accept step: mini-batches make the variance about :math:`1 + B / C` times what it should be, less in passes
through the data without replacement, and other potentials add a bias of order :math:`\varepsilon^2`. All of it vanishes
with the step size. More exactly, where a step keeps the share :math:`k = e^{-\varepsilon C}` of the momentum, a kick
displaces a chain in the end by :math:`\tfrac12 (1 + k)` times what the same momentum does that friction injects, so
that along directions in which chains move slowly the excess is

.. math::
    \frac{\varepsilon^2 V}{1 - k^2} \left(\frac{1 + k}{2}\right)^2
    = \frac{\varepsilon^2 V}{4} \cdot \frac{1 + k}{1 - k} ,

from :math:`B / C` at little friction to Langevin dynamics' :math:`\varepsilon^2 V / 4` where nothing is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.curvature import CurvatureEstimate
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.randomness import normals
from pyro_symmetric.mcmc.kernels.stochastic import Gradients, StochasticGradientKernel, StochasticTuning

MOST_KEPT = 0.95  # of the momentum in one step, if friction isn't given


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGHMC(StochasticGradientKernel):
    """Stochastic-gradient Hamiltonian Monte Carlo.

    ``step_size`` is stable below ``2 / sqrt(λ)`` for the largest curvature ``λ`` of the potential energy (eigenvalue of
    its Hessian), which grows with the number of rows. If not given, it is ``sqrt(4 tolerance / max(λ, 4 mean V))``,
    where ``V`` is the variance of the mini-batches' gradients, coordinate by coordinate; warm-up measures both. The
    statistic ``kinetic_temperature``, the mean of the squared momenta, averages to 1 where the step is small enough and
    friction outweighs the batches' noise.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.SGHMC(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=100, num_chains=4, seed=0, progress=False)
    >>> posterior.statistics["kinetic_temperature"].shape
    torch.Size([4, 20])

    :param friction: ``C``, the rate at which momentum is forgotten. ``None``: what keeps the mini-batches' excess
        to ``tolerance``, coordinate by coordinate, and at least ``0.05 / step_size``, so that a step forgets a
        twentieth, as in the paper's experiments.
    :param noise_estimate: ``B̂``, one number or a tensor ``(D,)``, which the injected noise is reduced by; 0 keeps what
        the mini-batches add. ``"auto"`` takes it from the variance of the chains' gradients, measured in warm-up. That
        needs ``replacement=True``: the noise of batches without replacement cancels over a pass through the data, and
        taking away all of it would leave too little. If there is more to take away than friction makes up for,
        nothing is injected.
    :param resample_momentum: draw momenta anew at the start of each iteration.
    """

    friction: float | None = None
    noise_estimate: float | Tensor | str = 0.0
    resample_momentum: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("friction", self.friction, none="one that is found")
        if isinstance(self.noise_estimate, str):
            if self.noise_estimate != "auto":
                raise ValueError(f"noise_estimate is {self.noise_estimate!r}; it must be a number, a tensor or 'auto'")
            if not self.replacement:
                raise ValueError(
                    "noise_estimate='auto' needs replacement=True: the noise of batches without replacement cancels "
                    "over a pass through the data"
                )
        elif not isinstance(self.noise_estimate, Tensor):
            arguments.number("noise_estimate", self.noise_estimate, least=0, below=math.inf)
        elif not bool(((self.noise_estimate >= 0) & self.noise_estimate.isfinite()).all()):
            raise ValueError("noise_estimate holds negative, infinite or NaN values; it must be at least 0 and finite")

    @property
    def has_momentum(self) -> bool:
        return True

    @property
    def measures(self) -> bool:
        return self.step_size is None or self.friction is None or self.noise_estimate == "auto"

    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        return (4 * self.tolerance / torch.maximum(estimate.stiffest, 4 * estimate.noise.mean())).sqrt()

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        state = super().init(density, z, num_warmup, generator)
        if self.friction is not None and self.noise_estimate != "auto":
            _, injected = self._momentum_shares(state.tuning, state.tuning.base_step_size)
            if not bool((injected >= 0).all()):
                raise ValueError(
                    f"noise_estimate is {self.noise_estimate}, more than a friction of {self.friction:.3g} can make up "
                    "for; raise friction above it, or reduce the noise by a smaller step_size or a larger batch_size"
                )
        return state

    def move(self, z: Tensor, momentum: Tensor, gradient: Gradients, tuning: StochasticTuning) -> StochasticTuning:
        keep, injected = self._momentum_shares(tuning, tuning.step_size)
        step, spread = tuning.step_size * self.preconditioner(tuning).sqrt(), injected.clamp(min=0).sqrt()
        r, generator = momentum, gradient.state.generator
        if self.resample_momentum:
            r.normal_(generator=generator)
        for noise in normals(z, self.num_steps, generator):
            r.addcmul_(gradient(z), step, value=-1)
            z.addcmul_(r, step, value=0.5)
            r.mul_(keep).addcmul_(noise, spread)
            z.addcmul_(r, step, value=0.5)
        return tuning

    def _momentum_shares(self, tuning: StochasticTuning, step: Tensor) -> tuple[Tensor, Tensor]:
        """The share of the momentum that a step keeps, and the variance that it injects: each ``()`` or ``(D,)``."""
        noise = step.new_zeros(()) if tuning.curvature is None else tuning.curvature.noise
        if self.friction is not None:
            keep = (-step * self.friction).exp()
        else:
            kicks = step.square() * noise
            keep = ((4 * self.tolerance - kicks) / (4 * self.tolerance + kicks)).clamp(min=0.0, max=MOST_KEPT)
        if isinstance(self.noise_estimate, str):
            return keep, 1 - keep.square() - step.square() * noise * (0.5 * (1 + keep)).square()
        estimate, preconditioner = self.noise_estimate, self.preconditioner(tuning)
        if not isinstance(estimate, Tensor) and not estimate:
            return keep, 1 - keep.square()
        if isinstance(estimate, Tensor):
            estimate = estimate.to(step)
        return keep, 1 - keep.square() - 2 * step * preconditioner * estimate  # in the units of the step
