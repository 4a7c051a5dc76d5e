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
(:mod:`~pyro_symmetric.distributions.matching`); :class:`~pyro_symmetric.distributions.ExactOrbit` adds up all elements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from pyro_symmetric import arguments
from pyro_symmetric.distributions.matching import UnitDensities, mean_field_moments
from pyro_symmetric.distributions.matchings import draw_matchings
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element

CHUNK_NUMBERS = 2**25  # that are held at once; beyond, the work is done chunk by chunk


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


def require_estimator(estimator: Any) -> None:
    """:raises TypeError: unless this is an estimator (a class of them is none) or None."""
    if not isinstance(estimator, OrbitEstimator | None):
        raise TypeError(f"estimator is {estimator!r}; it must be an OrbitEstimator such as SinkhornImportance(4)")


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
                elements = units.group.sample((count, *own.shape), device=value.device)
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
    surrogate = len(log_terms) * log_terms.logsumexp(0) - others
    return value.detach() + (surrogate - surrogate.detach())


# the proposal ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def propose(units: UnitDensities, count: int) -> tuple[Element, Tensor]:
    """Draw elements for each draw: matched sets one after the other, others uniformly, as their share of the group.

    :return: the identity and ``count`` elements, batch shape ``(count + 1,) + batch``, and the logarithms of the
        probabilities of the matched sets, times the number of their elements.
    """
    group, like, shape = units.group, units.like, (count + 1, *units.batch)
    options: dict[str, Any] = {"batch_shape": shape, "device": like.device, "dtype": like.dtype}
    left = [name for name, one in units.sets.items() if one.matched]
    log_tau, element = like.new_full(shape, units.log_order(left), dtype=torch.float64), Element(group, **options)
    if others := units.sets.keys() - set(left):
        uniform = group.without(left).sample(shape, device=like.device, dtype=like.dtype)
        for move, numbers in uniform.numbers.items():  # the first is the identity
            numbers[0] = torch.arange(numbers.shape[-1], device=like.device) if move == "permute" else 1.0
        element = Element(group, uniform.permutations, uniform.signs, **options)
        units.place(others, element)
    permutations, signs = dict(element.permutations), dict(element.signs)

    def take(name: str, found: Tensor, column: Tensor, sure: Tensor) -> Tensor:
        """Draw a set, and put it in place; the log-probabilities."""
        own = torch.arange(group[name].size, device=like.device)
        images, told = own.expand(*shape, -1), like.new_zeros((), dtype=torch.float64)
        if "permute" in group[name].moves and len(own) > 1:
            images, told = draw_matchings(found, count, column, sure, like.dtype)
        permutations[name], flips = images, None
        if len(found) == 2:
            both = found.expand(2, *shape, -1, -1).gather(-1, images.expand(2, *images.shape).unsqueeze(-1))
            odds = (both[0] - both[1])[..., 0]
            flips = torch.where(torch.rand_like(odds) < odds.sigmoid(), 1.0, -1.0).to(odds)
            flips[0] = 1.0
            told = told + logsigmoid(odds * flips).sum(-1)
            signs[name] = torch.empty_like(flips).scatter_(-1, images, flips).to(like)
        if bool((images == own).all()) and (flips is None or bool((flips > 0).all())):
            units.drawn.add(name)
            return told
        moved = Element(group, permutations, signs, **options)
        # Of proposals that are all alike, as where units are far apart, later sets look at one.
        alike = all(bool((v == v[:1]).all()) for v in (*permutations.values(), *signs.values()))
        units.place([name], moved.select(slice(0, 1)) if alike else moved)
        return told

    before: list[str] = []
    while units.shared and left != before:
        before = list(left)
        for name in before:
            found, column, sure = units.of(name, quick=True)
            if bool(sure.all()):
                log_tau = log_tau + take(name, found, column, sure)
                left.remove(name)
            elif len(found) == 1:
                units.sure[name] = column, sure
    for name in left if units.shared else ():
        units.expect(name)
    for name in left:
        log_tau = log_tau + take(name, *units.of(name))
    return Element(group, permutations, signs, **options), log_tau
