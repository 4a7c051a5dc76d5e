"""Paths between two posteriors.

* ``geodesic``: the path between mean-field Gaussians;
* ``barrier``: the loss along a path, with ``marginalise`` (over draws, in bounded memory) and ``repair`` (of the
  statistics of activations).
"""
