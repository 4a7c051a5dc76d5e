r"""SWAG: a Gaussian from the path of a stochastic-gradient optimiser (Maddox et al. 2019, arXiv 1902.02476, section 3).

Of iterates :math:`w_1 \dots w_S` of SGD at a constant step size,

.. math:: \mathcal N\Big(\bar w,\ \tfrac12 \operatorname{diag}\big(\overline{w^2} - \bar w^2\big)
    + \frac{1}{2 (K - 1)} \hat D \hat D^\top\Big)

The columns of :math:`\hat D` are the last :math:`K` iterates' deviations. The paper takes them from the mean as
it stood at each iterate; here they are taken from the final mean, so that with :math:`K = S` the low-rank part is half
of the iterates' sample covariance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.guides.gaussian import AutoGaussian
from pyro_symmetric.guides.layout import GuideLayout, LatentSite
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import batch_shape, require_finite, require_sites

# Iterates that agree to the last bit would make a deviation of zero, which no density has.
LEAST_DEVIATION = 1e-8


class SWAG:
    """The SWAG posterior of a Bayesian network, collected from the iterates of a training loop.

    >>> net, x, y = nn.Linear(2, 1), torch.randn(50, 2), torch.randn(50, 1)
    >>> collector = ps.SWAG(ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(scale=0.1)), rank=5)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> for step in range(30):
    ...     optimizer.zero_grad()
    ...     loss = (net(x) - y).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     if step >= 10:  # it has settled
    ...         collector = collector.collect(net)
    >>> collector
    SWAG(20 iterates of 3 weights, rank 5)
    >>> guide = collector.guide()
    >>> guide.sample_posterior((100,))["weight"].shape
    torch.Size([100, 1, 2])

    It keeps the moments of all iterates, in float64, and the last ``rank`` of them.

    :param model: the Bayesian network, whose sites the iterates hold.
    :param rank: ``K``, how many of the last iterates span the low-rank part; at most as many as there are.
    """

    def __init__(self, model: BayesianModel, rank: int = 20):
        self._shapes = arguments.instance("model", model, BayesianModel, "a BayesianModel").site_shapes
        self.rank = arguments.whole("rank", rank, 2)
        self.layout = GuideLayout(
            tuple(
                LatentSite(name, tuple(self._shapes[name]), prior.support, len(prior.event_shape))  # type: ignore[arg-type]
                for name, prior in model.priors().items()
            )
        )
        self.count = 0
        self._mean = self._squares = torch.zeros((), dtype=torch.float64, device="cpu")
        self._last: Tensor | None = None

    @torch.no_grad()
    def collect(self, iterates: nn.Module | Mapping[str, Tensor]) -> SWAG:
        """Take in iterates of stochastic gradient descent, in their order, after it has settled; returns itself.

        Sites with constraints are averaged unconstrained. The mean and the sum of squared deviations of two parts give
        those of both (Chan, Golub & LeVeque 1979).

        :param iterates: the network that is being trained; or weights, of one iterate or of batch shape ``(S,)``.
        :raises ValueError: if they don't fit the model, or aren't finite.
        """
        held = dict(iterates.named_parameters()) if isinstance(iterates, nn.Module) else iterates
        require_sites(held, self._shapes, "iterates")
        batch = batch_shape(held, self._shapes, "iterates")
        if len(batch) > 1:
            raise ValueError(f"iterates have batch shape {tuple(batch)}; it must be one iterate, or (S,) of them")
        require_finite(held, "iterates")
        path = self.layout.unconstrain({name: held[name] for name in self.layout.site_shapes}).reshape(
            -1, self.layout.dim
        )
        if not len(path):
            return self
        new, total, double = len(path), self.count + len(path), path.double()
        mean = double.mean(0)
        apart = mean - self._mean.to(mean)
        self._squares = self._squares.to(mean) + (double - mean).square().sum(0) + apart**2 * (self.count * new / total)
        self._mean, self.count = self._mean.to(mean) + apart * (new / total), total
        self._last = (path if self._last is None else torch.cat([self._last, path]))[-self.rank :].clone()
        return self

    @torch.no_grad()
    def guide(self) -> AutoGaussian:
        """The Gaussian of what has been collected.

        :raises ValueError: if there are fewer than two iterates.
        """
        if self._last is None or self.count < 2:
            raise ValueError(f"iterates collected so far: {self.count}; SWAG needs at least 2, by collect(net)")
        deviations = self._last - self._mean.to(self._last)
        scale = (0.5 * self._squares / self.count).sqrt().clamp(min=LEAST_DEVIATION).to(deviations)
        factor = deviations.T / math.sqrt(2 * (len(deviations) - 1))
        return AutoGaussian(self.layout, self._mean.to(deviations), scale, factor)

    def __repr__(self) -> str:
        return f"SWAG({self.count} iterates of {self.layout.dim} weights, rank {self.rank})"
