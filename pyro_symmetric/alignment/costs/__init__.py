"""What a match costs, and how well a unit of the source would do in the place of each of the reference.

* ``cost``: distances between Gaussians, and the inner products by which a match lowers them;
* ``rescale``: the best sign and scale of one unit; ``choices``: of pairs of units, and the scores that they then have;
* ``scores``: the scores of one batch of sources, kept while nothing that they depend on changes;
* ``activation``: scores by what units do rather than by their weights.
"""
