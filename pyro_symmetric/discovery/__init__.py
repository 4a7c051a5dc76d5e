"""From a network to its symmetry: traced, labelled, solved, explained, verified."""

from pyro_symmetric.discovery.completeness import completeness
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.rules.registry import register_rule
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.trace import UnknownOperator, UntraceableError
from pyro_symmetric.discovery.verify import BrokenSymmetry, InconclusiveError, UnverifiedSymmetry, verify

__all__ = [
    "BrokenSymmetry",
    "InconclusiveError",
    "Symmetry",
    "UnknownOperator",
    "UntraceableError",
    "UnverifiedSymmetry",
    "completeness",
    "find_symmetry",
    "register_rule",
    "verify",
    "verify_model",
]
