r"""Estimators of the symmetrised log-density.

For a base density ``q`` and a finite group ``G`` that acts with Jacobian ``J_g``,

.. math:: \bar q(w) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot w)\, |\det J_g(w)|

is too long a sum for most groups. An estimator is asked for :math:`\log \bar q(w)` at draws :math:`w \sim q` and states
in ``bound`` what its expected answer is: ``"exact"``, or ``"upper"``, an upper bound, so that the ELBO made of it is a
lower bound of that of :math:`\bar q`.

Reference: Gelberg et al. 2024, "Variational Inference Failures Under Model Symmetries" (arXiv 2408.05496), Theorem 4.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint

from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup

Bound = Literal["upper", "exact"]

# Moved copies of the weights that are held at once, in numbers; beyond, the orbit is scored chunk by chunk.
CHUNK_NUMBERS = 2**25


class Action(Protocol):
    """How a group acts on flat vectors; :class:`~pyro_symmetric.symmetry.permutation.FlatAction` is one."""

    group: PermutationGroup
    dim: int

    def __call__(self, vector: Tensor, element: Permutation) -> Tensor:
        """The moved vectors, batch shapes broadcast."""

    def log_abs_det(self, vector: Tensor, element: Permutation) -> Tensor:
        """Log-determinant of the action's Jacobian at ``vector``."""


class OrbitEstimator(Protocol):
    """What :class:`~pyro_symmetric.distributions.Symmetrized` needs: a value, and what that value is."""

    bound: ClassVar[Bound]

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        r"""Estimate :math:`\log \bar q` at ``value``.

        :param base: density ``q`` over vectors, event shape ``(D,)``.
        :param action: the group's action on those vectors.
        :param value: draws of ``base``, ``batch_shape + (D,)``.
        :return: ``batch_shape``, differentiable in ``value`` and in the parameters of ``base``.
        """


@dataclass(frozen=True)
class InfoNCE:
    r"""``K`` terms of the orbit sum: the identity and ``K - 1`` uniform elements, drawn anew at each call.

    .. math:: \log \frac{1}{K} \Big[ q(w) + \sum_{k=2}^{K} q(g_k \cdot w) \Big]

    For :math:`w \sim q` its mean is an upper bound of the mean of :math:`\log \bar q(w)` that falls with ``K`` and
    can't get below ``log q(w) - log K``: of the ``log |G|`` nats at stake it sees at most ``log K``. At ``w`` that are
    not drawn from ``q`` (a uniformly permuted draw, say) it is no bound. Cost: ``K`` evaluations of ``q``.

    Reference: Gelberg et al. 2024, Theorem 4.3.

    :param K: number of terms, at least 1 (which gives ``log q`` itself).
    """

    K: int = 16
    bound: ClassVar[Bound] = "upper"

    def __post_init__(self) -> None:
        if isinstance(self.K, bool) or not isinstance(self.K, int) or self.K < 1:
            raise ValueError(f"K is {self.K!r}; InfoNCE needs a whole number of terms, at least 1")

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        own = base.log_prob(value)
        if self.K == 1:
            return own
        proposals = action.group.sample((self.K - 1, *own.shape), device=value.device)
        moved = log_prob_on_orbit(base, action, value, proposals)
        return _log_mean_exp(torch.cat([own[None], moved]))


@dataclass(frozen=True)
class ExactOrbit:
    r"""The whole sum over the orbit, for groups small enough to enumerate: the ruler for every other estimator.

    Cost: ``|G|`` evaluations of ``q``.

    :param limit: the largest group that is accepted.
    """

    limit: int = field(default=100_000, repr=False)
    bound: ClassVar[Bound] = "exact"

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it must be the size of the largest group to enumerate")

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        order = action.group.order()
        if order > self.limit:
            raise ValueError(
                f"ExactOrbit would enumerate exp({action.group.log_order():.1f}) group elements, more than its limit "
                f"of "
                f"{self.limit}; use a bound such as InfoNCE(K), or raise the limit"
            )
        batch_dims = max(value.dim() - 1, len(base.batch_shape))
        everywhere = (slice(None), *([None] * batch_dims))
        own = base.log_prob(value)[None]
        if order == 1:
            return own[0]
        # The identity comes first; its term is the density itself, not what a bijection there and back makes of it.
        others = action.group.enumerate().to(value.device).select(slice(1, None)).select(everywhere)
        return _log_mean_exp(torch.cat([own, log_prob_on_orbit(base, action, value, others)]))


def log_prob_on_orbit(base: Distribution, action: Action, value: Tensor, elements: Permutation) -> Tensor:
    r""":math:`\log q(g \cdot w) + \log|\det J_g(w)|` for a stack of elements.

    :param value: ``batch_shape + (D,)``.
    :param elements: batch shape ``(K,) + batch_shape`` (or what broadcasts to it).
    :return: ``(K,) + batch_shape``. Beyond a fixed size of the moved weights the work is chunked over ``K``, and
        recomputed in the backward pass, so that memory stays bounded.
    """

    def score(vector: Tensor, part: Permutation) -> Tensor:
        return base.log_prob(action(vector, part)) + action.log_abs_det(vector, part)

    count = elements.batch_shape[0]
    chunk = max(1, CHUNK_NUMBERS // max(1, value.numel()))
    if chunk >= count:
        return score(value, elements)
    parts = [elements.select(slice(start, start + chunk)) for start in range(0, count, chunk)]
    if not torch.is_grad_enabled():
        return torch.cat([score(value, part) for part in parts])
    return torch.cat([checkpoint(score, value, part, use_reentrant=False) for part in parts])


def _log_mean_exp(log_terms: Tensor) -> Tensor:
    # The terms span hundreds of nats and their number can be 10⁵: the group sum is made in float64.
    total = torch.logsumexp(log_terms.double(), 0) - math.log(len(log_terms))
    return total.to(log_terms.dtype)
