"""Draws from a posterior: storage, convergence checks, predictions, tables, and weights
read from files.
"""

from pyro_symmetric.posterior.posterior import Posterior

__all__ = ["Posterior"]
