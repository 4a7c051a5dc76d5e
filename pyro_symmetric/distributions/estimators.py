r"""Estimators of the symmetrised log-density :math:`\log \bar q(w)` by importance
sampling of group elements.

.. math:: \log \hat q(w) = \log \frac{1}{K+1} \sum_{k=0}^{K}
   \frac{q(g_k \cdot w)\,|\det J_{g_k}(w)|}{|G|\, \tau(g_k \mid w)},
   \qquad g_0 = e, \quad g_1, \dots, g_K \sim \tau(\cdot \mid w)

*At draws of the base*, :math:`w \sim q`, its expectation is an upper bound of that of
:math:`\log \bar q(w)`, for every ``K`` and every proposal :math:`\tau` that depends on
the orbit of ``w`` alone: the ELBO made of it is a lower bound of the ELBO of
:math:`\bar q`. The identity is then a draw from :math:`q(g \cdot w) / (|G|\,\bar q(w))`
on the orbit, so that :math:`\mathbb E[1 / \hat q] = 1 / \bar q(w)`, and importance
weights :math:`p(w, D) / \hat q(w)` estimate the evidence without bias. *At any other
weights* the mean over ``K + 1`` proposals, without the identity, estimates
:math:`\bar q(w)` without bias. Both are importance-weighted hierarchical variational
inference (Sobolev & Vetrov 2019, arXiv 1905.03290).

:class:`InfoNCE` proposes uniformly, :class:`SinkhornImportance` by matching units
(:mod:`~pyro_symmetric.distributions.proposals`); :class:`ExactOrbit` sums over all
elements.
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
from pyro_symmetric.arguments import Names
from pyro_symmetric.distributions.proposals import propose
from pyro_symmetric.distributions.random_matchings import sum_over_signs
from pyro_symmetric.distributions.unit_densities import (
    UnitDensities,
    mean_field_moments,
    unit_blocks,
    unit_sets,
)
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group

CHUNK_NUMBERS = 2**25  # held at once; larger computations run in chunks
# By default an exact sum has at most so many terms a draw, in training and for a
# report, and enumerated elements.
TRAINING_TERMS = 50_000
REPORT_TERMS = 500_000
ENUMERATED_ELEMENTS = 720
LARGEST_PERMANENT = 20  # width; n 2^(n-1) terms are 10 million at 20


class OrbitEstimator(ABC):
    r"""An estimator of :math:`\log \bar q`, the average over ``action.group.finite``:
    permutations and signs; :meth:`averaged` returns what it averages over.

    ``bound`` states what its expectation is at draws of the base: ``"exact"``, or an
    ``"upper"`` bound of
    :math:`\log \bar q`.
    """

    bound: ClassVar[Literal["upper", "exact"]] = "upper"

    def averaged(self, base: Distribution, action: Action) -> Group:
        """Return the group over which the density of a base is averaged."""
        return action.group.finite

    @abstractmethod
    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        r"""Estimate :math:`\log \bar q` at draws of ``base``, ``batch_shape + (D,)`` ->
        ``batch_shape``, by
        :math:`\log \hat q` with :math:`\mathbb E[1 / \hat q] = 1 / \bar q`."""

    def log_prob_elsewhere(
        self, base: Distribution, action: Action, value: Tensor
    ) -> Tensor:
        r"""Return the log of an unbiased estimate of :math:`\bar q` at any weights,
        such as draws of a chain.
        """
        if self.bound == "exact":
            return self.log_prob(base, action, value)
        raise NotImplementedError(
            f"{type(self).__name__} estimates the density at draws of the base alone"
        )


@dataclass(frozen=True)
class _Sampled(OrbitEstimator):
    """An estimator by ``K`` proposals, ``matched`` to the base's units or uniform."""

    K: int
    matched: ClassVar[bool]

    def log_prob_elsewhere(
        self, base: Distribution, action: Action, value: Tensor
    ) -> Tensor:
        weights = log_weights(base, action, value, self.K + 1, self.matched)
        return log_mean_exp(weights[1:]).to(value.dtype)


