r"""Estimators of the symmetrised log-density by a few group elements.

They average the terms :math:`q(g \cdot w)\,|\det J_g(w)| / (|G|\,\tau(g|w))` of the identity ``e``, which brings a draw
of ``q`` to the base, and of ``K`` proposals :math:`g_k \sim \tau`:

.. math:: \log \frac{1}{K+1} \sum_{k=0}^{K} \frac{q(g_k \cdot w)\,|\det J_{g_k}(w)|}{|G|\, \tau(g_k \mid w)},
   \qquad g_0 = e, \quad g_1, \dots, g_K \sim \tau(\cdot \mid w) .

For :math:`w \sim q` its mean is an upper bound of that of :math:`\log \bar q(w)`, for every ``K`` and every proposal
that depends on the orbit of ``w`` alone, so that the ELBO made of it is a lower bound of that of :math:`\bar q`: as the
identity is a draw of :math:`q(g \cdot w) / (|G|\,\bar q(w))` on the orbit, the reciprocal of the average has the mean
:math:`1 / \bar q(w)`, and weights :math:`p(w, D) / \hat q` of draws of ``q`` estimate the evidence without bias. At any
other ``w`` the average over ``K + 1`` proposals, without the identity, has the mean :math:`\bar q(w)`. Both belong to
importance-weighted hierarchical variational inference (Sobolev & Vetrov 2019, arXiv 1905.03290).

:class:`InfoNCE` proposes uniformly, :class:`SinkhornImportance` by matching units
(:mod:`~pyro_symmetric.distributions.matching`); :class:`ExactOrbit` adds up all elements.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint

from pyro_symmetric import arguments
from pyro_symmetric.distributions.matching import (
    UnitDensities,
    mean_field_moments,
    over_signs,
    propose,
    sets_of,
    unit_blocks,
)
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Element

CHUNK_NUMBERS = 2**25  # that are held at once; beyond, the work is done chunk by chunk
# Numbers that an exact sum may handle for a draw, in training and for a report; elements that may be listed.
TERMS, TERMS_TO_REPORT, LISTED = 50_000, 500_000, 720
# n 2^(n-1) terms: 10 million at 20, which is what a machine holds and a person waits for.
LARGEST_PERMANENT = 20


class OrbitEstimator(ABC):
    r"""The estimator that :class:`~pyro_symmetric.distributions.Symmetrized` needs: a value, and what that value is.

    The average is over ``action.group.finite``, the permutations and signs of the group. ``bound`` says what the
    expected value is at draws of the base: ``"exact"``, or ``"upper"``, an upper bound of :math:`\log \bar q`.
    """

    bound: ClassVar[Literal["upper", "exact"]] = "upper"

    @abstractmethod
    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        r"""Estimate :math:`\log \bar q` at draws of ``base``, ``batch_shape + (D,)`` -> ``batch_shape``; the mean of
        the reciprocal of its exponential is :math:`1 / \bar q`."""

    def log_prob_elsewhere(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        r"""The log of an unbiased estimate of :math:`\bar q` at any weights: draws of a chain."""
        if self.bound == "exact":
            return self.log_prob(base, action, value)
        raise NotImplementedError(f"{type(self).__name__} estimates the density at draws of the base alone")


@dataclass(frozen=True)
class InfoNCE(OrbitEstimator):
    r"""The identity and ``K`` uniform elements, drawn anew at each call.

    .. math:: \log \frac{1}{K+1} \Big[ q(w) + \sum_{k=1}^{K} q(g_k \cdot w) \Big]

    It can't get below ``log q(w) - log(K + 1)``: of the ``log |G|`` nats at stake it sees at most ``log(K + 1)``;
    :class:`~pyro_symmetric.distributions.SinkhornImportance` has no such cap. Its gradient is, without bias, that of
    the bound it reports.

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

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 0)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        return log_mean_exp(log_terms(base, action, value, self.K, matched=False)).to(value.dtype)

    def log_prob_elsewhere(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        return log_mean_exp(log_terms(base, action, value, self.K + 1, matched=False)[1:]).to(value.dtype)


@dataclass(frozen=True)
class SinkhornImportance(OrbitEstimator):
    r"""The identity, and ``K`` elements drawn by matching the units of the draw to those of the base.

    If units are far apart it finds all of the :math:`\log|G|` nats, whatever the width, and if they are alike it knows
    that; in between a larger ``K`` helps. Normals that correlate units are matched by means and deviations alone: of
    overlapping units under a full covariance less than half of the nats may be found. *Tied units*, whose weights from
    state to state belong to two of them, lose more than others; *units inside others*, rows of an attention head, are
    proposed uniformly, so that as many of their nats are found as by :class:`InfoNCE`.

    *Gradients* are those of :math:`\log \bar q`, not of the estimate ``L`` as it stands: the identity is no free draw,
    so that with exact proposals :math:`1/(K+1)` of the gain's gradient is missing. The jackknife
    :math:`(K+1) \nabla L - \sum_k \nabla L_{-k}` gives it back, with :math:`L_{-k}` the estimate without proposal
    ``k``. Through the base's parameters at a fixed draw the mean of the gradient is zero with any proposal.

    Reference: the bound, Sobolev & Vetrov 2019 (arXiv 1905.03290); the scaling, Sinkhorn & Knopp 1967.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(10)})
    >>> base = dist.Normal(10 * torch.arange(10.0), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.groups.Action(group, ["w"]), ps.SinkhornImportance(4))
    >>> w = base.sample()
    >>> round(float(base.log_prob(w) - orbit.log_prob(w)), 2)  # log 10!
    15.1

    :param K: number of proposals, at least 1.
    """

    K: int = 4

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        return jackknifed(log_terms(base, action, value, self.K)).to(value.dtype)

    def log_prob_elsewhere(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        return log_mean_exp(log_terms(base, action, value, self.K + 1)[1:]).to(value.dtype)


@dataclass(frozen=True)
class ExactOrbit(OrbitEstimator):
    r"""The whole sum over the orbit, for groups small enough: the ruler for every other estimator.

    In general by enumeration, ``|G|`` evaluations of ``q``. If units are independent under the base (mean-field, or
    unit blocks), the sum over one set of units is a permanent of numbers that are sums over the units' signs:
    :math:`n\,2^{n-1}` terms instead of :math:`n!\,2^n`, up to width 20. Sets that share no site (one hidden layer;
    every second layer of a deep network, given the others) are summed so, and only the rest is enumerated.

    Value and gradient have no chance in them: the gradient is that of :math:`\log \bar q`.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(2)})
    >>> base = dist.Normal(torch.tensor([-3.0, 3.0]), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.groups.Action(group, ["w"]), ps.ExactOrbit())
    >>> w = torch.tensor([-3.0, 3.0])
    >>> round(float(base.log_prob(w) - orbit.log_prob(w)), 3)  # log 2!
    0.693

    :param limit: the largest number of elements to enumerate.
    """

    limit: int = field(default=100_000, repr=False)
    bound: ClassVar[Literal["upper", "exact"]] = "exact"

    def __post_init__(self) -> None:
        arguments.whole("limit", self.limit, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        summed, enumerated = divided(action.group.finite, independent_sets(base, action))
        order = enumerated.order()
        if order > self.limit:
            how = f", besides permanents of the units {list(summed.units)}," if summed.units else ""
            raise ValueError(
                f"ExactOrbit would enumerate exp({enumerated.log_order():.1f}) group elements{how} more than its limit "
                f"of {self.limit}; use a bound such as SinkhornImportance(16), or raise the limit"
            )
        own = base.log_prob(value)
        if value.numel() == 0:
            return own
        # The identity comes first; its term is the density itself, not what a bijection there and back makes of it.
        elements = enumerated.enumerate().to(value.device).select((slice(None), *([None] * own.dim())))
        terms = own[None]
        if order > 1:
            units = UnitDensities(base, action, value.expand(1, *own.shape, -1))
            others = elements.select(slice(1, None))
            terms = torch.cat([terms, log_prob_on_orbit(base, action, value, others, units, own)])
        if summed.units:
            terms = terms + _gains(base, action, value.expand(*own.shape, -1), summed, elements)
        return log_mean_exp(terms).to(own.dtype)


def usual_estimator(base: Distribution, action: Action, training: bool = True) -> OrbitEstimator:
    """Choose the exact sum where it costs about as much as an estimate, else matched units.

    :param training: whether it is evaluated once a step; otherwise for a report, which takes more elements.
    """
    group = action.group.finite
    summed, enumerated = divided(group, independent_sets(base, action))
    numbers = sum(shape.numel() for shape in group.site_shapes.values())
    terms = numbers + sum(one.size * 2.0 ** (one.size - 1) for one in summed.units.values())
    listed = math.exp(min(enumerated.log_order(), 700.0))
    cheap = listed <= LISTED * (1 + 1e-9) and listed * terms <= (TERMS if training else TERMS_TO_REPORT)
    return ExactOrbit() if cheap else SinkhornImportance(4 if training else 16)


# terms ----------------------------------------------------------------------------------------------------------------


def log_terms(base: Distribution, action: Action, value: Tensor, count: int, matched: bool = True) -> Tensor:
    r""":math:`\log q(g_k \cdot w) |\det J| / (|G|\, \tau(g_k|w))` of the identity and ``count`` proposals,
    ``(count + 1,) + batch_shape``, float64; of so many draws at once as memory allows.

    :param matched: whether proposals come from matched units; they are uniform otherwise.
    """
    if matched and torch._C._get_tracing_state() is not None:  # how often rows draw depends on the draws
        raise NotImplementedError("SinkhornImportance can't be traced by torch.jit: take Trace_ELBO, or InfoNCE(K)")

    def terms(value: Tensor) -> Tensor:
        own = base.log_prob(value)
        if value.numel() == 0 or not count:
            return own.double().expand(count + 1, *own.shape)
        with torch.autocast(value.device.type, enabled=False):  # differences of large numbers need all digits
            units = UnitDensities(base, action, value.expand(1, *own.shape, -1))
            if not matched:
                elements = units.group.sample((count, *map(int, own.shape)), device=value.device)
                return torch.cat([own[None], log_prob_on_orbit(base, action, value, elements, units, own)]).double()
            elements, log_tau = propose(units, count)
            moved = log_prob_on_orbit(base, action, value, elements.select(slice(1, None)), units, own)
            return torch.cat([own[None], moved]).double() - log_tau

    if not matched or base.batch_shape or value.dim() == 1:
        return terms(value)
    flat = value.reshape(-1, value.shape[-1])
    largest = max([one.count for one in action.group.units.values()], default=1)
    chunk = CHUNK_NUMBERS // ((count + 1) * max(action.dim, largest**2, 5000))
    found = in_chunks(lambda part: terms(flat[part]).mT, len(flat), chunk)
    return found.mT.reshape(count + 1, *value.shape[:-1])


def log_prob_on_orbit(
    base: Distribution, action: Action, value: Tensor, elements: Element, units: UnitDensities, own: Tensor
) -> Tensor:
    r""":math:`\log q(g \cdot w) + \log|\det J_g(w)|` for a stack of elements, ``(K,) + batch_shape``.

    Of independent units these are gathered from the matrix of all their densities, else the weights are moved. Beyond a
    fixed size of the moved weights the work is chunked over ``K``, and recomputed in the backward pass.

    :param elements: batch shape ``(K,) + batch_shape`` (or what broadcasts to it).
    :param units: of ``value``, ``batch_shape + (D,)``; ``own`` is its density.
    """
    mean_field = mean_field_moments(base) is not None and not action.nonlinear_sites

    def score(part: slice) -> Tensor:
        chosen = elements.select(part)
        if mean_field or units.blocks.keys() == units.sets.keys():
            return own + units.gains(chosen)
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


def jackknifed(log_terms: Tensor) -> Tensor:
    """The log-mean of the identity's term and ``K`` proposals', with the gradient ``(K+1) ∇L - Σ_k ∇L_{-k}``."""
    value = log_mean_exp(log_terms)
    if not log_terms.requires_grad:
        return value
    log_terms = log_terms.clamp(min=-1e300)  # infinite if the draw has no density under the base
    without = torch.eye(len(log_terms), dtype=torch.bool, device=log_terms.device)[1:]
    without = without.reshape(*without.shape, *[1] * (log_terms.dim() - 1))
    others = log_terms.masked_fill(without, -math.inf).logsumexp(1).sum(0)
    surrogate = len(log_terms) * log_terms.logsumexp(0) - others  # differentiable twice: weights kept fixed aren't
    return value.detach() + (surrogate - surrogate.detach())


# exact sums -----------------------------------------------------------------------------------------------------------


def _gains(base: Distribution, action: Action, value: Tensor, group: Group, elements: Element) -> Tensor:
    r"""``log mean_s q(s·e·w) - log q(e·w)`` over sets that share no site, ``(E,) + batch_shape``, float64."""

    def gain(part: slice) -> Tensor:
        units = UnitDensities(base, action, action(value, elements.select(part)), group)
        total = torch.zeros((), dtype=torch.float64, device=value.device)
        for name in units.sets:
            densities = units.of_lone(name)
            turned, at_rest = over_signs(densities.double()), densities[0].diagonal(dim1=-2, dim2=-1).sum(-1)
            permuted = "permute" in group[name].moves
            summed = log_permanent(turned) if permuted else turned.diagonal(dim1=-2, dim2=-1).sum(-1)
            total = total + summed - at_rest
        return total - units.log_order(units.sets)

    # What is held for one element: copies of the draws, and the largest level of each permanent.
    levels = sum(math.comb(one.size, one.size // 2) * one.size for one in group.units.values())
    few = CHUNK_NUMBERS // (value.shape[:-1].numel() * (4 * value.shape[-1] + levels))
    return in_chunks(gain, elements.batch_shape[0], few)


def independent_sets(base: Distribution, action: Action) -> tuple[str, ...]:
    """The sets of units whose densities are told unit by unit, all else being given."""
    group = action.group.finite
    if action.nonlinear_sites:
        return ()
    return tuple(group.units if mean_field_moments(base) is not None else unit_blocks(base, action, group))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode that it is filled in
def divided(group: Group, independent: tuple[str, ...]) -> tuple[Group, Group]:
    """The part of a group that permanents sum over, sets of which no two share a site; and the rest."""
    chosen: dict[str, set[str]] = {}
    for name in sorted(independent, key=lambda name: -group[name].size):
        own = group.without(other for other in group.units if other != name)
        found = sets_of(own, group.site_shapes).get(name)
        sites = {axis.site for axis in found.lone} if found and found.matched and not found.shared else set()
        narrow = group[name].size <= LARGEST_PERMANENT or "permute" not in group[name].moves
        if sites and narrow and len(group.family(name)) == 1 and all(map(sites.isdisjoint, chosen.values())):
            chosen[name] = sites
    rest = [name for name in group.units if name not in chosen]
    return group.without(rest) if rest else group, group.without(chosen) if chosen else group


def log_permanent(densities: Tensor) -> Tensor:
    """Logarithm of the permanent of ``exp(densities)``, ``batch_shape + (n, n)``, differentiable; ``n`` at most 20."""
    n = densities.shape[-1]
    if n > LARGEST_PERMANENT:
        raise ValueError(f"the matrix has width {n}; permanents are computed up to {LARGEST_PERMANENT}")
    total = densities.new_zeros(*densities.shape[:-2], 1)
    for row, (columns, previous) in enumerate(_subsets(n, densities.device)):
        total = torch.logsumexp(total[..., previous] + densities[..., row, :][..., columns], -1)
    return total[..., 0]


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _subsets(n: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For each size ``t``: the columns of every subset, ``(C(n, t), t)``, and where the subset without it stood."""
    masks = torch.arange(2**n, device=device)
    member = ((masks[:, None] >> torch.arange(n, device=device)) & 1).bool()
    size, place = member.sum(-1), torch.zeros_like(masks)
    levels = []
    for t in range(n + 1):
        own = (size == t).nonzero()[:, 0]
        if t:
            columns = member[own].nonzero()[:, 1].reshape(-1, t)
            levels.append((columns, place[own[:, None] ^ (1 << columns)]))
        place[own] = torch.arange(len(own), device=device)
    return levels
