r"""Estimators of the symmetrised log-density.

For a base density ``q`` and a finite group ``G`` that acts with Jacobian ``J_g``,

.. math:: \bar q(w) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot w)\, |\det J_g(w)|

is too long a sum for most groups. An estimator is asked for :math:`\log \bar q(w)` at draws :math:`w \sim q` and states
in ``bound`` what its expected answer is: ``"exact"``, or ``"upper"``, an upper bound, so that the ELBO made of it is a
lower bound of that of :math:`\bar q`.

The estimates :math:`\hat q` average the terms :math:`\omega(g) = q(g \cdot w)\,|\det J_g| / (|G|\,\tau(g|w))` of the
identity ``e``, which brings the draw to the base, and of ``K`` proposals :math:`g_k \sim \tau`. As the identity is a
draw of :math:`q(g \cdot w) / (|G|\,\bar q(w))` on the orbit, and the ``K + 1`` terms can be exchanged,

.. math:: \mathbb E \frac1{\hat q}
    = \frac1{\bar q(w)}\, \mathbb E_{g_0 \dots g_K \sim \tau} \frac{\omega(g_0)}{\frac1{K+1} \sum_k \omega(g_k)}
    = \frac1{\bar q(w)}, \qquad \mathbb E_{g_0 \dots g_K \sim \tau}\, \frac1{K+1} \sum_k \omega(g_k) = \bar q(w) .

So weights :math:`p(w, D) / \hat q` of draws of ``q`` estimate the evidence without bias, and the bound is Jensen's
inequality. At any other ``w`` no element is known that brings it to the base: the second mean, of ``K + 1`` proposals,
is what serves there. Both belong to one distribution of ``w`` and its elements (importance-weighted hierarchical
variational inference, Sobolev & Vetrov 2019, arXiv 1905.03290; Grosse, Ghahramani & Adams 2015, arXiv 1511.02543).

Each estimator has a module of its own. A new one is a frozen dataclass that inherits from :class:`OrbitEstimator`; that
alone makes it known to saved guides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint

from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group

Bound = Literal["upper", "exact"]
# What a base is, as far as estimators care, from the easiest on: a product of normals; normals that are correlated
# inside units, which are independent; any other normal; anything else (a flow), or one whose constrained values are
# moved.
BaseKind = Literal["mean field", "unit blocks", "normal", "other"]

# Moved copies of the weights that are held at once, in numbers; beyond, the orbit is scored chunk by chunk.
CHUNK_NUMBERS = 2**25

# All estimators by the names of their classes, in the order of their definition.
ESTIMATORS: dict[str, type[OrbitEstimator]] = {}


class OrbitEstimator(ABC):
    """The estimator that :class:`~pyro_symmetric.distributions.Symmetrized` needs: a value, and what that value is.

    The average is over ``action.group.finite``, the permutations and signs of the group.
    """

    bound: ClassVar[Bound]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ESTIMATORS[cls.__name__] = cls

    @abstractmethod
    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        r"""Estimate :math:`\log \bar q` at ``value``.

        :param base: density ``q`` over vectors, event shape ``(D,)``.
        :param action: the group's action on those vectors.
        :param value: draws of ``base``, ``batch_shape + (D,)``.
        :return: ``batch_shape``, differentiable in ``value`` and in the parameters of ``base``. The mean of the
            reciprocal of its exponential is :math:`1 / \bar q`.
        """

    def log_prob_elsewhere(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        r"""The log of an unbiased estimate of :math:`\bar q` at weights that ``base`` didn't draw: draws of a chain.

        :param value: any weights, ``batch_shape + (D,)``.
        :return: ``batch_shape``; its own mean is a lower bound of :math:`\log \bar q`.
        """
        if self.bound == "exact":
            return self.log_prob(base, action, value)
        raise NotImplementedError(f"{type(self).__name__} estimates the density at draws of the base alone")

    @property
    def knows_elsewhere(self) -> bool:
        """True if :meth:`log_prob_elsewhere` is there."""
        return self.bound == "exact" or type(self).log_prob_elsewhere is not OrbitEstimator.log_prob_elsewhere

    @classmethod
    def suggested(cls, group: Group, base: BaseKind, training: bool) -> OrbitEstimator | None:
        """The estimator of this class that suits a group; ``None``, as here, if another one suits better.

        :param group: permutations and signs.
        :param base: what the base is over the coordinates that the group moves.
        :param training: whether it is evaluated once a step; otherwise for a report, where time matters less than nats.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the name of the class and its fields."""
        return {"name": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


def estimator_from_dict(data: Mapping[str, Any]) -> OrbitEstimator:
    """The inverse of :meth:`OrbitEstimator.to_dict`.

    :raises ValueError: if no estimator of that name has been defined.
    """
    fields = dict(data)
    name = fields.pop("name", None)
    if name not in ESTIMATORS:
        raise ValueError(f"data names the estimator {name!r}; defined are {list(ESTIMATORS)}")
    return ESTIMATORS[name](**fields)


def suggested(group: Group, base: BaseKind, training: bool) -> OrbitEstimator:
    """The estimator that suits a group: exact ones are asked first, then those that were defined last."""
    asked = sorted(reversed(ESTIMATORS.values()), key=lambda kind: getattr(kind, "bound", "upper") != "exact")
    suggestions = (kind.suggested(group, base, training) for kind in asked)
    return next(suggestion for suggestion in suggestions if suggestion is not None)


def require_estimator(estimator: Any) -> None:
    """:raises TypeError: unless this is an estimator (a class of them is none)."""
    if not isinstance(estimator, OrbitEstimator):
        raise TypeError(f"estimator is {estimator!r}; it must be an OrbitEstimator such as SinkhornImportance(4)")


def log_prob_on_orbit(base: Distribution, action: Action, value: Tensor, elements: Element) -> Tensor:
    r""":math:`\log q(g \cdot w) + \log|\det J_g(w)|` for a stack of elements.

    :param value: ``batch_shape + (D,)``.
    :param elements: batch shape ``(K,) + batch_shape`` (or what broadcasts to it).
    :return: ``(K,) + batch_shape``. Beyond a fixed size of the moved weights the work is chunked over ``K``, and
        recomputed in the backward pass, so that memory stays bounded.
    """

    def score(part: slice) -> Tensor:
        chosen = elements.select(part)
        return base.log_prob(action(value, chosen)) + action.log_abs_det(value, chosen)

    return in_chunks(score, elements.batch_shape[0], CHUNK_NUMBERS // max(1, value.numel()))


def in_chunks(score: Callable[[slice], Tensor], count: int, chunk: int, dim: int = 0) -> Tensor:
    """Scores of ``count`` things, at most ``chunk`` at once, joined along ``dim``; recomputed in the backward pass."""
    chunk = max(1, chunk)
    if chunk >= count:
        return score(slice(0, count))
    parts = [slice(start, start + chunk) for start in range(0, count, chunk)]
    if not torch.is_grad_enabled():
        return torch.cat([score(part) for part in parts], dim)
    return torch.cat([checkpoint(score, part, use_reentrant=False) for part in parts], dim)


def log_mean_exp(log_terms: Tensor) -> Tensor:
    """Logarithm of the mean over the first dimension."""
    # The terms span hundreds of nats and their number can be 10⁵: the group sum is made in float64.
    total = torch.logsumexp(log_terms.double(), 0) - math.log(len(log_terms))
    return total.to(log_terms.dtype)
