"""Costs of a match: how well the units of sources go with those of a reference.

* ``protocol``: what the descent asks of any cost; ``table``: scores that are given, a matrix for each set of units;
* ``weights``: squared distances of weights (``"l2"``) and of mean-field Gaussians (``"wasserstein"``), with ``terms``
  (where units lie in weights) and ``multipliers`` (the best sign and scale of a unit);
* ``gaussian``: densities under a Gaussian (``"gaussian"``);
* ``activation``: what units do rather than what they are.
"""
