"""Rules by which axes flow through operators: each module registers those of some operators."""

from pyro_symmetric.discovery.rules import linear, pointwise, shape  # noqa: F401
