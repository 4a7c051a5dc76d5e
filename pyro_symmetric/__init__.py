"""Posteriors with symmetries for Pyro.

Find the weight-space symmetries of a network, symmetrise a guide over them, align
posteriors across them, sample reference posteriors with many chains at once, and
measure the quality of an approximation.

The public names by purpose; ``help(pyro_symmetric.find_symmetry)`` explains one:

Symmetries of networks and models
    find_symmetry Symmetry Group verify verify_model canonicalize minimal_mass

Models
    BayesianModel GaussianPrior CategoricalLikelihood GaussianLikelihood

Guides AutoSymmetrized symmetrize Symmetrized SinkhornImportance InfoNCE ExactOrbit
    AutoUnitBlocks AutoGaussian push_forward interpolate barycentre save_guide
    load_guide evidence

Samplers and posteriors
    sample NUTS HMC AdaptiveHMC MCLMC SGHMC SGLD pSGLD MCMC log_joint
    Posterior predict diagnose summary

Alignment
    align align_many loss_barrier relabel

Distances, tests and scores
    common_frame mmd mmd_test marginal_wasserstein total_variation invariance_tests
    scores

Ensembles, networks, data, errors
    ensemble networks datasets Error

Subpackages hold the rest: ``groups`` (units, elements, actions), ``discovery`` (rules
of operators, completeness, priors), ``canonical``, ``alignment`` (costs, results),
``compare`` (diversity, dynamics, results), ``guides``, ``mcmc`` (user-defined kernels),
``models`` (user-defined likelihoods), ``checkpoints``, ``store``.
"""

from pyro_symmetric import datasets, networks
from pyro_symmetric._version import __version__ as __version__
from pyro_symmetric.alignment import align, align_many, loss_barrier, relabel
from pyro_symmetric.canonical import canonicalize, minimal_mass
from pyro_symmetric.compare import (
    common_frame,
    diagnose,
    invariance_tests,
    marginal_wasserstein,
    mmd,
    mmd_test,
    scores,
    summary,
    total_variation,
)
from pyro_symmetric.discovery import Symmetry, find_symmetry, verify, verify_model
from pyro_symmetric.distributions import (
    ExactOrbit,
    InfoNCE,
    SinkhornImportance,
    Symmetrized,
)
from pyro_symmetric.ensembles import ensemble
from pyro_symmetric.errors import Error
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import (
    AutoGaussian,
    AutoSymmetrized,
    AutoUnitBlocks,
    barycentre,
    evidence,
    interpolate,
    load_guide,
    push_forward,
    save_guide,
    symmetrize,
)
from pyro_symmetric.infer import MCMC
from pyro_symmetric.mcmc import (
    HMC,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    AdaptiveHMC,
    log_joint,
    pSGLD,
    sample,
)
from pyro_symmetric.models import (
    BayesianModel,
    CategoricalLikelihood,
    GaussianLikelihood,
    GaussianPrior,
)
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.posterior import checkpoints as checkpoints
from pyro_symmetric.posterior.predict import predict

__all__ = [
    "HMC",
    "MCLMC",
    "MCMC",
    "NUTS",
    "SGHMC",
    "SGLD",
    "AdaptiveHMC",
    "AutoGaussian",
    "AutoSymmetrized",
    "AutoUnitBlocks",
    "BayesianModel",
    "CategoricalLikelihood",
    "Error",
    "ExactOrbit",
    "GaussianLikelihood",
    "GaussianPrior",
    "Group",
    "InfoNCE",
    "Posterior",
    "SinkhornImportance",
    "Symmetrized",
    "Symmetry",
    "align",
    "align_many",
    "barycentre",
    "canonicalize",
    "common_frame",
    "datasets",
    "diagnose",
    "ensemble",
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
    "mmd_test",
    "networks",
    "pSGLD",
    "predict",
    "push_forward",
    "relabel",
    "sample",
    "save_guide",
    "scores",
    "summary",
    "symmetrize",
    "total_variation",
    "verify",
    "verify_model",
]

_ROOMS = (
    *("alignment", "canonical", "checkpoints", "compare", "discovery"),
    *("distributions", "groups", "guides", "infer", "mcmc"),
)


def __dir__() -> list[str]:
    """List what is public, for tab completion."""
    return sorted({*__all__, *_ROOMS, "__version__"})