@dataclass(frozen=True)
class InfoNCE(_Sampled):
    r"""The InfoNCE bound: the mean over the identity and ``K`` uniform elements, drawn
    anew at each call.

    .. math:: \log \frac{1}{K+1} \Big[ q(w) + \sum_{k=1}^{K} q(g_k \cdot w) \Big]

    It is at least ``log q(w) - log(K + 1)``, so the mutual information that it finds is
    capped at ``log(K + 1)`` of up to ``log |G|`` nats;
    :class:`~pyro_symmetric.distributions.SinkhornImportance` has no such cap. Its
    gradient is an unbiased estimate of the bound's.

    Reference: Gelberg et al. 2024, "Variational Inference Failures Under Model
    Symmetries" (arXiv 2408.05496), Theorem 4.3, whose ``K`` counts the identity.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(10)})
    >>> base = dist.Normal(10 * torch.arange(10.0), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.groups.Action(group, ["w"]), ps.InfoNCE(15))
    >>> w = base.sample()
    >>> round(
    ...     float(base.log_prob(w) - orbit.log_prob(w)), 2
    ... )  # log 16; the mutual information is log 10! = 15.1
    2.77

    :param K: number of uniform elements; 0 gives ``log q`` itself.
    """

    K: int = 15
    matched: ClassVar[bool] = False

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 0)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        weights = log_weights(base, action, value, self.K, self.matched)
        return log_mean_exp(weights).to(value.dtype)


@dataclass(frozen=True)
class SinkhornImportance(_Sampled):
    r"""The importance-sampling bound with ``K`` proposals that match the draw's units
    to the base's.

    It finds all of the :math:`\log|G|` nats, at any width, if units are far apart, and
    none if they are alike; in between a larger ``K`` helps. Under a base that
    correlates units, they are matched by means and deviations alone: of overlapping
    units under a full covariance it may find less than half of the nats. *Tied units*,
    whose weights from state to state belong to two of them, lose more than others.
    *Units inside others*, rows of an attention head, are proposed uniformly: it finds
    as many of their nats as :class:`InfoNCE`.

    *Gradients* estimate those of :math:`\log \bar q`. The estimate ``L`` itself would
    lack :math:`1/(K+1)` of the gradient of the mutual information under exact
    proposals, as the identity isn't drawn from :math:`\tau`. The jackknife :math:`(K+1)
    \nabla L - \sum_k \nabla L_{-k}` restores it, with :math:`L_{-k}` the estimate
    without proposal ``k``. Through the base's parameters at a fixed draw the gradient
    has mean zero under any proposal.

    Reference: Sobolev & Vetrov 2019 (arXiv 1905.03290), the bound; Sinkhorn & Knopp
    1967, the proposal.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(10)})
    >>> base = dist.Normal(10 * torch.arange(10.0), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(
    ...     base, ps.groups.Action(group, ["w"]), ps.SinkhornImportance(4)
    ... )
    >>> w = base.sample()
    >>> round(float(base.log_prob(w) - orbit.log_prob(w)), 2)  # log 10!
    15.1

    :param K: number of proposals, at least 1.
    """

    K: int = 4
    matched: ClassVar[bool] = True

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        return jackknifed(log_weights(base, action, value, self.K)).to(value.dtype)


