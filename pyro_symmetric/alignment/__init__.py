"""Bring posteriors together across a symmetry, and measure what lies between them.

What a user calls: ``matching`` (:func:`align`), ``many`` (:func:`align_many`, with ``members`` and ``rounds``),
``relabel`` (:func:`relabel`), and ``paths.barrier`` (:func:`loss_barrier`). Each floor below knows only those beneath
it:

* ``descent``: coordinate descent over the units of a group, by a cost, the best of several; ``decision``: one step;
* ``moments``: what was given, site by site; ``gaussian``: what was given, as Gaussian moments;
* ``costs``: how well units go together, and what a match costs: write your own by ``costs.protocol``;
* ``exchanges``: units that lie on two axes of one site, a quadratic assignment problem;
* ``assignment``: linear assignment problems.

Beside them, ``paths``: distances and paths between Gaussians, and what is lost along the way.
"""

from pyro_symmetric.alignment.costs.activation import ActivationCost
from pyro_symmetric.alignment.costs.protocol import MatchCost, Matched
from pyro_symmetric.alignment.costs.table import TableCost
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.many import Frame, align_many
from pyro_symmetric.alignment.matching import Alignment, align
from pyro_symmetric.alignment.paths.barrier import BarrierCurve, loss_barrier
from pyro_symmetric.alignment.relabel import relabel

__all__ = [
    "ActivationCost",
    "Alignment",
    "BarrierCurve",
    "Frame",
    "GaussianWeights",
    "MatchCost",
    "Matched",
    "TableCost",
    "align",
    "align_many",
    "loss_barrier",
    "relabel",
    "to_gaussian",
]
