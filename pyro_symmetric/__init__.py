"""Posteriors with symmetries for Pyro.

Find the weight-space symmetries of a network, symmetrise a guide over them, align posteriors across them, sample
reference posteriors with many chains at once, and measure how close an approximation comes.
"""

from importlib.metadata import PackageNotFoundError, version

from pyro_symmetric import datasets
from pyro_symmetric.alignment import Alignment, BarrierCurve, GaussianWeights, align, loss_barrier, to_gaussian
from pyro_symmetric.compare import invariance_tests, marginal_wasserstein, mmd, scores
from pyro_symmetric.distributions import BetheBound, ExactOrbit, InfoNCE, SinkhornImportance, Symmetrized
from pyro_symmetric.guides import (
    AutoAligned,
    AutoFullRank,
    AutoLowRank,
    AutoMeanField,
    AutoSymmetrized,
    NotADensityError,
    SymmetrizedMeanField_ELBO,
    distinct,
    evidence,
    interpolate,
    load_guide,
    push_forward,
    sample_posterior,
    save_guide,
    suggest_estimator,
    swag,
)
from pyro_symmetric.mcmc import HMC, SGHMC, log_joint, sample
from pyro_symmetric.models import BayesianModel, CategoricalLikelihood, GaussianLikelihood, GaussianPrior
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry import (
    FiniteGroup,
    Permutation,
    PermutationGroup,
    SignGroup,
    WeightSymmetry,
    canonicalize,
    find_symmetry,
    minimal_mass,
)

try:
    __version__ = version("pyro-symmetric")
except PackageNotFoundError:  # a source tree that isn't installed
    __version__ = "0+unknown"

__all__ = [
    "HMC",
    "SGHMC",
    "Alignment",
    "AutoAligned",
    "AutoFullRank",
    "AutoLowRank",
    "AutoMeanField",
    "AutoSymmetrized",
    "BarrierCurve",
    "BayesianModel",
    "BetheBound",
    "CategoricalLikelihood",
    "ExactOrbit",
    "FiniteGroup",
    "GaussianLikelihood",
    "GaussianPrior",
    "GaussianWeights",
    "InfoNCE",
    "NotADensityError",
    "Permutation",
    "PermutationGroup",
    "Posterior",
    "SignGroup",
    "SinkhornImportance",
    "Symmetrized",
    "SymmetrizedMeanField_ELBO",
    "WeightSymmetry",
    "align",
    "canonicalize",
    "datasets",
    "distinct",
    "evidence",
    "find_symmetry",
    "interpolate",
    "invariance_tests",
    "load_guide",
    "log_joint",
    "loss_barrier",
    "marginal_wasserstein",
    "minimal_mass",
    "mmd",
    "push_forward",
    "sample",
    "sample_posterior",
    "save_guide",
    "scores",
    "suggest_estimator",
    "swag",
    "to_gaussian",
]
