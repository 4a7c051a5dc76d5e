"""Symmetrised distributions and the estimators of their log-density."""

from pyro_symmetric.distributions.exact import ExactOrbit
from pyro_symmetric.distributions.infonce import InfoNCE
from pyro_symmetric.distributions.orbit import ESTIMATORS, OrbitEstimator
from pyro_symmetric.distributions.sinkhorn_importance import SinkhornImportance
from pyro_symmetric.distributions.symmetrized import Symmetrized
from pyro_symmetric.distributions.unit_blocks import UnitBlocks

__all__ = [
    "ESTIMATORS",
    "ExactOrbit",
    "InfoNCE",
    "OrbitEstimator",
    "SinkhornImportance",
    "Symmetrized",
    "UnitBlocks",
]
