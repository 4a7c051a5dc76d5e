"""Guides that know the symmetries of their model; all plug into stock :class:`~pyro.infer.SVI`."""

from pyro_symmetric.guides.aligned import AutoAligned, push_forward
from pyro_symmetric.guides.base import WeightsGuide, distinct, sample_posterior
from pyro_symmetric.guides.bounds import Evidence, evidence
from pyro_symmetric.guides.files import load_guide, save_guide
from pyro_symmetric.guides.gaussian import AutoFullRank, AutoLowRank, AutoMeanField
from pyro_symmetric.guides.modes import AutoModes
from pyro_symmetric.guides.modes_elbo import Modes_ELBO
from pyro_symmetric.guides.objectives import SymmetrizedMeanField_ELBO
from pyro_symmetric.guides.one_sided import NotADensityError
from pyro_symmetric.guides.suggest import Suggestion, suggest_estimator
from pyro_symmetric.guides.swag import swag
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.guides.transport import barycentre, interpolate, wasserstein

__all__ = [
    "AutoAligned",
    "AutoFullRank",
    "AutoLowRank",
    "AutoMeanField",
    "AutoModes",
    "AutoSymmetrized",
    "Evidence",
    "Modes_ELBO",
    "NotADensityError",
    "Suggestion",
    "SymmetrizedMeanField_ELBO",
    "WeightsGuide",
    "barycentre",
    "distinct",
    "evidence",
    "interpolate",
    "load_guide",
    "push_forward",
    "sample_posterior",
    "save_guide",
    "suggest_estimator",
    "swag",
    "wasserstein",
]
