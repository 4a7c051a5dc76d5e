"""What a symmetry moves, from its axes to the elements that a search arrives at.

* ``units``: sets of units, what lies inside them, what multiplies them;
* ``moves``: what is decided together, and what depends on what;
* ``problem``: a whole symmetry, taken apart;
* ``state``: where a batch of sources stands; ``mover``: how that acts on sites.
"""
