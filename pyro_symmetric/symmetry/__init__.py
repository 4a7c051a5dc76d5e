"""Weight-space symmetries: found, explained, verified, applied, removed."""

from pyro_symmetric.symmetry.canonical import canonicalize, sorting_permutation
from pyro_symmetric.symmetry.discovery import find_symmetry
from pyro_symmetric.symmetry.explain import AxisExplanation, Explanation
from pyro_symmetric.symmetry.finite import FiniteGroup, SignedFlatAction, SignedPermutation, finite_part
from pyro_symmetric.symmetry.joint_density import InconclusiveError
from pyro_symmetric.symmetry.minimal_mass import MinimalMass, minimal_mass
from pyro_symmetric.symmetry.model_check import BrokenFactor, ModelVerification, verify_model
from pyro_symmetric.symmetry.permutation import Axis, Factor, FlatAction, Permutation, PermutationGroup
from pyro_symmetric.symmetry.priors import PriorCheck, check_priors
from pyro_symmetric.symmetry.rescaling import (
    RescaledAxis,
    RescalingFactor,
    Scaling,
    ScalingGroup,
    Shift,
    ShiftGroup,
    Sign,
    SignGroup,
)
from pyro_symmetric.symmetry.rules import register_rule
from pyro_symmetric.symmetry.trace import UnknownOperator, UntraceableError
from pyro_symmetric.symmetry.verify import BrokenSymmetry, Verification, verify
from pyro_symmetric.symmetry.weight_symmetry import SymmetryElement, WeightSymmetry

__all__ = [
    "Axis",
    "AxisExplanation",
    "BrokenFactor",
    "BrokenSymmetry",
    "Explanation",
    "Factor",
    "FiniteGroup",
    "FlatAction",
    "InconclusiveError",
    "MinimalMass",
    "ModelVerification",
    "Permutation",
    "PermutationGroup",
    "PriorCheck",
    "RescaledAxis",
    "RescalingFactor",
    "Scaling",
    "ScalingGroup",
    "Shift",
    "ShiftGroup",
    "Sign",
    "SignGroup",
    "SignedFlatAction",
    "SignedPermutation",
    "SymmetryElement",
    "UnknownOperator",
    "UntraceableError",
    "Verification",
    "WeightSymmetry",
    "canonicalize",
    "check_priors",
    "find_symmetry",
    "finite_part",
    "minimal_mass",
    "register_rule",
    "sorting_permutation",
    "verify",
    "verify_model",
]
