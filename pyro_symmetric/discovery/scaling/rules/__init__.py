"""Rules by which labels pass through operators: each module registers those of some operators."""

from pyro_symmetric.discovery.scaling.rules import (  # noqa: F401
    attention,
    contraction,
    creation,
    elementwise,
    indexing,
    normalisation,
    random_numbers,
    recurrent,
    reduction,
    scattering,
    shape,
    spatial,
)
