"""How close two sets of weights, or their predictions, are: distances, tests, diversity, dynamics, scores."""

from pyro_symmetric.compare import scores
from pyro_symmetric.compare.check import CheckResult, Finding, check
from pyro_symmetric.compare.convergence import ConvergenceResult, SpaceConvergence, convergence
from pyro_symmetric.compare.diversity import (
    FunctionalCollapse,
    functional_collapse,
    mean_entropy,
    mutual_information,
    pairwise_mutual_information,
    predictive_entropy,
)
from pyro_symmetric.compare.dynamics import (
    EquivalentModes,
    SortingTracker,
    equivalent_modes,
    excess_mass,
    kendall_tau,
)
from pyro_symmetric.compare.independence import independent_draws
from pyro_symmetric.compare.invariance import FactorInvariance, InvarianceResult, invariance_tests
from pyro_symmetric.compare.mmd import LayerMMD, MMDResult, mmd
from pyro_symmetric.compare.orbit import OrbitMMD, orbit_mmd
from pyro_symmetric.compare.sliced import SlicedDistance, SlicedResult, sliced_wasserstein
from pyro_symmetric.compare.summary import summary
from pyro_symmetric.compare.two_sample import MMDTest, mmd_test
from pyro_symmetric.compare.wasserstein import LayerWasserstein, WassersteinResult, marginal_wasserstein

__all__ = [
    "CheckResult",
    "ConvergenceResult",
    "EquivalentModes",
    "FactorInvariance",
    "Finding",
    "FunctionalCollapse",
    "InvarianceResult",
    "LayerMMD",
    "LayerWasserstein",
    "MMDResult",
    "MMDTest",
    "OrbitMMD",
    "SlicedDistance",
    "SlicedResult",
    "SortingTracker",
    "SpaceConvergence",
    "WassersteinResult",
    "check",
    "convergence",
    "equivalent_modes",
    "excess_mass",
    "functional_collapse",
    "independent_draws",
    "invariance_tests",
    "kendall_tau",
    "marginal_wasserstein",
    "mean_entropy",
    "mmd",
    "mmd_test",
    "mutual_information",
    "orbit_mmd",
    "pairwise_mutual_information",
    "predictive_entropy",
    "scores",
    "sliced_wasserstein",
    "summary",
]
