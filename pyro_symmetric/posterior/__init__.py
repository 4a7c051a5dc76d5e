"""Draws from a posterior: what they are, how well they were drawn, what they predict, and weights read from files."""

from pyro_symmetric.posterior.posterior import Posterior

__all__ = ["Posterior"]
