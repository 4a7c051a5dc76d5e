r"""Stochastic-gradient Langevin dynamics of many chains (Welling & Teh 2011, ICML).

.. math:: z \leftarrow z - \tfrac12 \varepsilon \nabla\tilde U(z) + \mathcal N(0, \varepsilon)

with a mini-batch's gradient :math:`\nabla\tilde U` of variance ``V``. Along a quadratic direction of curvature ``λ``
the recursion is an AR(1) process, so its stationary variance is known,

.. math:: \frac{1}{\lambda} \cdot \frac{1 + \varepsilon V / 4}{1 - \varepsilon \lambda / 4} ,

too large by about :math:`\varepsilon (\lambda + V) / 4` of it: the bias that a constant step leaves, stable for
:math:`\varepsilon < 4 / \lambda`. (Batches without replacement leave less of the second part.) A step that decays
lets it vanish, at the price of chains that move less and less.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyro_symmetric.mcmc.kernels.curvature import CurvatureEstimate
from pyro_symmetric.mcmc.kernels.randomness import normals
from pyro_symmetric.mcmc.kernels.stochastic import Gradients, StochasticGradientKernel, StochasticTuning


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGLD(StochasticGradientKernel):
    """Stochastic-gradient Langevin dynamics, with constant or polynomially decaying steps.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.SGLD(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    ``step_size``, Welling & Teh's ``ε``, is ``4 tolerance / (λ + mean V)`` if not given. ``λ`` is the largest curvature
    of the potential energy (eigenvalue of its Hessian), ``V`` the variance of the mini-batches' gradients, coordinate
    by coordinate; warm-up measures both.
    """

    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        return 4 * self.tolerance / (estimate.stiffest + estimate.noise.mean())

    def move(self, z: Tensor, momentum: Tensor, gradient: Gradients, tuning: StochasticTuning) -> StochasticTuning:
        step = tuning.step_size * self.preconditioner(tuning)
        spread = step.sqrt()
        for noise in normals(z, self.num_steps, gradient.state.generator):
            z.addcmul_(gradient(z), step, value=-0.5).addcmul_(noise, spread)
        return tuning
