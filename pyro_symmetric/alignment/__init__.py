"""Align posteriors under a symmetry, and measure the loss barriers between them.

The public functions (``pairwise``, ``many``, ``nearest``, ``barrier``, ``relabel``)
rest on ``moments`` (features and costs), ``covers`` and ``descent`` (the search
over permutations and signs), and ``scale_fit``.
"""

from pyro_symmetric.alignment.barrier import BarrierCurve, loss_barrier
from pyro_symmetric.alignment.many import Frame, align_many
from pyro_symmetric.alignment.moments import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.nearest import nearest_copy
from pyro_symmetric.alignment.pairwise import Alignment, align
from pyro_symmetric.alignment.relabel import relabel

__all__ = [
    "Alignment",
    "BarrierCurve",
    "Frame",
    "GaussianWeights",
    "align",
    "align_many",
    "loss_barrier",
    "nearest_copy",
    "relabel",
    "to_gaussian",
]
