"""The estimator of the symmetrised log-density that suits a guide and a group, and why."""

from __future__ import annotations

from typing import Any, get_args

from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from pyro_symmetric import arguments
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import Suggestion
from pyro_symmetric.distributions.orbit import BaseKind, suggested
from pyro_symmetric.groups import Group, group_of
from pyro_symmetric.guides.gaussian import AutoGaussian, plain
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.guides.modes import AutoModes
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks


def suggest_estimator(guide: Any, group: Group | Symmetry, *, training: bool = True) -> Suggestion:
    """The estimator that suits a guide and a group, and why, as the estimators themselves suggest it.

    >>> base = pyro.infer.autoguide.AutoDiagonalNormal
    >>> for size in (5, 64):
    ...     group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(size, 2)})
    ...     print(ps.suggest_estimator(base, group).estimator)
    ExactOrbit()
    SinkhornImportance(K=4)

    :param guide: the guide to symmetrise, or its class. One that is set up says, too, whether the group moves values
        that lie on a simplex, where no sum over the group is cheap.
    :param group: what to average over, or a symmetry.
    :param training: whether it is evaluated once a step; otherwise for a report, where time matters less than nats.
    """
    given = plain(guide)
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, AutoGuide):
        raise TypeError(f"guide is {arguments.shown(guide)}; it must be an automatic guide, or the class of one")
    arguments.flag("training", training)
    group = group_of(group).finite
    if isinstance(given, AutoGuide) and given.prototype_trace and layout_of(given).action(group).nonlinear_sites:
        return suggested(group, "other", training)
    parts = given.modes if isinstance(given, AutoModes) else [given]
    return suggested(group, max(map(_kind_of, parts), key=get_args(BaseKind).index), training)


def _kind_of(guide: AutoGuide | type[AutoGuide]) -> BaseKind:
    """The kind of base that one mode is."""
    kind = guide if isinstance(guide, type) else type(guide)
    if issubclass(kind, AutoDiagonalNormal | AutoNormal) or (isinstance(guide, AutoGaussian) and guide.is_mean_field):
        return "mean field"
    if issubclass(kind, AutoUnitBlocks):
        return "unit blocks"
    if issubclass(kind, AutoGaussian | AutoMultivariateNormal | AutoLowRankMultivariateNormal):
        return "normal"
    return "other"
