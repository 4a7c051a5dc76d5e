r"""Stochastic-gradient Hamiltonian Monte Carlo of many chains (Chen, Fox & Guestrin 2014, arXiv 1402.4102).

With step size :math:`\varepsilon`, friction :math:`C`, unit mass and a mini-batch's gradient :math:`\nabla\tilde U`,

.. math::
    r &\leftarrow r - \varepsilon \nabla\tilde U(z), \qquad z \leftarrow z + \tfrac12 \varepsilon r \\
    r &\leftarrow k r + \mathcal N\left(0,\ 1 - k^2\right), \qquad z \leftarrow z + \tfrac12 \varepsilon r,
        \qquad k = e^{-\varepsilon C} .

The paper discretises the same dynamics by Euler's method (its Algorithm 2), which biases even the variance under a
quadratic potential of curvature :math:`\lambda`, by :math:`\tfrac14 \varepsilon^2 \lambda` of it. This splitting
(BAOAB: Leimkuhler & Matthews 2013, arXiv 1203.5428) costs the same and with full gradients has no bias there.

There is no accept step. Other potentials add a bias of order :math:`\varepsilon^2`, and mini-batches, whose gradients
have the variance :math:`V`, make momenta and positions too wide. A kick displaces a chain in the end by
:math:`\tfrac12 (1 + k)` times what the same momentum does that friction injects, so that along directions in which
chains move slowly the excess of the variance is

.. math::
    \frac{\varepsilon^2 V}{1 - k^2} \left(\frac{1 + k}{2}\right)^2
    = \frac{\varepsilon^2 V}{4} \cdot \frac{1 + k}{1 - k} ,

from :math:`\tfrac12 \varepsilon V / C` at little friction to Langevin dynamics' :math:`\varepsilon^2 V / 4` where
nothing is kept. All of it vanishes with the step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.kernels.stochastic import CurvatureEstimate, StochasticGradientKernel, StochasticTuning

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

    Other settings are those of :class:`~pyro_symmetric.mcmc.SGLD`.

    :param friction: ``C``, the rate at which momentum is forgotten. ``None``: what keeps the mini-batches' excess
        to ``tolerance``, coordinate by coordinate, and at least ``0.05 / step_size``, so that a step forgets a
        twentieth, as in the paper's experiments.
    """

    friction: float | None = None

    has_momentum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("friction", self.friction, none="one that is found")

    @property
    def measures(self) -> bool:
        return self.step_size is None or self.friction is None

    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        return (4 * self.tolerance / torch.maximum(estimate.stiffest, 4 * estimate.noise.mean())).sqrt()

    def kept(self, tuning: StochasticTuning) -> Tensor:
        """The share ``k`` of the momentum that a step keeps, ``()`` or ``(D,)``."""
        if self.friction is not None:
            return (-tuning.step_size * self.friction).exp()
        assert tuning.curvature is not None
        kicks = tuning.step_size.square() * tuning.curvature.noise
        return ((4 * self.tolerance - kicks) / (4 * self.tolerance + kicks)).clamp(min=0.0, max=MOST_KEPT)

    def mover(self, tuning: StochasticTuning) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        keep, step = self.kept(tuning), tuning.step_size * tuning.preconditioner.sqrt()
        spread = (1 - keep.square()).sqrt()

        def move(z: Tensor, r: Tensor, gradient: Tensor, noise: Tensor) -> None:
            r.addcmul_(gradient, step, value=-1)
            z.addcmul_(r, step, value=0.5)
            r.mul_(keep).addcmul_(noise, spread)
            z.addcmul_(r, step, value=0.5)

        return move
