"""The symmetrised log-density by a few uniform group elements: the estimator of Gelberg et al."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions.orbit import Action, Bound, log_mean_exp, log_prob_on_orbit


@dataclass(frozen=True)
class InfoNCE:
    r"""``K`` terms of the orbit sum: the identity and ``K - 1`` uniform elements, drawn anew at each call.

    .. math:: \log \frac{1}{K} \Big[ q(w) + \sum_{k=2}^{K} q(g_k \cdot w) \Big]

    For :math:`w \sim q` its mean is an upper bound of the mean of :math:`\log \bar q(w)` that falls with ``K`` and
    can't get below ``log q(w) - log K``: of the ``log |G|`` nats at stake it sees at most ``log K``;
    :class:`~pyro_symmetric.distributions.SinkhornImportance` has no such cap. At ``w`` that are
    not drawn from ``q`` (a uniformly permuted draw, say) it is no bound. Cost: ``K`` evaluations of ``q``.

    Reference: Gelberg et al. 2024, "Variational Inference Failures Under Model Symmetries" (arXiv 2408.05496),
    Theorem 4.3.

    :param K: number of terms, at least 1 (which gives ``log q`` itself).
    """

    K: int = 16
    bound: ClassVar[Bound] = "upper"

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        own = base.log_prob(value)
        if self.K == 1 or action.group.order() == 1:
            return own
        proposals = action.group.sample((self.K - 1, *own.shape), device=value.device)
        moved = log_prob_on_orbit(base, action, value, proposals)
        return log_mean_exp(torch.cat([own[None], moved]))
