"""Canonical forms: one representative per orbit."""

from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.canonical.minimal_mass import minimal_mass
from pyro_symmetric.canonical.removal import sorting_permutation

__all__ = ["canonicalize", "minimal_mass", "sorting_permutation"]
