"""Canonical forms: one representative per orbit."""

from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.canonical.removal import sorting_permutation
from pyro_symmetric.canonical.scales import minimal_mass

__all__ = ["canonicalize", "minimal_mass", "sorting_permutation"]
