"""Symmetrised distributions and the estimators of their log-density."""

from pyro_symmetric.distributions.estimators import (
    ExactOrbit,
    InfoNCE,
    OrbitEstimator,
    SinkhornImportance,
    usual_estimator,
)
from pyro_symmetric.distributions.symmetrized import Symmetrized
from pyro_symmetric.distributions.unit_blocks import UnitBlocks

__all__ = [
    "ExactOrbit",
    "InfoNCE",
    "OrbitEstimator",
    "SinkhornImportance",
    "Symmetrized",
    "UnitBlocks",
    "usual_estimator",
]
