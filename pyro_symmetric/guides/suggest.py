"""The estimator that a symmetrised guide has by default."""

from __future__ import annotations

from typing import Any

from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from pyro_symmetric.distributions import OrbitEstimator
from pyro_symmetric.distributions.orbit import BaseKind, suggested
from pyro_symmetric.groups import Group
from pyro_symmetric.guides.gaussian import AutoGaussian, plain
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks


def usual_estimator(guide: AutoGuide, group: Group, *, training: bool = True) -> OrbitEstimator:
    """Choose the estimator for a guide and a finite group: exact where the sum is cheap, else matched units.

    :param training: whether it is evaluated once a step; otherwise for a report, where time matters less than nats.
    """
    guide = plain(guide)
    if guide.prototype_trace and layout_of(guide).action(group).nonlinear_sites:
        return suggested(group, "other", training)
    return suggested(group, _kind_of(guide), training)


def _kind_of(guide: Any) -> BaseKind:
    if isinstance(guide, AutoDiagonalNormal | AutoNormal) or (isinstance(guide, AutoGaussian) and guide.is_mean_field):
        return "mean field"
    if isinstance(guide, AutoUnitBlocks):
        return "unit blocks"
    if isinstance(guide, AutoGaussian | AutoMultivariateNormal | AutoLowRankMultivariateNormal):
        return "normal"
    return "other"
