"""Posteriors with symmetries for Pyro.

Find the weight-space symmetries of a network, symmetrise a guide over them, align posteriors across them, sample
reference posteriors with many chains at once, and measure how close an approximation comes.

The names, by purpose; ``help(pyro_symmetric.find_symmetry)`` explains one:

Symmetries of networks and models
    find_symmetry verify completeness register_rule verify_model check_priors Symmetry
    Group group_of Units Axis Element Action

Canonical forms
    canonicalize minimal_mass sorting_permutation

Models
    BayesianModel GaussianPrior CategoricalLikelihood GaussianLikelihood HeteroscedasticLikelihood
    log_joint

Guides
    AutoSymmetrized symmetrize Symmetrized SinkhornImportance ExactOrbit InfoNCE
    AutoUnitBlocks AutoGaussian
    sample_posterior save_guide load_guide

Evidence
    evidence

Samplers
    sample NUTS HMC AdaptiveHMC MCLMC SGHMC SGLD pSGLD Kernel State MCMC

Posteriors
    Posterior predict diagnose summary relabel to_arviz

Ensembles and checkpoints
    ensemble read_checkpoints

Alignment
    align align_many push_forward interpolate barycentre loss_barrier to_gaussian
    MatchCost ActivationCost TableCost Alignment Frame BarrierCurve GaussianWeights

Distances, tests and scores
    common_frame mmd mmd_test marginal_wasserstein total_variation scores
    DistanceResult
    invariance_tests excess_mass functional_collapse SortingTracker

Data
    datasets

Errors
    BrokenSymmetry UnverifiedSymmetry InconclusiveError UntraceableError UnknownOperator
    StoreError OtherRun
"""

from pyro_symmetric import datasets
from pyro_symmetric._version import __version__ as __version__
from pyro_symmetric.alignment import (
    ActivationCost,
    Alignment,
    BarrierCurve,
    Frame,
    GaussianWeights,
    MatchCost,
    TableCost,
    align,
    align_many,
    loss_barrier,
    relabel,
    to_gaussian,
)
from pyro_symmetric.arviz_export import to_arviz
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.canonical.minimal_mass import minimal_mass
from pyro_symmetric.canonical.sorting import sorting_permutation
from pyro_symmetric.checkpoints import read_checkpoints
from pyro_symmetric.compare import (
    DistanceResult,
    SortingTracker,
    common_frame,
    diagnose,
    excess_mass,
    functional_collapse,
    invariance_tests,
    marginal_wasserstein,
    mmd,
    mmd_test,
    scores,
    summary,
    total_variation,
)
from pyro_symmetric.discovery.completeness import completeness
from pyro_symmetric.discovery.export import UntraceableError
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.invariance import InconclusiveError
from pyro_symmetric.discovery.model_check import check_priors, verify_model
from pyro_symmetric.discovery.rules.registry import register_rule
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.trace import UnknownOperator
from pyro_symmetric.discovery.verify import BrokenSymmetry, UnverifiedSymmetry, verify
from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance, Symmetrized
from pyro_symmetric.ensembles import ensemble
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis, Units
from pyro_symmetric.guides import (
    AutoGaussian,
    AutoSymmetrized,
    AutoUnitBlocks,
    barycentre,
    evidence,
    interpolate,
    load_guide,
    push_forward,
    sample_posterior,
    save_guide,
    symmetrize,
)
from pyro_symmetric.infer import MCMC
from pyro_symmetric.likelihoods import CategoricalLikelihood, GaussianLikelihood, HeteroscedasticLikelihood
from pyro_symmetric.mcmc import (
    HMC,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    AdaptiveHMC,
    Kernel,
    OtherRun,
    State,
    log_joint,
    pSGLD,
    sample,
)
from pyro_symmetric.models import BayesianModel, GaussianPrior
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.predict import predict
from pyro_symmetric.storage import StoreError

__all__ = [
    "HMC",
    "MCLMC",
    "MCMC",
    "NUTS",
    "SGHMC",
    "SGLD",
    "Action",
    "ActivationCost",
    "AdaptiveHMC",
    "Alignment",
    "AutoGaussian",
    "AutoSymmetrized",
    "AutoUnitBlocks",
    "Axis",
    "BarrierCurve",
    "BayesianModel",
    "BrokenSymmetry",
    "CategoricalLikelihood",
    "DistanceResult",
    "Element",
    "ExactOrbit",
    "Frame",
    "GaussianLikelihood",
    "GaussianPrior",
    "GaussianWeights",
    "Group",
    "HeteroscedasticLikelihood",
    "InconclusiveError",
    "InfoNCE",
    "Kernel",
    "MatchCost",
    "OtherRun",
    "Posterior",
    "SinkhornImportance",
    "SortingTracker",
    "State",
    "StoreError",
    "Symmetrized",
    "Symmetry",
    "TableCost",
    "Units",
    "UnknownOperator",
    "UntraceableError",
    "UnverifiedSymmetry",
    "align",
    "align_many",
    "barycentre",
    "canonicalize",
    "check_priors",
    "common_frame",
    "completeness",
    "datasets",
    "diagnose",
    "ensemble",
    "evidence",
    "excess_mass",
    "find_symmetry",
    "functional_collapse",
    "group_of",
    "interpolate",
    "invariance_tests",
    "load_guide",
    "log_joint",
    "loss_barrier",
    "marginal_wasserstein",
    "minimal_mass",
    "mmd",
    "mmd_test",
    "pSGLD",
    "predict",
    "push_forward",
    "read_checkpoints",
    "register_rule",
    "relabel",
    "sample",
    "sample_posterior",
    "save_guide",
    "scores",
    "sorting_permutation",
    "summary",
    "symmetrize",
    "to_arviz",
    "to_gaussian",
    "total_variation",
    "verify",
    "verify_model",
]
