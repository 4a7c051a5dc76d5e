r"""A base density ``q`` along the orbit of a draw under a finite group ``G`` that acts with Jacobian ``J_g``, and what
averages it,

.. math:: \bar q(w) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot w)\, |\det J_g(w)| .
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from torch.utils.checkpoint import checkpoint

from pyro_symmetric.distributions.matching import UnitDensities, seats_of
from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import rows
from pyro_symmetric.weights import Weights

CHUNK_NUMBERS = 2**25  # that are held at once; beyond, the work is done chunk by chunk
FIT_DRAWS = 256  # to which normals are fitted if a base can't tell its moments, or if constrained values are permuted


class OrbitEstimator(ABC):
    """The estimator that :class:`~pyro_symmetric.distributions.Symmetrized` needs: a value, and what that value is.

    The average is over ``action.group.finite``, the permutations and signs of the group. ``bound`` says what the
    expected value is at draws of the base: ``"exact"``, or ``"upper"``, an upper bound of :math:`\\log \\bar q`.
    """

    bound: ClassVar[Literal["upper", "exact"]]

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


def in_chunks(score: Callable[[slice], Tensor], count: int, chunk: int) -> Tensor:
    """Scores of ``count`` things, at most ``chunk`` at once, joined; recomputed in the backward pass."""
    chunk = max(1, chunk)
    if chunk >= count:
        return score(slice(0, count))
    parts = [slice(start, start + chunk) for start in range(0, count, chunk)]
    if not torch.is_grad_enabled():
        return torch.cat([score(part) for part in parts])
    return torch.cat([checkpoint(score, part, use_reentrant=False) for part in parts])


def log_mean_exp(log_terms: Tensor) -> Tensor:
    """Logarithm of the mean over the first dimension."""
    # The terms span hundreds of nats and their number can be 10⁵: the group sum is made in float64.
    total = torch.logsumexp(log_terms.double(), 0) - math.log(len(log_terms))
    return total.to(log_terms.dtype)


# any base as normals --------------------------------------------------------------------------------------------------


def units_of(
    base: Distribution, action: Action, value: Tensor, batch: torch.Size, group: Group | None = None
) -> UnitDensities:
    """The densities of units under a base: exact for independent units, by means and deviations for any other.

    :param value: draws, ``(L, N, D)``, with ``batch`` the shape of the ``N``.
    :param group: a part of the action's group; all of it by default.
    """
    group, draws = group or action.group.finite, sites_of(action, value)
    moments = None if action.nonlinear_sites else mean_field_moments(base) or _told_moments(base)
    if moments is not None:
        loc, scale = (sites_of(action, laid_out(moment, base, batch)) for moment in moments)
        blocks = unit_blocks(base, action, group)
        return UnitDensities(group, draws, loc, scale, blocks)
    with torch.no_grad():
        fitted = sites_of(action, laid_out(base.sample(torch.Size([FIT_DRAWS])), base, batch))
    tiny = torch.finfo(value.dtype).tiny ** 0.25  # its inverse square is finite
    loc, scale = {s: v.mean(0) for s, v in fitted.items()}, {s: v.std(0).clamp(min=tiny) for s, v in fitted.items()}
    return UnitDensities(group, draws, loc, scale)


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Flat vectors -> what the group moves, by site in its view: coordinates, or constrained values where elements move
    those; of a simplex their centred logarithms, which are closer to normal."""
    values = action.layout.unflatten(flat)
    for site in action.nonlinear_sites:
        values[site] = action.layout.transforms[site](values[site])
        if site in action.simplex_sites:
            logs = values[site].clamp(min=torch.finfo(flat.dtype).tiny).log()
            values[site] = logs - logs.mean(-1, keepdim=True)
    return action.group.viewed(values)


def mean_field_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    """Means and deviations of a base that is a product of normals; None for any other."""
    while isinstance(base, Independent):
        base = base.base_dist
    return (base.loc, base.scale) if isinstance(base, Normal) else None


@torch.no_grad()
def _told_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    try:
        return base.mean, base.stddev
    except NotImplementedError:
        return None


def unit_blocks(base: Distribution, action: Action, group: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and precisions of the sets that no others concern, if the base is normal in blocks of their units."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if isinstance(base, UnitBlocks) and not action.nonlinear_sites:
        for name, units in _unit_entries(action, group).items():
            if base.are_independent(entries := units.to(base.loc.device)):
                root = torch.linalg.cholesky(base.covariances(entries).double())
                found[name] = base.loc[entries].double(), torch.cholesky_inverse(root)
    return found


@functools.lru_cache(maxsize=64)
def _unit_entries(action: Action, group: Group) -> dict[str, Tensor]:
    """Set of units -> the entries of each in the flat vector, ``(n, d)``; of sets that no others concern."""
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        entries = group.viewed(action.layout.unflatten(torch.arange(action.dim, device="cpu")))
        return {
            name: torch.cat([rows(entries[s.axis.site], s.axis, entries[s.axis.site].dim()) for s in seats], -1)
            for name, seats in seats_of(group, frozenset(entries)).items()
            if seats and all(seat.lone for seat in seats)
        }


def laid_out(vectors: Tensor, base: Distribution, batch: Sequence[int]) -> Tensor:
    """``lead + base batch + (D,)`` -> ``lead + (1 or N, D)``."""
    lead = vectors.dim() - 1 - len(base.batch_shape)
    if not base.batch_shape:
        return vectors.unsqueeze(lead)
    return vectors.expand(*vectors.shape[:lead], *batch, vectors.shape[-1]).flatten(lead, -2)
