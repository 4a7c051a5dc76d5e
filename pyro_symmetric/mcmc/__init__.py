"""Samplers of many chains at once, for any Pyro model with continuous latent sites."""

from pyro_symmetric.density.density import Density, log_joint
from pyro_symmetric.mcmc.kernels.hmc import HMC, AdaptiveHMC
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.kernels.mclmc import MCLMC
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.mcmc.kernels.stochastic import SGHMC, SGLD, pSGLD
from pyro_symmetric.mcmc.sample import sample

__all__ = [
    "HMC",
    "MCLMC",
    "NUTS",
    "SGHMC",
    "SGLD",
    "AdaptiveHMC",
    "Density",
    "Kernel",
    "State",
    "log_joint",
    "pSGLD",
    "sample",
]
