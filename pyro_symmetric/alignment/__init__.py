"""Bring posteriors together across a symmetry, and measure what lies between them."""

from pyro_symmetric.alignment.activation import ActivationCost
from pyro_symmetric.alignment.barrier import BarrierCurve, loss_barrier
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.geodesic import interpolate_gaussians
from pyro_symmetric.alignment.many import Cycles, Frame, align_many
from pyro_symmetric.alignment.matching import Alignment, align

__all__ = [
    "ActivationCost",
    "Alignment",
    "BarrierCurve",
    "Cycles",
    "Frame",
    "GaussianWeights",
    "align",
    "align_many",
    "interpolate_gaussians",
    "loss_barrier",
    "to_gaussian",
]
