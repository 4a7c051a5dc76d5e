"""The symmetrised log-density by importance sampling over the group, with proposals made by matching units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions.density_gain import log_density_gain
from pyro_symmetric.distributions.modes import Modes
from pyro_symmetric.distributions.normals import is_mean_field, normals_of, sites_of
from pyro_symmetric.distributions.orbit import Bound, OrbitEstimator, Suggestion, log_prob_on_orbit
from pyro_symmetric.distributions.proposal import propose
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.distributions.unit_sets import log_order_of
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.group import Group


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
    The default suits training; take 16 or more to report.

    *Gradients* are those of :math:`\log \bar q`, not of the estimate ``L`` as it stands. With the proposals held
    fixed, ``∇L`` is the mean of :math:`\nabla \log q(g_k \cdot w)` by the terms' shares of the sum, which are
    :math:`1/(K+1)` each if :math:`\tau` is exact. A proposal then gives :math:`\nabla \log \bar q(w)` in expectation,
    at any ``w``; the identity gives :math:`\nabla \log q(w)`, as it is no free draw, but moves with the path of
    ``w``. With the gain :math:`I = \mathbb E_q[\log q(w) - \log \bar q(w)]`,

    .. math:: \mathbb E\, \nabla L = \nabla\, \mathbb E_q \log \bar q(w) + \frac{\nabla I}{K+1},
       \qquad \mathbb E\, \frac{(K+1) \nabla L - \nabla \log q(w)}{K} = \nabla\, \mathbb E_q \log \bar q(w),

    and the second is what is used, beside the value of ``L``: half of the gain's gradient would be lost at ``K = 1``, a
    fifth at ``K = 4``, nothing as ``K`` grows. What is unbiased for what:

    * the value, for the bound, with any :math:`\tau`;
    * the gradient, for that of :math:`\mathbb E_q \log \bar q`, if :math:`\tau` is exact;
    * the part of the gradient that goes through the base's parameters at a fixed draw: its mean is zero, as it should
      be, with any :math:`\tau`. Which of the ``K + 1`` elements is the draw's own has their shares as probabilities, so
      that both terms average :math:`\partial \log q(w)`. Sticking the landing, which leaves that part out, changes no
      mean.

    Mean-field bases come close to that: of :math:`\nabla I`, up to 0.02 is lost on one layer, with signs and for
    mixtures, up to 0.05 on two layers, and more only if :math:`\nabla I` is next to nothing. If proposals are
    poor, more stays lost, as the identity takes most of the sum and leaves the gradient of ``log q``. On four
    overlapping units at ``K`` = 1, 4, 16 that is 0.13, 0.08, 0.04 for a low-rank base, whose units are matched by their
    means and deviations alone, and 0.31, 0.20, 0.10 for a full-rank one (``benchmarks/performance/gradient_bias.py``);
    a low-rank base of another problem lost 0.34 at ``K = 4``. If training such a base, take a larger ``K``, or
    ``ExactOrbit`` if the group allows.

    Cost: three products of ``n × n`` by ``n × (weights of a unit)`` matrices a set, ``K`` matchings of ``n`` units,
    and ``K`` densities of those weights that the matchings move; if two sets share a site (two hidden layers or
    more), ``2 K`` such products. Memory: ``samples · K · n²`` and the moved weights.

    Signs of units (odd activations, factor analysis) are drawn after the matching, which sums over them. Units that
    hold others (heads of attention, groups of a convolution) are matched by what matching those inside them would be
    worth, and those inside follow. Base distributions that aren't mean-field are matched by their means and deviations.

    Of a mixture (:class:`~pyro_symmetric.distributions.Modes`) each component is matched by itself: ``K + 1`` elements
    for each, the identity among those of the component that made the draw. Drawing the component that made it, too,
    from its posterior given the draw, keeps the bound; as all cases are at hand, they are averaged over. (Each
    component's own bound wouldn't do: at a draw of another component the identity is no draw from the posterior of the
    element.) With exact proposals all cases agree, component ``k`` has the share
    :math:`R_k = \pi_k \bar q_k(w) / \bar q(w)` of each, and what ``∇L`` has too much is
    :math:`\sum_k r_k R_k \nabla (\log q_k - \log \bar q_k) / (K+1)`, with :math:`r_k` the probability that ``k`` made
    the draw. In that case only the sum over component ``k`` holds the identity, and it gets the gradient above.

    Reference: the bound, Sobolev & Vetrov 2019 (arXiv 1905.03290); the scaling, Sinkhorn & Knopp 1967.

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
        own = base.log_prob(value)
        if not action.group.finite.sites or own.numel() == 0:
            return own
        with torch.autocast(value.device.type, enabled=False):  # differences of large numbers need all digits
            if isinstance(base, Modes):
                total = self._log_sum_of_modes(base, action, value, own)
            else:
                total = _log_sum_with_identity(_log_ratios(base, action, value, own, self.K))
        return (total - math.log(self.K + 1)).to(own.dtype).reshape(own.shape)

    def _log_sum_of_modes(self, base: Modes, action: Action, value: Tensor, own: Tensor) -> Tensor:
        r""":math:`\sum_k r_k(w) \log S_k`, ``S_k`` the sum as it is if component ``k`` made the draw, ``(N,)``."""
        made, others = [], []
        for component in base.components:
            mine = component.log_prob(value).expand(own.shape)
            ratios = _log_ratios(component, action, value, mine, self.K + 1)
            made.append(_log_sum_with_identity(ratios[:-1]))  # the identity, and K proposals
            others.append(torch.logsumexp(ratios[1:], 0))  # K + 1 proposals
        known = torch.stack(others).repeat(len(made), 1, 1)
        this = torch.eye(len(made), dtype=torch.bool, device=own.device).unsqueeze(-1)
        cases = torch.where(this, torch.stack(made), known)  # (who made it, component, N)
        log_sums = torch.logsumexp(cases + base.log_weights.double().unsqueeze(-1), 1)
        # Held fixed in gradients, like the proposals: if those are exact, all cases agree.
        responsibilities = base.responsibilities(value).detach().expand(*own.shape, -1).reshape(-1, len(made))
        return (responsibilities.double().mT * log_sums).sum(0)

    @classmethod
    def suggested(cls, group: Group, mean_field: bool, training: bool) -> Suggestion:
        reason = (
            f"the group has exp({group.log_order():.1f}) elements, too many to add up; elements proposed by matching "
            f"units find most of those nats at any width, of which InfoNCE(K) can see no more than log(K + 1)"
        )
        if not mean_field:
            reason += "; this base is matched by its means and deviations, so take a larger K if units overlap"
        return Suggestion(cls(4 if training else 16), reason)


def _log_sum_with_identity(log_ratios: Tensor) -> Tensor:
    """The log of the sum ``S`` of the identity's ratio and ``K`` others, ``(N,)``, with the gradient of
    ``((K+1) log S - log q(w)) / K``: see :class:`SinkhornImportance`."""
    total = torch.logsumexp(log_ratios, 0)
    # Infinite if the draw has no density under the base: a value of zero all the same.
    excess = ((total - log_ratios[0]) / (len(log_ratios) - 1)).nan_to_num()
    return total + (excess - excess.detach())


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
