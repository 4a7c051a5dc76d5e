"""Whole comparisons: fit one Bayesian network several ways and report how close each
comes to a reference posterior.
"""

from pyro_symmetric.study import chains, networks, variational  # noqa: F401 (each registers its methods)
from pyro_symmetric.study.compare import Study, run_study
from pyro_symmetric.study.methods import METHODS, Fit, Method, register
from pyro_symmetric.study.problem import StudySettings

__all__ = [
    "METHODS",
    "Fit",
    "Method",
    "Study",
    "StudySettings",
    "register",
    "run_study",
]
