"""Independent normals in place of a base density, exact or fitted, site by site: what units are matched by.

Estimators that match units need the log-density of one unit's weights under another's factors. A mean-field base gives
it exactly. Any other base (full-rank, low-rank, a flow), and sites whose constrained values are permuted (a simplex),
give it approximately, by the normals of the same means and deviations; proposals made from them are as valid, bounds
included, only less sharp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyro_symmetric.groups.action import Action
from pyro_symmetric.weights import Weights

# Draws to which normals are fitted if a base can't tell its moments, or if constrained values are permuted.
FIT_DRAWS = 128


@dataclass(frozen=True)
class Normals:
    """Independent normal densities of weights.

    :param loc: site -> means, ``(N, *view_shape)``, or ``(1, *view_shape)`` if all draws share them.
    :param scale: site -> deviations, likewise.
    """

    loc: Weights
    scale: Weights


def mean_field_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    """Means and deviations of a base that is a product of normals; None for any other."""
    while isinstance(base, Independent):
        base = base.base_dist
    return (base.loc, base.scale) if isinstance(base, Normal) else None


def is_mean_field(base: Distribution, action: Action) -> bool:
    """True if weights are independent normals that elements move themselves, so that unit densities are exact."""
    return not action.nonlinear_sites and mean_field_moments(base) is not None


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Flat vectors -> what the group moves, by site, in the group's view: constrained values if it moves those."""
    return action.group.viewed(action.constrain(flat) if action.nonlinear_sites else action.unflatten(flat))


def normals_of(base: Distribution, action: Action, batch: Sequence[int]) -> Normals:
    """The base as independent normals of what the group moves.

    :param batch: batch shape of the draws; the moments are laid out for its ``N`` draws unless all share them.
    """
    moments = None if action.nonlinear_sites else mean_field_moments(base) or _known_moments(base)
    if moments is not None:
        loc, scale = (sites_of(action, laid_out(moment, base, batch)) for moment in moments)
        return Normals(loc, scale)
    with torch.no_grad():
        draws = sites_of(action, laid_out(base.sample(torch.Size([FIT_DRAWS])), base, batch))
    tiny = torch.finfo(next(iter(draws.values())).dtype).tiny ** 0.25  # its inverse square is finite
    return Normals(
        {site: value.mean(0) for site, value in draws.items()},
        {site: value.std(0).clamp(min=tiny) for site, value in draws.items()},
    )


@torch.no_grad()
def _known_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    try:
        return base.mean, base.stddev
    except NotImplementedError:
        return None


def laid_out(vectors: Tensor, base: Distribution, batch: Sequence[int]) -> Tensor:
    """``lead + base batch + (D,)`` -> ``lead + (1 or N, D)``."""
    lead = vectors.dim() - 1 - len(base.batch_shape)
    if not base.batch_shape:
        return vectors.unsqueeze(lead)
    return vectors.expand(*vectors.shape[:lead], *batch, vectors.shape[-1]).flatten(lead, -2)
