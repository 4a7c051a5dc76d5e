"""Symmetrised distributions and the estimators of their log-density."""

from pyro_symmetric.distributions.estimators import (
    ExactOrbit,
    InfoNCE,
    OrbitEstimator,
    SinkhornImportance,
)
from pyro_symmetric.distributions.rotations import RotationImportance, usual_estimator
from pyro_symmetric.distributions.symmetrized import Symmetrized
from pyro_symmetric.distributions.unit_blocks import UnitBlocks

__all__ = [
    "ExactOrbit",
    "InfoNCE",
    "OrbitEstimator",
    "RotationImportance",
    "SinkhornImportance",
    "Symmetrized",
    "UnitBlocks",
    "usual_estimator",
]
