"""How close two sets of weights, or their predictions, are: distances, invariance tests, diversity, scores."""

from pyro_symmetric.compare import scores
from pyro_symmetric.compare.diversity import (
    mean_entropy,
    mutual_information,
    pairwise_mutual_information,
    predictive_entropy,
)
from pyro_symmetric.compare.invariance import FactorInvariance, InvarianceResult, invariance_tests
from pyro_symmetric.compare.mmd import LayerMMD, MMDResult, mmd
from pyro_symmetric.compare.wasserstein import LayerWasserstein, WassersteinResult, marginal_wasserstein

__all__ = [
    "FactorInvariance",
    "InvarianceResult",
    "LayerMMD",
    "LayerWasserstein",
    "MMDResult",
    "WassersteinResult",
    "invariance_tests",
    "marginal_wasserstein",
    "mean_entropy",
    "mmd",
    "mutual_information",
    "pairwise_mutual_information",
    "predictive_entropy",
    "scores",
]
