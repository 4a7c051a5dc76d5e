r"""The distance of a guide's units from their priors, which tells whether symmetrised
training would change the fit.

With few rows, a mean-field guide of many units leaves them at the prior: a unit that
leaves it costs :math:`\mathrm{KL}(q_u \,\|\, p_u)`. The symmetrised ELBO pays up to
:math:`\log n` of that back for each of ``n`` units, so that it is worth having if the
data gain less than the KL, but more than the KL without :math:`\log n`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import (
    IndependentTransform,
    Normal,
    Transform,
    TransformedDistribution,
    kl_divergence,
)

from pyro_symmetric._process import forked
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import InfoNCE
from pyro_symmetric.distributions.unit_blocks import in_blocks
from pyro_symmetric.groups import Group, group_of
from pyro_symmetric.guides.base import action_on
from pyro_symmetric.guides.gaussian import plain_posterior, unit_positions

AT_PRIOR = 2.0  # nats of a unit's KL, below which it is as good as at the prior
CLOSE = 2.0  # times log n: units of a larger KL stay live, whatever the objective
DRAWS = 256  # for priors that aren't normal


@dataclass(frozen=True, eq=False)
class UnitDivergences:
    """KL divergences of a guide's units from their priors, in nats, shown in one line.

    :param nats: the divergence of every unit, ``(units,)`` a set of them.
    :param symmetrized: whether the guide was trained on the symmetrised ELBO.
    :param share: what symmetrising the guide adds to its ELBO, over ``log |G|``; NaN if
        it wasn't estimated.
    """

    nats: tuple[Tensor, ...]
    symmetrized: bool = False
    share: float = math.nan

    @property
    def at_prior(self) -> int:
        """The number of units within 2 nats of their prior."""
        return int((torch.cat(self.nats) < AT_PRIOR).sum())

    def __repr__(self) -> str:
        units = torch.cat(self.nats)
        live = units[units >= AT_PRIOR]
        verb = "is" if self.at_prior == 1 else "are"
        line = f"{self.at_prior} of {len(units)} units {verb} at the prior"
        if len(live):
            line += f", the others {float(live.mean()):.3g} nats from it"
        line += f"; log n = {math.log(max(map(len, self.nats))):.1f}"
        if not math.isnan(self.share):
            line += f", I / log|G| = {self.share:.2f}"
        if not self.symmetrized and any(map(_collapsed, self.nats)):
            line += ": train on the symmetrised ELBO"
        return line


def _collapsed(nats: Tensor) -> bool:
    """Return whether most units are at the prior, and the others not far from it."""
    live = nats[nats >= AT_PRIOR]
    far = live.mean() > CLOSE * math.log(len(nats))  # false if none is live
    return 2 * len(live) < len(nats) and not far


@torch.no_grad()
def unit_divergences(
    guide: AutoGuide,
    symmetry: Group | Symmetry,
    priors: Sequence[Mapping[str, Any]] = (),
) -> UnitDivergences:
    """Return the KL divergences of a set-up Gaussian guide's units from their priors.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> guide = ps.AutoUnitBlocks(model, group, init_scale=1.0).setup()
    >>> ps.guides.unit_divergences(guide, group)
    3 of 3 units are at the prior; log n = 1.1: train on the symmetrised ELBO

    They are exact for normal priors, and by draws for others of independent entries. A
    weight between two layers counts for the unit that it enters. Correlations within
    the guide, and sites whose entries aren't independent, are left out: the divergences
    are at least those shown.

    :param priors: site -> distribution, at one or more draws of other sites; by default
        at the guide's set-up, which is exact if the priors depend on no other site.
    :raises TypeError: if the guide isn't Gaussian, or no units are moved.
    """
    normal = in_blocks(plain_posterior(guide))
    action = action_on(guide, group_of(symmetry).finite)
    nodes = guide.prototype_trace.nodes  # type: ignore[union-attr]
    loc = action.layout.unflatten(normal.loc)
    scale = action.layout.unflatten(normal.stddev)
    nats = {}
    for site, transform in action.layout.transforms.items():
        entries = Normal(loc[site], scale[site])
        site_priors = [by_site[site] for by_site in priors] or [nodes[site]["fn"]]
        divergences = [_of_entries(entries, prior, transform) for prior in site_priors]
        nats[site] = torch.stack(divergences).mean(0)
    by_entry = action.layout.flatten(nats)
    sets = [by_entry[places].sum(-1) for places in unit_positions(action)]
    if not sets:
        raise TypeError("the group moves no units whose coordinates are their own")
    estimator = getattr(guide, "estimator", None)
    symmetrized = estimator is not None and guide.is_fresh
    return UnitDivergences(tuple(sets), symmetrized and estimator != InfoNCE(0))


def _of_entries(guide: Normal, prior: Any, transform: Transform) -> Tensor:
    """Return the divergence of every unconstrained entry of a site from its prior."""
    while hasattr(prior, "base_dist") and not isinstance(
        prior, TransformedDistribution
    ):
        prior = prior.base_dist
    if prior.event_shape:
        return torch.zeros_like(guide.loc)
    if isinstance(prior, Normal):
        return kl_divergence(guide, prior).expand_as(guide.loc)
    while isinstance(transform, IndependentTransform):  # of to_event
        transform = transform.base_transform
    with forked(0):
        draws = guide.sample((DRAWS,))
    values = transform(draws)
    log_prior = prior.log_prob(values) + transform.log_abs_det_jacobian(draws, values)
    return (guide.log_prob(draws) - log_prior).mean(0)
