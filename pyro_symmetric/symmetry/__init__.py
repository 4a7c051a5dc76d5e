"""Weight-space symmetries: found, explained, verified, applied, removed."""

from pyro_symmetric.symmetry.canonical import canonicalize, sorting_permutation
from pyro_symmetric.symmetry.discovery import find_symmetry
from pyro_symmetric.symmetry.explain import AxisExplanation, Explanation
from pyro_symmetric.symmetry.minimal_mass import MinimalMass, minimal_mass
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
    "BrokenSymmetry",
    "Explanation",
    "Factor",
    "FlatAction",
    "MinimalMass",
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
    "SymmetryElement",
    "UnknownOperator",
    "UntraceableError",
    "Verification",
    "WeightSymmetry",
    "canonicalize",
    "check_priors",
    "find_symmetry",
    "minimal_mass",
    "register_rule",
    "sorting_permutation",
    "verify",
]
