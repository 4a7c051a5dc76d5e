"""Bring posteriors together across a symmetry, and measure what lies between them.

What a user calls: ``matching`` (:func:`align`), ``many`` (:func:`align_many`, with ``members`` and ``common``),
``relabel`` (:func:`relabel`), and ``paths.barrier`` (:func:`loss_barrier`). Each floor below knows only those beneath
it:

* ``moments``: what was given, site by site, in the group's view; ``gaussian``: what was given, as Gaussian moments;
* ``descent``: who goes with whom: the search for the best element;
* ``costs``: what a match costs, and how well pairs of units go together;
* ``parts``: what a symmetry moves, where a search stands, and how that acts on sites.

Beside them, ``paths``: distances and paths between Gaussians, and what is lost along the way.
"""

from pyro_symmetric.alignment.costs.activation import ActivationCost
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.many import Cycles, Frame, align_many
from pyro_symmetric.alignment.matching import Alignment, align
from pyro_symmetric.alignment.paths.barrier import BarrierCurve, loss_barrier
from pyro_symmetric.alignment.paths.geodesic import interpolate_gaussians
from pyro_symmetric.alignment.relabel import relabel

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
    "relabel",
    "to_gaussian",
]
