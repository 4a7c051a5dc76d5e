"""Who goes with whom: the search for the element of lowest cost, for a batch of sources at once.

* ``assignment``: one linear assignment problem, or many; ``nesting``: with units inside units;
* ``matcher``: coordinate descent, move by move; ``descent``: where it ended;
* ``search``: several descents, the best of which is kept;
* ``given_scores``: the optimum, without a descent, where scores are given instead of a cost of weights.
"""
