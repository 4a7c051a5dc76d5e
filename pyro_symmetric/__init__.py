"""Posteriors with symmetries for Pyro.

Find the weight-space symmetries of a network, symmetrise a guide over them, align posteriors across them, sample
reference posteriors with many chains at once, and measure how close an approximation comes.
"""

from importlib.metadata import PackageNotFoundError, version

from pyro_symmetric import datasets
from pyro_symmetric.alignment import (
    ActivationCost,
    Alignment,
    BarrierCurve,
    Frame,
    GaussianWeights,
    align,
    align_many,
    loss_barrier,
    relabel,
    to_gaussian,
)
from pyro_symmetric.checkpoints import read_checkpoints, write_checkpoints
from pyro_symmetric.compare import (
    SortingTracker,
    check,
    convergence,
    equivalent_modes,
    excess_mass,
    functional_collapse,
    invariance_tests,
    marginal_wasserstein,
    mmd,
    mmd_test,
    orbit_mmd,
    scores,
    sliced_wasserstein,
)
from pyro_symmetric.distributions import BetheBound, ExactOrbit, InfoNCE, SinkhornImportance, Symmetrized
from pyro_symmetric.ensembles import ensemble, load_ensemble
from pyro_symmetric.guides import (
    AutoAligned,
    AutoFullRank,
    AutoLowRank,
    AutoMeanField,
    AutoModes,
    AutoSymmetrized,
    Modes_ELBO,
    NotADensityError,
    SymmetrizedMeanField_ELBO,
    barycentre,
    distinct,
    evidence,
    interpolate,
    load_guide,
    push_forward,
    sample_posterior,
    save_guide,
    suggest_estimator,
    swag,
    wasserstein,
)
from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, SGLD, ChEES, CyclicalSG, log_joint, pSGLD, sample
from pyro_symmetric.models import BayesianModel, CategoricalLikelihood, GaussianLikelihood, GaussianPrior
from pyro_symmetric.predict import predict
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
    "NUTS",
    "SGHMC",
    "SGLD",
    "ActivationCost",
    "Alignment",
    "AutoAligned",
    "AutoFullRank",
    "AutoLowRank",
    "AutoMeanField",
    "AutoModes",
    "AutoSymmetrized",
    "BarrierCurve",
    "BayesianModel",
    "BetheBound",
    "CategoricalLikelihood",
    "ChEES",
    "CyclicalSG",
    "ExactOrbit",
    "FiniteGroup",
    "Frame",
    "GaussianLikelihood",
    "GaussianPrior",
    "GaussianWeights",
    "InfoNCE",
    "Modes_ELBO",
    "NotADensityError",
    "Permutation",
    "PermutationGroup",
    "Posterior",
    "SignGroup",
    "SinkhornImportance",
    "SortingTracker",
    "Symmetrized",
    "SymmetrizedMeanField_ELBO",
    "WeightSymmetry",
    "align",
    "align_many",
    "barycentre",
    "canonicalize",
    "check",
    "convergence",
    "datasets",
    "distinct",
    "ensemble",
    "equivalent_modes",
    "evidence",
    "excess_mass",
    "find_symmetry",
    "functional_collapse",
    "interpolate",
    "invariance_tests",
    "load_ensemble",
    "load_guide",
    "log_joint",
    "loss_barrier",
    "marginal_wasserstein",
    "minimal_mass",
    "mmd",
    "mmd_test",
    "orbit_mmd",
    "pSGLD",
    "predict",
    "push_forward",
    "read_checkpoints",
    "relabel",
    "sample",
    "sample_posterior",
    "save_guide",
    "scores",
    "sliced_wasserstein",
    "suggest_estimator",
    "swag",
    "to_gaussian",
    "wasserstein",
    "write_checkpoints",
]
