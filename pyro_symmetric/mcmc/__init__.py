"""Samplers of many chains at once, for any Pyro model with continuous latent sites."""

from pyro_symmetric.mcmc.hmc import HMC
from pyro_symmetric.mcmc.kernel import Kernel, State
from pyro_symmetric.mcmc.layout import Layout
from pyro_symmetric.mcmc.potential import Potential, log_joint
from pyro_symmetric.mcmc.run import sample
from pyro_symmetric.mcmc.sgmcmc import SGHMC

__all__ = ["HMC", "SGHMC", "Kernel", "Layout", "Potential", "State", "log_joint", "sample"]
