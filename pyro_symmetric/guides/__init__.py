"""Symmetrised and Gaussian guides for stock :class:`~pyro.infer.SVI`.

They pickle, also to workers of process pools and dask. Under
:class:`~torch.nn.parallel.DistributedDataParallel` wrap ``Trace_ELBO()(model, guide)``
after ``guide.setup(...)``, and give all ranks the same seed before each step.
"""

from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.by_hand import symmetrize
from pyro_symmetric.guides.collapse import UnitDivergences, unit_divergences
from pyro_symmetric.guides.evidence import Evidence, evidence
from pyro_symmetric.guides.files import load_guide, save_guide
from pyro_symmetric.guides.gaussian import (
    AutoGaussian,
    AutoUnitBlocks,
    sample_posterior,
)
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.guides.transport import (
    barycentre,
    fit_gaussian,
    interpolate,
    push_forward,
)

__all__ = [
    "AutoGaussian",
    "AutoSymmetrized",
    "AutoUnitBlocks",
    "Evidence",
    "UnitDivergences",
    "WeightsGuide",
    "barycentre",
    "evidence",
    "fit_gaussian",
    "interpolate",
    "load_guide",
    "push_forward",
    "sample_posterior",
    "save_guide",
    "symmetrize",
    "unit_divergences",
]
