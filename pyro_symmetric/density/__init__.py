"""Potential energy and gradient of any Pyro model, for many chains at once."""

from pyro_symmetric.density.density import Density, log_joint

__all__ = ["Density", "log_joint"]
