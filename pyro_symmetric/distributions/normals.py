"""Independent normals in place of a base density, exact or fitted, site by site: what units are matched by.

Estimators that match units need the log-density of one unit's weights under another's factors. A mean-field base gives
it exactly. Any other base (full-rank, low-rank, a flow), and sites whose constrained values are permuted (a simplex),
give it approximately, by the normals of the same means and deviations; proposals made from them are as valid, bounds
included, only less sharp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyro_symmetric.groups.action import Action
from pyro_symmetric.weights import Weights

# Draws from which moments are fitted if a base can't tell them.
FIT_DRAWS = 128


@dataclass(frozen=True)
class Normals:
    """Independent normal densities of weights.

    :param loc: site -> means, ``(N, *view_shape)``, or ``(1, *view_shape)`` if all draws share them.
    :param scale: site -> deviations, likewise.
    """

    loc: Weights
    scale: Weights

    def each(self, change: Callable[[Tensor], Tensor]) -> Normals:
        """All means and deviations, changed."""
        return Normals(*({site: change(value) for site, value in part.items()} for part in (self.loc, self.scale)))

    def rows(self, part: slice, count: int) -> Normals:
        """For some of the ``N`` draws, stacked ``count`` times; unchanged if all draws share them."""
        return self.each(lambda v: v if len(v) == 1 else v[part].repeat(count, *([1] * (v.dim() - 1))))


def mean_field_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    """Means and deviations of a base that is a product of normals; None for any other."""
    while isinstance(base, Independent):
        base = base.base_dist
    return (base.loc, base.scale) if isinstance(base, Normal) else None


def is_mean_field(base: Distribution, action: Action) -> bool:
    """Whether weights are independent normals that elements move themselves, so that unit scores are exact."""
    return not action.nonlinear_sites and mean_field_moments(base) is not None


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Flat vectors -> what the group moves, by site, in the group's view: constrained values if it moves those."""
    return action.group.viewed(action.constrain(flat) if action.nonlinear_sites else action.unflatten(flat))


def normals_of(base: Distribution, action: Action, batch: Sequence[int]) -> Normals:
    """The base as independent normals of what the group moves.

    :param batch: batch shape of the draws; the moments are laid out for its ``N`` draws unless all share them.
    """
    if action.nonlinear_sites:
        return _fitted_sites(base, action, batch)
    loc, scale = (_laid_out(moment, batch, 1) for moment in mean_field_moments(base) or _moments(base))
    return Normals(sites_of(action, loc), sites_of(action, scale))


@torch.no_grad()
def _moments(base: Distribution) -> tuple[Tensor, Tensor]:
    try:
        return base.mean, base.stddev
    except NotImplementedError:
        draws = base.sample(torch.Size([FIT_DRAWS]))
        return draws.mean(0), draws.std(0)


@torch.no_grad()
def _fitted_sites(base: Distribution, action: Action, batch: Sequence[int]) -> Normals:
    flat = base.sample(torch.Size([FIT_DRAWS]))
    draws, lead = sites_of(action, flat), flat.dim() - 1
    tiny = torch.finfo(flat.dtype).tiny ** 0.25  # its inverse square is finite
    return Normals(
        {site: _laid_out(value.mean(0), batch, value.dim() - lead) for site, value in draws.items()},
        {site: _laid_out(value.std(0).clamp(min=tiny), batch, value.dim() - lead) for site, value in draws.items()},
    )


def _laid_out(moment: Tensor, batch: Sequence[int], event_dims: int) -> Tensor:
    """``base batch + event`` -> ``(1 or N) + event``."""
    event = moment.shape[moment.dim() - event_dims :]
    if moment.dim() == event_dims:
        return moment[None]
    return moment.expand(*batch, *event).reshape(-1, *event)
