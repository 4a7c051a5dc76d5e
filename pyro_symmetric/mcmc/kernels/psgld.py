r"""Preconditioned stochastic-gradient Langevin dynamics (Li, Chen, Carlson & Carin 2016, arXiv 1512.07666).

.. math::
    V &\leftarrow \alpha V + (1 - \alpha)\, \nabla\tilde U(z)^2, \qquad G = 1 / (\delta + \sqrt V) \\
    z &\leftarrow z - \tfrac12 \varepsilon\, G \nabla\tilde U(z) + \mathcal N(0, \varepsilon G)

RMSProp's preconditioner, one of each chain's own. (The paper's gradients are those of a row of the likelihood, so that
its steps and its damping are an N-th of these.)

A preconditioner that depends on where the chain is needs a further drift, which asks for second derivatives; the
paper's experiments leave it out, and then draw from another law. Here the preconditioner is learnt in warm-up, once an
iteration, and then kept: the bias that is left is that of plain :class:`~pyro_symmetric.mcmc.kernels.sgld.SGLD` in the
coordinates :math:`G^{-1/2} z`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.sgld import SGLD


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class pSGLD(SGLD):
    """Stochastic-gradient Langevin dynamics with RMSProp's preconditioner.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.pSGLD(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    Other settings are those of :class:`SGLD`, whose ``step_size`` is here that of the preconditioned coordinates.

    :param smoothing: ``α``, the weight of the past in the average of squared gradients.
    :param damping: ``δ``; the largest preconditioner is its inverse.
    """

    smoothing: float = 0.99
    damping: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("damping", self.damping)
        arguments.number("smoothing", self.smoothing, least=0, below=1)

    @property
    def learns_variances(self) -> bool:
        return False

    def first_preconditioner(self, density: Density, gradient: Tensor) -> Tensor:
        # All coordinates start alike: one gradient's own small entries would make preconditioners that explode.
        return self._of(gradient.square().mean().expand_as(gradient))

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        before = state.tuning.preconditioner
        moment = state.gradient.square().lerp((1 / before - self.damping).square(), self.smoothing)
        usable = torch.isfinite(moment).all(-1, keepdim=True)
        tuning = replace(state.tuning, preconditioner=torch.where(usable, self._of(moment), before))
        return super().adapt(density, replace(state, tuning=tuning), iteration, num_warmup)

    def _of(self, moment: Tensor) -> Tensor:
        return 1 / (moment.sqrt() + self.damping)
