r"""Estimators of the symmetrised log-density.

For a base density ``q`` and a finite group ``G`` that acts with Jacobian ``J_g``,

.. math:: \bar q(w) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot w)\, |\det J_g(w)|

is too long a sum for most groups. An estimator is asked for :math:`\log \bar q(w)` at draws :math:`w \sim q` and states
in ``bound`` what its expected answer is: ``"exact"``, or ``"upper"``, an upper bound, so that the ELBO made of it is a
lower bound of that of :math:`\bar q`.

Each estimator has a module of its own; :func:`~pyro_symmetric.guides.suggest_estimator` picks one.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint

Bound = Literal["upper", "exact"]

# Moved copies of the weights that are held at once, in numbers; beyond, the orbit is scored chunk by chunk.
CHUNK_NUMBERS = 2**25


class Action(Protocol):
    """How a group acts on flat vectors; :class:`~pyro_symmetric.symmetry.permutation.FlatAction` is one.

    The group is a ``PermutationGroup``, or a ``FiniteGroup`` of permutations and signs; an estimator that needs more
    than draws from it, or a list of its elements, says which groups it takes.
    """

    group: Any
    dim: int

    def __call__(self, vector: Tensor, element: Any) -> Tensor:
        """The moved vectors, batch shapes broadcast."""

    def log_abs_det(self, vector: Tensor, element: Any) -> Tensor:
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


def require_estimator(estimator: Any) -> None:
    """:raises TypeError: unless this is an estimator (a class of them is none)."""
    if isinstance(estimator, type) or not callable(getattr(estimator, "log_prob", None)):
        raise TypeError(f"estimator is {estimator!r}; it must be an estimator such as SinkhornImportance(4)")


def log_prob_on_orbit(base: Distribution, action: Action, value: Tensor, elements: Any) -> Tensor:
    r""":math:`\log q(g \cdot w) + \log|\det J_g(w)|` for a stack of elements.

    :param value: ``batch_shape + (D,)``.
    :param elements: batch shape ``(K,) + batch_shape`` (or what broadcasts to it).
    :return: ``(K,) + batch_shape``. Beyond a fixed size of the moved weights the work is chunked over ``K``, and
        recomputed in the backward pass, so that memory stays bounded.
    """

    def score(vector: Tensor, part: Any) -> Tensor:
        return base.log_prob(action(vector, part)) + action.log_abs_det(vector, part)

    count = elements.batch_shape[0]
    chunk = max(1, CHUNK_NUMBERS // max(1, value.numel()))
    if chunk >= count:
        return score(value, elements)
    parts = [elements.select(slice(start, start + chunk)) for start in range(0, count, chunk)]
    if not torch.is_grad_enabled():
        return torch.cat([score(value, part) for part in parts])
    return torch.cat([checkpoint(score, value, part, use_reentrant=False) for part in parts])


def log_mean_exp(log_terms: Tensor) -> Tensor:
    """Logarithm of the mean over the first dimension."""
    # The terms span hundreds of nats and their number can be 10⁵: the group sum is made in float64.
    total = torch.logsumexp(log_terms.double(), 0) - math.log(len(log_terms))
    return total.to(log_terms.dtype)
