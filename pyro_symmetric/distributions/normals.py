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

from pyro_symmetric.distributions.orbit import Action
from pyro_symmetric.symmetry.finite import SignedFlatAction
from pyro_symmetric.symmetry.flat import FlatAction
from pyro_symmetric.symmetry.weights import Weights

# Draws from which moments are fitted where a base can't tell them.
FIT_DRAWS = 128


@dataclass(frozen=True)
class Normals:
    """Independent normal densities of weights.

    :param loc: site -> means, ``(N, *site_shape)``, or ``(1, *site_shape)`` where all draws share them.
    :param scale: site -> deviations, likewise.
    """

    loc: Weights
    scale: Weights

    def double(self) -> Normals:
        """In float64."""
        return Normals({k: v.double() for k, v in self.loc.items()}, {k: v.double() for k, v in self.scale.items()})

    def rows(self, part: slice) -> Normals:
        """For some of the ``N`` draws; unchanged where all draws share them."""

        def some(weights: Weights) -> Weights:
            return {k: v if len(v) == 1 else v[part] for k, v in weights.items()}

        return Normals(some(self.loc), some(self.scale))

    def repeated(self, count: int) -> Normals:
        """For ``count`` stacks of the same ``N`` draws, flattened; unchanged where all draws share them."""

        def repeat(weights: Weights) -> Weights:
            return {k: v if len(v) == 1 else v.repeat(count, *([1] * (v.dim() - 1))) for k, v in weights.items()}

        return Normals(repeat(self.loc), repeat(self.scale))


def mean_field_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    """Means and deviations of a base that is a product of normals; None for any other."""
    while isinstance(base, Independent):
        base = base.base_dist
    return (base.loc, base.scale) if isinstance(base, Normal) else None


def is_mean_field(base: Distribution, action: Action) -> bool:
    """Whether weights are independent normals and the group merely permutes them, so that unit densities are exact."""
    return isinstance(action, FlatAction) and mean_field_moments(base) is not None


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Flat vectors -> what the group permutes, by site: constrained values where the action acts on those."""
    if isinstance(action, FlatAction | SignedFlatAction):
        return action.unflatten(flat)
    return action.constrain(flat)  # type: ignore[attr-defined]


def normals_of(base: Distribution, action: Action, batch: Sequence[int]) -> Normals:
    """The base as independent normals of what the group permutes.

    :param batch: batch shape of the draws; the moments are laid out for its ``N`` draws unless all share them.
    """
    if not isinstance(action, FlatAction | SignedFlatAction):
        return _fitted_sites(base, action, batch)
    loc, scale = (_laid_out(moment, batch, 1) for moment in mean_field_moments(base) or _moments(base))
    return Normals(action.unflatten(loc), action.unflatten(scale))


@torch.no_grad()
def _moments(base: Distribution) -> tuple[Tensor, Tensor]:
    try:
        return base.mean, base.stddev
    except NotImplementedError:
        draws = base.sample(torch.Size([FIT_DRAWS]))
        return draws.mean(0), draws.std(0)


@torch.no_grad()
def _fitted_sites(base: Distribution, action: Action, batch: Sequence[int]) -> Normals:
    draws = sites_of(action, base.sample(torch.Size([FIT_DRAWS])))
    event = {site: len(action.group.site_shapes[site]) for site in draws}
    tiny = torch.finfo(next(iter(draws.values())).dtype).tiny ** 0.25  # its inverse square is finite
    return Normals(
        {site: _laid_out(value.mean(0), batch, event[site]) for site, value in draws.items()},
        {site: _laid_out(value.std(0).clamp(min=tiny), batch, event[site]) for site, value in draws.items()},
    )


def _laid_out(moment: Tensor, batch: Sequence[int], event_dims: int) -> Tensor:
    """``base batch + event`` -> ``(1 or N) + event``."""
    event = moment.shape[moment.dim() - event_dims :]
    if moment.dim() == event_dims:
        return moment[None]
    return moment.expand(*batch, *event).reshape(-1, *event)
