"""The symmetrised log-density by importance sampling over the group, with proposals made by matching units."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions.density_gain import log_density_gain
from pyro_symmetric.distributions.normals import is_mean_field, mean_field_log_prob, normals_of, sites_of
from pyro_symmetric.distributions.orbit import (
    BaseKind,
    Bound,
    OrbitEstimator,
    log_mean_exp,
    log_prob_on_orbit,
)
from pyro_symmetric.distributions.proposal import propose
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.distributions.unit_sets import log_order_of
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.group import Group

# Weights whose density costs next to nothing beside the matching of their units, so that more elements are cheap.
FEW_NUMBERS = 400


@dataclass(frozen=True)
class SinkhornImportance(OrbitEstimator):
    r"""``K`` elements drawn by matching the units of the draw to those of the base, and the identity.

    .. math:: \log \frac{1}{K+1} \sum_{k=0}^{K} \frac{q(g_k \cdot w)\,|\det J_{g_k}(w)|}{|G|\, \tau(g_k \mid w)},
       \qquad g_0 = e, \quad g_1, \dots, g_K \sim \tau(\cdot \mid w)

    For :math:`w \sim q` its mean is an upper bound of that of :math:`\log \bar q(w)`, for every ``K`` and every
    proposal :math:`\tau` that depends on the orbit of ``w`` only (importance-weighted hierarchical variational
    inference), and exact if :math:`\tau` is the posterior of the group element. Here :math:`\tau` matches units by
    Sinkhorn's algorithm (:mod:`~pyro_symmetric.distributions.proposal`): if units are far apart it finds all of the
    :math:`\log|G|` nats, whatever the width, and if they are alike it knows that; in between a larger ``K`` helps.
    The default suits training if units are independent and in one layer; otherwise take 16, and four times as many to
    report, as guides do by default.

    *Gradients* are those of :math:`\log \bar q`, not of the estimate ``L`` as it stands. With the proposals held
    fixed, ``∇L`` is the mean of :math:`\nabla \log q(g_k \cdot w)` by the terms' shares of the sum, which are
    :math:`1/(K+1)` each if :math:`\tau` is exact. A proposal then gives :math:`\nabla \log \bar q(w)` in expectation,
    at any ``w``; the identity gives :math:`\nabla \log q(w)`, as it is no free draw, but moves with the path of
    ``w``. With the gain :math:`I = \mathbb E_q[\log q(w) - \log \bar q(w)]` and :math:`L_{-k}` the estimate without
    proposal ``k``,

    .. math:: \mathbb E\, \nabla L = \nabla\, \mathbb E_q \log \bar q(w) + \frac{\nabla I}{K+1},
       \qquad \mathbb E\, \Big[ (K+1) \nabla L - \sum_{k=1}^{K} \nabla L_{-k} \Big]
       = \nabla\, \mathbb E_q \log \bar q(w),

    and the second, the jackknife, is what is used, beside the value of ``L``. What is unbiased for what:

    * the value, for the bound, with any :math:`\tau`;
    * the gradient, for that of :math:`\mathbb E_q \log \bar q`, if :math:`\tau` is exact; otherwise the jackknife
      takes away what falls like ``1/K``;
    * the part of the gradient that goes through the base's parameters at a fixed draw: its mean is zero, as it should
      be, with any :math:`\tau`. Which of the ``K + 1`` elements is the draw's own has their shares as probabilities, so
      that all terms average :math:`\partial \log q(w)`. Sticking the landing, which leaves that part out, changes no
      mean.

    :math:`\tau` is exact up to six units of one set that can be exchanged, nine that flip, four that do both, if they
    are independent under the base (mean-field, :class:`~pyro_symmetric.distributions.UnitBlocks`) or the base is any
    other normal; nearly exact for more. Normals that correlate units are matched by placing one unit after the other,
    given those already placed (:mod:`~pyro_symmetric.distributions.conditional_walk`), if they have at most 400
    entries; beyond, by means and deviations. Flows, and sites whose constrained values are permuted, are matched by a
    normal fitted to 1024 draws, up to 100 entries. What is then lost of :math:`\nabla I` is measured by
    ``benchmarks/performance/gradient_bias.py``, for overlapping units: with ``K = 16`` at most 0.02 for units of one
    layer, whatever the base, and 0.2 for two hidden layers of 5 and 4; with ``K = 4``, 0.05 of a full rank over seven
    units, 0.1 under a flow. *Tied units*, whose weights from state to state belong to two of them, lose far more: eight
    recurrent ones 0.46 with ``K = 16`` and 0.72 with ``K = 4``; ``ExactOrbit`` loses nothing there.
    Sums of up to 25,000 terms are better added up:
    ``ExactOrbit``, which loses nothing, is then the default.
    :func:`~pyro_symmetric.guides.evidence` doubts an estimate whose bounds from both sides, ``log_prob`` and
    ``log_prob_elsewhere``, lie more than half a nat apart, and a training by such an estimate if it is a twentieth
    of :math:`\log|G|`: then take a larger ``K``, or ``ExactOrbit`` if the group allows.

    Cost: three products of ``n × n`` by ``n × (weights of a unit)`` matrices a set, ``K`` matchings of ``n`` units,
    and ``K`` densities of those weights that the matchings move; if two sets share a site (two hidden layers or
    more), ``2 K`` such products. Memory: ``samples · K · n²`` and the moved weights.

    Signs of units (odd activations, factor analysis) are drawn after the matching, which sums over them. Units that
    hold others (heads of attention, groups of a convolution) are matched by what matching those inside them would be
    worth, and those inside follow; there, means and deviations alone count. A conditional walk costs one factorisation
    of the covariance, and at most five steps of ``n²`` densities of units; a step for all that is left if few are.

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
    bound: ClassVar[Bound] = "upper"

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        if torch._C._get_tracing_state() is not None:
            raise NotImplementedError(
                "SinkhornImportance can't be traced by torch.jit: how often it draws depends on the draws. Use "
                "Trace_ELBO, or JitTrace_ELBO with InfoNCE(K) or ExactOrbit()"
            )
        own = mean_field_log_prob(base, value)
        if not action.group.finite.sites or own.numel() == 0:
            return own
        with torch.autocast(value.device.type, enabled=False):  # differences of large numbers need all digits
            total = _log_sum_with_identity(_log_ratios(base, action, value, own, self.K))
        return (total - math.log(self.K + 1)).to(own.dtype).reshape(own.shape)

    def log_prob_elsewhere(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        own = base.log_prob(value)
        if not action.group.finite.sites or own.numel() == 0:
            return own
        ratios = _log_ratios(base, action, value, own, self.K + 1)[1:]
        return log_mean_exp(ratios).to(own.dtype).reshape(own.shape)

    @classmethod
    def suggested(cls, group: Group, base: BaseKind, training: bool) -> SinkhornImportance:
        count = 4 if training else 16
        return cls(count if _matched_well(group, base) else 4 * count)


def _matched_well(group: Group, base: BaseKind) -> bool:
    """True if proposals are nearly exact: units of one layer, independent. Or if more of them would cost too much."""
    if base == "other":
        return False
    numbers = sum(shape.numel() for shape in group.site_shapes.values())
    own = [[axis.site for axis in group.axes(units)] for units in group.units]
    if any(len(set(sites)) < len(sites) for sites in own):  # tied: recurrent weights
        return False
    sites = [site for sites in own for site in sites]
    apart = base in ("mean field", "unit blocks") and len(set(sites)) == len(sites)
    return apart or numbers > FEW_NUMBERS


def _log_sum_with_identity(log_ratios: Tensor) -> Tensor:
    """The log of the sum ``S`` of the identity's ratio and ``K`` others, ``(N,)``, with the gradient of
    ``(K+1) log S - sum_k log S_k``, ``S_k`` the sum without proposal ``k``: see :class:`SinkhornImportance`."""
    if not log_ratios.requires_grad:
        return torch.logsumexp(log_ratios, 0)
    log_ratios = log_ratios.clamp(min=-1e300)  # infinite if the draw has no density under the base
    count = len(log_ratios) - 1
    total = torch.logsumexp(log_ratios, 0)
    without = torch.logsumexp(log_ratios[_all_but_one(count, total.device)], 1).sum(0)
    jackknife = (count + 1) * total - without
    return total.detach() + (jackknife - jackknife.detach())


@functools.lru_cache(maxsize=16)
def _all_but_one(count: int, device: torch.device) -> Tensor:
    """The identity and all proposals but one, for each: ``(count, count)``."""
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        rows = [[k for k in range(count + 1) if k != left_out] for left_out in range(1, count + 1)]
        return torch.tensor(rows, device=device)


def _log_ratios(base: Distribution, action: Action, value: Tensor, own: Tensor, count: int) -> Tensor:
    r""":math:`\log q(g_k \cdot w) |\det J| / (|G|\, \tau(g_k|w))` of the identity and ``count`` proposals,
    ``(count + 1, N)``.

    :param own: the log-density of the base at the draws, of batch shape.
    """
    batch = own.shape
    flat = value.expand(*batch, value.shape[-1]).reshape(-1, value.shape[-1])
    units = UnitDensities(action.group.finite, normals_of(base, action, batch), sites_of(action, flat))
    if not units.sets:
        return own.reshape(1, -1).double().expand(count + 1, -1)
    elements, log_tau = propose(units, count)
    if is_mean_field(base, action):
        moved = own.reshape(-1) + log_density_gain(units, elements)
    else:
        elements = elements.select((slice(None), torch.arange(len(flat), device=value.device).reshape(batch)))
        moved = log_prob_on_orbit(base, action, value, elements).reshape(count, -1)
    return torch.cat([own.reshape(1, -1), moved]).double() - log_tau.double() - log_order_of(units.group, units.sets)
