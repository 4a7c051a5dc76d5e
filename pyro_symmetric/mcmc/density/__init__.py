"""The log-density of any Pyro model with continuous sites: layout, energy and gradient for many chains at once."""

from pyro_symmetric.mcmc.density.density import Density, log_joint

__all__ = ["Density", "log_joint"]
