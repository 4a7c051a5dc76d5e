"""From a network to its symmetry: trace it, let axes flow, solve, explain, verify."""

from pyro_symmetric.discovery.completeness import completeness
from pyro_symmetric.discovery.find import UnknownOperator, find_symmetry
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.registry import register_rule
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.trace import UntraceableError
from pyro_symmetric.discovery.verify import (
    BrokenSymmetry,
    InconclusiveError,
    UnverifiedSymmetry,
    verify,
)

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
