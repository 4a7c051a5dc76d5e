"""The symmetrised log-density by a few uniform group elements: the estimator of Gelberg et al."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions.orbit import Bound, OrbitEstimator, log_mean_exp, log_prob_on_orbit
from pyro_symmetric.groups.action import Action


@dataclass(frozen=True)
class InfoNCE(OrbitEstimator):
    r"""The identity and ``K`` uniform elements, drawn anew at each call.

    .. math:: \log \frac{1}{K+1} \Big[ q(w) + \sum_{k=1}^{K} q(g_k \cdot w) \Big]

    For :math:`w \sim q` its mean is an upper bound of the mean of :math:`\log \bar q(w)` that falls with ``K`` and
    can't get below ``log q(w) - log(K + 1)``: of the ``log |G|`` nats at stake it sees at most ``log(K + 1)``;
    :class:`~pyro_symmetric.distributions.SinkhornImportance` has no such cap. At ``w`` that are
    not drawn from ``q`` (a uniformly permuted draw, say) it is no bound. Cost: ``K + 1`` evaluations of ``q``.

    Its gradient is, without bias, that of the bound it reports: elements are drawn uniformly, whatever ``w`` and the
    base's parameters are, so that differentiating the estimate as it stands differentiates its mean.

    Reference: Gelberg et al. 2024, "Variational Inference Failures Under Model Symmetries" (arXiv 2408.05496),
    Theorem 4.3, whose ``K`` counts the identity.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(10)})
    >>> base = dist.Normal(10 * torch.arange(10.0), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.groups.Action(group, ["w"]), ps.InfoNCE(15))
    >>> w = base.sample()
    >>> round(float(base.log_prob(w) - orbit.log_prob(w)), 2)  # log 16, of the log 10! = 15.1 that there are
    2.77

    :param K: number of elements beside the identity; 0 gives ``log q`` itself.
    """

    K: int = 15
    bound: ClassVar[Bound] = "upper"

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 0)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        own, group = base.log_prob(value), action.group.finite
        if self.K == 0 or group.log_order() == 0:
            return own
        proposals = group.sample((self.K, *own.shape), device=value.device)
        return log_mean_exp(torch.cat([own[None], log_prob_on_orbit(base, action, value, proposals)]))

    def log_prob_elsewhere(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        batch, group = torch.broadcast_shapes(base.batch_shape, value.shape[:-1]), action.group.finite
        proposals = group.sample((self.K + 1, *batch), device=value.device)
        return log_mean_exp(log_prob_on_orbit(base, action, value, proposals))
