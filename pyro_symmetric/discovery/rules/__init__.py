"""Rules by which axes flow through operators: each module registers those of some operators."""

from pyro_symmetric.discovery.rules import (  # noqa: F401
    contraction,
    elementwise,
    lookup,
    normalisation,
    recurrent,
    reduction,
    shape,
    spatial,
)