@dataclass(frozen=True)
class ExactOrbit(OrbitEstimator):
    r"""The sum over the whole orbit, for small groups: the reference for every other
    estimator.

    .. math:: \log \bar q(w) = \log \frac{1}{|E|} \sum_{e \in E}
        \frac{1}{|S|} \sum_{s \in S} q(s \cdot e \cdot w),
       \qquad G = S \times E

    If units are independent under the base (mean-field, or unit blocks), the sum over
    one set of units is the permanent of their densities, each summed over the unit's
    signs: :math:`n\,2^{n-1}` terms instead of :math:`n!\,2^n`, up to width 20. ``S``
    are sets that share no site (one hidden layer; every second layer of a deep
    network); ``E``, the rest, is enumerated. Value and gradient are deterministic.

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
        summed, enumerated = split_group(
            action.group.finite, independent_sets(base, action)
        )
        order = enumerated.order()
        if order > self.limit:
            besides = (
                f", besides permanents of the units {list(summed.units)},"
                if summed.units
                else ""
            )
            raise ValueError(
                f"ExactOrbit would enumerate exp({enumerated.log_order():.1f}) group "
                f"elements{besides} more than its "
                f"limit of {self.limit}; use a bound such as SinkhornImportance(16), "
                "or raise the limit"
            )
        log_q = base.log_prob(value)
        if value.numel() == 0:
            return log_q
        elements = (
            enumerated.enumerate()
            .to(value.device)
            .select((slice(None), *([None] * log_q.dim())))
        )
        # of the identity, which comes first: free of the rounding of a bijection
        log_probs = log_q[None]
        if order > 1:
            units = UnitDensities(base, action, value.expand(1, *log_q.shape, -1))
            non_identity = elements.select(slice(1, None))
            log_probs = torch.cat(
                [
                    log_probs,
                    log_prob_on_orbit(base, action, value, non_identity, units, log_q),
                ]
            )
        if summed.units:
            log_probs = log_probs + log_mean_ratios(
                base, action, value.expand(*log_q.shape, -1), summed, elements
            )
        return log_mean_exp(log_probs).to(log_q.dtype)


def finite_estimator(
    base: Distribution, action: Action, training: bool = True
) -> OrbitEstimator:
    """Choose :class:`ExactOrbit` where it costs about as much as an estimate, else
    :class:`SinkhornImportance`.
    """
    group = action.group.finite
    summed, enumerated = split_group(group, independent_sets(base, action))
    numbers = sum(shape.numel() for shape in group.site_shapes.values())
    terms = numbers + sum(
        unit_set.size * 2.0 ** (unit_set.size - 1) for unit_set in summed.units.values()
    )
    order = math.exp(min(enumerated.log_order(), 700.0))
    most = TRAINING_TERMS if training else REPORT_TERMS
    cheap = order <= ENUMERATED_ELEMENTS * (1 + 1e-9) and order * terms <= most
    return ExactOrbit() if cheap else SinkhornImportance(4 if training else 16)


# importance weights -------------------------------------------------------------------


def log_weights(
    base: Distribution, action: Action, value: Tensor, count: int, matched: bool = True
) -> Tensor:
    r"""Return the log importance weights :math:`\log [q(g_k \cdot w)\,|\det J| / (|G|\,
    \tau(g_k|w))]` of the identity and ``count`` proposals, ``(count + 1,) +
    batch_shape``, float64. Draws are evaluated in chunks that fit memory.

    :param matched: whether proposals match units; otherwise they are uniform,
        :math:`|G|\,\tau = 1`.
    """
    # the number of redraws depends on the draws
    if matched and torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            "SinkhornImportance can't be traced by torch.jit: take Trace_ELBO, or "
            "InfoNCE(K)"
        )

    def evaluate(value: Tensor) -> Tensor:
        log_q = base.log_prob(value)
        if value.numel() == 0 or not count:
            return log_q.double().expand(count + 1, *log_q.shape)
        # differences of large numbers need all digits
        with torch.autocast(value.device.type, enabled=False):
            units = UnitDensities(base, action, value.expand(1, *log_q.shape, -1))
            log_tau: Tensor | float = 0.0
            if matched:
                elements, log_tau = propose(units, count)
                elements = elements.select(slice(1, None))
            else:
                elements = units.group.sample(
                    (count, *map(int, log_q.shape)), device=value.device
                )
            moved = log_prob_on_orbit(base, action, value, elements, units, log_q)
            return torch.cat([log_q[None], moved]).double() - log_tau

    if not matched or base.batch_shape or value.dim() == 1:
        return evaluate(value)
    vectors = value.reshape(-1, value.shape[-1])
    widest = max(
        [unit_set.count for unit_set in action.group.units.values()], default=1
    )
    chunk = CHUNK_NUMBERS // ((count + 1) * max(action.dim, widest**2, 5000))
    weights = in_chunks(lambda part: evaluate(vectors[part]).mT, len(vectors), chunk)
    return weights.mT.reshape(count + 1, *value.shape[:-1])


def log_prob_on_orbit(
    base: Distribution,
    action: Action,
    value: Tensor,
    elements: Element,
    units: UnitDensities,
    log_q: Tensor,
) -> Tensor:
    r"""Return :math:`\log q(g \cdot w) + \log|\det J_g(w)|` for a stack of elements,
    ``(K,) + batch_shape``.

    If units are independent under the base it is gathered from the matrices of their
    densities, else the weights are moved. Evaluated in chunks of elements that fit
    memory.

    :param elements: of batch shape ``(K,) + batch_shape``, or one that broadcasts to
        it.
    :param units: the densities of the units of ``value``, ``batch_shape + (D,)``.
    :param log_q: the base's log-density of ``value``.
    """
    mean_field = mean_field_moments(base) is not None and not action.nonlinear_sites

    def evaluate(part: slice) -> Tensor:
        chunk = elements.select(part)
        if mean_field or units.blocks.keys() == units.sets.keys():
            return log_q + units.log_ratio(chunk)
        return base.log_prob(action(value, chunk)) + action.log_abs_det(value, chunk)

    return in_chunks(
        evaluate, elements.batch_shape[0], CHUNK_NUMBERS // max(1, value.numel())
    )


def in_chunks(evaluate: Callable[[slice], Tensor], count: int, chunk: int) -> Tensor:
    """Evaluate ``count`` items, at most ``chunk`` at once, and concatenate; the
    backward pass recomputes each chunk.
    """
    chunk = max(1, chunk)
    if chunk >= count:
        return evaluate(slice(0, count))
    parts = [slice(start, start + chunk) for start in range(0, count, chunk)]
    if not torch.is_grad_enabled():
        return torch.cat([evaluate(part) for part in parts])
    return torch.cat(
        [checkpoint(evaluate, part, use_reentrant=False) for part in parts]
    )


def log_mean_exp(log_weights: Tensor) -> Tensor:
    """Return ``log mean exp`` over the first dimension, summed in float64: terms span
    hundreds of nats.
    """
    total = torch.logsumexp(log_weights.double(), 0) - math.log(len(log_weights))
    return total.to(log_weights.dtype)


def jackknifed(
    log_weights: Tensor, of_means: Callable[[Tensor], Tensor] = lambda means: means
) -> Tensor:
    r"""Return ``L``, the log of the mean weight of the identity and ``K`` proposals, or
    a function of the logs of several means, with the gradient
    :math:`(K+1) \nabla L - \sum_{k=1}^K \nabla L_{-k}`, where :math:`L_{-k}` leaves out
        proposal ``k``."""
    value = of_means(log_mean_exp(log_weights))
    if not log_weights.requires_grad:
        return value
    # -inf, of a draw without density under the base, has no gradient
    log_weights = log_weights.clamp(min=-1e300)
    left_out = torch.eye(len(log_weights), dtype=torch.bool, device=log_weights.device)[
        1:
    ]
    left_out = left_out.reshape(*left_out.shape, *[1] * (log_weights.dim() - 1))
    # L_{-k}, but for a constant
    leave_one_out = of_means(log_weights.masked_fill(left_out, -math.inf).logsumexp(1))
    whole = of_means(log_weights.logsumexp(0))
    jackknife = len(log_weights) * whole - leave_one_out.sum(0)
    # a surrogate, so that it is differentiable twice
    return value.detach() + (jackknife - jackknife.detach())


# exact sums ---------------------------------------------------------------------------


def log_mean_ratios(
    base: Distribution, action: Action, value: Tensor, group: Group, elements: Element
) -> Tensor:
    r"""Return :math:`\log \frac{1}{|S|} \sum_s q(s \cdot e \cdot w) / q(e \cdot w)`,
    ``(E,) + batch_shape``, float64: a permanent for each set of the group ``S``, which
    share no site."""

    def evaluate(part: slice) -> Tensor:
        units = UnitDensities(base, action, action(value, elements.select(part)), group)
        total = torch.zeros((), dtype=torch.float64, device=value.device)
        for name in units.sets:
            densities = units.exclusive_matrix(name)
            over_signs = sum_over_signs(densities.double())
            identity = densities[0].diagonal(dim1=-2, dim2=-1).sum(-1)
            permuted = "permute" in group[name].moves
            summed = (
                log_permanent(over_signs)
                if permuted
                else over_signs.diagonal(dim1=-2, dim2=-1).sum(-1)
            )
            total = total + summed - identity
        return total - units.log_order(units.sets)

    # Numbers held for one element: copies of the draws, and the largest level of each
    # permanent.
    levels = sum(
        math.comb(unit_set.size, unit_set.size // 2) * unit_set.size
        for unit_set in group.units.values()
    )
    numbers = value.shape[:-1].numel() * (4 * value.shape[-1] + levels)
    return in_chunks(evaluate, elements.batch_shape[0], CHUNK_NUMBERS // numbers)


def independent_sets(base: Distribution, action: Action) -> Names:
    """Return the sets whose units are independent under the base, given the other
    sets.
    """
    group = action.group.finite
    if action.nonlinear_sites:
        return ()
    return tuple(
        group.units
        if mean_field_moments(base) is not None
        else unit_blocks(base, action, group)
    )


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode in which it is filled
def split_group(group: Group, independent: Names) -> tuple[Group, Group]:
    """Split a group into ``S``, summed by permanents over sets that share no site, and
    ``E``, the rest.
    """
    summed: dict[str, set[str]] = {}
    for name in sorted(independent, key=lambda name: -group[name].size):
        lying = unit_sets(group.only([name]), tuple(group.site_shapes)).get(name)
        if lying is None or not lying.matched or lying.shared:
            continue
        units = group[name]
        narrow = units.size <= LARGEST_PERMANENT or "permute" not in units.moves
        sites = {axis.site for axis in lying.exclusive}
        apart = all(map(sites.isdisjoint, summed.values()))
        if narrow and apart and len(group.family(name)) == 1:
            summed[name] = sites
    return group.only(summed), group.without(summed)


def log_permanent(densities: Tensor) -> Tensor:
    r"""Return the log of the permanent of :math:`e^A`, ``batch_shape + (n, n)``, ``n``
    at most 20; differentiable.

    Row by row, over subsets ``C`` of ``t`` columns: :math:`P_t(C) = \sum_{c \in C}
    e^{A_{tc}} P_{t-1}(C \setminus c)`.
    """
    n = densities.shape[-1]
    if n > LARGEST_PERMANENT:
        raise ValueError(
            f"the matrix has width {n}; permanents are computed up to "
            f"{LARGEST_PERMANENT}"
        )
    total = densities.new_zeros(*densities.shape[:-2], 1)
    for row, (columns, previous) in enumerate(_subsets(n, densities.device)):
        total = torch.logsumexp(
            total[..., previous] + densities[..., row, :][..., columns], -1
        )
    return total[..., 0]


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _subsets(n: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """List for each size ``t`` the columns of every subset, ``(C(n, t), t)``, and the
    position, among the subsets of size ``t - 1``, of the subset without each column."""
    masks = torch.arange(2**n, device=device)
    member = ((masks[:, None] >> torch.arange(n, device=device)) & 1).bool()
    size = member.sum(-1)
    position = torch.zeros_like(masks)
    levels = []
    for t in range(n + 1):
        subsets = (size == t).nonzero()[:, 0]
        if t:
            columns = member[subsets].nonzero()[:, 1].reshape(-1, t)
            levels.append((columns, position[subsets[:, None] ^ (1 << columns)]))
        position[subsets] = torch.arange(len(subsets), device=device)
    return levels
