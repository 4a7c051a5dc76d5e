"""Bring posteriors together across a symmetry, and measure what lies between them.

What a user calls: ``matching`` (:func:`align`), ``many`` (:func:`align_many`), ``barrier`` (:func:`loss_barrier`, with
``marginalise`` and ``repair``), ``geodesic`` and ``bures`` (distances and paths between Gaussians).

How a match is found, from the outside in:

* ``gaussian``, ``inputs``, ``members``: whatever came, as moments site by site, checked;
* ``search``: several descents, the best of which is kept; ``descent``: one, move by move;
* ``units``, ``moves``: what can be moved, and what is decided together, read off the group's axes;
* ``state``: where a batch of sources stands, and how that acts on sites;
* ``scores``: how well pairs of units go together; ``choices`` and ``rescale``: with their best signs and scales;
* ``nesting``: units inside units; ``assignment``: who goes with whom;
* ``costs``: what all this lowers; ``given_scores``, ``activation``: scores that aren't read off weights.
"""

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
