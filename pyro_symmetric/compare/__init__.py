"""Comparison of draws and their predictions: distances, tests, diagnosis, functional
diversity, scores.
"""

from pyro_symmetric.compare import scores
from pyro_symmetric.compare.diagnosis import Diagnosis, diagnose
from pyro_symmetric.compare.distances import marginal_wasserstein, mmd, mmd_test
from pyro_symmetric.compare.draws import independent_draws
from pyro_symmetric.compare.dynamics import SortingTracker, kendall_tau
from pyro_symmetric.compare.frames import common_frame, summary
from pyro_symmetric.compare.invariance import invariance_tests
from pyro_symmetric.compare.references import against_reference
from pyro_symmetric.compare.results import DistanceResult, SignificanceTest
from pyro_symmetric.compare.scores import (
    FunctionalCollapse,
    functional_collapse,
    mutual_information,
    pairwise_mutual_information,
    total_variation,
)
from pyro_symmetric.posterior.diagnostics import Check

__all__ = [
    "Check",
    "Diagnosis",
    "DistanceResult",
    "FunctionalCollapse",
    "SignificanceTest",
    "SortingTracker",
    "against_reference",
    "common_frame",
    "diagnose",
    "functional_collapse",
    "independent_draws",
    "invariance_tests",
    "kendall_tau",
    "marginal_wasserstein",
    "mmd",
    "mmd_test",
    "mutual_information",
    "pairwise_mutual_information",
    "scores",
    "summary",
    "total_variation",
]
