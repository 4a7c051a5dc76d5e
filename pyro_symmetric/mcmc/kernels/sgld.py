r"""Stochastic-gradient Langevin dynamics of many chains, plain (Welling & Teh 2011, ICML) and preconditioned.

.. math:: z \leftarrow z - \tfrac12 \varepsilon \nabla\tilde U(z) + \mathcal N(0, \varepsilon)

with a mini-batch's gradient :math:`\nabla\tilde U` of variance ``V``. Along a quadratic direction of curvature ``λ``
the recursion is an AR(1) process, so its stationary variance is known,

.. math:: \frac{1}{\lambda} \cdot \frac{1 + \varepsilon V / 4}{1 - \varepsilon \lambda / 4} ,

too large by about :math:`\varepsilon (\lambda + V) / 4` of it: the bias that a constant step leaves, stable for
:math:`\varepsilon < 4 / \lambda`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import tuned
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.stochastic import CurvatureEstimate, StochasticGradientKernel, StochasticTuning

SMOOTHING, DAMPING = 0.99, 1e-5  # alpha and delta of pSGLD


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGLD(StochasticGradientKernel):
    """Stochastic-gradient Langevin dynamics, with a constant step.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.SGLD(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: Welling & Teh's ``ε``. ``None``: ``4 tolerance / (λ + mean V)``, where ``λ`` is the largest
        curvature of the potential energy (eigenvalue of its Hessian) and ``V`` the variance of the mini-batches'
        gradients, coordinate by coordinate; warm-up measures both.
    :param batch_size: rows of a mini-batch of a ``BayesianModel``; each chain draws its own, independently. ``None``:
        all. Another model's mini-batches are what its plates with ``subsample_size`` draw.
    :param tolerance: with ``step_size=None``, the relative excess of the variance that the step may cause: by
        discretisation where curvature is largest, and by mini-batch noise on average over coordinates.
    :param num_steps: gradient steps for each iteration; the sampler's ``thinning`` multiplies it.
    """

    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        return 4 * self.tolerance / (estimate.stiffest + estimate.noise.mean())

    def mover(self, tuning: StochasticTuning) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        step = tuning.step_size * tuning.preconditioner
        spread = step.sqrt()

        def move(z: Tensor, momentum: Tensor, gradient: Tensor, noise: Tensor) -> None:
            z.addcmul_(gradient, step, value=-0.5).addcmul_(noise, spread)

        return move


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class pSGLD(SGLD):
    r"""Stochastic-gradient Langevin dynamics with RMSProp's preconditioner.

    Li, Chen, Carlson & Carin 2016 (arXiv 1512.07666),

    .. math::
        V &\leftarrow \alpha V + (1 - \alpha)\, \nabla\tilde U(z)^2, \qquad G = 1 / (\delta + \sqrt V) \\
        z &\leftarrow z - \tfrac12 \varepsilon\, G \nabla\tilde U(z) + \mathcal N(0, \varepsilon G)

    for each chain by itself, but ``G`` is learnt in warm-up and then kept. One that depends on where the chain is needs
    a further drift, which asks for second derivatives; the paper's experiments leave it out, and draw from another law.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.pSGLD(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    Other settings are those of :class:`SGLD`, whose ``step_size`` is here that of the preconditioned coordinates.
    """

    learns_variances = False

    def first_preconditioner(self, gradient: Tensor) -> Tensor:
        # All coordinates start alike: one gradient's own small entries would make preconditioners that explode.
        return self._of(gradient.square().mean().expand_as(gradient))

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        before = state.tuning.preconditioner
        moment = state.gradient.square().lerp((1 / before - DAMPING).square(), SMOOTHING)
        usable = torch.isfinite(moment).all(-1, keepdim=True)
        state = tuned(state, preconditioner=torch.where(usable, self._of(moment), before))
        return super().adapt(density, state, iteration, num_warmup)

    def _of(self, moment: Tensor) -> Tensor:
        return 1 / (moment.sqrt() + DAMPING)
