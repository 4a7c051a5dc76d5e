"""Rules by which axes flow through operators."""

from pyro_symmetric.discovery.rules import operators  # noqa: F401
