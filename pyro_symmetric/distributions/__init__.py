"""Symmetrised distributions and the estimators of their log-density."""

from pyro_symmetric.distributions.constrained import ConstrainedAction
from pyro_symmetric.distributions.orbit import ExactOrbit, InfoNCE, OrbitEstimator
from pyro_symmetric.distributions.symmetrized import Symmetrized

__all__ = ["ConstrainedAction", "ExactOrbit", "InfoNCE", "OrbitEstimator", "Symmetrized"]
