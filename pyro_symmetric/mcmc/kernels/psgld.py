r"""Preconditioned stochastic-gradient Langevin dynamics (Li, Chen, Carlson & Carin 2016, arXiv 1512.07666).

.. math::
    V &\leftarrow \alpha V + (1 - \alpha)\, (\nabla\tilde U(z) / N)^2, \qquad G = 1 / (\delta + \sqrt V) \\
    z &\leftarrow z - \tfrac12 \varepsilon\, G \nabla\tilde U(z) + \mathcal N(0, \varepsilon G)

RMSProp's preconditioner, one of each chain's own. (The paper averages gradients of the log-likelihood alone; here the
prior's, an N-th as large as a term of it, are included.)

A preconditioner that depends on where the chain is needs a further drift :math:`\tfrac12 \varepsilon\, \Gamma(z)`,
:math:`\Gamma_i = \partial G_i / \partial z_i`, which asks for second derivatives; the paper's algorithm has it, its
experiments leave it out. Without it a preconditioner that followed the gradient at once would draw from :math:`p(z) /
G(z)` instead of :math:`p(z)`; the slow average makes that milder, the more so the more a chain moves in :math:`1 / (1 -
\alpha)` steps. So by default the preconditioner is learnt in warm-up and then kept: :math:`\Gamma` is zero, and the
bias that is left is that of plain :class:`~pyro_symmetric.mcmc.kernels.sgld.SGLD` in the coordinates
:math:`G^{-1/2} z`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.randomness import normals
from pyro_symmetric.mcmc.kernels.sgld import SGLD
from pyro_symmetric.mcmc.kernels.stochastic import Gradients, StochasticTuning


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class pSGLD(SGLD):
    """Stochastic-gradient Langevin dynamics with RMSProp's preconditioner.

    ``step_size``, if not given, is that of :class:`SGLD` in the preconditioned coordinates.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.pSGLD(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    :param smoothing: ``α``, the weight of the past in the average of squared gradients.
    :param damping: ``δ``; the largest preconditioner is its inverse.
    :param running: renew the preconditioner after warm-up too, as the paper does, at the price of the bias that the
        module's description gives. Otherwise all of it comes from warm-up, of at least some ``1 / (1 - smoothing)``
        gradient steps; without one this is plain SGLD.
    """

    smoothing: float = 0.99
    damping: float = 1e-5
    running: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("damping", self.damping)
        arguments.number("smoothing", self.smoothing, least=0, below=1)

    def first_moment(self, density: Density, gradient: Tensor) -> Tensor:
        # All coordinates start alike: one gradient's own small entries would make preconditioners that explode.
        typical = (gradient / max(density.num_rows, 1)).square().mean()
        return typical.expand_as(gradient).clone()

    def preconditioner(self, tuning: StochasticTuning) -> Tensor:
        assert tuning.second_moment is not None
        return self._of(tuning.second_moment)

    def move(self, z: Tensor, momentum: Tensor, gradient: Gradients, tuning: StochasticTuning) -> StochasticTuning:
        if not (self.running or tuning.warming_up):
            return super().move(z, momentum, gradient, tuning)
        assert tuning.second_moment is not None
        moment, weight = tuning.second_moment, (1 - self.smoothing) / max(gradient.density.num_rows, 1) ** 2
        for noise in normals(z, self.num_steps, gradient.state.generator):
            step = tuning.step_size * self._of(moment)
            z.addcmul_(gradient(z), step, value=-0.5).addcmul_(noise, step.sqrt())
            # From this step's gradient for the next one, which is thus independent of its noise.
            moment = (self.smoothing * moment).addcmul_(gradient.last, gradient.last, value=weight)
        usable = torch.isfinite(moment).all(-1, keepdim=True)
        return replace(tuning, second_moment=torch.where(usable, moment, tuning.second_moment))

    def _of(self, second_moment: Tensor) -> Tensor:
        return second_moment.sqrt().add_(self.damping).reciprocal_()
