"""The estimator of the symmetrised log-density that suits a guide and a group, and why."""

from __future__ import annotations

from typing import Any

from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoNormal

from pyro_symmetric import arguments
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import Suggestion
from pyro_symmetric.distributions.orbit import suggested
from pyro_symmetric.groups import Group, group_of
from pyro_symmetric.guides.gaussian import AutoGaussian, plain


def suggest_estimator(guide: Any, group: Group | Symmetry, *, training: bool = True) -> Suggestion:
    """The estimator that suits a guide and a group, and why, as the estimators themselves suggest it.

    >>> suggest_estimator(AutoDiagonalNormal, find_symmetry(net, x)).reason

    :param guide: the guide to symmetrise, or its class.
    :param group: what to average over, or a symmetry.
    :param training: whether it is evaluated once a step; otherwise for a report, where time matters less than nats.
    """
    given = plain(guide)
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, AutoGuide):
        raise TypeError(f"guide is {arguments.shown(guide)}; it must be an automatic guide, or the class of one")
    arguments.flag("training", training)
    mean_field = isinstance(given, AutoGaussian) and given.is_mean_field
    mean_field = mean_field or issubclass(kind, AutoDiagonalNormal | AutoNormal)
    return suggested(group_of(group).finite, mean_field, training)
