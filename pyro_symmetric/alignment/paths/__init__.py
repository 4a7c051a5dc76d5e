"""Paths between two posteriors.

* ``geodesic``: distance and path between mean-field Gaussians; ``bures``: between Gaussians with correlations;
* ``barrier``: the loss along a path, with ``marginalise`` (over draws, in bounded memory) and ``repair`` (of the
  statistics of activations).
"""
